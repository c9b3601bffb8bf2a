"""The peer's rules, seen from its trainer: its step limits, and the order of its messages."""

from __future__ import annotations

import pytest
from attrs import evolve

from holdfast.membership.peer.local_round import OVERTAKEN_MAX
from holdfast.membership.peer.peer_effects import (
    ApplyRound,
    FetchFragment,
    PeerEffect,
    ReloadTrainer,
    StoreResult,
    TellMaster,
    TellTrainer,
)
from holdfast.membership.peer.replica import Replica, leader_of
from holdfast.membership.peer.trainer_control import WORTH_SHARE
from holdfast.protocol import messages as m

ME = "a" * 32
EVERY = 5
LINEAGE, ROOT, DIGEST = b"l" * 32, b"r" * 32, b"d" * 32
ME_ALONE = (m.Contributor(ME, 80, 1.0),)


def a_contributor(fragment_count: int = 1) -> Replica:
    """Return a contributor in sync at version 0, with its trainer loaded."""
    replica = Replica(ME)
    heads = tuple(m.FragmentHead(fragment, 0, ROOT) for fragment in range(fragment_count))
    replica.founded(LINEAGE, heads)
    replica.welcome(m.Welcome(1, 1, "", None, LINEAGE, heads, 0, (), 1), EVERY, fragment_count)
    me = m.MemberInfo(ME, "me", 1, (), m.Role.CONTRIBUTOR, True)
    replica.take_view(m.View(1, (me,), 0))
    replica.trainer_came()
    return replica


def told(effects: list[PeerEffect]) -> list[m.Message]:
    return [effect.message for effect in effects if isinstance(effect, TellTrainer)]


def order_of(
    number: int,
    contributors: tuple[m.Contributor, ...] = ME_ALONE,
    version: int | None = None,
    owner: str = ME,
) -> m.Reduce:
    """Return the order of a round, by default of the version that as many rounds have made."""
    plan = m.Plan(1024, (m.OwnerRun(owner, 1),), "fp32", "fp32")
    receivers = tuple(dict.fromkeys((ME, *(each.peer for each in contributors))))
    base = number - 1 if version is None else version
    return m.Reduce(number, 1, 0, base, 1, contributors, receivers, plan)


def post(replica: Replica, message: m.Posted) -> list[PeerEffect]:
    """Post for a round as the trainer was last told to, with a norm of 1."""
    offer = replica.rounds[message.round].offer
    return replica.course.posted(evolve(message, offer=offer), 1.0, "")


def reduce_and_commit(
    replica: Replica,
    number: int,
    at_step: int,
    contributors: tuple[m.Contributor, ...] = ME_ALONE,
    manifest: tuple[m.ContributorRun, ...] = (),
    posted_step: int | None = None,
) -> None:
    """Run a round from its Open to its Commit, without applying it."""
    version = number - 1
    replica.course.open(m.Open(number, 0, version, at_step))
    post(replica, m.Posted(number, 0, version, 80, posted_step or at_step))
    replica.course.reduce(order_of(number, contributors))
    replica.course.reduction_done(number, 1, DIGEST)
    replica.course.commit(m.Commit(number, 1, 0, version, at_step, contributors, DIGEST, manifest))


def test_a_trainer_is_held_at_the_step_of_a_round_it_was_not_told_of() -> None:
    """The next round is open here before the last one is applied. Between the two messages about
    them the trainer runs on: it must not run past the new round's step."""
    replica = a_contributor()
    reduce_and_commit(replica, 1, 5)
    assert told(replica.course.open(m.Open(2, 0, 1, 10))) == [], "not before version 1 is there"
    ended, opened = told(replica.course.applied(1, m.FragmentHead(0, 1, ROOT)))
    assert isinstance(ended, m.RoundEnded)
    assert isinstance(opened, m.RoundOpened)
    assert ended.step_limit == 10
    assert (opened.at_step, opened.step_limit) == (10, 15)


