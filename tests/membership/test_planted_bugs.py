"""Does the stateful test see anything? Each test here plants one bug, which it must find.

The bugs, by what they break:

    commit before journal      the messages of a decision overtake its record
    any result                 the first digest reported is committed, majority or not
    impatient                  a result is committed when the quorum has it, not all survivors
    waits for the dead         a lost contributor stays in the attempt
    joiner left out            a joiner is not among the receivers, so it cannot replay
    transfer too early         a joiner fetches while a reduction runs without it
    pins too late              the transfer is ordered before the donors are told to pin
    donor without state        a donor is asked for what it is still fetching itself
    first root wins            a root is agreed when one member has reported it
    promotes laggards          a spare takes a place before it has applied the newest commit
    deaf to silence            nobody is ever found silent
    rounds reused              round numbers start over with the master
    views reused               view numbers start over with the master
    any undecided              an undecided result is called committed whatever its digest
    forgets the late           a commit that is never applied is not missed
    no way back                a healed contributor is not asked again
    vacancies lost             a place that is given up is never filled
    never finishes stalls      an attempt in which nothing moves goes on for ever

and about repairs:

    repairs too early          a repair does not wait for all to have shut out the lost
    keeps accepting            a survivor takes results from the lost after its flush
    throws away                a lost owner's chunks are all added up again, held or not
    successor adds again       a successor adds up again instead of spreading what it holds
    dead successors            a lost owner's chunks stay where they are
    same number                a rerun with fewer contributors goes on under the old number
    below the quorum           a result that too few are left to hold is committed

Some are caught by one conversation with the master each:

    old attempt                answers of an earlier attempt count for the present one
    deaf to listeners          a lost listener that inherited chunks is not missed
    the lost accuse            what a lost peer has said about others still counts
    any manifest               results with one digest agree whatever their manifests

and about what members say of one another:

    refused but added          a contribution that two call bad stays in the committed result
    one word refuses           an update is refused when one member calls it bad
    finds everywhere           what a member that owns no chunk has found counts, too
    one owner's find           an update is refused for what one owner alone has found
    no disputes                a pair that failed in one round is planned with in the next
    spares first               whoever reaches nobody costs all spares the results
    heads are votes            of one invite and line everybody has a vote
    anybody founds             whoever came by the founder's invite and is ready first founds
    moves alone                who alone says that bytes move keeps an attempt alive

and about masters and lineage:

    deaf to terms              a master does not mind that its peers obey another one
    one is enough              a version that one member claims is adopted
    too sure of itself         a master that is behind does not wait for a majority
    goes back at once          a run is rewound as soon as nobody holds the newest version
    strangers' weights         a state whose root the journal does not know is gone back to
    feeds the line             who waits in line is synced all the same

An example that finds each of those that take a search is kept in planted_examples.json, as hypothesis
writes it for ``reproduce_failure``.

What a peer's own code could do wrong in a repair is planted in tests/swarm/test_planted_simulation.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from attrs import evolve
from hypothesis import Phase as Phases
from hypothesis import reproduce_failure, settings
from hypothesis.errors import DidNotReproduce, InvalidArgument
from hypothesis.stateful import run_state_machine_as_test

from holdfast.membership.master.attachment import Attachment
from holdfast.membership.master.founding import Founding
from holdfast.membership.master.lineage import Lineage
from holdfast.membership.master.removal import Removal
from holdfast.membership.master.rounds import (
    accusations,
    contribution_checks,
    norms,
    reduction_driver,
    reduction_orders,
    repair,
    repairer,
    round_scheduler,
)
from holdfast.membership.master.rounds.attempt import Attempt
from holdfast.membership.master.rounds.norms import UnderstatedNorm
from holdfast.membership.master.rounds.outcome import ReductionOutcome
from holdfast.membership.master.rounds.round import Round
from holdfast.membership.master.rounds.round_table import RoundTable
from holdfast.membership.master.routes.disputes import Disputes
from holdfast.membership.master.state import roster
from holdfast.membership.master.state.context import Context
from holdfast.membership.master.state.detector import Detector
from holdfast.membership.master.state.journal import RoundCommitted, RoundNumbered, RunHistory
from holdfast.membership.master.state.master_effects import Effect, RecordDurably, SendMessage
from holdfast.membership.master.state.succession import Succession
from holdfast.membership.master.sync import donor_choice, root_votes, state_sync
from holdfast.protocol.errors import LocalProtocolError
from holdfast.protocol.messages import Donate, Flush, Message, Repair, RouteWanted
from tests.membership import (
    model,
    test_disputes,
    test_repair,
    test_rounds,
    test_succession,
    test_voting_blocs,
)
from tests.membership.machine import MasterMachine
from tests.membership.model import ModelPeer
from tests.planting import Bugs, Note, Patch, Plant, spares_first, what_shows

BUGS = Bugs()
bug = BUGS.named


CONVERSATIONS: dict[str, tuple[Plant, Callable[[], None]]] = {}


def conversation(name: str, finds: Callable[[], None]) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        CONVERSATIONS[name] = plant, finds
        return plant

    return register


def reorder(patch: Patch, last: Callable[[Effect], bool]) -> None:
    """The effects that ``last`` names come after all others."""
    original = Context.take_effects

    def take_effects(self: Context) -> list[Effect]:
        return sorted(original(self), key=last)

    patch.setattr(Context, "take_effects", take_effects)


@bug("commit before journal")
def _(patch: Patch) -> None:
    reorder(patch, lambda e: isinstance(e, RecordDurably) and isinstance(e.record, RoundCommitted))


@bug("any result")
def _(patch: Patch) -> None:
    def agreed(self: Attempt, _roster: roster.Roster) -> ReductionOutcome | None:
        return next(iter(self.outcomes.values()), None)

    patch.setattr(Attempt, "agreed", agreed)


@bug("impatient")
def _(patch: Patch) -> None:
    original = Attempt.unreported

    def unreported(self: Attempt) -> list[str]:
        missing = original(self)
        return [] if len(self.survivors()) > 2 and len(missing) == 1 else missing

    patch.setattr(Attempt, "unreported", unreported)


@conversation("old attempt", test_rounds.test_a_death_is_repaired_among_the_survivors)
def _(patch: Patch) -> None:
    def attempt(self: RoundTable, number: int, _attempt_number: int) -> Attempt | None:
        round_ = self.rounds.get(number)
        return round_.attempt if round_ is not None else None

    patch.setattr(RoundTable, "attempt", attempt)


@bug("waits for the dead")
def _(patch: Patch) -> None:
    patch.setattr(Round, "forget", lambda self, peer, why: None)


@conversation(
    "refused but added",
    test_rounds.test_a_result_with_a_refused_update_in_it_is_never_committed,
)
def _(patch: Patch) -> None:
    patch.setattr(RoundTable, "refuse_update", lambda self, round_, peer, why: None)


@bug("joiner left out")
def _(patch: Patch) -> None:
    original = reduction_orders.ReductionOrders._receivers

    def receivers(
        self: reduction_orders.ReductionOrders, adding: set[str], fragment: int
    ) -> tuple[str, ...]:
        members = self.context.roster.members
        all_ = original(self, adding, fragment)
        return tuple(p for p in all_ if p in adding or members[p].in_sync)

    patch.setattr(reduction_orders.ReductionOrders, "_receivers", receivers)


@bug("transfer too early")
def _(patch: Patch) -> None:
    patch.setattr(round_scheduler.RoundScheduler, "excluded", lambda self, member, fragment: False)


@bug("pins too late")
def _(patch: Patch) -> None:
    reorder(patch, lambda e: isinstance(e, SendMessage) and isinstance(e.message, Donate))


@bug("donor without state")
def _(patch: Patch) -> None:
    def donors(choice: Any, member: roster.Member, _head: Any) -> list[roster.Member]:
        return [m for m in choice._members if m is not member and m.copies]

    patch.setattr(donor_choice.DonorChoice, "choose", donors)


@bug("first root wins")
def _(patch: Patch) -> None:
    original = state_sync.StateSync.decide

    def decide(
        self: state_sync.StateSync, fragment: int, version: int, *, force: bool = False
    ) -> bytes:
        return original(self, fragment, version, force=True)

    patch.setattr(state_sync.StateSync, "decide", decide)


@bug("promotes laggards")
def _(patch: Patch) -> None:
    patch.setattr(roster, "holds_newest", lambda member, versions: bool(member.copies))


@bug("deaf to silence")
def _(patch: Patch) -> None:
    patch.setattr(Detector, "silent", lambda self, now_s: [])
    patch.setattr(Detector, "next_deadline_s", lambda self: math.inf)


@bug("rounds reused")
def _(patch: Patch) -> None:
    original = RunHistory.replay

    def replay(records: Any) -> RunHistory:
        return original([r for r in records if not isinstance(r, RoundNumbered)])

    patch.setattr(RunHistory, "replay", replay)


@bug("views reused")
def _(patch: Patch) -> None:
    patch.setattr(roster, "VIEWS_PER_TERM", 0)


@bug("any undecided")
def _(patch: Patch) -> None:
    def outcomes(self: Attachment, hello: Any) -> Any:
        held = {reduced.round for reduced in hello.undecided}
        return tuple(c for c in self.context.history.commits.values() if c.round in held)

    patch.setattr(Attachment, "outcomes", outcomes)


@bug("forgets the late")
def _(patch: Patch) -> None:
    patch.setattr(
        state_sync.StateSync, "late", lambda self, member, fragment, why, version=None: None
    )
    patch.setattr(state_sync.StateSync, "next_deadline_s", lambda self: math.inf)


@bug("no way back")
def _(patch: Patch) -> None:
    original = round_scheduler.RoundScheduler._invite

    def invite(self: round_scheduler.RoundScheduler, round_: Round) -> None:
        if not round_.invited:
            original(self, round_)

    patch.setattr(round_scheduler.RoundScheduler, "_invite", invite)


@bug("vacancies lost")
def _(patch: Patch) -> None:
    original = Removal.remove

    def remove(self: Removal, member: Any, why: str, *, keep_place: bool = False) -> None:
        original(self, member, why, keep_place=True)

    patch.setattr(Removal, "remove", remove)


@bug("never finishes stalls")
def _(patch: Patch) -> None:
    patch.setattr(
        reduction_driver.ReductionDriver, "_stall_limit_s", lambda self, attempt: math.inf
    )


@bug("repairs too early")
def _(patch: Patch) -> None:
    original = Attempt.begin_flush

    def begin_flush(self: Attempt, now_s: float) -> None:
        original(self, now_s)
        self.held.update(dict.fromkeys(self.survivors()[1:], bytes((len(self.owners) + 7) // 8)))

    patch.setattr(Attempt, "begin_flush", begin_flush)


@bug("throws away")
def _(patch: Patch) -> None:
    original = repair.plan_repair

    def plan_repair(
        owners: Any, lost: Any, left: Any, receivers: Any, _held: Any, apart: Any
    ) -> Any:
        return original(owners, lost, left, receivers, dict.fromkeys(left, b""), apart)

    patch.setattr(repairer, "plan_repair", plan_repair)


@bug("dead successors")
def _(patch: Patch) -> None:
    patch.setattr(repairer, "plan_repair", lambda *_: ())


@bug("keeps accepting")
def _(patch: Patch) -> None:
    original = ModelPeer.handle

    def handle(self: ModelPeer, message: Message) -> None:
        original(self, message)
        if isinstance(message, Flush | Repair) and message.round in self.reducing:
            self.reducing[message.round].shut.clear()

    patch.setattr(ModelPeer, "handle", handle)


@bug("successor adds again")
def _(patch: Patch) -> None:
    original = ModelPeer.handle

    def handle(self: ModelPeer, message: Message) -> None:
        original(self, message)
        if isinstance(message, Repair) and message.round in self.reducing:
            running = self.reducing[message.round]
            for chunk in [c for c in running.spread_to if running.owners[c] == self.peer]:
                present = sum(
                    1 << at
                    for at, contributor in enumerate(running.order.contributors)
                    if contributor.peer not in running.shut
                )
                running.chunks[chunk] = (message.attempt, present)

    patch.setattr(ModelPeer, "handle", handle)


@conversation("deaf to listeners", test_repair.test_what_only_a_spare_holds_is_spread_by_the_spare)
def _(patch: Patch) -> None:
    original = Attempt.lose

    def lose(self: Attempt, peer: str, why: str) -> None:
        if peer in self.peers():
            original(self, peer, why)

    patch.setattr(Attempt, "lose", lose)


@bug("same number")
def _(patch: Patch) -> None:
    original = reduction_orders.ReductionOrders.begin

    def begin(self: reduction_orders.ReductionOrders, round_: Round, contributors: Any) -> None:
        if round_.attempt is not None:
            round_.attempt.number = round_.attempt.flush_number = round_.attempt.number - 1
        original(self, round_, contributors)

    patch.setattr(reduction_orders.ReductionOrders, "begin", begin)


@bug("below the quorum")
def _(patch: Patch) -> None:
    patch.setattr(
        reduction_orders.ReductionOrders,
        "_too_few",
        lambda self, round_: not round_.running().survivors(),
    )
    patch.setattr(model, "check_invariants", lambda coordinator: None)


@conversation("the lost accuse", test_repair.test_what_the_lost_have_said_about_others_is_void)
def _(patch: Patch) -> None:
    def against(self: Attempt, peer: str, without: Mapping[str, Collection[str]]) -> set[str]:
        return self.accusers.get(peer, set()).union(without.get(peer, ()))

    patch.setattr(Attempt, "against", against)


@conversation(
    "any manifest",
    test_repair.test_results_with_equal_digests_and_unlike_manifests_do_not_agree,
)
def _(patch: Patch) -> None:
    patch.setattr(ReductionOutcome, "__eq__", lambda self, other: self.digest == other.digest)
    patch.setattr(ReductionOutcome, "__hash__", lambda self: hash(self.digest))


@conversation(
    "one word refuses",
    test_rounds.test_one_alone_does_not_get_an_update_refused_and_nobody_is_removed,
)
def _(patch: Patch) -> None:
    patch.setattr(accusations, "ACCUSERS_MIN", 1)


@conversation("finds everywhere", test_rounds.test_who_owned_no_chunk_has_found_nothing)
def _(patch: Patch) -> None:
    patch.setattr(Attempt, "norm_reports", lambda self: dict(self.reports))


@conversation(
    "one owner's find",
    test_rounds.test_what_one_owner_alone_has_found_refuses_nothing_and_keeps_the_two_apart,
)
def _(patch: Patch) -> None:
    original = norms.understated

    def understated(*arguments: Any) -> list[UnderstatedNorm]:
        return [evolve(found, accuser="") for found in original(*arguments)]

    patch.setattr(contribution_checks, "understated", understated)


@conversation(
    "no disputes",
    test_rounds.test_whom_one_alone_has_lost_it_need_not_reach_in_the_rounds_to_come,
)
def _(patch: Patch) -> None:
    patch.setattr(Disputes, "note", lambda self, one, other, now_s: 0.0)


@conversation(
    "spares first",
    partial(
        test_disputes.test_who_says_that_it_reaches_nobody_leaves_no_spare_without_results,
        RouteWanted,
    ),
)
def _(patch: Patch) -> None:
    spares_first(patch)


@conversation(
    "heads are votes",
    test_voting_blocs.test_four_of_one_invite_and_line_do_not_replace_everybodys_weights,
)
def _(patch: Patch) -> None:
    patch.setattr(root_votes, "voice_of", lambda member: (member.peer, ""))


@conversation(
    "anybody founds", test_voting_blocs.test_of_those_who_came_by_one_invite_the_first_one_founds
)
def _(patch: Patch) -> None:
    def founders(self: Founding) -> list[roster.Member]:
        return [member for member in self.context.roster.by_number() if member.grant.founder]

    patch.setattr(Founding, "founders", founders)


@conversation(
    "moves alone", test_rounds.test_one_member_that_says_it_moves_does_not_keep_an_attempt_alive
)
def _(patch: Patch) -> None:
    patch.setattr(Attempt, "moved", lambda self, peer, now_s: setattr(self, "moved_s", now_s))


@conversation(
    "deaf to terms",
    partial(test_succession.test_who_has_obeyed_another_master_ends_this_one, 2, b""),
)
def _(patch: Patch) -> None:
    patch.setattr(Succession, "met", lambda self, term, nonce, who: False)


@conversation("one is enough", test_succession.test_a_version_that_fewer_hold_is_given_up)
def _(patch: Patch) -> None:
    original = Lineage.adopt

    def adopt(self: Lineage) -> bool:
        versions, electorate = self.context.history.versions, self.succession.electorate
        beyond = {
            member.peer
            for member in self.context.roster
            for head in member.reported_heads.values()
            if head.version > versions[head.fragment]
        }
        self.succession.electorate = electorate & beyond or electorate
        try:
            return original(self)
        finally:
            self.succession.electorate = electorate

    patch.setattr(Lineage, "adopt", adopt)


@conversation(
    "too sure of itself", test_succession.test_fresh_peers_do_not_decide_what_the_journal_lacks
)
def _(patch: Patch) -> None:
    patch.setattr(Succession, "waiting", property(lambda self: False))


@conversation("goes back at once", test_succession.test_who_returns_in_time_is_the_source)
def _(patch: Patch) -> None:
    patch.setattr(Lineage, "due_s", property(lambda self: -math.inf))


@conversation(
    "strangers' weights", test_succession.test_a_state_whose_root_the_journal_does_not_know_is_none
)
def _(patch: Patch) -> None:
    def holds(self: Lineage, member: roster.Member) -> tuple[int, ...]:
        return tuple(head.version for head in member.reported_heads.values())

    patch.setattr(Lineage, "_holds", holds)


@conversation(
    "feeds the line",
    test_succession.test_more_than_the_spares_wait_in_line_without_state_and_move_up,
)
def _(patch: Patch) -> None:
    patch.setattr(Context, "in_line", lambda self: set())


EXAMPLES: dict[str, str] = json.loads(Path(__file__).with_name("planted_examples.json").read_text())
FINDS = settings(
    max_examples=600,
    stateful_step_count=50,
    phases=[Phases.generate],  # it need not be small, only found
    database=None,
    derandomize=True,
    print_blob=True,
    report_multiple_bugs=False,
)
# An invariant, the witness, a peer, or the journal: whoever sees it first.
SEEN = (AssertionError, LocalProtocolError)


def shows(example: str) -> bool:
    """Does the bug that is planted show when this is lived through?"""

    class Again(MasterMachine):
        pass

    again = reproduce_failure(hypothesis.__version__, example.encode())(Again)
    try:
        run_state_machine_as_test(again, settings=FINDS)
    except SEEN:
        return True
    except (
        DidNotReproduce,
        InvalidArgument,
    ):  # the rules have changed, or how examples are written
        return False
    raise AssertionError("hypothesis has not run the example")


def search() -> str | None:
    """An example that shows it."""
    try:
        run_state_machine_as_test(MasterMachine, settings=FINDS)
    except SEEN as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        found = re.search(r"reproduce_failure\('[^']+', b'([^']+)'\)", notes)
        assert found is not None, notes
        return found.group(1)
    return None


@pytest.mark.planted
@pytest.mark.timeout(600)  # a search, on busy cores
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch, record_property: Note) -> None:
    BUGS[name](monkeypatch)
    assert what_shows(EXAMPLES.get(name), shows, search, record_property) is not None


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_planted_bug_fails_a_conversation(name: str, monkeypatch: Patch) -> None:
    plant, finds = CONVERSATIONS[name]
    finds()
    plant(monkeypatch)
    with pytest.raises((AssertionError, LocalProtocolError, ValueError)):
        finds()


def test_every_bug_is_listed_above() -> None:
    assert __doc__ is not None
    for name in [*BUGS, *CONVERSATIONS]:
        assert f"    {name} " in __doc__
    assert set(EXAMPLES) <= set(BUGS)
