"""Admission, founding, sync and places of members, as conversations."""

from __future__ import annotations

import json

import pytest

from holdfast.membership.master.coordinator import Grant
from holdfast.membership.master.hello_checks import PROCESS_S, PROCESSES_MAX
from holdfast.membership.master.state.history import RunHistory
from holdfast.membership.master.state.journal import (
    PeerAdmitted,
    PlaceTaken,
    PlaceVacated,
    RunFounded,
)
from holdfast.membership.master.state.master_effects import DropPeer, SendMessage
from holdfast.membership.master.sync.state_sync import SYNC_ATTEMPTS_MAX
from holdfast.protocol import messages as m
from tests.membership.table import (
    CONTRIBUTOR,
    DIGEST,
    FOUNDER,
    LAYOUT,
    LINEAGE,
    OTHER_DIGEST,
    SPARE,
    TEN_SECONDS,
    A,
    B,
    C,
    D,
    E,
    Table,
    head_of,
    hello_of,
    holding,
    reducing,
    sizes_of,
    started,
)

OTHER_LAYOUT = m.ModelLayout((m.TensorSpec("w", (4, 8), "float32", "parameter"),))


# ---------------------------------------------------------------- refusals


def test_versions_that_do_not_meet_are_refused_with_both_ranges() -> None:
    table = Table()
    table.join(A, hello=hello_of(A, versions=(m.VERSION_MAX + 1, m.VERSION_MAX + 3)))
    assert table.dropped(A) is m.RefusalCode.VERSION
    assert f"{m.VERSION_MAX + 1} to {m.VERSION_MAX + 3}" in table.announced()
    assert f"{m.VERSION_MIN} to {m.VERSION_MAX}" in table.announced()
    assert A not in table.master.context.roster


def test_there_are_at_most_512_members(monkeypatch: pytest.MonkeyPatch) -> None:
    assert m.MEMBERS_MAX == 512
    monkeypatch.setattr(m, "MEMBERS_MAX", 3)
    table = started(A, B, C)
    table.join(D)
    assert table.dropped(D) is m.RefusalCode.FULL
    assert "this run has 3 members, the most there are: join again when" in table.announced()
    table.join(C, hello=hello_of(C, incarnation=2))  # who is a member may come back
    assert len(table.master.context.roster) == 3
    table.leave(B)
    table.join(D)
    assert D in table.master.context.roster


def test_another_runs_peer_is_refused() -> None:
    table = Table()
    table.join(A, hello=hello_of(A, run_id="cd" * 16))
    assert table.dropped(A) is m.RefusalCode.RUN


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (m.TensorSpec("w", (4, 8), "float32", "parameter"), "'w' has shape [4, 8]"),
        (
            m.TensorSpec("w", (4, 4), "float16", "parameter"),
            "dtype float16 where the run has float3",
        ),
        (m.TensorSpec("w", (4, 4), "float32", "buffer"), "kind buffer"),
        (m.TensorSpec("v", (4, 4), "float32", "parameter"), "tensor 0 is 'v'"),
    ],
)
def test_another_layout_is_refused_with_the_first_difference(
    theirs: m.TensorSpec, words: str
) -> None:
    table = Table()
    table.found(A)
    table.join(B, hello=hello_of(B, layout=m.ModelLayout((theirs,))))
    assert table.dropped(B) is m.RefusalCode.LAYOUT
    assert words in table.announced()


@pytest.mark.parametrize(("extra", "words"), [(1, "'x', which the run has not"), (-1, "lacks 'w'")])
def test_a_missing_or_additional_tensor_is_named(extra: int, words: str) -> None:
    table = Table()
    table.found(A)
    more = m.TensorSpec("x", (1,), "float32", "parameter")
    tensors = (*LAYOUT.tensors, more) if extra > 0 else LAYOUT.tensors[:-1]
    table.join(B, hello=hello_of(B, layout=None))
    table.say(B, m.TrainerAttached(m.ModelLayout(tensors)))
    assert table.dropped(B) is m.RefusalCode.LAYOUT
    assert words in table.announced()


def test_a_kicked_peer_stays_out() -> None:
    table = started(A, B)
    table.take(table.master.kick(B, "mines coins", table.now_s))
    assert table.dropped(B) is m.RefusalCode.KICKED
    assert [info.peer for info in table.hear(A, m.View).members] == [A]
    for _ in range(2):
        table.join(B)
        assert table.dropped(B) is m.RefusalCode.KICKED
        assert "mines coins" in table.announced()
        table.restart()


