"""Messages between a trainer and its daemon: attach, rounds, waiting, and the end."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import nn

import holdfast
from holdfast.client import quiet_step
from holdfast.client.attach import attach
from holdfast.client.daemon_connection import DaemonConnection
from holdfast.client.hook import Run
from holdfast.client.state.inner_optimizer import InnerOptimizer
from holdfast.protocol import messages as m
from holdfast.protocol.arena import (
    LOSS_SLOT,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    create_arena_file,
)
from holdfast.protocol.errors import RemoteProtocolError
from tests.client.fake_daemon import WAIT_S, FakeDaemon, settled, talking, wait_for
from tests.client.plain_model import equals, line, move, step, train, weights

# ---------------------------------------------------------------- attaching


def test_founding_posts_the_models_tensors_and_loads_them_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas()
        daemon.found()
        values = daemon.shared.values(0)
        assert values.tolist() == [
            *before["0.weight"].reshape(-1).tolist(),
            *before["0.bias"].tolist(),
            *before["1.weight"].tolist(),
            *before["1.bias"].tolist(),
            *before["1.running_mean"].tolist(),
            *before["1.running_var"].tolist(),
        ]
        assert daemon.sizes == (m.FragmentSize(14, 10, 1),)
        assert np.isnan(daemon.posted.loss[0])  # none so far
        daemon.load(step=0)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        assert (run.global_step, run.finished, run.contributing) == (0, False, True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])


def test_the_hello_says_who_and_what() -> None:
    def script(daemon: FakeDaemon) -> None:
        hello = daemon.hear(m.TrainerHello)
        assert hello.pid == os.getpid()
        assert [each.name for each in hello.layout.tensors] == ["weight"]
        daemon.say(m.Rejected("that will do"))

    with talking(script) as path, pytest.raises(holdfast.AttachRefused, match="that will do"):
        attach(line(), socket_path=path)


def test_a_socket_without_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SOCKET", "/nowhere/at/all")
    with pytest.raises(holdfast.NoDaemonError, match="/nowhere/at/all"):
        attach(line())


def test_the_environment_names_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(FakeDaemon.start, stay=True) as path:
        monkeypatch.setenv("HOLDFAST_SOCKET", path)
        with attach(line()) as run:
            assert run.global_step == 0


def test_the_seed_is_the_member_number_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def seed() -> int:
        with talking(FakeDaemon.start, stay=True) as path, attach(line(), socket_path=path) as run:
            return run.seed

    monkeypatch.setenv("HOLDFAST_MEMBER", "12")
    assert seed() == 12
    monkeypatch.setenv("HOLDFAST_MEMBER", "gpu-box")
    assert seed() == seed() != 12
    monkeypatch.delenv("HOLDFAST_MEMBER")
    assert seed() == os.getpid()


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(line().parameters(), lr=0.1)
    with pytest.raises(holdfast.ModelError, match="none of this model's parameters"):
        attach(line(), optimizer, socket_path="/nowhere")


def test_a_daemon_that_dies_while_we_attach() -> None:
    with talking(lambda daemon: daemon.open_arenas()) as path:
        with pytest.raises(holdfast.DaemonGone):
            attach(line(), socket_path=path)


def test_attaching_to_a_run_that_is_over() -> None:
    model = line()

    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas()
        daemon.share(0, 3, 9)
        daemon.load(step=300, finished=True)

    with talking(script) as path, attach(model, socket_path=path) as run:
        assert run.finished
        assert weights(model) == [9, 9, 9]
        run.step(loss=1.0)  # harmless
        run.log(validation_loss=1.0)


@pytest.mark.parametrize("fault", ["more", "fewer", "tensors", "descriptors", "order"])
def test_a_daemon_that_talks_nonsense(fault: str) -> None:
    def script(daemon: FakeDaemon) -> None:
        daemon.hear(m.TrainerHello)
        if fault == "order":
            daemon.load()
            return
        size = m.FragmentSize({"more": 4, "fewer": 2}.get(fault, 3), 3, 0)
        files = [create_arena_file([size]) for _ in range(2)]
        tensors = (1,) if fault == "tensors" else (0,)
        sent = files[:1] if fault == "descriptors" else files
        daemon.say(m.ArenaOpened((tensors,), (size,), 0), sent)
        for file in files:
            os.close(file)

    with talking(script) as path, pytest.raises(RemoteProtocolError):
        attach(line(), socket_path=path)


def test_attaching_leaks_no_file_descriptors() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(3):
        with talking(FakeDaemon.start) as path, attach(line(), socket_path=path):
            pass
    # Each arena's map holds one of its own until the last view of it is gone.
    settled(lambda: count() <= before)


# ---------------------------------------------------------------- quiet steps


def test_a_quiet_step_writes_its_figures_and_says_nothing() -> None:
    stepped, checked = threading.Event(), threading.Event()

    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        wait_for(stepped)
        assert daemon.posted.slots[[STEP_SLOT, TOKENS_SLOT]].tolist() == [2, 100]
        assert daemon.posted.slots.view(np.float64)[LOSS_SLOT] == 2.5
        assert daemon.hears_nothing()
        checked.set()

    with talking(script) as path, attach(line(), socket_path=path) as run:
        run.step(loss=3.5, tokens=60)
        run.step(loss=2.5, tokens=40)
        stepped.set()
        wait_for(checked)


def test_quiet_steps_make_no_system_call_and_the_mailbox_alone_wakes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quiet_step, "POLL_INTERVAL_S", 1e9)
    calls = []
    receive_nowait = DaemonConnection.receive_nowait

    def counted(connection: DaemonConnection) -> m.Message | None:
        calls.append(1)
        return receive_nowait(connection)

    monkeypatch.setattr(DaemonConnection, "receive_nowait", counted)
    quiet = threading.Event()

    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        wait_for(quiet)
        daemon.say(m.Finished())

    with talking(script, stay=True) as path, attach(line(), socket_path=path) as run:
        run.step()
        looked = len(calls)
        for _ in range(100):
            run.step()
        assert len(calls) == looked
        quiet.set()
        train(run)
        assert run.finished


def test_figures_reach_the_dashboard_without_those_that_are_not_finite() -> None:
    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        assert daemon.hear(m.Metrics) == m.Metrics(1, {"n" * 64: 2.0})

    with talking(script) as path, attach(line(), socket_path=path) as run:
        run.step()
        run.log(**{"n" * 65: np.float32(2.0)}, gradient=float("inf"))
        with pytest.raises(ValueError, match="at most 32"):
            run.log(**{f"figure_{number}": 0.0 for number in range(33)})


# ---------------------------------------------------------------- rounds without overlap


def test_a_round_posts_the_delta_and_takes_the_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = line(1.0)
    waiting = threading.Event()
    receive = DaemonConnection.receive

    def observed(connection: DaemonConnection) -> m.Message:
        waiting.set()
        return receive(connection)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=2)
        posted = daemon.post_round(1, at_step=2)
        assert 0.0 < posted.step_s < 1.0
        assert evolve(posted, step_s=0.0) == m.Posted(1, 0, version=0, tokens=20, step=2)
        assert daemon.posted.values(0).tolist() == [-4, -4, -4]  # anchor minus local
        wait_for(waiting)
        assert daemon.hears_nothing()  # it waits for the outcome
        daemon.commit(1, [7, 8, 9], step=5)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        monkeypatch.setattr(DaemonConnection, "receive", observed)
        for _ in range(2):
            move(model, 2.0)
            run.step(loss=1.0, tokens=10)
        assert weights(model) == [7, 8, 9]
        assert run.global_step == 5  # the run's, which is ahead of ours
        assert run.round_count == 1
        assert run.waited_s > 0


def test_an_aborted_round_changes_nothing_and_the_delta_comes_again() -> None:
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        daemon.post_round(1, at_step=1)
        daemon.end_round(1, committed=False, step=9, step_limit=2)
        posted = daemon.post_round(2, at_step=2)
        assert (posted.tokens, posted.version, posted.step) == (11, 0, 2)
        assert daemon.posted.values(0).tolist() == [-3] * 3
        daemon.end_round(2, committed=False)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        for amount, tokens in ((1.0, 10), (2.0, 1)):
            step(run, model, amount, tokens=tokens)
        assert weights(model) == [4] * 3
        assert (run.global_step, run.round_count) == (2, 0)


def test_an_excluded_trainer_keeps_its_delta_on_top_of_the_commit() -> None:
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        daemon.post_round(1, at_step=1)
        daemon.commit(1, 10, contributed=False, step_limit=2)
        posted = daemon.post_round(2, at_step=2)
        assert (posted.tokens, posted.version) == (12, 1)
        assert daemon.posted.values(0).tolist() == [-5] * 3  # both steps' worth
        daemon.commit(2, 20)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        step(run, model, 2.0, tokens=5)
        assert weights(model) == [12] * 3
        step(run, model, 3.0, tokens=7)
        assert weights(model) == [20] * 3


def test_a_commit_that_comes_without_its_round_is_merged_all_the_same() -> None:
    model = line(1.0)
    moved = threading.Event()

    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        wait_for(moved)
        daemon.commit(1, 10, contributed=False, step=4)
        daemon.round(2, 1, change=1.0)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        move(model, 0.5)
        moved.set()
        while run.round_count < 2:
            run.step()
        assert weights(model) == [9] * 3


def test_two_fragments_have_rounds_of_their_own() -> None:
    model = nn.Sequential(line(1.0, 2), line(2.0, 2))

    def script(daemon: FakeDaemon) -> None:
        daemon.start(fragment_count=2, step_limit=1)
        assert daemon.round(1, 1, 0.5, fragment=1, step_limit=2).tokens == 5
        assert daemon.posted.values(1).tolist() == [-1, -1]
        posted = daemon.round(2, 2, 0.5, fragment=0, step_limit=3)
        assert (posted.tokens, posted.version) == (10, 0)
        assert daemon.posted.values(0).tolist() == [-2, -2]
        assert daemon.round(3, 3, 0.5, fragment=1).tokens == 10

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        for _ in range(3):
            step(run, model, 1.0, tokens=5)
        assert [tensor.tolist() for tensor in model.parameters()] == [[[1.5, 1.5]], [[1.0, 1.0]]]


def test_the_trainer_does_not_go_beyond_the_hold_step() -> None:
    model = line()

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=3)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 3)
        assert daemon.hears_nothing()
        assert daemon.posted.slots[STEP_SLOT] == 3
        assert daemon.post_round(1, at_step=3, step_limit=5).step == 3
        daemon.end_round(1, committed=False, step_limit=6)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 6)
        assert daemon.hears_nothing()
        assert daemon.posted.slots[STEP_SLOT] == 6
        daemon.say(m.Finished())

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        while not run.finished:
            run.step()
        assert run.global_step == 6


# ---------------------------------------------------------------- spares and resyncs


def test_a_spare_waits_in_its_first_step_and_follows_every_commit() -> None:
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        daemon.say(m.SetRole(False, "all places are taken"))
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 1)
        for version in (1, 2):
            daemon.open_round(version, at_step=0)
            assert daemon.hears_nothing()  # it posts nothing
            daemon.commit(version, 10.0 * version, contributed=False, step=100 * version)
            settled(functools.partial(equals, model, 10.0 * version))
        assert daemon.posted.slots[STEP_SLOT] == 200
        daemon.load(step=200, step_limit=201)
        daemon.say(m.SetRole(True, ""))
        posted = daemon.post_round(3, at_step=201)
        assert (posted.tokens, posted.version, posted.step) == (4, 2, 201)
        assert daemon.posted.values(0).tolist() == [-2] * 3  # the warm-up step is not in it
        daemon.end_round(3, committed=False)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        step(run, model, 5.0, tokens=9)
        assert run.contributing
        assert weights(model) == [20] * 3
        assert run.global_step == 200
        step(run, model, 2.0, tokens=4)


@pytest.mark.parametrize("fresh", [True, False])
def test_the_optimizer_forgets_warm_up_steps_unless_it_came_with_a_state(fresh: bool) -> None:
    model = line(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def one_step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    def steps_taken() -> float:
        state = optimizer.state.get(model.weight)
        return float(state["step"]) if state else 0.0

    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas()
        daemon.found()
        daemon.say(m.SetRole(False, "all places are taken"))
        daemon.load()
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 1)
        daemon.load(step=0, step_limit=1)
        daemon.say(m.SetRole(True, ""))
        daemon.post_round(1, at_step=1)
        daemon.load(step=1, step_limit=1)  # a resync
        daemon.end_round(1, committed=False, step_limit=9)

    if not fresh:
        one_step()
    with talking(script, stay=True) as path, attach(model, optimizer, socket_path=path) as run:
        assert not run.contributing
        one_step()
        run.step()
        assert steps_taken() == (0 if fresh else 2), "the warm-up step"
        one_step()
        run.step()
        assert steps_taken() == (1 if fresh else 3), "a real step outlives a resync"


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_a_known_copy_of_the_weights_takes_over_a_merge(overlap_steps: int) -> None:
    model = line(4.0)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.25, t0=-9)  # its average lags behind

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=overlap_steps, step_limit=4 + overlap_steps)
        daemon.round(1, at_step=4, change=8.0)

    with talking(script, stay=True) as path, attach(model, optimizer, socket_path=path) as run:
        while not run.round_count:
            model.weight.grad = torch.ones(1, 3)
            optimizer.step()
            lagged = not torch.equal(optimizer.state[model.weight]["ax"], model.weight)
            run.step()
        assert lagged
        assert model.weight.max() < 0.0, "it was merged"
        assert torch.equal(optimizer.state[model.weight]["ax"], model.weight)
    nn.init.constant_(model.weight, 1.0)
    InnerOptimizer(optimizer).mark_restored()
    assert torch.equal(optimizer.state[model.weight]["ax"], model.weight)


def test_state_that_looks_like_the_weights_is_named_at_the_first_step() -> None:
    model = line(4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    model.weight.grad = torch.ones(1, 3)
    optimizer.step()
    optimizer.state[model.weight]["average"] = model.weight.detach() * 0.9
    with (
        talking(FakeDaemon.start, stay=True) as path,
        attach(model, optimizer, socket_path=path) as run,
        pytest.warns(UserWarning, match="'average' looks like a copy of the weights") as found,
    ):
        run.step()
    assert len(found) == 1, "the momentum does not"


def test_a_contributor_that_becomes_a_spare_waits_and_loses_its_delta() -> None:
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        daemon.round(1, 1, change=1.0)
        daemon.say(m.SetRole(False, "a faster one came"))
        daemon.commit(2, 5, contributed=False)
        daemon.say(m.SetRole(True, ""))

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        while run.round_count < 2 or not run.contributing:
            step(run, model, 1.0)
        assert weights(model) == [5] * 3


def test_a_resync_replaces_the_weights_and_drops_delta_and_tokens() -> None:
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        daemon.post_round(1, at_step=1)  # now it waits
        daemon.share(0, 4, 50)
        daemon.load(step=40, step_limit=41)
        posted = daemon.post_round(2, at_step=41)
        assert (posted.version, posted.tokens, posted.step) == (4, 7, 41)
        assert daemon.posted.values(0).tolist() == [-1] * 3
        daemon.end_round(2, committed=False)

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        step(run, model, 3.0, tokens=100)
        assert (run.global_step, weights(model)) == (40, [50] * 3)
        step(run, model, 1.0, tokens=7)


def test_a_round_posted_before_a_resync_does_not_count_as_posted() -> None:
    """Its delta is in no tensor any more, so the commit must not take it off again."""
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=5, step_limit=1)
        daemon.post_round(1, at_step=1)
        daemon.share(0, 3, 30)
        daemon.load(step=10, step_limit=11)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 11)
        daemon.commit(1, 40, contributed=True, step=11, step_limit=11)
        daemon.say(m.Rejected("enough"))

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        step(run, model, 8.0)
        while run.global_step < 10:
            run.step()
        move(model, 0.5)
        with pytest.raises(holdfast.AttachRefused):
            run.step()
        assert weights(model) == [40.5] * 3


@pytest.mark.fault("a contributor is slower, or comes back while the others go on")
def test_a_round_that_waits_is_posted_for_at_the_next_step_and_once() -> None:
    model = line(1.0)
    posted: list[m.Posted] = []

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=50, step_limit=200)
        daemon.open_round(1, at_step=100, step_limit=200)
        settled(lambda: daemon.posted.slots[STEP_SLOT] >= 3)
        daemon.open_round(1, at_step=0, step_limit=200)
        posted.append(daemon.hear(m.Posted))
        daemon.open_round(1, at_step=0, step_limit=200)  # it was on its way
        went_on_from = int(daemon.posted.slots[STEP_SLOT])
        settled(lambda: daemon.posted.slots[STEP_SLOT] >= went_on_from + 5)
        assert daemon.hears_nothing(), "it posts once"
        daemon.commit(1, 6, contributed=True, step=100, step_limit=200)
        daemon.say(m.Finished())

    with talking(script) as path, attach(model, socket_path=path) as run:
        while not run.finished:
            time.sleep(0.001)
            run.step(tokens=10)
    assert 3 <= posted[0].step < 100
    assert posted[0].tokens == 10 * posted[0].step, "what was trained until then, no more"


# ---------------------------------------------------------------- the end


def test_the_end_leaves_the_runs_weights_in_the_model_and_no_traceback() -> None:
    model = line(1.0)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=3, step_limit=1)
        daemon.post_round(1, at_step=1)
        daemon.commit(1, 6)
        daemon.say(m.Finished())

    with talking(script) as path:
        run = attach(model, socket_path=path)
        train(run, model)
    assert weights(model) == [6] * 3
    run.log(validation_loss=1.0)  # the daemon is gone, and that is no fault now
    run.step()
    run.close()
    run.close()


def test_the_end_is_heard_even_when_the_socket_breaks_first() -> None:
    """The daemon sent Finished and ended; the trainer's next send fails."""
    gone = threading.Event()
    model = line()

    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        daemon.say(m.Finished())
        daemon.stream.close()
        gone.set()

    with talking(script) as path, attach(model, socket_path=path) as run:
        wait_for(gone)
        run.log(validation_loss=1.0)
        assert run.finished


