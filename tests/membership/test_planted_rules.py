"""Small rules, each of which stands in one function: it is taken out, and a test must miss it.

An entry of ``BUGS`` is the function, as owner, name and what makes one without the rule of it, and
the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from attrs import evolve

from holdfast.membership.master import leases
from holdfast.membership.master.leases import Leases
from holdfast.membership.master.rounds import repair, round_scheduler, update_history
from holdfast.membership.master.rounds.attempt import Attempt, Audit
from holdfast.membership.master.rounds.audits import Auditing
from holdfast.membership.master.rounds.inquiry import Findings
from holdfast.membership.master.rounds.reduction_orders import ReductionOrders
from holdfast.membership.master.rounds.repair import Repairer
from holdfast.membership.master.rounds.update_history import RoundFindings, UpdateHistory
from holdfast.membership.master.state import roster
from holdfast.membership.master.state.history import MemberHistory
from holdfast.membership.master.state.roster import Roster
from holdfast.membership.master.state.voting_blocs import elect, voices_of
from holdfast.membership.peer.lease_book import LeaseBook
from holdfast.membership.shared import layout_difference
from holdfast.protocol import packed_orders
from holdfast.protocol.errors import LocalProtocolError, RemoteProtocolError
from holdfast.protocol.packed_orders import Heard
from tests.membership import (
    test_audits,
    test_inquiry,
    test_lease_book,
    test_leases,
    test_mean_weights,
    test_members,
    test_repair,
    test_rounds,
    test_update_history,
)
from tests.planting import Make, Patch, always, take_out
from tests.protocol import test_packed_orders


def booked(test: Callable[[LeaseBook], None]) -> Callable[[], None]:
    return lambda: test(test_lease_book.a_book())


# ---------------------------------------------------------------- without a rule


def plurality(_real: Any) -> object:
    def agreed(self: Attempt, members: Any) -> object:
        found = elect(self.outcomes, voices_of(members, self.survivors()))
        return found and found.winner

    return agreed


def same_number(real: Any) -> object:
    def next_view(self: Roster, places: set[str], *, force: bool) -> bool:
        number = self.view_number
        is_new: bool = real(self, places, force=force)
        self.view_number = number
        return is_new

    return next_view


def unchecked(real: Any) -> object:
    return lambda **how: real(**how | {"write_checksum": False})


def anonymous(real: Any) -> object:
    def of(_kind: type, reports: Any, contributors: Any) -> object:
        return real.__func__(RoundFindings, [("", each) for _, each in reports], contributors)

    return classmethod(of)


def any_survivors(_real: Any) -> object:
    def too_few(self: ReductionOrders, round_: Any) -> bool:
        quorum: int = self.round_table.quorum(round_.original_count)
        return len(round_.running().survivors()) < quorum

    return too_few


def wanted_still(real: Any) -> object:
    def claim(self: LeaseBook) -> object:
        wanted = self._wanted
        claimed = real(self)
        self._wanted = wanted
        return claimed

    return claim


# ---------------------------------------------------------------- the table

BUGS: dict[str, tuple[tuple[Any, str, Make], Callable[[], None]]] = {
    "a plurality commits": (
        (Attempt, "agreed", plurality),
        test_rounds.test_no_majority_aborts,
    ),
    "nobody is asked what differs": (
        (Attempt, "disagrees", always(value=False)),
        test_inquiry.test_one_that_gives_each_another_result_is_left_out_and_the_round_run_again,
    ),
    "committed before it is checked": (
        (Audit, "over", lambda _real: property(lambda self: True)),
        test_audits.test_a_checker_that_is_silent_is_replaced,
    ),
    "bytes buy a checker no time": (
        (Auditing, "moved", always(None)),
        test_audits.test_a_checker_that_bytes_reach_keeps_its_turn_and_no_longer,
    ),
    "any number of chunks": (
        (Repairer, "held", lambda real: lambda *to: real(*to[:2], evolve(to[2], results=b"\x00"))),
        test_repair.test_chunks_that_do_not_exist_are_a_violation,
    ),
    "listeners are left with the dead": (
        (Repairer, "serve_listeners", always(None)),
        test_repair.test_a_spare_gets_from_others_what_a_dead_owner_has_not_sent_it,
    ),
    "the mute are waited for": (
        (Repairer, "flush_limit_s", always(math.inf)),
        test_repair.test_who_does_not_answer_a_flush_is_removed,
    ),
    "the first takes all": (
        (repair, "plan_repair", lambda real: lambda *of: real(*of[:2], of[2][:1], *of[3:])),
        test_repair.test_chunks_are_dealt_evenly_and_runs_are_joined,
    ),
    "who lacks a link takes over": (
        (repair, "plan_repair", lambda real: lambda *of: real(*of[:5])),
        test_repair.test_a_member_that_lacks_a_link_takes_over_what_nobody_else_can,
    ),
    "one word makes two faces": (
        (Findings, "culprits", lambda _real: property(lambda self: list(self.against))),
        test_inquiry.test_whom_an_owner_misled_is_synced_again_and_not_called_bad,
    ),
    "a bloc has many words": (
        (Findings, "by_voice", lambda _real: lambda self, voices: self),
        test_inquiry.test_several_of_one_invite_and_line_have_one_word,
    ),
    "a spare takes what was always free": (
        (roster, "next_to_seat", lambda real: lambda *of: real(*of[:2], 1, *of[3:])),
        test_members.test_a_spare_never_takes_a_place_that_was_always_free,
    ),
    "all views have one number": (
        (Roster, "next_view", same_number),
        test_members.test_welcome_comes_before_the_view_that_has_the_newcomer_in_it,
    ),
    "any layout is the run's": (
        (layout_difference, "layout_difference", always(None)),
        test_members.test_who_waits_with_another_layout_is_refused_when_the_run_is_founded,
    ),
    "views are not heard": (
        (
            Heard,
            "then",
            lambda real: lambda self, of, data: real(self, of, data)._replace(view=b""),
        ),
        test_packed_orders.test_what_hardly_differs_takes_a_few_bytes_for_each_member,
    ),
    "any view is the base": (
        (packed_orders.zstandard, "ZstdCompressor", unchecked),
        test_packed_orders.test_who_has_heard_something_else_is_not_misled,
    ),
    "an order of any length": (
        (packed_orders, "FRAME_BYTES_MAX", lambda _real: 2**40),
        test_packed_orders.test_a_message_of_another_kind_or_length_is_refused,
    ),
    "what an order takes is not noted": (
        (Leases, "ordered", always(None)),
        partial(
            test_leases.test_what_an_ordered_reduction_may_spend_is_nobodys_until_it_is_over,
            commits=True,
        ),
    ),
    "given while members are awaited": (
        (Leases, "settle", lambda real: lambda self, waiting: real(self, waiting=False)),
        test_leases.test_after_a_restart_nothing_is_given_twice_while_members_are_awaited,
    ),
    "spent is forgotten at once": (
        (leases, "RECENT_COMMITS", lambda _real: 0),
        test_leases.test_an_update_on_its_way_may_name_what_a_commit_has_spent,
    ),
    "no sample is void": (
        (LeaseBook, "barred", always(value=False)),
        booked(test_lease_book.test_a_spare_draws_samples_that_count_nowhere),
    ),
    "spent though left out": (
        (LeaseBook, "committed", lambda real: lambda *of, contributed: real(*of, contributed=True)),
        booked(test_lease_book.test_what_a_round_did_not_take_is_in_the_next_update),
    ),
    "the demoted take places": (
        (roster, "next_to_seat", lambda real: lambda *of: real(*of[:6])),
        test_members.test_whom_the_operator_has_demoted_takes_no_place_and_another_does,
    ),
    "newcomers weigh": (
        (round_scheduler, "weights_of", lambda _real: lambda tokens, _context: dict(tokens)),
        test_mean_weights.test_a_newcomer_weighs_nothing_in_its_first_rounds,
    ),
    "a return ends the trial": (
        (MemberHistory, "serve", lambda _real: lambda self, _commit: self.served.clear()),
        test_mean_weights.test_a_trial_goes_on_after_a_restart_and_under_another_number,
    ),
    "an invite weighs as it likes": (
        (round_scheduler, "capped_by_invite", lambda _real: lambda weights, *_: dict(weights)),
        test_mean_weights.test_an_invite_has_its_share_and_no_more,
    ),
    "nothing is a mean": (
        (ReductionOrders, "_too_few", any_survivors),
        test_mean_weights.test_a_round_of_which_only_newcomers_are_left_is_aborted,
    ),
    "one word of two names": (
        (RoundFindings, "middle", lambda _real: staticmethod(min)),
        partial(test_update_history.test_one_owners_word_names_nobody, 2),
    ),
    "one owner is enough": (
        (update_history, "REPORTS_MIN", lambda _real: 1),
        partial(test_update_history.test_one_owners_word_names_nobody, 1),
    ),
    "heard about oneself": (
        (RoundFindings, "of", anonymous),
        test_update_history.test_nobody_is_heard_about_itself,
    ),
    "one round names": (
        (update_history, "ODD_ROUNDS", lambda _real: 1),
        test_update_history.test_a_bad_week_is_forgotten,
    ),
    "one round stays": (
        (update_history, "SCORE_LIMIT", lambda _real: math.inf),
        test_update_history.test_a_bad_week_is_forgotten,
    ),
    "a claim fits the exponent": (
        (update_history, "UNEQUAL_MIN", lambda _real: 1),
        test_update_history.test_two_liars_do_not_fit_the_exponent,
    ),
    "tokens tell nothing": (
        (UpdateHistory, "_efforts", lambda _real: lambda self, norms, _tokens: norms),
        partial(test_update_history.test_who_has_trained_less_and_says_so_is_not_lazy, 0.9),
    ),
    "a request outlives its session": (
        (LeaseBook, "claim", wanted_still),
        test_lease_book.test_a_request_that_a_lost_session_took_along_is_made_again,
    ),
}


@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_rule_that_is_taken_out_is_missed(name: str, monkeypatch: Patch) -> None:
    function, test = BUGS[name]
    take_out(monkeypatch, function)
    missed = AssertionError, LocalProtocolError, RemoteProtocolError, ValueError
    with pytest.raises((*missed, pytest.fail.Exception)):
        test()