def test_who_was_never_here_can_be_kicked_too() -> None:
    table = Table()
    table.take(table.master.kick(B, "leaked token", table.now_s))
    table.join(B)
    assert table.dropped(B) is m.RefusalCode.KICKED


@pytest.mark.fault("a member sends junk")
def test_what_only_a_master_says_ends_the_peer_that_says_it() -> None:
    table = started(A, B)
    table.say(B, m.Finish(1))
    assert table.dropped(B) is m.RefusalCode.PROTOCOL
    table.say(B, m.Heartbeat())  # was on its way already
    assert table.effects == []


@pytest.mark.parametrize("head", [head_of(0, 1), head_of(0, 5), head_of(9, 0), head_of(0, 0, b"")])
def test_a_version_that_was_never_committed_ends_the_peer_that_reports_it(head: object) -> None:
    table = started(A, B)
    table.say(B, m.Applied(1, head))  # type: ignore[arg-type]
    assert table.dropped(B) is m.RefusalCode.PROTOCOL


# ---------------------------------------------------------------- connections and numbers


def test_welcome_comes_before_the_view_that_has_the_newcomer_in_it() -> None:
    table = Table()
    table.join(A)
    kinds = [type(e.message) for e in table.effects if isinstance(e, SendMessage)]
    assert kinds == [m.Welcome, m.View]
    table.join(B)
    numbers = [info.number for info in table.master.context.roster.view_members]
    assert numbers == [1, 2]
    assert table.hear(A, m.View).number < table.hear(A, m.View).number


def test_a_reconnect_keeps_number_and_place_and_drops_the_old_connection() -> None:
    table = started(A, B, spares=[C], toml="[membership]\ncontributors = 2\n")
    state = holding(B, 0)
    table.join(B, CONTRIBUTOR, state)
    first = table.effects[0]
    assert first == DropPeer(B, m.RefusalCode.DUPLICATE, "it connected again", previous=True)
    assert table.hear(B, m.Welcome).number == 2
    assert table.roles() == {"a": "contributor*", "b": "contributor*", "c": "spare*"}
    assert not table.records(PlaceVacated)


def test_another_process_of_the_same_peer_is_a_new_member() -> None:
    table = started(A, B, spares=[C], toml="[membership]\ncontributors = 2\n")
    table.join(B, CONTRIBUTOR, hello_of(B, incarnation=2))
    assert isinstance(table.effects[0], DropPeer)
    assert table.effects[0].previous
    assert table.hear(B, m.Welcome).number == 4
    assert table.roles() == {"a": "contributor*", "b": "spare", "c": "contributor*"}


def test_the_first_of_several_copies_of_a_state_folder_stays() -> None:
    table = started(A, B)
    heard: list[m.RefusalCode] = []
    for incarnation in (2, 3, 1, 2, 1):  # 1 has not ended, as it seemed
        table.join(B, hello=hello_of(B, incarnation=incarnation))
        drop = table.effects[0]
        assert isinstance(drop, DropPeer)
        heard.append(drop.code)
    duplicate, final = m.RefusalCode.DUPLICATE, m.RefusalCode.COPY
    assert heard == [duplicate, duplicate, final, duplicate, final]


def test_a_refused_newcomer_does_not_disturb_the_old_connection() -> None:
    table = started(A, B)
    table.join(B, hello=hello_of(B, layout=OTHER_LAYOUT))
    (drop,) = [e for e in table.effects if isinstance(e, DropPeer)]
    assert not drop.previous
    assert B in table.master.context.roster


def test_numbers_only_grow() -> None:
    table = started(A)
    for incarnation in range(2, 6):
        table.join(B, hello=hello_of(B, incarnation=incarnation))
        assert table.hear(B, m.Welcome).number == incarnation
        table.leave(B)
    table.join(B, hello=hello_of(B, incarnation=5))
    assert table.hear(B, m.Welcome).number == 5  # the same process comes back
    assert len(table.records(PeerAdmitted)) == 5


def test_silence_is_measured_by_the_masters_clock() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.wait(6.0, A)
    table.say(B, m.Heartbeat())
    table.wait(4.0, A)
    assert table.dropped(C) is m.RefusalCode.SILENT
    assert B in table.master.context.roster
    table.wait(6.0, A)
    assert table.dropped(B) is m.RefusalCode.SILENT


# ---------------------------------------------------------------- founding


def test_the_first_founder_with_a_trainer_is_asked() -> None:
    table = Table()
    table.join(A)  # may not found
    table.join(B, FOUNDER, hello_of(B, layout=None))  # has no trainer yet
    assert "waiting for the trainer of b (bbbbbbbb)" in table.status()["why_waiting"]
    table.join(C, FOUNDER)
    table.hear(C, m.SupplyWeights)
    table.say(B, m.TrainerAttached(LAYOUT))
    table.hears_no(A, m.SupplyWeights)
    table.hears_no(B, m.SupplyWeights)
    assert table.status()["state"] == "waiting for weights"