def test_the_daemon_sees_the_end_even_if_a_forked_worker_still_has_the_socket() -> None:
    """The workers of a DataLoader have copies of all descriptors, and outlive ``run.close``."""
    ours, theirs = socket.socketpair()
    with ours.dup(), theirs:
        DaemonConnection(ours).close()
        theirs.settimeout(WAIT_S)
        assert theirs.recv(1) == b""


@pytest.mark.parametrize(
    ("last", "error", "words"),
    [
        (None, holdfast.DaemonGone, "no longer part of the run"),
        (m.RoundOpened(1, 0, 0, 1, m.COUNT_MAX), holdfast.DaemonGone, "no longer part of the run"),
        (m.Rejected("it is not finite"), holdfast.AttachRefused, "it is not finite"),
        (m.Heartbeat(1), RemoteProtocolError, "Heartbeat"),
        (m.RoundEnded(1, 0, True, False, 5, 0, 2**40), RemoteProtocolError, "version 5"),
    ],
    ids=["gone", "gone while it waits", "refused", "not for a trainer", "not in the arena"],
)
def test_what_ends_a_trainer_is_raised_by_its_step(
    last: m.Message | None, error: type[Exception], words: str
) -> None:
    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        if last is not None:
            daemon.say(last)
        if isinstance(last, m.RoundOpened):
            daemon.hear(m.Posted)

    with talking(script) as path, attach(line(), socket_path=path) as run:
        with pytest.raises(error, match=words):
            train(run, pause_s=0.001)