def test_a_new_trainer_is_held_at_the_open_rounds_step_until_it_is_told_of_it() -> None:
    replica = a_contributor()
    reduce_and_commit(replica, 1, 5)
    replica.course.applied(1, m.FragmentHead(0, 1, ROOT))
    replica.course.open(m.Open(2, 0, 1, 10))
    replica.trainer_lost()
    effects = replica.trainer_came()
    assert [effect for effect in effects if isinstance(effect, ReloadTrainer)] == [
        ReloadTrainer(5, 10)
    ]
    assert [each.step_limit for each in told(effects) if isinstance(each, m.RoundOpened)] == [15]


def test_a_trainer_whose_weights_are_not_finite_is_told_so_with_the_state_it_is_given() -> None:
    replica = a_contributor()
    order = m.SyncFragment(m.FragmentHead(0, 3, ROOT), (), replaces_newer=False)
    replica.sync(order)
    assert replica.trainer_spoilt() == [], "the shared state is on its way"
    loads = [each for each in replica.fetched(order.head, 0) if isinstance(each, ReloadTrainer)]
    assert [each.spoilt for each in loads] == [True]
    loads = [each for each in replica.trainer_came() if isinstance(each, ReloadTrainer)]
    assert [each.spoilt for each in loads] == [False], "once"


def test_an_update_of_samples_that_are_void_costs_what_was_trained_on_them() -> None:
    """All that were handed out are trained, so that nothing bars the trainer until it is past
    them.
    """
    replica = a_contributor()
    replica.leases.begin(10)
    replica.leases.leased(m.Leased((m.LeaseRange(0, 4),), all=True, length=10))
    assert replica.leases.draw(0, 0, 4, leased=True)
    replica.course.open(m.Open(1, 0, 0, 5))
    left = m.Leased((m.LeaseRange(4, 10),), all=True, length=10)
    replica.leases.leased(left)  # 0 to 3 went to others
    assert replica.trainer.bar(barred=replica.leases.barred({0: 4})) == []
    refused = post(replica, m.Posted(1, 0, 0, 80, 5, 0.0, (m.RankSamples(0, 0, 4),)))
    assert [type(each.message) for each in refused if isinstance(each, TellMaster)] == [m.NotReady]
    assert [each for each in refused if isinstance(each, ReloadTrainer)]
    assert opened_at(refused)[0] == 5, "it may post for the same round"
    assert replica.leases.draw(0, 4, 2, leased=True)
    samples = (m.RankSamples(0, 4, 6),)
    told = post(replica, m.Posted(1, 0, 0, 80, 6, 0.0, samples, b"first"))
    (ready,) = [each.message for each in told if isinstance(each, TellMaster)]
    assert isinstance(ready, m.Ready)
    assert ready.first_batches == b"first"


def test_after_an_abort_the_trainer_waits_where_the_round_is_opened_again() -> None:
    replica = a_contributor()
    replica.course.open(m.Open(1, 0, 0, 5))
    post(replica, m.Posted(1, 0, 0, 80, 5))
    (ended,) = told(replica.course.abort(m.Abort(1, "too few")))
    assert isinstance(ended, m.RoundEnded)
    assert (ended.committed, ended.step_limit) == (False, 5)
    (opened,) = told(replica.course.open(m.Open(2, 0, 0, 5)))
    assert isinstance(opened, m.RoundOpened)
    assert (opened.at_step, opened.step_limit) == (5, 10)


def test_after_an_abort_the_trainer_goes_on_to_a_later_round_that_is_open() -> None:
    """The master opens the aborted fragment's round again when the open one is closed."""
    replica = a_contributor(fragment_count=2)
    replica.course.open(m.Open(1, 0, 0, 2))
    post(replica, m.Posted(1, 0, 0, 80, 2))
    replica.course.reduce(order_of(1))
    replica.course.open(m.Open(2, 1, 0, 5))
    (ended,) = told(replica.course.abort(m.Abort(1, "nothing moved")))
    assert isinstance(ended, m.RoundEnded)
    assert not ended.committed
    assert ended.step_limit > 5, "round 2 is posted at step 5"