def founded(
    fragments: int = 1, version: int = 0, layout: m.ModelLayout = LAYOUT
) -> m.WeightsSupplied:
    heads = tuple(head_of(fragment, version) for fragment in range(fragments))
    return m.WeightsSupplied(layout, sizes_of(fragments), heads, LINEAGE)


def test_when_the_founder_dies_the_next_one_is_asked() -> None:
    table = Table()
    table.join(A, FOUNDER)
    table.join(B, FOUNDER)
    table.hear(A, m.SupplyWeights)
    table.leave(A)
    table.hear(B, m.SupplyWeights)
    table.say(B, m.TrainerLost("crash"))
    table.say(B, founded())  # sent before it knew; nobody is the founder now
    assert not table.records(RunFounded)
    table.say(B, m.TrainerAttached(LAYOUT))
    table.hear(B, m.SupplyWeights)
    table.say(B, founded())
    assert table.records(RunFounded)


def test_a_founded_run_welcomes_everybody_again_and_syncs_them() -> None:
    table = Table(fragments=2)
    table.join(A, FOUNDER)
    table.join(B)
    table.join(C, hello=hello_of(C, layout=None))
    table.forget()
    table.say(A, founded(2))
    for peer in (B, C):
        welcome = table.hear(peer, m.Welcome)
        assert welcome.layout == LAYOUT
        assert welcome.lineage == LINEAGE
        assert welcome.heads == (head_of(0, 0), head_of(1, 0))
        assert table.hear(peer, m.SyncFragment) == m.SyncFragment(head_of(0, 0), (A,))
        assert table.hear(peer, m.SyncFragment) == m.SyncFragment(head_of(1, 0), (A,))
    table.hears_no(A, m.Welcome)
    assert table.roles() == {"a": "contributor*", "b": "spare", "c": "spare"}


def test_who_waits_with_another_layout_is_refused_when_the_run_is_founded() -> None:
    table = Table()
    table.join(A, FOUNDER)
    table.join(B, hello=hello_of(B, layout=OTHER_LAYOUT))
    table.say(A, founded())
    assert table.dropped(B) is m.RefusalCode.LAYOUT


HUGE = m.ModelLayout((m.TensorSpec("w", (2**25, 2**25), "float32", "parameter"),))


@pytest.mark.parametrize(
    ("layout", "sizes", "fault"),
    [
        (HUGE, (m.FragmentSize(2**50, 2**50, 0),), "at most 68719476736"),
        (LAYOUT, (m.FragmentSize(2**50, 2**50, 0),), "its fragments have 1125899906842624 values"),
        (LAYOUT, (m.FragmentSize(16, 0, 0),), "0 values with momentum, its tensors 16"),
        (LAYOUT, (m.FragmentSize(16, 16, 2**62),), "counters, its tensors 0"),
        (
            LAYOUT,
            (m.FragmentSize(0, 16, 0), m.FragmentSize(16, 0, 0)),
            "2 fragments, where run.toml",
        ),
        (LAYOUT, (m.FragmentSize(15, 16, 0),), "its fragments have 15 values"),
        (
            m.ModelLayout((m.TensorSpec("w", (2**62,) * 16, "float32", "counter"),)),
            (m.FragmentSize(0, 0, 2**63 - 1),),
            "counters, its tensors",
        ),
    ],
)
def test_sizes_that_are_not_the_layouts_or_no_member_can_hold_found_no_run(
    layout: m.ModelLayout, sizes: tuple[m.FragmentSize, ...], fault: str
) -> None:
    table = Table()
    table.join(A, FOUNDER, hello_of(A, layout=layout))
    heads = tuple(head_of(fragment, 0) for fragment in range(len(sizes)))
    table.say(A, m.WeightsSupplied(layout, sizes, heads, LINEAGE))
    assert table.dropped(A) is m.RefusalCode.PROTOCOL
    assert not table.records(RunFounded)
    assert any(fault in event.text for event in table.master.context.events)


def test_a_fragment_of_too_many_chunks_founds_no_run() -> None:
    table = Table("[reduce]\nchunk_bytes = 4096\n")
    layout = m.ModelLayout((m.TensorSpec("w", (2**30,), "float32", "buffer"),))
    table.join(A, FOUNDER, hello_of(A, layout=layout))
    size = m.FragmentSize(2**30, 0, 0)
    table.say(A, m.WeightsSupplied(layout, (size,), (head_of(0, 0),), LINEAGE))
    assert table.dropped(A) is m.RefusalCode.PROTOCOL
    assert any("use larger ones" in event.text for event in table.master.context.events)


