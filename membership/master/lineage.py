"""The lineage of versions, where the journal alone cannot tell the newest, or no member holds it.

Two things can happen to the newest version:

    the journal lacks it   The journal was cut, or is a copy (see ``succession``). More than half of
                           its contributors hold one version beyond it, with one root; or no member
                           holds the journal's, all came, and this is what most hold
                           --> adopted
    no member holds it     All holders are gone, and a member has an older complete state of the
                           run, with the journal's roots, in memory or in a checkpoint: after
                           ``rewind_s``, or at once if all that were ever in the run have begun
                           again
                           --> rewound

Both are recorded. Weights that the run never had are never taken: a version counts only if the
journal knows its root, or if its contributors confirm it. A member that returns with a newer
version of what was rewound holds what the run has given up, and is synced like any other; the
*branch* in ``Welcome`` tells it not to apply results that it still has of those rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from ...protocol.messages import FragmentHead, RefusalCode
from ...protocol.text import plural
from ..shared.event_kind import EventKind
from .rounds.round_table import Evict
from .state.context import Context, format_member
from .state.journal import RunRewound, VersionAdopted
from .state.roster import RECEIVED_STATES, CopyState, Member
from .state.succession import NAMES_MAX, Succession
from .state.voting_blocs import Voice, elect, voices_of
from .sync.state_sync import StateSync


@frozen
class Fallback:
    """An older state of the run that members hold."""

    heads: tuple[FragmentHead, ...]
    undone: int  # commits since then
    holders: tuple[str, ...]


class Lineage:
    """Adopts versions beyond the journal's, and rewinds the run to older ones."""

    def __init__(
        self, context: Context, state_sync: StateSync, succession: Succession, evict: Evict
    ) -> None:
        self.context = context
        self.state_sync = state_sync
        self.succession = succession
        self._evict = evict
        # Since when no member holds the newest versions while some hold older ones.
        self.lost_since_s: float | None = None
        # Since when no member holds the versions of a journal that is behind, while members hold
        # different newer ones.
        self.useless_since_s: float | None = None
        self._announced_lost = False

    # --------------------------------------------------- versions that the journal has lost

    def adopt(self) -> bool:
        """Adopt a version beyond the journal's that was the run's; return whether there was one."""
        history = self.context.history
        if not history.founded or not history.masters.behind:
            return False
        useless = False
        for fragment in range(history.fragment_count):
            reported = {
                member.peer: member.transfers.reported_heads[fragment]
                for member in self.context.roster
                if fragment in member.transfers.reported_heads
                and member.transfers.reported_heads[fragment].version > history.versions[fragment]
            }
            claims = Counter(
                reported[peer] for peer in self.succession.electorate if peer in reported
            )
            if not claims:
                continue
            # Of equals, the one that spares hold, too: a damaged copy is held by one member only.
            # Of these the newest: all were the run's, one after the other.
            held = Counter(reported.values())
            head = max(claims, key=lambda each: (claims[each], held[each], each.version))
            count = claims[head]
            voices = self._voices()
            found = elect(reported, voices, len(self.succession.electorate) - len(voices))
            if found is not None and found.majority:
                self._adopt(found.winner, claims[found.winner])
                return True
            if not self.succession.waiting and fragment in self.lost():
                useless = True
                if self._everybody_came():
                    self._adopt(head, count)
                    return True
        if not useless:
            self.useless_since_s = None
        elif self.useless_since_s is None:
            self.useless_since_s = self.context.now_s
        return False

    def _voices(self) -> dict[str, Voice]:
        """Return the voices of the journal's contributors, the oldest first."""
        admitted = self.context.history.members.admitted
        electorate = sorted(
            self.succession.electorate,
            key=lambda peer: (admitted[peer].number if peer in admitted else math.inf, peer),
        )
        return voices_of(self.context.roster, electorate)

    def _everybody_came(self) -> bool:
        """Return whether all that may know the missing records had the time to attach."""
        if self.succession.electorate <= self.succession.attached:
            return True
        return self.useless_since_s is not None and self.context.now_s >= self._until_s(
            self.useless_since_s
        )

    def _until_s(self, since_s: float) -> float:
        return since_s + (self.context.spec.membership.rewind_s or math.inf)

    def _back_s(self, since_s: float) -> float:
        """Return when the run goes back: at once if no holder of the lost versions can return any
        more.

        That is so if all peers that were ever in the run are attached, each in a process that began
        after the last commit: then no other copies exist. A journal that may lack its end does not
        know all peers.
        """
        history, roster = self.context.history, self.context.roster
        begun_again = not history.masters.behind and all(
            record.peer in roster.members and record.number >= history.members.number_at_commit
            for record in history.members.able()
        )
        return since_s if begun_again else self._until_s(since_s)

    def _adopt(self, head: FragmentHead, count: int) -> None:
        history = self.context.history
        self.useless_since_s = None
        before = history.versions[head.fragment]
        turn = history.schedule.turns[head.fragment] + head.version - before - 1
        self.context.record(VersionAdopted(head, self.context.due_step(head.fragment, turn)))
        self.context.announce(
            EventKind.RUN,
            None,
            f"adopted version {head.version} of fragment {head.fragment}: {count} of "
            f"{len(self.succession.electorate)} contributors hold it, the journal had lost what "
            f"came after version {before}",
        )
        self.state_sync.compare_again(head.fragment)

    # --------------------------------------------------- versions that no member holds any more

    def lost(self) -> list[int]:
        """Return the fragments whose newest version no member holds, or is about to hold."""
        history = self.context.history
        if not history.founded:
            return []
        return [
            fragment
            for fragment in range(history.fragment_count)
            if not any(
                member.copies[fragment].state is not CopyState.STALE
                for member in self.context.roster
            )
        ]

    def fallback(self) -> Fallback | None:
        """Return the newest earlier state that a member holds completely, if enough members are
        attached.

        One holder is enough: its roots are the journal's, and members that copy from it check them.
        """
        history = self.context.history
        able = [m for m in self.context.roster if not (m.relay or m.draining)]
        if len(able) < self.context.spec.membership.min_members:
            return None
        holders: dict[tuple[int, ...], list[str]] = {}
        for member in self.context.roster.by_number():
            # A member's checkpoints count too: its newest state may have been given up.
            kept = [self._known(member, heads) for heads in member.transfers.kept]
            for versions in (self._holds(member), *kept):
                if versions is not None:
                    holders.setdefault(versions, []).append(member.peer)
        best: Fallback | None = None
        for versions, peers in holders.items():
            undone = history.earlier(versions)
            if undone and (best is None or undone < best.undone):
                heads = tuple(
                    FragmentHead(fragment, version, history.root(fragment, version))
                    for fragment, version in enumerate(versions)
                )
                best = Fallback(heads, undone, tuple(peers))
        return best

    def _holds(self, member: Member) -> tuple[int, ...] | None:
        """Return the versions of a member's state, if the journal knows all its roots."""
        heads = member.transfers.reported_heads
        if len(heads) != self.context.history.fragment_count:
            return None
        return self._known(member, [heads[fragment] for fragment in sorted(heads)])

    def _known(self, member: Member, heads: Sequence[FragmentHead]) -> tuple[int, ...] | None:
        history = self.context.history
        known = all(h.root and history.root(h.fragment, h.version) == h.root for h in heads)
        if member.relay or member.draining or not known:
            return None
        return tuple(head.version for head in heads)

    def call_back(self) -> bool:
        """Evict members that may be about to apply a lost version, before the run goes back.

        Each attaches again, and its ``Hello`` says what it holds. No copy may get newer while it is
        the run's only one.

        Returns:
          True if a member was evicted.
        """
        if self.lost_since_s is None or self.context.now_s < self._back_s(self.lost_since_s):
            return False
        mute = [
            member
            for member in self.context.roster.by_number()
            if any(member.copies[fragment].mute for fragment in self.lost())
        ]
        for member in mute:
            reason = (
                "it has not reported whether it holds the newest version, and no other peer does"
            )
            self._evict(member.peer, RefusalCode.LAGGING, reason)
        if mute:
            self.lost_since_s = self.context.now_s  # they have time to return
        return bool(mute)

    def rewind(self, *, busy: bool) -> bool:
        """Go back to a state that members hold, if it is time.

        Args:
          busy: a round is in flight: its contributors hold the newest versions.

        Returns:
          True if the run was rewound.
        """
        history, now_s = self.context.history, self.context.now_s
        if busy or not self.lost():
            self.lost_since_s, self._announced_lost = None, False
            return False
        found = self._possible()
        if found is None:
            self.lost_since_s = None
            return False
        if self.lost_since_s is None:
            self.lost_since_s = now_s
        if not self._announced_lost:
            self._announced_lost = True
            self.context.announce(EventKind.RUN, None, self.why_waiting(now_s))
        if now_s < self._back_s(self.lost_since_s):
            return False
        before = list(history.versions)
        self.context.record(RunRewound(found.heads))
        self.lost_since_s, self._announced_lost = None, False
        names = ", ".join(self.context.name(peer) for peer in found.holders[:NAMES_MAX])
        self.context.announce(
            EventKind.RUN,
            None,
            f"REWOUND by {plural(found.undone, 'round')}, which no connected peer holds; the run"
            f" goes on from versions {history.versions} (it was at {before}), which {names} hold",
        )
        for fragment, version in enumerate(before):
            if version != history.versions[fragment]:
                self.state_sync.compare_again(fragment)
        return True

    def _possible(self) -> Fallback | None:
        history, spec = self.context.history, self.context.spec
        if (
            not spec.membership.rewind_s
            or history.finished
            or history.paused
            or self.succession.waiting
            or self.useless_since_s is not None  # one of the versions beyond becomes the run's
            or self.state_sync.missing
        ):
            return None
        return self.fallback()

    @property
    def due_s(self) -> float:
        """Return when the run goes back or adopts a version; infinity if nothing is lost."""
        lost_s = math.inf if self.lost_since_s is None else self._back_s(self.lost_since_s)
        useless_s = self.useless_since_s
        return min(lost_s, math.inf if useless_s is None else self._until_s(useless_s))

    # ------------------------------------------------------------ for people

    def why_waiting(self, now_s: float) -> str:
        """Return a sentence about lost versions and their last holders, or an empty one."""
        lost = self.lost()
        if not lost:
            return ""
        history = self.context.history
        which = ", ".join(f"version {history.versions[f]} of fragment {f}" for f in lost[:3])
        if len(lost) > 3:
            which += f" and of {len(lost) - 3} more fragments"
        names = self._last_holders(lost)
        text = (
            f"no connected peer holds {which}: waiting for {', '.join(names) or 'a peer that does'}"
        )
        if self.lost_since_s is not None:
            found = self.fallback()
            undone = found.undone if found is not None else 0
            text += (
                f" since {now_s - self.lost_since_s:.0f} s; in "
                f"{max(0.0, self._back_s(self.lost_since_s) - now_s):.0f} s "
                f"the run goes on without the last {undone} rounds"
            )
        elif self.useless_since_s is not None:
            absent = self.succession.electorate - self.succession.attached
            others = ", ".join(sorted(map(self.context.name, absent))[:NAMES_MAX])
            left_s = self._until_s(self.useless_since_s) - now_s
            text = (
                f"{text}, or for {others}: connected peers hold versions that the journal has "
                f"lost, and they differ; in {max(0.0, left_s):.0f} s the newest becomes the run's"
            )
        elif self.context.spec.membership.rewind_s:
            needed = self.context.spec.membership.min_members
            text += f" (or for {needed} members, one of which holds an earlier version)"
        return text

    def _last_holders(self, lost: list[int]) -> list[str]:
        """Return the peers that had the lost versions when they were last seen, the last first."""
        history = self.context.history
        found: dict[str, str] = {}
        for member, _why in reversed(self.context.departed):
            if any(
                fragment < len(member.copies)
                and member.copies[fragment].state in RECEIVED_STATES
                and member.copies[fragment].version == history.versions[fragment]
                for fragment in lost
            ):
                found.setdefault(member.peer, format_member(member))
        for fragment in lost:
            commit = history.commits.get(fragment)
            for contributor in commit.contributors if commit is not None else ():
                found.setdefault(contributor.peer, self.context.name(contributor.peer))
        here = self.context.roster.members
        names = [
            name
            for peer, name in found.items()
            if peer not in here and not history.members.is_out(peer)
        ]
        return names[:NAMES_MAX]
