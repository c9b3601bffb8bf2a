"""Probes: each unknown line once, one at a time, and never beside a round or a transfer."""

from __future__ import annotations

import pytest

from holdfast.membership.master.routes.probing import ANSWER_S, Probing
from holdfast.membership.master.routes.routes import Routes
from holdfast.membership.master.state.context import Context
from holdfast.membership.master.state.journal import RunFounded, RunHistory
from holdfast.membership.master.state.master_effects import SendMessage
from holdfast.membership.master.state.roster import Member, new_member
from holdfast.membership.planning.bandwidth import Bandwidth, Bandwidths
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.messages import FragmentSize, Measured, Probe, Probed
from tests.membership.table import CONTRIBUTOR, LAYOUT, LINEAGE, RUN_ID, A, B, C, head_of, hello_of


class Bench:
    """Members that are in sync, and the rules under test."""

    def __init__(self, *peers: str) -> None:
        self.context = Context(RunSpec(), RUN_ID, RunHistory(), 1)
        sizes = (FragmentSize(16, 16, 0),)
        self.context.record(RunFounded(LAYOUT, sizes, LINEAGE, (head_of(0, 0),)))
        self.bandwidths = Bandwidths()
        self.probing = Probing(self.context, self.bandwidths, Routes(self.context))
        for number, peer in enumerate(peers, 1):
            self.join(peer, number)

    def join(self, peer: str, number: int) -> Member:
        member = new_member(peer, hello_of(peer), CONTRIBUTOR, number, 1, self.context.now_s)
        member.in_sync = True
        self.context.roster.members[peer] = member
        return member

    def leave(self, peer: str) -> None:
        self.probing.removed(self.context.roster.members.pop(peer))

    def advance(self, *, lines_busy: bool = False) -> tuple[str, Probe] | None:
        """Return the peer that was ordered to probe, and the order, if any."""
        self.context.take_effects()
        self.probing.advance(lines_busy=lines_busy)
        sent = [each for each in self.context.take_effects() if isinstance(each, SendMessage)]
        if not sent:
            return None
        (send,) = sent
        assert isinstance(send.message, Probe)
        return send.peer, send.message

    def answer(self, order: tuple[str, Probe], bytes_per_s: float) -> None:
        receiver, probe = order
        member = self.context.roster.members[receiver]
        report = Probed(probe.number, probe.sender, int(bytes_per_s), 1.0)
        self.probing.probed(member, report)

    def one(self, *, lines_busy: bool = False) -> tuple[str, Probe]:
        order = self.advance(lines_busy=lines_busy)
        assert order is not None
        return order


def test_every_unknown_line_is_measured_once_one_at_a_time() -> None:
    bench = Bench(A, B, C)
    senders = []
    while (order := bench.advance()) is not None:
        assert bench.advance() is None, "one is running"
        senders.append(order[1].sender)
        assert order[0] != order[1].sender
        bench.answer(order, 1e6 * len(senders))
    assert senders == [A, B, C]
    rates = [bench.bandwidths.known(peer) for peer in (A, B, C)]
    assert rates == [Bandwidth(each, each) for each in (1e6, 2e6, 3e6)]


def test_a_probe_goes_to_the_member_that_receives_fastest() -> None:
    bench = Bench(A, B, C)
    bench.bandwidths.measured(B, Measured(1_000, 1.0, 5_000, 1.0, ()))
    bench.bandwidths.measured(C, Measured(1_000, 1.0, 9_000, 1.0, ()))
    receiver, order = bench.one()
    assert (receiver, order.sender) == (C, A)


def test_lines_that_rounds_have_measured_are_left_alone() -> None:
    bench = Bench(A, B)
    for peer in (A, B):
        bench.bandwidths.measured(peer, Measured(1_000, 1.0, 0, 0.0, ()))
    assert bench.advance() is None


def test_nothing_is_sent_while_the_lines_are_needed() -> None:
    bench = Bench(A, B)
    assert bench.advance(lines_busy=True) is None
    assert bench.advance() is not None


def test_no_member_is_measured_alone_or_before_it_is_in_sync() -> None:
    bench = Bench(A)
    assert bench.advance() is None
    joiner = bench.join(B, 2)
    joiner.in_sync = False
    assert bench.advance() is None
    joiner.in_sync = True
    assert bench.advance() is not None


def test_a_probe_without_an_answer_is_given_up_and_not_repeated() -> None:
    bench = Bench(A, B)
    order = bench.one()
    assert bench.probing.next_deadline_s() == ANSWER_S
    bench.context.now_s = ANSWER_S
    bench.advance()
    assert bench.one()[1].sender == B
    bench.answer(order, 1e6)  # too late: others may have had the line meanwhile
    assert bench.bandwidths.known(A) is None


def test_a_probe_that_failed_is_not_repeated() -> None:
    bench = Bench(A, B)
    bench.answer(bench.one(), 0.0)
    assert bench.bandwidths.known(A) is None
    assert bench.one()[1].sender == B


@pytest.mark.parametrize("gone", ["sender", "receiver"])
def test_a_probe_whose_end_is_gone_delays_no_other(gone: str) -> None:
    bench = Bench(A, B, C)
    receiver, order = bench.one()
    bench.leave(order.sender if gone == "sender" else receiver)
    assert bench.advance() is not None


def test_a_member_that_returns_as_another_process_is_probed_again() -> None:
    bench = Bench(A, B)
    for _turn in range(2):
        bench.answer(bench.one(), 0.0)
    bench.leave(A)
    bench.join(A, 3)
    assert bench.one()[1].sender == A


def test_only_the_receiver_that_was_asked_is_believed() -> None:
    bench = Bench(A, B, C)
    receiver, order = bench.one()
    (other,) = {B, C} - {receiver}
    bench.answer((other, order), 1e9)
    assert bench.bandwidths.known(order.sender) is None
    bench.answer((receiver, order), 1e6)
    assert bench.bandwidths.known(order.sender) == Bandwidth(1e6, 1e6)


def test_a_round_soon_outweighs_what_a_probe_found() -> None:
    known = Bandwidths()
    known.probed(Probed(1, A, 1_000, 0.001))
    assert known.known(A) == Bandwidth(1e6, 1e6), "however short, its receiver has timed it"
    known.measured(A, Measured(int(2e6 * 10), 10.0, 0, 0.0, ()))
    rate = known.known(A)
    assert rate is not None
    assert rate.up_bytes_per_s == pytest.approx(2e6, rel=0.05)