@pytest.mark.parametrize("message", [founded(1, version=3), founded(1, layout=OTHER_LAYOUT)])
def test_a_void_founding_ends_the_founder_not_the_run(message: m.WeightsSupplied) -> None:
    table = Table()
    table.join(A, FOUNDER)
    table.join(B, FOUNDER)
    table.say(A, message)
    assert table.dropped(A) is m.RefusalCode.PROTOCOL
    table.hear(B, m.SupplyWeights)
    assert not table.records(RunFounded)


def test_a_key_that_comes_as_ever_new_processes_fills_no_journal() -> None:
    table = started(A, B)
    before = len(table.records(PeerAdmitted))
    for incarnation in range(2, 200):
        table.join(C, hello=hello_of(C, incarnation=incarnation))
        table.now_s += 0.1
    many = len(table.records(PeerAdmitted)) - before
    assert many <= PROCESSES_MAX + 3, "and a few for the time that it took"
    assert table.dropped(C) is m.RefusalCode.BUSY
    # Who reconnects is no new process, and another key is not held up by this one.
    for _ in range(3 * PROCESSES_MAX):
        table.join(B, hello=hello_of(B))
    table.join(D)
    assert D in table.master.context.roster
    table.now_s += 2 * PROCESS_S
    table.join(C, hello=hello_of(C, incarnation=1_000))
    assert len(table.records(PeerAdmitted)) - before == many + 2


def test_nobody_founds_a_run_twice() -> None:
    table = started(A, B)
    table.say(B, founded())
    assert len(table.records(RunFounded)) == 1
    assert B in table.master.context.roster


# ---------------------------------------------------------------- syncing


def test_donors_pin_before_the_joiner_is_told() -> None:
    table = started(A, B)
    table.join(C)
    order = [
        (e.peer[0], type(e.message).__name__)
        for e in table.effects
        if isinstance(e, SendMessage) and isinstance(e.message, m.Donate | m.SyncFragment)
    ]
    assert order == [("a", "Donate"), ("b", "Donate"), ("c", "SyncFragment")]
    assert table.hear(A, m.Donate) == m.Donate(head_of(0, 0), C)
    assert table.hear(C, m.SyncFragment) == m.SyncFragment(head_of(0, 0), (A, B))
    table.say(C, m.Synced(head_of(0, 0), 64))
    assert table.hear(A, m.Release) == m.Release(0, 0, C)
    table.hear(B, m.Release)
    assert table.roles()["c"] == "contributor*"


def test_a_joiner_replays_what_is_committed_while_it_fetches() -> None:
    table = started(A, B)
    table.join(C)
    order = table.reduce(A, B)
    assert order.receivers == (A, B, C)
    table.reduced(order, A, B)
    table.hear(C, m.Commit)
    table.applied(order, A, B)
    table.say(C, m.Synced(head_of(0, 0), 64))
    assert table.roles()["c"] == "spare"  # not yet: version 1 is to come
    assert table.why(C) == "applying version 1 of fragment 0"
    table.say(C, m.Applied(order.round, head_of(0, 1)))
    assert table.roles()["c"] == "contributor*"


def test_a_synced_version_ahead_of_the_fetched_one_is_fine() -> None:
    table = started(A, B)
    table.join(C)
    order = table.reduce(A, B)
    table.reduced(order, A, B)
    table.say(C, m.Synced(head_of(0, 1), 64))  # its root is not agreed yet
    assert table.roles()["c"] == "spare"
    table.applied(order, A, B)
    assert table.roles()["c"] == "contributor*"


def test_a_joiner_that_lost_a_result_while_it_fetched_fetches_again() -> None:
    table = started(A, B)
    table.join(C)
    order = table.reduce(A, B)
    table.complete(order, A, B)
    table.say(C, m.ReduceFailed(order.round, 1, (A,), False, "no link"))
    table.forget()
    table.say(C, m.Synced(head_of(0, 0), 64))  # and nothing leads from there to the newest version
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)
    table.say(C, m.Synced(head_of(0, 1), 64))
    assert table.roles()["c"] == "contributor*"


