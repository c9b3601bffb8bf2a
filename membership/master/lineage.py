"""Which versions are the run's, where the journal alone cannot say or nobody holds them any more.

Two things can happen to the newest version:

    the journal lacks it   it was cut, or is a copy (``succession``): more than half of the journal's
                           contributors hold one version beyond it, with one root; or nobody holds
                           the journal's, all came, and this is what most hold      --> adopted
    nobody holds it        all holders are gone, and somebody has an older state of the run, complete,
                           with its roots, in memory or in any checkpoint: after ``rewind_s``, or
                           at once if all who were ever in the run have begun anew --> rewound

Both are recorded. Weights that the run never had are never taken: what counts is a version whose
root the journal knows, or one that its contributors swear to. A member that returns with a newer version
of what was rewound holds what the run has given up, and is brought in sync like anybody else; the
*branch* in ``Welcome`` tells it not to apply what it still has of those rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from ...protocol.messages import FragmentHead, RefusalCode
from .rounds.round_table import Evict
from .state.context import Context, said
from .state.journal import RunRewound, VersionAdopted
from .state.master_effects import EventKind
from .state.roster import CopyState, Member
from .state.succession import NAMES_SAID_MAX, Succession
from .state.voting_blocs import Voice, elect, voices_of
from .sync.state_sync import StateSync


@frozen
class Fallback:
    """An older state of the run that somebody holds."""

    heads: tuple[FragmentHead, ...]
    undone: int  # commits since then
    holders: tuple[str, ...]


class Lineage:
    """One per master.

    Attributes:
      lost_since_s: since when nobody holds the newest versions while somebody holds older ones.
      useless_since_s: since when nobody holds the versions of a journal that is behind, while members
        hold newer ones, each another.
    """

    def __init__(
        self, context: Context, state_sync: StateSync, succession: Succession, evict: Evict
    ) -> None:
        self.context = context
        self.state_sync = state_sync
        self.succession = succession
        self._evict = evict
        self.lost_since_s: float | None = None
        self.useless_since_s: float | None = None
        self._said_lost = False

    # ------------------------------------------------------------ what the journal has lost

    def adopt(self) -> bool:
        """Take over a version beyond the journal's that was the run's. True if one was."""
        history = self.context.history
        if not history.founded or not history.behind:
            return False
        useless = False
        for fragment in range(history.fragment_count):
            told = {
                member.peer: member.told[fragment]
                for member in self.context.roster
                if fragment in member.told
                and member.told[fragment].version > history.versions[fragment]
            }
            claims = Counter(told[peer] for peer in self.succession.electorate if peer in told)
            if not claims:
                continue
            # Of those with equally many, what spares hold, too: a damaged copy is alone. Of those
            # the newest: all were the run's, one after the other.
            held = Counter(told.values())
            head = max(claims, key=lambda each: (claims[each], held[each], each.version))
            count = claims[head]
            voices = self._voices()
            found = elect(told, voices, len(self.succession.electorate) - len(voices))
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
        """Of the journal's contributors; who came to the run first is first."""
        admitted = self.context.history.admitted
        electorate = sorted(
            self.succession.electorate,
            key=lambda peer: (admitted[peer].number if peer in admitted else math.inf, peer),
        )
        return voices_of(self.context.roster, electorate)

    def _everybody_came(self) -> bool:
        """All who may know what the journal lacks have had their time to say it."""
        if self.succession.electorate <= self.succession.attached:
            return True
        return self.useless_since_s is not None and self.context.now_s >= self._until_s(
            self.useless_since_s
        )

    def _until_s(self, since_s: float) -> float:
        return since_s + (self.context.spec.membership.rewind_s or math.inf)

    def _back_s(self, since_s: float) -> float:
        """When the run goes back: at once if nobody can come any more who holds what is lost.

        That is when everybody who ever was in the run is here, each in a process that began after
        the last commit: then what they say they hold is all there is. A journal that may lack its end
        does not know who was in the run.
        """
        history, roster = self.context.history, self.context.roster
        admitted = [a for peer, a in history.admitted.items() if not history.is_out(peer)]
        anew = not history.behind and all(
            record.peer in roster.members and record.number >= history.number_at_commit
            for record in admitted
        )
        return since_s if anew else self._until_s(since_s)

    def _adopt(self, head: FragmentHead, count: int) -> None:
        history = self.context.history
        self.useless_since_s = None
        before = history.versions[head.fragment]
        turn = history.turns[head.fragment] + head.version - before - 1
        self.context.record(VersionAdopted(head, self.context.due_step(head.fragment, turn)))
        self.context.announce(
            EventKind.RUN,
            None,
            f"adopted version {head.version} of fragment {head.fragment}: {count} of "
            f"{len(self.succession.electorate)} contributors hold it, the journal had lost what "
            f"came after version {before}",
        )
        self.state_sync.compare_again(head.fragment)

    # ------------------------------------------------------------ what nobody holds any more

    def lost(self) -> list[int]:
        """Fragments whose newest version nobody here holds, or is about to hold."""
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
        """The newest earlier state that somebody holds, all of it, while enough are here to go on.

        One holder is enough: its roots are the journal's, and whoever copies from it checks them.
        """
        history = self.context.history
        able = [m for m in self.context.roster if not (m.relay or m.draining)]
        if len(able) < self.context.spec.membership.min_members:
            return None
        holders: dict[tuple[int, ...], list[str]] = {}
        for member in self.context.roster.by_number():
            for versions in (self._holds(member), *self._keeps(member)):
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
        """The versions of a member's state, if every root of it is one that the journal knows."""
        if len(member.told) != self.context.history.fragment_count:
            return None
        return self._known(member, [member.told[fragment] for fragment in sorted(member.told)])

    def _keeps(self, member: Member) -> list[tuple[int, ...] | None]:
        """Likewise of the states in its checkpoints: the newest may be what the run has given up."""
        return [self._known(member, heads) for heads in member.kept]

    def _known(self, member: Member, heads: Sequence[FragmentHead]) -> tuple[int, ...] | None:
        history = self.context.history
        known = all(h.root and history.root(h.fragment, h.version) == h.root for h in heads)
        if member.relay or member.draining or not known:
            return None
        return tuple(head.version for head in heads)

    def call_back(self) -> bool:
        """Before the run goes back: who may be about to apply what is lost has to come anew, and its
        ``Hello`` says what it holds. Nobody's copy may get newer while it is the run's only one.
        """
        if self.lost_since_s is None or self.context.now_s < self._back_s(self.lost_since_s):
            return False
        mute = [
            member
            for member in self.context.roster.by_number()
            if any(member.copies[fragment].mute for fragment in self.lost())
        ]
        for member in mute:
            reason = "it has never said whether it holds the newest version, and nobody else does"
            self._evict(member.peer, RefusalCode.LAGGING, reason)
        if mute:
            self.lost_since_s = self.context.now_s  # they have their time to come back
        return bool(mute)

    def rewind(self, *, busy: bool) -> bool:
        """Go back to what members hold, if it is time. True if the run did.

        Args:
          busy: a round is in flight: its contributors hold the newest versions.
        """
        history, now_s = self.context.history, self.context.now_s
        if busy or not self.lost():
            self.lost_since_s, self._said_lost = None, False
            return False
        found = self._possible()
        if found is None:
            self.lost_since_s = None
            return False
        if self.lost_since_s is None:
            self.lost_since_s = now_s
        if not self._said_lost:
            self._said_lost = True
            self.context.announce(EventKind.RUN, None, self.why_waiting(now_s))
        if now_s < self._back_s(self.lost_since_s):
            return False
        before = list(history.versions)
        self.context.record(RunRewound(found.heads))
        self.lost_since_s, self._said_lost = None, False
        names = ", ".join(self.context.name(peer) for peer in found.holders[:NAMES_SAID_MAX])
        self.context.announce(
            EventKind.RUN,
            None,
            f"REWOUND by {found.undone} rounds, which nobody who came holds; the run goes on from versions "
            f"{history.versions} (it was at {before}), which {names} hold",
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
        """When the run goes back if nobody comes; infinity while it need not or cannot."""
        lost_s = math.inf if self.lost_since_s is None else self._back_s(self.lost_since_s)
        useless_s = self.useless_since_s
        return min(lost_s, math.inf if useless_s is None else self._until_s(useless_s))

    # ------------------------------------------------------------ for people

    def why_waiting(self, now_s: float) -> str:
        """What is lost, who had it, and what becomes of it; empty: nothing is."""
        lost = self.lost()
        if not lost:
            return ""
        history = self.context.history
        which = ", ".join(f"version {history.versions[f]} of fragment {f}" for f in lost[:3])
        if len(lost) > 3:
            which += f" and of {len(lost) - 3} more fragments"
        names = self._last_holders(lost)
        text = f"nobody here holds {which}: waiting for {', '.join(names) or 'a peer that does'}"
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
            others = ", ".join(sorted(map(self.context.name, absent))[:NAMES_SAID_MAX])
            left_s = self._until_s(self.useless_since_s) - now_s
            text = (
                f"{text}, or for {others}: those who are here hold versions that the journal has "
                f"lost, each another one; in {max(0.0, left_s):.0f} s the newest becomes the run's"
            )
        elif self.context.spec.membership.rewind_s:
            needed = self.context.spec.membership.min_members
            text += f" (or for {needed} members, one of which holds an earlier version)"
        return text

    def _last_holders(self, lost: list[int]) -> list[str]:
        """Peers that had the lost versions when they were last seen, those who left last first."""
        history = self.context.history
        found: dict[str, str] = {}
        for member, _why in reversed(self.context.departed):
            if any(
                fragment < len(member.copies)
                and member.copies[fragment].state in (CopyState.HELD, CopyState.UNCHECKED)
                and member.copies[fragment].version == history.versions[fragment]
                for fragment in lost
            ):
                found.setdefault(member.peer, said(member))
        for fragment in lost:
            commit = history.commits.get(fragment)
            for contributor in commit.contributors if commit is not None else ():
                found.setdefault(contributor.peer, self.context.name(contributor.peer))
        here = self.context.roster.members
        names = [
            name for peer, name in found.items() if peer not in here and not history.is_out(peer)
        ]
        return names[:NAMES_SAID_MAX]