def log_for_ever(run: Run) -> None:
    """Log until that fails: a message cannot be sent, and the daemon's last ones are read."""
    while True:
        run.log(loss=1.0)


def test_a_daemon_that_dies_is_one_error_and_not_a_chain_of_them() -> None:
    def script(daemon: FakeDaemon) -> None:
        daemon.start()
        daemon.stream.close()

    with talking(script) as path, attach(line(), socket_path=path) as run:
        with pytest.raises(holdfast.DaemonGone) as raised:
            log_for_ever(run)
        shown = "".join(traceback.format_exception(raised.value))
        assert shown.count("Traceback (most recent call last)") == 1


def test_ctrl_c_works_while_the_trainer_waits() -> None:
    main_thread = threading.get_ident()

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        daemon.post_round(1, at_step=1)
        assert daemon.hears_nothing()
        signal.pthread_kill(main_thread, signal.SIGINT)

    with talking(script, stay=True) as path, attach(line(), socket_path=path) as run:
        with pytest.raises(KeyboardInterrupt):
            train(run)
        assert run._quiet.slots[WAITING_SLOT] == 0, "a script that catches it may train on"


# ---------------------------------------------------------------- the package


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="detach"):
        getattr(holdfast, "detach")  # noqa: B009 - the point


def types_are_public(run: Run) -> Any:
    """Checked by mypy, not run: what scripts use is typed."""
    holdfast.attach(nn.Linear(1, 1)).step(loss=0.0)
    return run.seed, m.PostInitial, m.InitialPosted