def test_a_joiner_that_a_round_leaves_out_while_it_fetches_starts_from_scratch() -> None:
    """The joiner has no link to the chunk owners, so it cannot get from the fetched version to the
    next.
    """
    table = started(A, B)
    table.join(C)
    for other in (A, B):
        table.say(C, m.RouteWanted(other, 0, False, "no answer"))
    order = table.reduce(A, B)
    assert order.receivers == (A, B)
    for other in (A, B):
        table.say(C, m.RouteWorks(other, table.hear(C, m.Route).number))
    table.complete(order, A, B)
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)
    table.say(C, m.Synced(head_of(0, 1), 64))
    assert table.roles()["c"] == "contributor*"


def test_a_donor_of_wrong_blocks_is_named_though_the_transfer_succeeded() -> None:
    table = started(A, B)
    table.join(C)
    table.say(C, m.Synced(head_of(0, 0), 64, (A, D)))
    assert "a (aaaaaaaa) served wrong blocks of fragment 0 to c (cccccccc)" in table.announced()
    assert "dddddddd" not in table.announced()
    counts = {row["name"]: row["bad_blocks"] for row in table.status()["members"]}
    assert counts == {"a": 1, "b": 0, "c": 0}


@pytest.mark.fault(
    "a copy of the state differs", "its root is in the minority", "healed by the blocks that differ"
)
def test_a_copy_that_differs_is_fetched_though_its_version_is_right() -> None:
    table = started(A)
    wrong = head_of(0, 0, OTHER_DIGEST)
    table.join(B, hello=hello_of(B, heads=[wrong], lineage=LINEAGE))
    assert table.hear(B, m.SyncFragment).head == head_of(0, 0)


def test_copies_over_valid_ones_come_one_after_the_other() -> None:
    table = Table(fragments=2)
    table.found(A)
    wrong = [head_of(0, 0, OTHER_DIGEST), head_of(1, 0, OTHER_DIGEST)]
    table.join(B, hello=hello_of(B, heads=wrong, lineage=LINEAGE))
    table.hear(B, m.Welcome)
    assert table.hear(B, m.SyncFragment).head == head_of(0, 0)
    table.hears_no(B, m.SyncFragment)
    table.say(B, m.Synced(head_of(0, 0), 64))
    assert table.hear(B, m.SyncFragment).head == head_of(1, 0)


def test_a_head_without_a_root_decides_nothing() -> None:
    table, order = reducing(A)
    table.reduced(order, A)
    table.restart()
    table.join(A, hello=hello_of(A, heads=[head_of(0, 1, b"")], lineage=LINEAGE))
    assert table.master.context.history.root(0, 1) == b""


def test_a_failed_transfer_is_tried_again_from_others() -> None:
    table = started(A, B)
    table.join(C)
    table.forget()
    table.say(C, m.SyncFailed(0, 0, (A,), "block 7 has another digest"))
    assert "a (aaaaaaaa) served wrong blocks" in table.announced()
    table.hear(B, m.Release)
    assert table.hear(C, m.SyncFragment).donors == (B,)


def test_after_too_many_failures_the_joiner_is_removed() -> None:
    table = started(A)
    table.join(B)
    for _ in range(SYNC_ATTEMPTS_MAX):
        assert B in table.master.context.roster
        table.say(B, m.SyncFailed(0, 0, (A,), "block 7 has another digest"))
    assert table.dropped(B) is m.RefusalCode.LAGGING


def test_a_wrong_root_after_a_transfer_counts_as_a_failure() -> None:
    table = started(A)
    table.join(B)
    table.forget()
    table.say(B, m.Synced(head_of(0, 0, OTHER_DIGEST), 64))
    assert "differs from the run's" in table.announced()
    table.hear(B, m.SyncFragment)


def test_a_transfer_that_does_not_move_is_started_again() -> None:
    table = started(A, toml=TEN_SECONDS)
    table.join(B)
    for second in range(1, 60):
        table.wait(1.0, A, B)
        table.say(B, m.Progress(0, 0, 0.0, None, "syncing", 0, second, second, {}))
    table.forget()
    table.wait(39.0, A, B)
    table.hears_no(B, m.SyncFragment)
    table.wait(1.0, A, B)
    table.hear(B, m.SyncFragment)


def test_when_all_donors_die_the_transfer_starts_over_at_the_present_version() -> None:
    table = started(A, B)
    table.join(C)
    table.join_in_sync(D)
    order = table.commit(A, B, D, others=[])
    assert order.receivers == (A, B, C, D)
    table.forget()
    table.leave(A)
    table.hears_no(C, m.SyncFragment)
    table.leave(B)  # D holds version 1, and was not a donor
    assert table.hear(C, m.SyncFragment) == m.SyncFragment(head_of(0, 1), (D,))