def opened_at(effects: list[PeerEffect]) -> tuple[int, int]:
    """Return the step and the step limit that the trainer is told with a round."""
    (opened,) = [each for each in told(effects) if isinstance(each, m.RoundOpened)]
    return opened.at_step, opened.step_limit


def posted_at(step: int) -> Replica:
    """Return a replica at version 1, whose trainer posted at this step for the round of step 5."""
    replica = a_contributor()
    reduce_and_commit(replica, 1, 5, posted_step=step)
    replica.course.applied(1, m.FragmentHead(0, 1, ROOT))
    return replica


def test_a_trainer_that_is_ahead_trains_half_a_rounds_steps_before_it_posts_again() -> None:
    """The trainer went on while the master was away: the next rounds are all due at its step."""
    half = int(WORTH_SHARE * EVERY)
    replica = posted_at(47)
    assert opened_at(replica.course.open(m.Open(2, 0, 1, 10))) == (47 + half, 50)
    (ended,) = told(replica.course.abort(m.Abort(2, "too few")))
    assert isinstance(ended, m.RoundEnded)
    assert ended.step_limit == 47 + half, "it waits where the round is opened again"
    assert opened_at(replica.course.open(m.Open(3, 0, 1, 10))) == (47 + half, 50)
    assert opened_at(replica.course.open(m.Open(3, 0, 1, 0))) == (0, 15), "nudged: the others wait"


def test_a_trainer_that_is_not_ahead_posts_at_the_rounds_step() -> None:
    assert opened_at(posted_at(5).course.open(m.Open(2, 0, 1, 10))) == (10, 15)
    assert opened_at(posted_at(7).course.open(m.Open(2, 0, 1, 10))) == (10, 15)


def test_after_a_rewind_no_round_is_posted_before_some_steps_were_trained() -> None:
    """The run's rounds come again, from the state that a trainer far ahead has just loaded."""
    replica = posted_at(47)
    replica.trainer.run_step = 60
    replica.trainer_came()
    assert opened_at(replica.course.open(m.Open(2, 0, 1, 10))) == (
        60 + int(WORTH_SHARE * EVERY),
        65,
    )


@pytest.mark.parametrize("ours", [80, 0])
def test_a_trainer_is_told_whether_it_is_among_the_contributors(ours: int) -> None:
    replica = a_contributor()
    other = m.Contributor("b" * 32, 240, 1.0)
    ourselves = (m.Contributor(ME, ours, 1.0),) if ours else ()
    reduce_and_commit(replica, 1, 5, (*ourselves, other))
    (ended,) = told(replica.course.applied(1, m.FragmentHead(0, 1, ROOT)))
    assert isinstance(ended, m.RoundEnded)
    assert ended.contributed == (ours > 0)


@pytest.mark.parametrize(
    ("runs", "contributed"),
    [(((b"\x02", 4),), False), (((b"\x03", 2), (b"\x02", 2)), True)],
)
def test_a_trainer_is_told_whether_any_of_its_update_is_in_the_mean(
    runs: tuple[tuple[bytes, int], ...], contributed: bool
) -> None:
    """An update that is in no chunk stays in the trainer's local weights."""
    replica = a_contributor()
    both = (m.Contributor(ME, 80, 1.0), m.Contributor("b" * 32, 240, 1.0))
    reduce_and_commit(replica, 1, 5, both, tuple(m.ContributorRun(*run) for run in runs))
    (ended,) = told(replica.course.applied(1, m.FragmentHead(0, 1, ROOT)))
    assert isinstance(ended, m.RoundEnded)
    assert (ended.committed, ended.contributed) == (True, contributed)


@pytest.mark.parametrize("applied", [True, False])
def test_a_round_opens_for_the_trainer_at_its_base_version(applied: bool) -> None:
    replica = a_contributor()
    reduce_and_commit(replica, 1, 5)
    if applied:
        replica.course.applied(1, m.FragmentHead(0, 1, ROOT))
    opened = told(replica.course.open(m.Open(2, 0, 1, 10)))
    assert [type(message) for message in opened] == ([m.RoundOpened] if applied else [])


