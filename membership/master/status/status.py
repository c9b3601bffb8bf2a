"""The master's state as plain JSON, with an answer to "why am I waiting?" for everybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from ....protocol.messages import Commit, Contributor, CopyProgress, FragmentHead
from ...manifest import AddedContributor, MeanContents, format_committed, went_in
from ..rounds.attempt import Attempt
from ..rounds.round import PastRole, Round, RoundPhase, answered, part_of
from ..state.context import quoted
from ..state.roster import CopyState, Member, can_contribute, role_of
from ..state.succession import NAMES_SAID_MAX
from ..state.voting_blocs import format_invite_warning, large_invites
from ..sync.catch_up import format_rate
from ..trainers import NO_STEP, state_of
from .headline import headline

MIB = 2**20

if TYPE_CHECKING:
    from ..coordinator import Coordinator


def describe(coordinator: Coordinator, now_s: float, *, past: bool = True) -> dict[str, Any]:
    """Everything a person may want to know, as plain JSON. Times are the master's clock or seconds since.

    Args:
      past: False: without the rounds and events that were, which are most of it.
    """
    return _present(coordinator, now_s) | (_past(coordinator) if past else {})


def _past(coordinator: Coordinator) -> dict[str, Any]:
    return {
        "past_rounds": [_past_round(round_) for round_ in coordinator.scheduler.round_table.past],
        "events": [
            {"kind": e.kind.value, "peer": e.peer, "text": e.text, "at_s": e.at_s}
            for e in coordinator.context.events
        ],
    }


def _present(coordinator: Coordinator, now_s: float) -> dict[str, Any]:
    context = coordinator.context
    history, scheduler = context.history, coordinator.scheduler
    state, why_waiting = _state(coordinator, now_s)
    contributors = {member.peer for member in scheduler.contributors()}
    last = next(
        (r for r in reversed(scheduler.round_table.past) if r.phase is RoundPhase.COMMITTED), None
    )
    return {
        "run": {"id": context.run_id, "name": context.spec.run.name},
        "now_s": now_s,
        "term": context.term,
        "state": state,
        "why_waiting": why_waiting,
        "headline": headline(coordinator),
        "step": history.step,
        "committed": history.commit_count,
        "aborted": scheduler.round_table.abort_count,
        "repaired": scheduler.round_table.repair_count,
        "rerun": scheduler.round_table.rerun_count,
        "rounds_wanted": context.spec.run.rounds,
        "view": context.roster.view_number,
        "counts": {
            "live": len(context.roster),
            "participating": len(contributors),
            "contributed": len(last.went_in.added) if last and last.went_in else 0,
        },
        "places": {
            "limit": context.spec.membership.contributors,
            "taken": len(history.places),
            "vacant": history.vacancies,
        },
        "fragments": [_head(head) for head in history.heads()],
        "members": [_member(coordinator, m, now_s) for m in context.roster.by_number()],
        "departed": [
            {**_facts(coordinator, member), "why": reason} for member, reason in context.departed
        ],
        "rounds": [_round(coordinator, r, now_s) for r in scheduler.rounds.values()],
        "routes": coordinator.routes.rows(),
        "masters": list(history.masters),
        "rewound": history.rewind_count,
        "revoked": dict(history.revoked),
        "quarantined": [
            {"peer": peer, "name": history.name_of(peer), "why": why}
            for peer, why in history.quarantined.items()
        ],
        "barred": sorted(scheduler.driver.audits.barred()),
        "audited": scheduler.driver.audits.passed_count,
        "warnings": [
            format_invite_warning(invite, count)
            for invite, count in large_invites(coordinator.places.contributing()).items()
        ],
    }


def _state(coordinator: Coordinator, now_s: float) -> tuple[str, str]:
    """One word for the run, and why nothing happens if nothing does."""
    context, scheduler = coordinator.context, coordinator.scheduler
    history = context.history
    if coordinator.succession.superseded:
        return "superseded", coordinator.succession.superseded
    if history.finished:
        return "finished", ""
    if coordinator.succession.waiting:
        return "waiting for members", coordinator.succession.why_waiting()
    if not history.founded:
        return "waiting for founder", _why_unfounded(coordinator)
    for round_ in scheduler.rounds.values():
        return "training", _why_round(coordinator, round_)
    if history.paused:
        return "paused", "the run's owner paused it; `holdfast resume` lets it go on"
    if coordinator.state_sync.missing:
        names = ", ".join(sorted(context.name(p) for p in coordinator.state_sync.missing))
        return "waiting for members", f"the master has restarted and waits for {names}"
    needed = context.spec.membership.min_members
    here = len(scheduler.contributors())
    if here < needed:
        return "waiting for members", _why_few(coordinator, here, needed, now_s)
    if now_s < scheduler.round_table.backoff.until_s:
        wait_s = scheduler.round_table.backoff.until_s - now_s
        return "training", f"the last round was aborted; the next opens in {wait_s:.1f} s"
    return "training", ""


def _why_unfounded(coordinator: Coordinator) -> str:
    context = coordinator.context
    if coordinator.founding.founder is not None:
        return f"{context.name(coordinator.founding.founder)} is to give the run its first weights"
    if founders := coordinator.founding.founders():
        names = ", ".join(context.name(member.peer) for member in founders)
        return f"waiting for the founder: {names} has no trainer yet"
    return "waiting for the founder: nobody whose invite allows it has joined"


def _why_few(coordinator: Coordinator, here: int, needed: int, now_s: float) -> str:
    context, missing = coordinator.context, needed - here
    text = (
        f"waiting for {missing} more contributor{'s' if missing > 1 else ''}: "
        f"{here} of {needed} are here, in sync and with a trainer"
    )
    coming = [
        f"{context.name(m.peer)} ({why(coordinator, m) or 'no place yet'})"
        for m in context.roster.by_number()
        if not m.relay and not can_contribute(m, context.history.places)
    ]
    last = {c.peer for commit in context.history.commits.values() for c in commit.contributors}
    gone = [context.name(p) for p in sorted(last) if p not in context.roster]
    if coming:
        text += f"; here but not ready: {', '.join(coming[:NAMES_SAID_MAX])}"
    if gone:
        text += f"; not here: {', '.join(gone[:NAMES_SAID_MAX])}"
    lost = coordinator.lineage.why_waiting(now_s)
    return f"{text}; {lost}" if lost and len(context.roster) else text


def _why_round(coordinator: Coordinator, round_: Round) -> str:
    context = coordinator.context
    if round_.phase is RoundPhase.OPEN:
        waiting = [
            peer
            for peer in coordinator.scheduler.expected(round_)
            if peer not in round_.ready and peer not in round_.declined
        ]
        what = f"to be ready for round {round_.number}"
    elif round_.running().flushing:
        attempt = round_.running()
        waiting = attempt.unheard() or [p for p in attempt.served() if p not in attempt.held]
        lost = ", ".join(context.name(peer) for peer in attempt.lost)
        what = f"to say what it holds of round {round_.number}, which goes on without {lost}"
    else:
        waiting = round_.running().unreported()
        what = f"to finish the reduction of round {round_.number}"
    names = ", ".join(context.name(peer) for peer in waiting)
    return f"waiting for {names} {what}" if names else ""


def _member(coordinator: Coordinator, member: Member, now_s: float) -> dict[str, Any]:
    return {
        **_facts(coordinator, member),
        "why": why(coordinator, member),
        "attached_s": now_s - member.attached_s,
        "silent_s": coordinator.context.detector.silent_s(member.peer, now_s),
    }


def _facts(coordinator: Coordinator, member: Member) -> dict[str, Any]:
    """What is known of a member, whether it is still here or not."""
    context = coordinator.context
    progress = member.progress
    return {
        "peer": member.peer,
        "name": member.name,
        "number": member.number,
        "addresses": list(member.addresses),
        "host": member.host,
        "reach": "reachable" if member.reachable else "outbound",
        "relay": _relay(member),
        "site": member.site,
        "software": member.software,
        "role": role_of(member, context.history.places).value,
        "granted": member.grant.role.value,
        "in_sync": member.in_sync,
        "trainer": member.layout is not None,
        "trainer_state": state_of(member, context.now_s),
        "draining": member.draining,
        "phase": progress.phase if progress else "",
        "step": progress.step if progress else 0,
        "tokens": progress.tokens if progress else 0,
        "tokens_per_s": progress.tokens_per_s if progress else 0.0,
        "loss": progress.loss if progress else None,
        "waited_s": progress.waited_s if progress else 0.0,
        "stepped_s": progress.stepped_s if progress else 0.0,
        "metrics": dict(progress.metrics) if progress else {},
        "bytes": {
            "bulk_sent": progress.bulk_sent_bytes if progress else 0,
            "bulk_received": progress.bulk_received_bytes if progress else 0,
            "state_received": progress.state_received_bytes if progress else 0,
            "state_saved": progress.state_saved_bytes if progress else 0,
        },
        "copies": [copy_row(copy) for copy in _copies(member)],
        "bandwidth": _bandwidth(coordinator, member),
        "bad_blocks": member.bad_blocks_count,
        "direction": member.direction,
        "heads": [
            {
                "fragment": fragment,
                "version": copy.version,
                "root": copy.root.hex(),
                "state": copy.state.value,
            }
            for fragment, copy in enumerate(member.copies)
        ],
    }


def _forwards(member: Member) -> str:
    """What a relay does, as a sentence."""
    relayed = member.relayed
    if relayed is None or not relayed.pairs:
        return "a relay: nobody needs it now"
    spent = "; its quota is spent" if relayed.spent else ""
    pairs = "1 pair" if relayed.pairs == 1 else f"{relayed.pairs} pairs"
    return f"forwards for {pairs}, {relayed.carried_bytes / 1e6:.1f} MB so far{spent}"


def _relay(member: Member) -> dict[str, Any] | None:
    """What it forwards for others; None: it does not."""
    offer, relayed = member.offer, member.relayed
    if offer is None:
        return None
    return {
        "bytes_per_s": offer.bytes_per_s,
        "pairs_max": offer.pairs,
        "quota_bytes": offer.quota_bytes or None,
        "pairs": relayed.pairs if relayed else 0,
        "streams": relayed.streams if relayed else 0,
        "carried_bytes": relayed.carried_bytes if relayed else 0,
        "spent": relayed.spent if relayed else False,
    }


def _bandwidth(coordinator: Coordinator, member: Member) -> dict[str, Any]:
    """As measured, bytes per second; None: not measured yet, or no cap."""
    context, bandwidths = coordinator.context, coordinator.scheduler.bandwidths
    known = bandwidths.known(member.peer)
    links = bandwidths.links.get(member.peer, {})
    return {
        "up_bytes_per_s": known.up_bytes_per_s if known else None,
        "down_bytes_per_s": known.down_bytes_per_s if known else None,
        "upload_cap_bytes_per_s": member.upload_bytes_per_s or None,
        "download_cap_bytes_per_s": member.download_bytes_per_s or None,
        "links": {peer: rate for peer, rate in links.items() if peer in context.roster},
    }


def why(coordinator: Coordinator, member: Member) -> str:
    """What this member waits for; empty if it does what it is here for."""
    context = coordinator.context
    history = context.history
    if not history.founded:
        if coordinator.founding.founder == member.peer:
            return "it is to give the run its first weights"
        return "waiting for the founder to give the run its first weights"
    if member.draining:
        why_leaving = f": {quoted(member.draining_why)}" if member.draining_why else ""
        return f"leaving as soon as nothing needs it{why_leaving}"
    if history.finished:
        return "the run is finished"
    if member.relay:
        return _forwards(member)
    if not member.in_sync and member.peer in context.in_line():
        return "waiting: all places and spares are taken"
    if not member.in_sync:
        return _why_not_in_sync(coordinator, member)
    if member.layout is None:
        state = state_of(member, coordinator.context.now_s)
        return "waiting for its trainer" + ("" if state == "none" else f": {state}")
    if member.progress is not None and member.progress.phase.startswith(NO_STEP):
        return member.progress.phase
    if not can_contribute(member, history.places):
        rest_s = member.rests_until_s - context.now_s
        if rest_s > 0.0:
            return f"a spare: it was late again and again; it is tried again in {rest_s:.0f} s"
        limit = context.spec.membership.contributors
        if limit and len(history.places) >= limit:
            return f"all {limit} places are taken; it steps in when one becomes vacant"
        return "a spare: it steps in when a contributor is lost"
    for round_ in coordinator.scheduler.rounds.values():
        if round_.phase is RoundPhase.OPEN and member.peer in round_.ready:
            others = [p for p in coordinator.scheduler.expected(round_) if p != member.peer]
            if not answered(round_, others):
                return _why_round(coordinator, round_)
        if member.peer in round_.declined:
            return f"not in round {round_.number}: {round_.declined[member.peer]}"
    return ""


def _why_not_in_sync(coordinator: Coordinator, member: Member) -> str:
    history = coordinator.context.history
    fetching = [copy.fetch for copy in member.copies if copy.fetch is not None]
    if fetching:
        if told := [format_copy(copy) for copy in _copies(member)]:
            return "; ".join(told)
        donors = {donor for fetch in fetching for donor in fetch.donors}
        source = f"{len(donors)} donors" if donors else "its disk"
        return f"fetching {len(fetching)} fragments from {source}"
    if slow := coordinator.state_sync.catch_up.waits(member):
        return slow
    for fragment, copy in enumerate(member.copies):
        version = history.versions[fragment]
        if copy.state is CopyState.STALE:
            if coordinator.scheduler.excluded(member, fragment):
                return "waiting for the end of a reduction that began before it joined"
            if not history.root(fragment, version):
                return f"waiting until the members agree on version {version}: {copy.why}"
            return f"waiting for a peer that holds version {version}: {copy.why}"
        if copy.state is CopyState.UNCHECKED:
            return f"waiting until the members agree on version {copy.version}"
        if copy.version < version:
            return f"applying version {version} of fragment {fragment}"
    return "waiting for the end of a reduction that began before it joined"


def _copies(member: Member) -> list[CopyProgress]:
    """What the member says of copies that are still wanted."""
    if member.progress is None:
        return []
    return [
        told
        for told in member.progress.copies
        if told.fragment < len(member.copies)
        and (fetch := member.copies[told.fragment].fetch) is not None
        and fetch.head.version == told.version
    ]


def copy_row(copy: CopyProgress) -> dict[str, Any]:
    """A copy as plain JSON."""
    left_bytes = copy.all_bytes - copy.done_bytes
    return {
        "fragment": copy.fragment,
        "version": copy.version,
        "blocks": {"done": copy.done_blocks, "all": copy.all_blocks},
        "bytes": {"done": copy.done_bytes, "all": copy.all_bytes},
        "bytes_per_s": copy.bytes_per_s,
        "left_s": left_bytes / copy.bytes_per_s if copy.bytes_per_s else None,
        "donors": list(copy.donors),
        "rounds_kept": copy.rounds_kept,
        "text": format_copy(copy),
    }


def format_copy(copy: CopyProgress) -> str:
    """How far a copy is, for people."""
    text = f"copying fragment {copy.fragment}: "
    text += f"{copy.done_bytes / MIB:.0f} of {copy.all_bytes / MIB:.0f} MiB"
    text += f" from {len(copy.donors)} donor{'' if len(copy.donors) == 1 else 's'}"
    if copy.bytes_per_s:
        left_s = (copy.all_bytes - copy.done_bytes) / copy.bytes_per_s
        text += f", {format_rate(copy.bytes_per_s)}, {left_s:.0f} s left"
    if copy.rounds_kept:
        text += f"; {copy.rounds_kept} round{'' if copy.rounds_kept == 1 else 's'} to replay"
    return text


def _round(coordinator: Coordinator, round_: Round, now_s: float) -> dict[str, Any]:
    attempt = round_.attempt
    return {
        "round": round_.number,
        "fragment": round_.fragment,
        "version": round_.version,
        "at_step": round_.at_step,
        "phase": round_.phase.value,
        "open_s": (round_.closed_s if attempt else now_s) - round_.opened_s,
        "reduce_s": now_s - round_.closed_s if attempt else None,
        "plan": _plan(attempt, now_s) if attempt else None,
        "expected": coordinator.scheduler.expected(round_),
        "ready": sorted(round_.ready),
        "declined": dict(round_.declined),
        "attempt": attempt.number if attempt else 0,
        "contributors": _contributors(attempt.contributors) if attempt else [],
        "reported": sorted(attempt.outcomes) if attempt else [],
        "lost": dict(attempt.lost) if attempt else {},
        "flushing": attempt.flushing if attempt else False,
        "repairs": round_.repair_count,
        "reruns": round_.rerun_count,
    }


def past_row(round_: Round) -> dict[str, Any]:
    """A round that is over, with what its members did when: for those who keep it."""
    return {
        **_past_round(round_),
        "marks": {
            peer: {
                "name": mark.name,
                "ready_s": _since(round_, mark.ready_s),
                "reduced_s": _since(round_, mark.reduced_s),
                "state": part_of(round_, peer).value,
            }
            for peer, mark in round_.marks.items()
        },
    }


def journaled_row(commit: Commit, name_of: Callable[[str], str]) -> dict[str, Any]:
    """A committed round as the journal has it; what only the master's memory had is null.

    Args:
      name_of: a peer's name; empty: nobody remembers.
    """
    added = went_in(commit)
    return {
        "round": commit.round,
        "fragment": commit.fragment,
        "version": commit.version,
        "at_step": commit.at_step,
        "outcome": RoundPhase.COMMITTED.value,
        "why": f"{format_committed(added)}; of it is known what the journal has",
        "attempts": commit.attempt,
        "repairs": None,
        "reruns": None,
        "lost": {},
        **_went_in(added, None),
        "declined": {},
        "digest": commit.digest.hex(),
        "opened_s": None,
        "open_s": None,
        "reduce_s": None,
        "plan": None,
        "marks": {
            (peer := each.contributor.peer): {
                "name": name_of(peer) or peer[:8],
                "ready_s": None,
                "reduced_s": None,
                "state": PastRole.CONTRIBUTED.value,
            }
            for each in added.added
        },
    }


def _since(round_: Round, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - round_.opened_s, 6)


def _past_round(round_: Round) -> dict[str, Any]:
    attempt = round_.attempt
    closed_s = round_.closed_s if attempt else round_.ended_s
    return {
        "round": round_.number,
        "fragment": round_.fragment,
        "version": round_.version,
        "at_step": round_.at_step,
        "outcome": round_.phase.value,
        "why": round_.outcome,
        "attempts": attempt.number if attempt else 0,
        "repairs": round_.repair_count,
        "reruns": round_.rerun_count,
        "lost": dict(attempt.lost) if attempt else {},
        **_went_in(round_.went_in, attempt),
        "declined": dict(round_.declined),
        "digest": round_.digest.hex(),
        "opened_s": round_.opened_s,
        "open_s": closed_s - round_.opened_s,
        "reduce_s": round_.ended_s - closed_s,
        "plan": _plan(attempt, round_.ended_s) if attempt else None,
    }


def _plan(attempt: Attempt, end_s: float) -> dict[str, Any]:
    """What the last attempt should have taken, at best could have taken, and took."""
    return {
        **attrs.asdict(attempt.estimate),
        "took_s": end_s - attempt.started_s,
        "tree": bool(attempt.sites),
        "sites": [list(site) for site in attempt.sites],
    }


def _went_in(made: MeanContents | None, attempt: Attempt | None) -> dict[str, Any]:
    """What a mean was made of; where there is none, who was to add and of which nothing counts."""
    if made is None:
        order = attempt.contributors if attempt is not None else ()
        made = MeanContents(tuple(AddedContributor(each, 0.0, 0.0) for each in order))
    return {
        "contributors": [
            {
                **attrs.asdict(each.contributor),
                "chunk_share": each.chunk_share,
                "weight_share": each.weight_share,
            }
            for each in made.added
        ],
        "chunk_count": len(attempt.owners) if attempt is not None else None,
        "manifest": [
            {"contributors": part.places, "weight": part.weight, "chunks": part.chunks}
            for part in made.parts
        ],
    }


def _contributors(contributors: tuple[Contributor, ...]) -> list[dict[str, Any]]:
    return [attrs.asdict(contributor) for contributor in contributors]


def _head(head: FragmentHead) -> dict[str, Any]:
    return {"fragment": head.fragment, "version": head.version, "root": head.root.hex()}