@pytest.mark.fault(
    "all holders of the newest version are gone",
    "no donor",
    "the run waits and says for whom; after `rewind_s` it goes back, at once if nobody else can"
    " come",
)
def test_without_a_holder_of_the_newest_version_the_run_waits_and_says_so() -> None:
    table = started(A, B, toml="[membership]\nrewind_s = 0\n")
    table.leave(B)
    table.commit(A)
    table.leave(A)
    table.join(B, hello=holding(B, 0))
    table.hears_no(B, m.SyncFragment)
    status = table.status()
    assert status["state"] == "waiting for members"
    assert "no connected peer holds version 1 of fragment 0" in status["why_waiting"]
    assert "holds version 0, the run is at 1" in table.why(B)
    table.wait(1000.0, B)
    table.join(A, hello=holding(A, 1))
    assert table.hear(B, m.SyncFragment) == m.SyncFragment(head_of(0, 1), (A,))


def test_two_that_hold_half_the_state_each_heal_each_other() -> None:
    table = started(A, B, fragments=2)
    order = table.commit(A, B)
    table.leave(A)
    table.leave(B)
    one, other = head_of(0, 1), head_of(1, 0)
    table.join(A, hello=hello_of(A, heads=[one], lineage=LINEAGE))
    table.join(B, hello=hello_of(B, heads=[head_of(0, 0), other], lineage=LINEAGE))
    assert order.fragment == 0
    assert table.hear(A, m.SyncFragment) == m.SyncFragment(other, (B,))
    assert table.hear(B, m.SyncFragment) == m.SyncFragment(one, (A,))


def test_the_result_of_an_undecided_round_is_told_with_the_welcome() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A, B, C)
    table.applied(order, A, B)
    table.leave(C)
    held = m.Reduced(order.round, order.attempt, DIGEST)
    hello = holding(C, 0, held)
    table.join(C, hello=hello)
    assert [c.round for c in table.hear(C, m.Welcome).committed] == [order.round]
    table.hears_no(C, m.SyncFragment)
    table.say(C, m.Applied(order.round, head_of(0, 1)))
    assert table.roles()["c"] == "contributor*"


def test_an_undecided_result_that_was_not_committed_is_void() -> None:
    table, order = reducing(A, B)
    table.reduced(order, A, B)
    table.leave(B)
    table.applied(order, A)
    held = m.Reduced(order.round, order.attempt, OTHER_DIGEST)
    hello = holding(B, 0, held)
    table.join(B, hello=hello)
    assert table.hear(B, m.Welcome).committed == ()
    table.hear(B, m.SyncFragment)


def test_who_does_not_apply_what_the_welcome_told_is_synced() -> None:
    table, order = reducing(A, B, toml=TEN_SECONDS)
    table.reduced(order, A, B)
    table.applied(order, A)
    table.leave(B)
    held = m.Reduced(order.round, order.attempt, DIGEST)
    table.join(B, hello=holding(B, 0, held))
    table.wait(10.0, A, B)
    assert table.hear(B, m.SyncFragment).head == head_of(0, 1)


def test_a_reduction_that_runs_without_a_returning_peer_keeps_it_out_of_sync() -> None:
    table = started(A, B, C)
    table.leave(C)
    order = table.reduce(A, B)
    state = holding(C, 0)
    table.join(C, hello=state)
    assert table.roles()["c"] == "spare"
    table.complete(order, A, B)
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)


# ---------------------------------------------------------------- places


def test_contributors_take_free_places_and_the_rest_are_spares() -> None:
    table = started(A, B, toml="[membership]\ncontributors = 2\n")
    table.join_in_sync(C)
    assert table.roles() == {"a": "contributor*", "b": "contributor*", "c": "spare*"}
    assert table.why(C).startswith("all 2 places are taken")


def test_whom_the_operator_has_demoted_takes_no_place_and_another_does() -> None:
    table = started(A, B, C, spares=[D])
    table.take(table.master.demote(B, False, table.now_s))
    assert table.roles() == {
        "a": "contributor*",
        "b": "spare*",
        "c": "contributor*",
        "d": "contributor*",
    }
    assert table.why(B) == "a spare: the run's operator has demoted it"
    table.leave(B)
    table.join_in_sync(B, incarnation=2)
    members = table.master.context.history.members
    assert B not in members.places
    assert RunHistory.replay(table.journal).members.demoted == members.demoted == {B}
    table.take(table.master.demote(B, True, table.now_s))
    assert B in members.places
    assert not members.demoted


def test_a_spare_never_takes_a_place_that_was_always_free() -> None:
    table = started(A, spares=[B], toml="[membership]\ncontributors = 5\n")
    assert table.roles() == {"a": "contributor*", "b": "spare*"}