@pytest.mark.fault(
    "frames are lost with a link after their sender was done",
    "later rounds overtake it",
    "the fragment is fetched",
)
def test_a_committed_result_that_later_ones_overtake_is_given_up() -> None:
    """The frames were lost with a link after their sender was done: no peer sends them again."""
    replica = a_contributor()
    others = (m.Contributor("b" * 32, 80, 1.0), m.Contributor("c" * 32, 80, 1.0))
    said: list[m.Message] = []
    for number in range(1, OVERTAKEN_MAX + 2):
        effects = replica.course.reduce(order_of(number, others, owner="b" * 32))
        said = [effect.message for effect in effects if isinstance(effect, TellMaster)]
        assert not said or number == OVERTAKEN_MAX + 1
        if number > 1:
            replica.course.reduction_done(number, 1, DIGEST)
        replica.course.commit(m.Commit(number, 1, 0, number - 1, EVERY * number, others, DIGEST))
    (failed,) = said
    assert isinstance(failed, m.ReduceFailed)
    assert (failed.round, failed.accused) == (1, ())
    assert 1 not in replica.rounds


@pytest.mark.parametrize("committed_first", [False, True])
def test_a_result_that_waits_for_a_copy_is_stored_once(committed_first: bool) -> None:
    replica = Replica(ME)
    replica.welcome(m.Welcome(1, 1, "", None, LINEAGE, (), 0, (), 1), EVERY, 1)
    replica.sync(m.SyncFragment(m.FragmentHead(0, 1, ROOT), ("b" * 32,)))
    others = (m.Contributor("b" * 32, 80, 1.0),)
    stored: list[int] = []
    for number in (1, 2):
        replica.course.reduce(order_of(number, others, version=number, owner="b" * 32))
        commit = m.Commit(number, 1, 0, number, 5, others, DIGEST)
        effects: list[PeerEffect] = []
        if committed_first:
            effects += replica.course.commit(commit)
        effects += replica.course.reduction_done(number, 1, DIGEST)
        if not committed_first:
            effects += replica.course.commit(commit)
        stored += [each.round for each in effects if isinstance(each, StoreResult)]
    assert stored == [1, 2]
    effects = replica.fetched(m.FragmentHead(0, 1, ROOT), 0)
    assert any(isinstance(each, ApplyRound) for each in effects)


def test_a_round_told_again_with_an_earlier_step_is_posted_for_at_once() -> None:
    replica = a_contributor()
    replica.course.open(m.Open(1, 0, 0, EVERY))

    (nudged,) = told(replica.course.open(m.Open(1, 0, 0, 0)))
    assert isinstance(nudged, m.RoundOpened)
    assert (nudged.round, nudged.at_step, nudged.step_limit) == (1, 0, replica.trainer.step_limit())

    post(replica, m.Posted(1, 0, 0, 48, EVERY - 2))
    assert told(replica.course.open(m.Open(1, 0, 0, 0))) == [], "it has posted; once is enough"


def test_who_is_invited_again_answers_with_what_it_has_posted() -> None:
    """The master took it for out of sync for a moment. Told to post again, the trainer would hold
    the second update for the one that the round has.
    """
    replica = a_contributor()
    invitation = m.Open(1, 0, 0, EVERY)
    assert told(replica.course.open(invitation))
    assert replica.course.open(invitation) == [], "the offer holds"
    answer = post(replica, m.Posted(1, 0, 0, 80, EVERY))
    assert replica.course.open(invitation) == answer != []
    replica.trainer_spoilt()
    assert told(replica.course.open(invitation)), "what it has posted is of weights that are gone"


def test_an_update_that_crosses_a_load_is_not_taken() -> None:
    replica = a_contributor()
    replica.course.open(m.Open(1, 0, 0, EVERY))
    crossing = m.Posted(1, 0, 0, 80, EVERY, offer=replica.rounds[1].offer)
    assert opened_at(replica.trainer_spoilt())[0] == EVERY, "it is offered again"
    assert replica.course.posted(crossing, 1.0, "") == []
    assert post(replica, crossing) != []


