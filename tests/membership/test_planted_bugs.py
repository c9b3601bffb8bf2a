"""Does a conversation with the master see that a rule of it is missing? Each test plants one bug.

About answers to an attempt:

    old attempt                answers of an earlier attempt count for the present one
    deaf to listeners          a lost listener that inherited chunks is not missed
    the lost accuse            what a lost peer has said about others still counts
    any manifest               results with one digest agree whatever their manifests
    any undecided              an undecided result is called committed whatever its digest
    repairs too early          a repair does not wait for all to have shut out the lost
    throws away                a lost owner's chunks are all added up again, held or not
    promotes laggards          a spare takes a place before it has applied the newest commit
    takes it along             who leaves may be all that holds the newest version

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
    the nonce decides          of two starts on one backup, whoever is obeyed
    one is enough              a version that one member claims is adopted
    too sure of itself         a master that is behind does not wait for a majority
    goes back at once          a run is rewound as soon as nobody holds the newest version
    strangers' weights         a state whose root the journal does not know is gone back to
    feeds the line             who waits in line is synced all the same

Bugs that take a search are planted in tests/swarm/test_planted_simulation.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pytest
from attrs import evolve

from holdfast.membership.master.attachment import Attachment
from holdfast.membership.master.departures import Departures
from holdfast.membership.master.lineage import Lineage
from holdfast.membership.master.places import Founding
from holdfast.membership.master.rounds import (
    accusations,
    contribution_checks,
    norms,
    repair,
)
from holdfast.membership.master.rounds.attempt import Attempt, Blame, ReductionOutcome, Reports
from holdfast.membership.master.rounds.norms import UnderstatedNorm
from holdfast.membership.master.rounds.round_table import RoundTable
from holdfast.membership.master.routes.disputes import Disputes
from holdfast.membership.master.state import roster
from holdfast.membership.master.state.context import Context
from holdfast.membership.master.state.succession import Succession
from holdfast.membership.master.sync import root_votes
from holdfast.protocol.errors import LocalProtocolError
from holdfast.protocol.messages import RouteWanted
from tests.membership import (
    test_disputes,
    test_members,
    test_repair,
    test_rounds,
    test_succession,
    test_voting_blocs,
)
from tests.planting import Bugs, Make, Patch, Plant, always, spares_first, take_out

CONVERSATIONS: dict[str, tuple[Plant, Callable[[], None]]] = {}


def conversation(name: str, finds: Callable[[], None]) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        CONVERSATIONS[name] = plant, finds
        return plant

    return register


@conversation("old attempt", test_rounds.test_a_death_is_repaired_among_the_survivors)
def _(patch: Patch) -> None:
    def attempt(self: RoundTable, number: int, _attempt_number: int) -> Attempt | None:
        round_ = self.rounds.get(number)
        return round_.attempt if round_ is not None else None

    patch.setattr(RoundTable, "attempt", attempt)


@conversation("deaf to listeners", test_repair.test_what_only_a_spare_holds_is_spread_by_the_spare)
def _(patch: Patch) -> None:
    original = Attempt.lose

    def lose(self: Attempt, peer: str, why: str) -> None:
        if peer in self.peers():
            original(self, peer, why)

    patch.setattr(Attempt, "lose", lose)


@conversation(
    "heads are votes",
    test_voting_blocs.test_four_of_one_invite_and_line_do_not_replace_everybodys_weights,
)
def _(patch: Patch) -> None:
    patch.setattr(root_votes, "voice_of", lambda member: (member.peer, ""))


@conversation("the lost accuse", test_repair.test_what_the_lost_have_said_about_others_is_void)
def _(patch: Patch) -> None:
    def against(self: Blame, peer: str, without: Mapping[str, Collection[str]]) -> set[str]:
        return self.accusers.get(peer, set()).union(without.get(peer, ()))

    patch.setattr(Blame, "against", against)


@conversation(
    "any manifest",
    test_repair.test_results_with_equal_digests_and_unlike_manifests_do_not_agree,
)
def _(patch: Patch) -> None:
    patch.setattr(ReductionOutcome, "__eq__", lambda self, other: self.digest == other.digest)
    patch.setattr(ReductionOutcome, "__hash__", lambda self: hash(self.digest))


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
    "spares first",
    partial(
        test_disputes.test_who_says_that_it_reaches_nobody_leaves_no_spare_without_results,
        RouteWanted,
    ),
)
def _(patch: Patch) -> None:
    spares_first(patch)


@conversation("one is enough", test_succession.test_a_version_that_fewer_hold_is_given_up)
def _(patch: Patch) -> None:
    original = Lineage.adopt

    def adopt(self: Lineage) -> bool:
        versions, electorate = self.context.history.versions, self.succession.electorate
        beyond = {
            member.peer
            for member in self.context.roster
            for head in member.transfers.reported_heads.values()
            if head.version > versions[head.fragment]
        }
        self.succession.electorate = electorate & beyond or electorate
        try:
            return original(self)
        finally:
            self.succession.electorate = electorate

    patch.setattr(Lineage, "adopt", adopt)


@conversation(
    "any undecided",
    test_members.test_an_undecided_result_that_was_not_committed_is_void,
)
def _(patch: Patch) -> None:
    def outcomes(self: Attachment, hello: Any) -> Any:
        held = {reduced.round for reduced in hello.undecided}
        return tuple(c for c in self.context.history.commits.values() if c.round in held)

    patch.setattr(Attachment, "outcomes", outcomes)


@conversation(
    "repairs too early",
    test_repair.test_a_death_while_the_others_are_asked_begins_the_asking_again,
)
def _(patch: Patch) -> None:
    original = Attempt.begin_flush

    def begin_flush(self: Attempt, now_s: float) -> None:
        original(self, now_s)
        nothing = bytes((len(self.owners) + 7) // 8)
        self.flush.held.update(dict.fromkeys(self.survivors()[1:], nothing))

    patch.setattr(Attempt, "begin_flush", begin_flush)


@conversation(
    "throws away",
    test_repair.test_a_chunk_that_a_survivor_holds_is_spread_and_the_others_are_made_again,
)
def _(patch: Patch) -> None:
    original = repair.plan_repair

    def plan_repair(
        owners: Any, lost: Any, left: Any, receivers: Any, _held: Any, apart: Any
    ) -> Any:
        return original(owners, lost, left, receivers, dict.fromkeys(left, b""), apart)

    patch.setattr(repair, "plan_repair", plan_repair)


def any_heads(_real: Any) -> object:
    def holds(self: Lineage, member: roster.Member) -> tuple[int, ...]:
        return tuple(head.version for head in member.transfers.reported_heads.values())

    return holds


def all_founders(_real: Any) -> object:
    def founders(self: Founding) -> list[roster.Member]:
        return [member for member in self.context.roster.by_number() if member.grant.founder]

    return founders


ONE_FUNCTION: dict[str, tuple[tuple[Any, str, Make], Callable[[], None]]] = {
    "refused but added": (
        (RoundTable, "refuse_update", always(None)),
        test_rounds.test_a_result_with_a_refused_update_in_it_is_never_committed,
    ),
    "one word refuses": (
        (accusations, "ACCUSERS_MIN", lambda _real: 1),
        test_rounds.test_one_alone_does_not_get_an_update_refused_and_nobody_is_removed,
    ),
    "finds everywhere": (
        (Attempt, "norm_reports", lambda _real: lambda self: dict(self.reports.norms)),
        test_rounds.test_who_owned_no_chunk_has_found_nothing,
    ),
    "no disputes": (
        (Disputes, "note", always(0.0)),
        test_rounds.test_whom_one_alone_has_lost_it_need_not_reach_in_the_rounds_to_come,
    ),
    "moves alone": (
        (Reports, "moved", lambda _real: lambda self, _, now_s: setattr(self, "moved_s", now_s)),
        test_rounds.test_one_member_that_says_it_moves_does_not_keep_an_attempt_alive,
    ),
    "deaf to terms": (
        (Succession, "met", always(value=False)),
        test_succession.test_who_has_obeyed_a_later_master_ends_this_one,
    ),
    "the nonce decides": (
        (Succession, "met", lambda met: lambda self, *of: met(self, *of[:2], 9, of[3])),
        test_succession.test_of_two_starts_of_one_term_that_goes_on_which_more_members_obey,
    ),
    "too sure of itself": (
        (Succession, "waiting", lambda _real: property(lambda self: False)),
        test_succession.test_fresh_peers_do_not_decide_what_the_journal_lacks,
    ),
    "goes back at once": (
        (Lineage, "due_s", lambda _real: property(lambda self: -math.inf)),
        test_succession.test_who_returns_in_time_is_the_source,
    ),
    "feeds the line": (
        (Context, "in_line", lambda _real: lambda self: set()),
        test_succession.test_more_than_the_spares_wait_in_line_without_state_and_move_up,
    ),
    "promotes laggards": (
        (roster, "holds_newest", lambda _real: lambda member, versions: bool(member.copies)),
        test_members.test_a_spare_that_lags_is_promoted_once_it_has_caught_up,
    ),
    "takes it along": (
        (Departures, "_copies_need", always(value=False)),
        test_rounds.test_the_last_holder_goes_when_another_has_a_copy,
    ),
    "strangers' weights": (
        (Lineage, "_holds", any_heads),
        test_succession.test_a_state_whose_root_the_journal_does_not_know_is_none,
    ),
    "anybody founds": (
        (Founding, "founders", all_founders),
        test_voting_blocs.test_of_those_who_came_by_one_invite_the_first_one_founds,
    ),
}
for _name, (_function, _finds) in ONE_FUNCTION.items():
    CONVERSATIONS[_name] = partial(take_out, function=_function), _finds


@pytest.mark.planted
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_planted_bug_fails_a_conversation(name: str, monkeypatch: Patch) -> None:
    plant, finds = CONVERSATIONS[name]
    finds()
    plant(monkeypatch)
    with pytest.raises((AssertionError, LocalProtocolError, ValueError)):
        finds()


def test_every_bug_is_listed_above() -> None:
    assert Bugs({name: plant for name, (plant, _finds) in CONVERSATIONS.items()}).are_listed(
        __doc__
    )