@pytest.mark.parametrize("how", ["dies", "is silent", "is kicked", "leaves"])
def test_a_spare_is_promoted_in_the_view_that_shows_the_loss(how: str) -> None:
    table = started(A, B, spares=[C], toml=TEN_SECONDS)
    if how == "dies":
        table.leave(B)
    elif how == "is silent":
        table.wait(10.0, A, C)
    elif how == "is kicked":
        table.take(table.master.kick(B, "no reason", table.now_s))
    else:
        table.say(B, m.Leaving("enough"))
    views = [each for each in table.heard[A] if isinstance(each, m.View)]
    assert len(views) == 1
    assert [(i.peer, i.role) for i in views[0].members] == [
        (A, m.Role.CONTRIBUTOR),
        (C, m.Role.CONTRIBUTOR),
    ]
    table.hear(C, m.Open)  # and it is in the round that is open
    assert [r.peer for r in table.records(PlaceTaken)] == [A, B, C]


def test_a_vacancy_is_filled_once() -> None:
    table = started(A, B, spares=[C, D])
    table.leave(B)
    assert table.roles() == {"a": "contributor*", "c": "contributor*", "d": "spare*"}


def test_a_returning_contributor_finds_its_place_taken_and_fills_the_next_vacancy() -> None:
    table = started(A, B, spares=[C], toml="[membership]\ncontributors = 2\n")
    table.leave(B)
    table.join(B, hello=holding(B, 0))
    assert table.roles() == {"a": "contributor*", "b": "spare*", "c": "contributor*"}
    table.leave(C)
    assert table.roles() == {"a": "contributor*", "b": "contributor*"}


@pytest.mark.parametrize("lack", ["sync", "trainer", "will"])
def test_only_a_spare_that_can_step_in_is_promoted(lack: str) -> None:
    table = started(A, B)
    if lack == "sync":
        table.join(C, SPARE)
    else:
        table.join_in_sync(C, SPARE)
    if lack == "trainer":
        table.say(C, m.TrainerLost("crash"))
    table.join_in_sync(D, SPARE)
    if lack == "will":
        table.ready(A)
        table.say(C, m.Leaving("enough"))
    table.leave(B)
    assert table.roles()["d"] == "contributor*"
    assert table.roles().get("c") != "contributor*"


def test_a_spare_that_lags_is_promoted_once_it_has_caught_up() -> None:
    table, order = reducing(A, B, spares=[C])
    table.complete(order, A, B)
    table.leave(B)
    assert table.roles() == {"a": "contributor*", "c": "spare*"}
    table.applied(order, C)
    assert table.roles() == {"a": "contributor*", "c": "contributor*"}


def test_a_relay_gets_no_state_and_no_place() -> None:
    table = started(A)
    table.join(E, Grant(m.Role.RELAY))
    table.hears_no(E, m.SyncFragment)
    assert table.roles()["e"] == "relay"
    assert table.reduce(A).receivers == (A,)


# ---------------------------------------------------------------- the master's death


def test_after_a_restart_peers_go_on_where_they_were() -> None:
    table = started(A, B, spares=[C], toml="[membership]\ncontributors = 2\n")
    order = table.commit(A, B, others=[C])
    view = table.master.context.roster.view_number
    table.restart()
    table.join(C, SPARE, holding(C, 1))
    table.join(A, hello=holding(A, 1))
    assert table.master.context.roster.view_number > view
    table.hears_no(A, m.Open)  # B may still come
    status = table.status()
    assert "the master has restarted and waits for b (bbbbbbbb)" in status["why_waiting"]
    table.join(B, hello=holding(B, 1))
    assert table.roles() == {"a": "contributor*", "b": "contributor*", "c": "spare*"}
    for peer in (A, B, C):
        table.hears_no(peer, m.SyncFragment)
    assert table.hear(B, m.Welcome).term == 2
    opened = table.hear(A, m.Open)
    assert opened.round > order.round
    assert (opened.version, opened.at_step) == (1, 200)


def test_a_contributor_that_does_not_come_back_is_replaced_after_the_deadline() -> None:
    table = started(A, B, spares=[C], toml=TEN_SECONDS)
    table.restart()
    table.join(A, hello=holding(A, 0))
    table.join(C, SPARE, holding(C, 0))
    table.wait(9.9, A, C)
    assert table.roles() == {"a": "contributor*", "c": "spare*"}
    table.wait(0.1, A, C)
    assert table.roles() == {"a": "contributor*", "c": "contributor*"}
    table.hear(C, m.Open)