def test_an_update_that_crosses_a_new_session_is_not_taken() -> None:
    """The new session's master does not know the round any more, and then it opens it again."""
    replica = a_contributor()
    replica.course.open(m.Open(1, 0, 0, EVERY))
    crossing = m.Posted(1, 0, 0, 80, EVERY, offer=replica.rounds[1].offer)
    heads = (m.FragmentHead(0, 0, ROOT),)
    replica.welcome(m.Welcome(1, 1, "", None, LINEAGE, heads, 0, (), 1), EVERY, 1)
    assert not replica.rounds
    assert opened_at(replica.course.open(m.Open(1, 0, 0, EVERY)))[0] == EVERY
    assert replica.course.posted(crossing, 1.0, "") == []
    assert post(replica, crossing) != []


def test_a_peer_without_the_last_result_is_behind_until_it_has_a_copy() -> None:
    replica = a_contributor()
    replica.course.open(m.Open(1, 0, 0, EVERY))
    post(replica, m.Posted(1, 0, 0, 80, EVERY))
    replica.course.reduce(order_of(1))
    assert not replica.behind
    said = replica.course.commit(
        m.Commit(1, 2, 0, 0, EVERY, ME_ALONE, DIGEST)
    )  # of another attempt
    assert any(isinstance(each, TellMaster) for each in said)
    replica.finish(m.Finish(1))
    assert (replica.behind, replica.fetching) == (True, False)
    head = m.FragmentHead(0, 1, ROOT)
    replica.sync(m.SyncFragment(head, ("b" * 32,)))
    assert (replica.behind, replica.fetching) == (True, True)
    replica.fetched(head, 0)
    assert (replica.behind, replica.fetching) == (False, False)


@pytest.mark.parametrize(
    ("ordered", "back"), [(1, False), (2, False), (0, True), (1, True)], ids=str
)
def test_a_copy_that_is_ordered_while_a_round_is_applied_waits_for_it(
    ordered: int, back: bool
) -> None:
    """Else the copy may be there first, and the round has nothing to follow."""
    replica = a_contributor()
    reduce_and_commit(replica, 1, EVERY)
    order = m.SyncFragment(m.FragmentHead(0, ordered, ROOT), ("b" * 32,), replaces_newer=back)
    effects = replica.sync(order)
    assert not any(isinstance(each, FetchFragment) for each in effects)
    effects = replica.course.applied(1, m.FragmentHead(0, 1, ROOT))
    begun = [each for each in effects if isinstance(each, FetchFragment)]
    said = [each.message for each in effects if isinstance(each, TellMaster)]
    assert [type(each) for each in said][:1] == [m.Applied]
    if ordered == 1:
        assert (begun, said[1:]) == ([], [m.Synced(order.head, 0)]), "it is held now"
    else:
        assert (begun, said[1:]) == ([FetchFragment(order)], [])
    assert replica.fetching == bool(begun)


def test_a_copy_that_waits_for_a_round_can_be_called_off() -> None:
    replica = a_contributor()
    reduce_and_commit(replica, 1, EVERY)
    replica.sync(m.SyncFragment(m.FragmentHead(0, 2, ROOT), ("b" * 32,)))
    replica.stop_copy(m.Release(0, 2, ME))
    effects = replica.course.applied(1, m.FragmentHead(0, 1, ROOT))
    assert not any(isinstance(each, FetchFragment) for each in effects)
    assert replica.heads() == (m.FragmentHead(0, 1, ROOT),)


def test_a_round_of_another_lineage_that_is_still_applied_makes_no_version_of_this_one() -> None:
    replica = a_contributor()
    reduce_and_commit(replica, 1, EVERY)
    heads = (m.FragmentHead(0, 1, ROOT),)
    replica.welcome(m.Welcome(1, 1, "", None, bytes(32), heads, EVERY, (), 1), EVERY, 1)
    assert replica.course.applied(1, m.FragmentHead(0, 1, ROOT)) == []
    assert replica.heads() == ()


