"""What contributors weigh in a round: policies against strangers, none of which holds by default.

The trial: a new member's first rounds are trained, posted and measured at weight 0. The cap: all
members of one invite together weigh at most a share of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..state.context import Context


def weights_of(tokens: Mapping[str, int], context: Context) -> dict[str, int]:
    """Return what contributors weigh that have trained on these tokens."""
    spec, weights = context.spec.membership, dict(tokens)
    served = context.history.members.served
    tried = {peer for peer in tokens if served.get(peer, 0) >= spec.trial_rounds}
    if tried:  # else nobody would weigh anything
        weights |= dict.fromkeys(tokens.keys() - tried, 0)
    if spec.invite_share_max < 1.0:
        members = [(peer, context.roster.get(peer)) for peer in tokens]
        invites = {peer: member.grant.invite if member else "" for peer, member in members}
        weights = capped_by_invite(weights, invites, spec.invite_share_max)
    return weights


def capped_by_invite(
    weights: Mapping[str, int], invites: Mapping[str, str], share_max: float
) -> dict[str, int]:
    """Scale weights down until no invite has more than its share; at most to equal shares.

    Args:
      invites: by peer; a peer whose invite is not known stands for itself.
    """
    sums: dict[str, int] = {}
    for peer, weight in weights.items():
        invite = invites[peer] or peer
        sums[invite] = sums.get(invite, 0) + weight
    limit = _level(sorted(filter(None, sums.values()), reverse=True), share_max)
    return {
        peer: weight and max(1, int(weight * min(1.0, limit / sums[invites[peer] or peer])))
        for peer, weight in weights.items()
    }


def _level(sums: list[int], share_max: float) -> float:
    """Return the most that an invite may weigh; the larger ones are given, in descending order."""
    for capped_count, largest in enumerate(sums):
        left = 1.0 - capped_count * share_max
        if left <= 0.0:
            break
        limit = share_max * sum(sums[capped_count:]) / left
        if largest <= limit:
            return limit
    return float(min(sums, default=0))