@pytest.mark.fault(
    "it dies between journal and message",
    "the `Hello`'s undecided results",
    "`Welcome` tells who holds the result that it was committed",
)
def test_a_decision_nobody_heard_of_survives_the_master() -> None:
    table, order = reducing(A, B)
    table.reduced(order, A, B)  # recorded; say that no Commit was ever sent
    table.restart()
    held = m.Reduced(order.round, 1, DIGEST)
    for peer in (A, B):
        table.join(
            peer,
            hello=holding(peer, 0, held),
        )
        assert [c.digest for c in table.hear(peer, m.Welcome).committed] == [DIGEST]
    table.applied(order, A, B)
    assert table.roles() == {"a": "contributor*", "b": "contributor*"}
    assert table.hear(A, m.Open).version == 1


def test_the_first_to_return_does_not_decide_alone_what_the_state_is() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A, B, C)
    table.restart()
    table.join(A, hello=hello_of(A, heads=[head_of(0, 1, OTHER_DIGEST)], lineage=LINEAGE))
    assert table.master.context.history.root(0, 1) == b""
    for peer in (B, C):
        table.join(peer, hello=holding(peer, 1))
    assert table.master.context.history.root(0, 1) == head_of(0, 1).root
    assert table.hear(A, m.SyncFragment).donors == (B, C)


def test_after_a_restart_who_still_applies_the_last_commit_is_waited_for() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    table.reduced(order, A, B, C)  # all hear Commit and begin to apply it
    table.restart()
    for peer in (A, B, C):
        table.join(peer, hello=holding(peer, 0))
    table.say(A, m.Applied(order.round, head_of(0, 1, OTHER_DIGEST)))
    assert table.master.context.history.root(0, 1) == b""
    table.applied(order, B, C)
    assert table.master.context.history.root(0, 1) == head_of(0, 1).root
    table.hear(A, m.SyncFragment)
    for peer in (B, C):
        table.hears_no(peer, m.SyncFragment)
        assert table.roles()[peer[0]] == "contributor*"


def test_after_a_restart_silent_voters_count_for_a_deadline_only() -> None:
    table, order = reducing(A, B, C, toml=TEN_SECONDS)
    table.reduced(order, A, B, C)
    table.restart()
    for peer in (A, B):
        table.join(peer, hello=holding(peer, 0))
    table.applied(order, A)
    table.wait(9.9, A, B)
    assert table.master.context.history.root(0, 1) == b""
    table.wait(0.1, A, B)
    assert table.master.context.history.root(0, 1) == head_of(0, 1).root


def test_a_joiner_never_becomes_the_source_of_truth() -> None:
    table = started(A)
    table.commit(A)
    table.restart()
    table.join(B, FOUNDER, hello_of(B, heads=[head_of(0, 9)], lineage=b"F" * 32))
    table.wait(1000.0, B)
    table.hears_no(B, m.SupplyWeights)
    table.hears_no(B, m.Open)
    table.join(A, hello=holding(A, 1))
    assert table.hear(B, m.SyncFragment).donors == (A,)


def test_status_is_plain_json_at_every_stage() -> None:
    table = Table(fragments=2)
    json.dumps(table.status())
    table.start(A, B, spares=[C])
    table.say(A, m.Progress(7, 70, 3.5, 1.25, "training", 1, 2, 3, {"lr": m.LoggedFigure(0.1, 7)}))
    order = table.reduce(A, B)
    status = json.loads(json.dumps(table.status()))
    assert status["counts"] == {"live": 3, "participating": 2, "contributed": 0}
    assert status["rounds"][0]["attempt"] == 1
    member = status["members"][0]
    assert (member["step"], member["loss"], member["metrics"]) == (7, 1.25, {"lr": 0.1})
    table.complete(order, A, B, others=[C])
    table.join(D)
    status = json.loads(json.dumps(table.status()))
    assert status["counts"] == {"live": 4, "participating": 2, "contributed": 2}
    assert status["past_rounds"][0]["outcome"] == "committed"
    assert [c["weight"] for c in status["past_rounds"][0]["contributors"]] == [10, 10]


@pytest.mark.fault(
    "the master's machine sleeps", "its own timer is late", "nobody is blamed for silence"
)
def test_a_master_that_stood_still_itself_blames_nobody_for_silence() -> None:
    table = Table()
    table.join(A)
    table.take(table.master.overslept(table.now_s + 1_000.0))
    effects = table.take(table.master.tick(table.now_s + 1_000.1))
    assert not [effect for effect in effects if isinstance(effect, DropPeer)]
