"""Copies of the state: roots of versions, members that differ from them, transfers between members.

*Roots.* Members report the digest of each version that they reach; each report is a vote on the
version's root, see ``root_votes``.

*Transfers.* A joiner receives the result of every reduction that begins after it attached. So it
may fetch the committed version as soon as no reduction of that fragment runs without it: it gets
every later result and replays it. ``Donate`` goes to the donors before any later ``Commit``, on
ordered streams, so they pin exactly that version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ....protocol import messages as m
from ...planning.bandwidth import Bandwidths
from ...planning.predict import FETCHES_MAX
from ...shared.event_kind import EventKind
from ..routes.routes import Routes
from ..state.context import Context, format_member, quoted
from ..state.journal import RootKnown
from ..state.roster import RECEIVED_STATES, Copy, CopyState, Fetch, Member, holds_newest
from ..state.succession import Succession
from .catch_up import CatchUp
from .donor_choice import DonorChoice, note_bad_donors
from .root_votes import RootVotes

SYNC_ATTEMPTS_MAX = 5  # transfers that fail in a row before the member has to start over
# In place of ``FETCHES_MAX`` where the member holds a valid copy of another version: new blocks
# wait in memory beside it.
BESIDE_MAX = 1
ROOT_BYTES = 32  # a head without a root says nothing about what is held
STALL_DEADLINES = 4  # a transfer without any bytes for this long has failed


Excluded = Callable[[Member, int], bool]
"""Return whether a reduction of the fragment is running whose result the member will not get."""


class StateSync:
    """The members' copies of the state: their transitions, and transfers between members."""

    def __init__(
        self,
        context: Context,
        succession: Succession,
        bandwidths: Bandwidths,
        routes: Routes,
    ) -> None:
        self.context = context
        self.succession = succession
        self.bandwidths = bandwidths
        self.routes = routes
        self.catch_up = CatchUp(context)
        self.votes = RootVotes(context)
        # Contributors from before the master's restart that are not back yet.
        self.missing = set(context.history.members.places)

    # ------------------------------------------------------------ coming and going

    def attached(self, member: Member, hello: m.Hello, committed: Iterable[m.Commit]) -> None:
        """Compare what a newly attached member reports to hold with the run."""
        history = self.context.history
        self.missing.discard(member.peer)
        if not history.founded or hello.lineage != history.lineage:
            self.votes.unheard.discard(member.peer)
            why = "it holds another run's state" if hello.lineage else "it holds no state yet"
            for copy in member.copies:
                copy.why = why
            return
        member.transfers.kept = [
            kept.heads
            for kept in hello.kept
            if [head.fragment for head in kept.heads] == list(range(len(member.copies)))
        ]
        next_results = {commit.fragment: commit.version for commit in committed}
        for head in hello.heads:
            if head.fragment < len(member.copies) and len(head.root) == ROOT_BYTES:
                member.transfers.reported_heads[head.fragment] = head
                self._compare(
                    member, head, about_to_apply=next_results.get(head.fragment) == head.version
                )

    def _compare(
        self, member: Member, head: m.FragmentHead, *, about_to_apply: bool = False
    ) -> None:
        """Compare a stale copy that a member reports to hold with the run's version.

        Args:
          about_to_apply: the member holds the next result, too, and applies it on its Welcome.
        """
        copy = member.copies[head.fragment]
        version = self.context.history.versions[head.fragment]
        if head.version == version or about_to_apply:
            copy.version, copy.root = head.version, head.root
            self.votes.cast(member, head)
            self._check(member, head.fragment)
        else:
            copy.why = f"it holds version {head.version}, the run is at {version}"
            if head.version + 1 < version:  # it cannot be about to apply the newest one
                self.votes.unheard.discard(member.peer)

    def compare_again(self, fragment: int) -> None:
        """Compare all copies of a fragment again: its committed version changed without a round."""
        newest = self.context.history.versions[fragment]
        self.votes.forget_beyond(fragment, newest)
        for member in self.context.roster.by_number():
            copy, head = member.copies[fragment], member.transfers.reported_heads.get(fragment)
            if copy.state in RECEIVED_STATES:
                why = f"the run has gone to version {newest} of fragment {fragment}"
                self._move(member, fragment, CopyState.STALE, why)
            elif copy.fetch is not None:
                self._move(member, fragment, CopyState.STALE, "the run has changed its version")
            copy.version, copy.root = 0, b""
            if head is not None:
                self._compare(member, head)

    def beyond(self, member: Member, head: m.FragmentHead) -> None:
        """Take a copy as stale whose version is of a branch not taken, or lost by the journal."""
        member.transfers.reported_heads[head.fragment] = head
        copy = member.copies[head.fragment]
        if copy.fetch is None:
            newest = self.context.history.versions[head.fragment]
            why = f"it holds version {head.version}, the run is at {newest}"
            self._move(member, head.fragment, CopyState.STALE, why)

    def founded(self, founder: Member | None) -> None:
        """Give every member its copies; the founder's are the run's state by definition."""
        history = self.context.history
        for member in self.context.roster:
            member.copies = [Copy() for _ in history.versions]
        if founder is not None:
            for head in history.heads():
                self.report(founder, head)

    def removed(self, member: Member) -> None:
        """Forget a member that is no longer in the roster: its votes, pins and transfers."""
        self.catch_up.removed(member.peer)
        self.votes.forget_peer(member.peer)
        for copy in member.copies:
            self._release(member, copy)
        for other in self.context.roster:
            for fragment, copy in enumerate(other.copies):
                if copy.fetch is None or member.peer not in copy.fetch.donors:
                    continue
                copy.fetch.donors.remove(member.peer)
                if not copy.fetch.donors:  # no failure of the member: it may try again at once
                    self._move(other, fragment, CopyState.STALE, "its donors are gone")

    # ------------------------------------------------------------ what members report

    def report(self, member: Member, head: m.FragmentHead) -> None:
        """Take a member's report that it holds this version with this root."""
        copy = member.copies[head.fragment]
        if copy.state is CopyState.FETCHING:
            return  # what it holds is being replaced; its Synced will report the copy
        member.transfers.reported_heads[head.fragment] = head
        self.votes.cast(member, head)
        copy.version, copy.root, copy.mute = head.version, head.root, False
        newest = self.context.history.versions[head.fragment]
        if copy.state is not CopyState.STALE or head.version == newest:
            # A stale copy that is still behind may lack a result and could not catch up by itself.
            self._check(member, head.fragment)

    def synced(self, member: Member, message: m.Synced) -> None:
        """Take the end of a transfer as the member reports it."""
        head = message.head
        copy = member.copies[head.fragment]
        if copy.fetch is None:
            self.report(member, head)
            return
        wanted = copy.fetch.head
        if head.version < wanted.version:
            self._fail(
                member, head.fragment, f"it reports version {head.version}, not {wanted.version}"
            )
            return
        note_bad_donors(self.context, member, copy.fetch, message.bad_donors)
        member.transfers.reported_heads[head.fragment] = head
        copy.version, copy.root = head.version, head.root
        self._check(member, head.fragment)
        if copy.state in RECEIVED_STATES:
            member.transfers.failures = 0
            self.votes.cast(member, head)

    def failed(self, member: Member, message: m.SyncFailed) -> None:
        """Take a transfer's failure as the member reports it."""
        if message.fragment >= len(member.copies):
            return
        copy = member.copies[message.fragment]
        if copy.fetch is None:
            self.late(member, message.fragment, quoted(message.reason))
            return
        if copy.fetch.head.version != message.version:
            return  # about a transfer that was replaced in the meantime
        note_bad_donors(self.context, member, copy.fetch, message.bad_donors)
        self._fail(member, message.fragment, quoted(message.reason))

    def moved(self, member: Member, *, state: bool) -> None:
        """Note that bytes arrive at a member: of a transfer (``state``), or of a reduction."""
        now_s = self.context.now_s
        for copy in member.copies:
            if copy.fetch is not None:
                self.catch_up.heard(member, copy.fetch)
            if state and copy.fetch is not None:
                copy.fetch.moved_s = now_s
            elif not math.isinf(copy.due_s):
                copy.due_s = now_s + self.context.spec.membership.deadline_s

    def late(self, member: Member, fragment: int, why: str, version: int | None = None) -> None:
        """Take a copy as stale that did not get, or did not apply, what was committed.

        Args:
          version: before the round that it lacks. A transfer of a later version contains that
            round; a transfer of this version or an earlier one does not, and is ended.
        """
        copy = member.copies[fragment]
        if copy.fetch is None:
            self._move(member, fragment, CopyState.STALE, why)
        elif version is not None and version >= copy.fetch.head.version:
            self._outrun(member, fragment, why)

    def committed(self, commit: m.Commit, receivers: Iterable[str], wrong: dict[str, str]) -> None:
        """Give receivers of a committed result a deadline; copies of all others become stale.

        Args:
          receivers: the peers that were sent the result.
          wrong: receivers that are known not to hold it, and why.
        """
        deadline_s = self.context.now_s + self.context.spec.membership.deadline_s
        got = set(receivers)
        self.catch_up.committed(commit.fragment, got)
        for member in self.context.roster:
            if not member.copies:
                continue
            copy = member.copies[commit.fragment]
            if copy.fetch is not None and self.catch_up.log_full(copy.fetch):
                self._outrun(member, commit.fragment, "more rounds are committed than it can keep")
            if member.peer in wrong:
                self.late(member, commit.fragment, wrong[member.peer], commit.version)
            elif member.peer not in got and (copy.state in RECEIVED_STATES or copy.fetch):
                # A copy that is under way could not replay this result.
                why = f"it was not among the receivers of round {commit.round}"
                if copy.fetch is None:
                    self.late(member, commit.fragment, why)
                else:
                    self._end_fetch(member, copy.fetch, why)
            elif copy.state in RECEIVED_STATES and math.isinf(copy.due_s):
                copy.due_s = deadline_s
        self.votes.prune()

    # ------------------------------------------------------------ decisions

    def decide(self, fragment: int, version: int, *, force: bool = False) -> bytes:
        """Return the version's root, agreed on now if possible, or ``b""``.

        Args:
          force: do not wait for members that have not reported.
        """
        history = self.context.history
        known = history.root(fragment, version)
        if known:
            return known
        best = self.votes.winner(fragment, version, force=force)
        if not best:
            return b""
        self.context.record(RootKnown(m.FragmentHead(fragment, version, best)))
        for member in self.context.roster.by_number():
            copy = member.copies[fragment]
            if copy.state is CopyState.UNCHECKED and copy.version == version:
                self._check(member, fragment)
        return best

    def settle(self, excluded: Excluded) -> bool:
        """Agree on roots and settle which members are in sync. Return whether anything changed."""
        history = self.context.history
        if not history.founded:
            return False
        changed = False
        for fragment, version in self.votes.voted_on():
            if not history.root(fragment, version):
                changed |= bool(self.decide(fragment, version))
        for member in self.context.roster.by_number():
            changed |= self._late_copies(member)
            changed |= self._settle_in_sync(member, excluded)
        return changed

    def transfer(self, excluded: Excluded) -> bool:
        """Start every transfer that may start. Return whether any did."""
        if not self.context.history.founded:
            return False
        stale = [each for each in self.context.roster.by_number() if self._may_fetch(each)]
        if not stale:
            return False
        in_line = self.context.in_line()
        choice = DonorChoice(self.context.roster, self.bandwidths, self.routes)
        changed = False
        for member in stale:
            if member.peer not in in_line:
                changed |= self._start_transfers(member, excluded, choice)
        return changed

    def _may_fetch(self, member: Member) -> bool:
        return any(copy.state is CopyState.STALE for copy in member.copies) and not (
            member.relay or member.draining or self.catch_up.waits(member)
        )

    def _settle_in_sync(self, member: Member, excluded: Excluded) -> bool:
        """Update whether a member is in sync: from all newest versions until a copy is stale."""
        if member.in_sync:
            in_sync = all(copy.state in RECEIVED_STATES for copy in member.copies)
        else:
            in_sync = holds_newest(member, self.context.history.versions) and not any(
                excluded(member, fragment) for fragment in range(len(member.copies))
            )
        if in_sync == member.in_sync:
            return False
        member.in_sync = in_sync
        if in_sync:
            member.transfers.bad_donors.clear()
            member.transfers.kept.clear()
            member.transfers.failures = 0
            self.catch_up.in_sync(member)
            text = "is in sync"
        else:
            whys = [copy.why for copy in member.copies if copy.state not in RECEIVED_STATES]
            text = f"is no longer in sync: {whys[0]}"
        self.context.announce_peer(EventKind.SYNC, member.peer, text)
        return True

    def _late_copies(self, member: Member) -> bool:
        now_s = self.context.now_s
        stall_s = STALL_DEADLINES * self.context.spec.membership.deadline_s
        changed = False
        for fragment, copy in enumerate(member.copies):
            if now_s >= copy.due_s:
                self.late(member, fragment, "it did not apply the last commit in time")
                copy.mute = True
                changed = True
            elif copy.fetch is not None and now_s >= copy.fetch.moved_s + stall_s:
                self._stalled(member, fragment, f"nothing has arrived for {stall_s:g} s")
                changed = True
        return changed

    def _start_transfers(self, member: Member, excluded: Excluded, choice: DonorChoice) -> bool:
        changed = False
        running = sum(copy.fetch is not None for copy in member.copies)
        for fragment, copy in enumerate(member.copies):
            if running >= FETCHES_MAX:
                break
            if copy.state is not CopyState.STALE or excluded(member, fragment):
                continue
            head = self.context.history.head(fragment)
            reported = member.transfers.reported_heads.get(fragment)
            beside = reported is not None or bool(copy.root)
            if beside and running >= BESIDE_MAX:
                continue
            newer = reported is not None and reported.version > head.version
            unclear = self.succession.waiting or self.missing
            if newer and unclear and self.context.history.masters.behind:
                continue  # its version may turn out to be the run's, see ``lineage``
            if not head.root:
                continue
            donors = choice.choose(member, head)
            if not (donors or member.has_on_disk(head)):
                continue
            copy.fetch = Fetch(head, [donor.peer for donor in donors], self.context.now_s)
            choice.began(copy.fetch.donors)
            self.catch_up.began(member, copy.fetch)
            self._move(member, fragment, CopyState.FETCHING)
            member.transfers.reported_heads.pop(fragment, None)  # it discards what it has
            for donor in donors:
                self.context.send(donor.peer, m.Donate(head, member.peer))
            self.context.send(member.peer, m.SyncFragment(head, tuple(copy.fetch.donors), newer))
            running += 1
            changed = True
        return changed

    # ------------------------------------------------------------ one copy

    def _outrun(self, member: Member, fragment: int, why: str) -> None:
        """End a copy that rounds have overtaken: it cannot end in sync any more."""
        fetch = member.copies[fragment].fetch
        assert fetch is not None
        slow = self.catch_up.give_up(member, fetch)
        self._end_fetch(member, fetch, slow or why)

    def _end_fetch(self, member: Member, fetch: Fetch, why: str) -> None:
        """End a transfer and tell its receiver to drop what it has fetched."""
        head = fetch.head
        self.context.send(member.peer, m.Release(head.fragment, head.version, member.peer))
        self._move(member, head.fragment, CopyState.STALE, why)

    def _stalled(self, member: Member, fragment: int, why: str) -> None:
        """End a transfer without new blocks; results may take all of the line."""
        fetch = member.copies[fragment].fetch
        assert fetch is not None
        if fetch.log_count and self.catch_up.carries(member, fetch):
            self._outrun(member, fragment, why)
        else:
            self._fail(member, fragment, why)

    def _check(self, member: Member, fragment: int) -> None:
        """Compare what the member reported with the run's root of that version."""
        copy = member.copies[fragment]
        history = self.context.history
        known = history.root(fragment, copy.version)
        behind = history.versions[fragment] - copy.version
        if known and known != copy.root:
            why = f"its version {copy.version} of fragment {fragment} differs from the run's"
            self.context.announce(EventKind.SYNC, member.peer, f"{format_member(member)}: {why}")
            if copy.fetch is not None:
                self._fail(member, fragment, why)
            else:
                self._move(member, fragment, CopyState.STALE, why)
            return
        self._move(member, fragment, CopyState.HELD if known else CopyState.UNCHECKED)
        deadline_s = self.context.spec.membership.deadline_s
        copy.due_s = self.context.now_s + deadline_s if behind else math.inf

    def _fail(self, member: Member, fragment: int, why: str) -> None:
        member.transfers.failures += 1
        fetch = member.copies[fragment].fetch
        if fetch is not None and not fetch.donors:  # the copy on its own disk was wrong
            kept = member.transfers.kept
            member.transfers.kept = [heads for heads in kept if heads[fragment] != fetch.head]
        self.context.announce_peer(
            EventKind.SYNC,
            member.peer,
            f"could not fetch fragment {fragment}: {why} "
            f"(failure {member.transfers.failures} of {SYNC_ATTEMPTS_MAX})",
        )
        self._move(member, fragment, CopyState.STALE, why)

    def _move(self, member: Member, fragment: int, state: CopyState, why: str = "") -> None:
        copy = member.copies[fragment]
        assert state is not CopyState.FETCHING or copy.state is CopyState.STALE
        copy.state, copy.mute = state, False
        if copy.state is not CopyState.FETCHING:
            self._release(member, copy)
        if copy.state in (CopyState.STALE, CopyState.FETCHING):
            copy.due_s = math.inf
            copy.why = why or copy.why

    def _release(self, member: Member, copy: Copy) -> None:
        if copy.fetch is not None:
            head = copy.fetch.head
            for donor in copy.fetch.donors:
                self.context.send(donor, m.Release(head.fragment, head.version, member.peer))
            copy.fetch = None

    # ------------------------------------------------------------ questions

    def hopeless(self) -> list[tuple[Member, m.RefusalCode, str]]:
        """Return the members whose transfers failed too often, with the refusal."""
        return [
            (member, m.RefusalCode.LAGGING, f"{SYNC_ATTEMPTS_MAX} state transfers in a row failed")
            for member in self.context.roster.by_number()
            if member.transfers.failures >= SYNC_ATTEMPTS_MAX
        ]

    def next_deadline_s(self) -> float:
        """Return when the next copy is late or stalled, or a member may try again."""
        stall_s = STALL_DEADLINES * self.context.spec.membership.deadline_s
        stalled_s = min(
            (
                min(copy.due_s, copy.fetch.moved_s + stall_s if copy.fetch else math.inf)
                for member in self.context.roster
                for copy in member.copies
            ),
            default=math.inf,
        )
        return min(stalled_s, self.catch_up.next_deadline_s())