def test_a_run_that_went_back_leaves_nobody_behind() -> None:
    replica = a_contributor()
    reduce_and_commit(replica, 1, 5)
    assert replica.behind, "the commit is being applied"
    replica.course.applied(1, m.FragmentHead(0, 1, ROOT))
    assert not replica.behind
    replica.course.commit(m.Commit(2, 1, 0, 1, 2 * EVERY, ME_ALONE, DIGEST))
    assert replica.behind
    heads = (m.FragmentHead(0, 1, ROOT),)
    welcome = m.Welcome(1, 1, "", None, LINEAGE, heads, EVERY, (), 1)
    replica.welcome(evolve(welcome, branch=1), EVERY, 1)
    assert not replica.behind


# ---------------------------------------------------------------- who leads


BIRCH = "b" * 32


def member(
    peer: str, number: int, role: m.Role = m.Role.CONTRIBUTOR, in_sync: bool = True
) -> m.MemberInfo:
    return m.MemberInfo(peer, peer[0], number, (), role, in_sync)


@pytest.mark.parametrize(
    ("members", "leader"),
    [
        ([], None),
        ([member(ME, 1, m.Role.SPARE)], None),
        ([member(BIRCH, 2), member(ME, 1)], ME),
        ([member(ME, 1, m.Role.SPARE), member(BIRCH, 2)], BIRCH),
        ([member(ME, 1, in_sync=False), member(BIRCH, 2)], BIRCH),
        ([member(ME, 1, in_sync=False), member(BIRCH, 2, in_sync=False)], ME),
    ],
)
def test_the_first_contributor_that_is_in_sync_leads(
    members: list[m.MemberInfo], leader: str | None
) -> None:
    found = leader_of(m.View(1, tuple(members), 0))
    assert (None if found is None else found.peer) == leader


def test_a_trainer_is_told_its_role_before_attach_returns_and_when_it_changes() -> None:
    replica = Replica(ME)
    heads = (m.FragmentHead(0, 0, ROOT),)
    welcome = m.Welcome(1, 1, "", None, LINEAGE, heads, 0, (), 1)
    replica.founded(LINEAGE, heads)
    replica.welcome(evolve(welcome, total_steps=100), EVERY, 1)
    replica.take_view(m.View(1, (member(BIRCH, 1), member(ME, 2)), 0))
    came = replica.trainer_came()
    assert told(came) == [m.SetRole(True, "", False, 100)]
    assert [type(effect) for effect in came[:2]] == [TellTrainer, ReloadTrainer]
    assert told(replica.take_view(m.View(2, (member(ME, 2),), 0))) == [
        m.SetRole(True, "", True, 100)
    ]
    assert told(replica.take_view(m.View(3, (member(ME, 2),), 0))) == []
    longer = evolve(welcome, total_steps=200)
    assert told(replica.welcome(longer, EVERY, 1)) == [m.SetRole(True, "", True, 200)]


def test_nobody_becomes_the_leader_of_a_finished_run() -> None:
    replica = a_contributor()
    replica.take_view(m.View(2, (member(BIRCH, 1), member(ME, 2)), 0))
    replica.finish(m.Finish(1))
    assert told(replica.take_view(m.View(3, (member(ME, 2),), 0))) == []


def test_a_spare_that_becomes_a_contributor_loads_before_it_is_told() -> None:
    replica = Replica(ME)
    heads = (m.FragmentHead(0, 0, ROOT),)
    replica.founded(LINEAGE, heads)
    replica.welcome(m.Welcome(1, 1, "", None, LINEAGE, heads, 0, (), 1), EVERY, 1)
    replica.take_view(m.View(1, (member(ME, 1, m.Role.SPARE),), 0))
    replica.trainer_came()
    effects = replica.take_view(m.View(2, (member(ME, 1),), 0))
    assert [type(effect) for effect in effects[:2]] == [ReloadTrainer, TellTrainer]
