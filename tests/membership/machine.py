"""The stateful test itself: rules that throw faults at ``World``; used with and without bugs."""

from __future__ import annotations

import sys

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from holdfast.membership.master.coordinator import Grant
from holdfast.membership.master.rounds.round import RoundPhase
from holdfast.protocol.messages import ReduceFailed, Role, TrainerAttached, TrainerLost
from tests.membership.model import DEADLINE_S, ModelPeer, World, layout_of, leaving
from tests.membership.witness import hashed

GRANTS = (
    Grant(Role.CONTRIBUTOR, founder=True),
    Grant(Role.CONTRIBUTOR, founder=True),
    Grant(Role.CONTRIBUTOR),
    Grant(Role.CONTRIBUTOR),
    Grant(Role.SPARE),
)
peers = st.integers(0, len(GRANTS) - 1)
accusations: st.SearchStrategy[set[int]] = st.one_of(
    st.sets(peers, min_size=1, max_size=1), st.sets(peers, min_size=2, max_size=2), st.just(set())
)
booleans = st.booleans()
cycles = st.integers(0, 3)  # of ordinary work after a fault


class MasterMachine(RuleBasedStateMachine):
    """Faults and ordinary work in any order; afterwards the run must recover."""

    @initialize(
        places=st.sampled_from([0, 0, 2]),
        min_members=st.sampled_from([1, 1, 2]),
        fragments=st.sampled_from([1, 2]),
        rounds=st.sampled_from([0, 0, 0, 5]),
        started=st.sampled_from([True, True, True, False]),
        spares=st.sampled_from([-1, -1, 1, 0]),
        rewind_s=st.sampled_from([0, 15]),
    )
    def begin(
        self,
        places: int,
        min_members: int,
        fragments: int,
        rounds: int,
        started: bool,
        spares: int,
        rewind_s: int,
    ) -> None:
        toml = (
            f"[run]\nrounds = {rounds}\n[membership]\ncontributors = {places}\n"
            f"min_members = {min_members}\ndeadline_s = {DEADLINE_S}\ngrace_s = 2.0\n"
            f"spares = {spares}\nrewind_s = {rewind_s}\n"
        )
        self.handled = sys.exc_info()[1]  # by whoever runs us; none of our own
        self.world = World(toml, fragments, GRANTS)
        if started:
            for peer in self.world.peers:
                self.world.attach(peer)
            self.everybody(4)

    def peer(self, index: int) -> ModelPeer:
        return self.world.peers[index]

    # ------------------------------------------------------------ ordinary work

    @rule(times=st.integers(1, 6))
    def everybody(self, times: int) -> None:
        for _ in range(times):
            for peer in self.world.peers:
                self.world.work(peer)

    @rule(index=peers)
    def work(self, index: int) -> None:
        self.world.work(self.peer(index))

    @rule(index=peers, heard=st.integers(0, 3), said=st.integers(0, 3))
    def a_few_messages(self, index: int, heard: int, said: int) -> None:
        self.world.deliver(self.peer(index), heard)
        self.world.flush(self.peer(index), said)

    @rule(
        index=peers, weight=st.sampled_from([0, 5, 10]), norm=st.sampled_from([1.0, 1.0, 5.0, 50.0])
    )
    def train(self, index: int, weight: int, norm: float) -> None:
        peer = self.peer(index)
        self.world.deliver(peer)
        for number in list(peer.opens):
            peer.train(number, weight, norm)
        self.world.flush(peer)

    @rule()
    def to_the_middle(self) -> None:
        """Up to a reduction that everybody has been ordered to do and nobody has done."""
        for _ in range(8):
            for peer in self.world.peers:
                if self.in_the_middle():
                    break
                self.world.work(peer)
        for peer in self.world.peers:
            self.world.deliver(peer)

    def in_the_middle(self) -> bool:
        rounds = self.world.master.scheduler.rounds.values()
        return any(r.phase is RoundPhase.REDUCING and not r.running().outcomes for r in rounds)

    @rule(index=peers, wrong=booleans, said=booleans, middle=booleans)
    def reduce(self, index: int, wrong: bool, said: bool, middle: bool) -> None:
        if middle:
            self.to_the_middle()
        peer = self.peer(index)
        for number in list(peer.orders):
            event(f"reduced {'wrong' if wrong else 'right'}")
            peer.reduce(number, self.world.by_id, wrong=wrong)
        if said:
            self.world.flush(peer)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, DEADLINE_S, 3 * DEADLINE_S]), then=cycles)
    def wait(self, seconds: float, then: int) -> None:
        self.world.wait(seconds)
        self.everybody(then)

    # ------------------------------------------------------------ faults

    @rule(index=peers, then=cycles)
    def connect(self, index: int, then: int) -> None:
        self.note_phase("connected again")
        self.world.attach(self.peer(index))
        self.everybody(then)

    @rule(then=cycles)
    def connect_all(self, then: int) -> None:
        for peer in self.world.peers:
            peer.frozen = False
            if not peer.connected:
                self.world.attach(peer)
        self.everybody(then)

    @rule(
        index=peers,
        how=st.sampled_from(["connection", "process", "disk"]),
        middle=booleans,
        then=cycles,
    )
    def lose(self, index: int, how: str, middle: bool, then: int) -> None:
        if middle:
            self.to_the_middle()
        self.note_phase(f"lost the {how}")
        if how == "connection":
            self.world.detach(self.peer(index))
        else:
            self.world.restart_peer(self.peer(index), keep_state=how == "process")
        self.everybody(then)

    @rule(index=peers, wrong=booleans, master_dies=booleans, then=cycles)
    def miss_the_outcome(self, index: int, wrong: bool, master_dies: bool, then: int) -> None:
        """A result is reported, the connection breaks before the decision is heard."""
        self.to_the_middle()
        peer = self.peer(index)
        for number in list(peer.orders):
            peer.reduce(number, self.world.by_id, wrong=wrong)
        self.world.flush(peer)
        for other in self.world.peers:
            if other is not peer:
                self.world.work(other)
        if master_dies:
            self.world.restart_master()
        for other in self.world.peers if master_dies else [peer]:
            if other.grant.role is Role.CONTRIBUTOR:
                event(f"undecided at the return: {len(other.results)}")
                self.world.attach(other)
        self.everybody(then)

    @rule(index=peers, victim=peers, bad=booleans, then=cycles)
    def answer_late(self, index: int, victim: int, bad: bool, then: int) -> None:
        """Deliver a peer's report on an attempt when the next attempt has begun."""
        self.to_the_middle()
        peer, other = self.peer(index), self.peer(victim)
        for number in list(peer.orders):
            peer.reduce(number, self.world.by_id)
        if victim != index and not bad:
            self.world.detach(other)
        elif victim != index:
            for number in list(other.orders):
                third = next(p.peer for p in self.world.peers if p not in (peer, other))
                other.give_up(number, (third,), "?", bad=True)
            self.world.flush(other)
        self.world.flush(peer)
        for other in self.world.peers:
            if other is not peer:
                self.world.work(other)
        self.everybody(then)

    @rule(victim=peers, heirs_die=booleans, then=cycles)
    def let_listeners_inherit(self, victim: int, heirs_die: bool, then: int) -> None:
        """An owner dies when only those who do not add have its results; perhaps they die, too."""
        self.to_the_middle()
        listeners = [
            peer
            for peer in self.world.peers
            for order in peer.orders.values()
            if peer.peer not in [c.peer for c in order.contributors]
        ]
        if not listeners or self.peer(victim) in listeners:
            return
        for peer in listeners:
            for number in list(peer.orders):
                peer.reduce(number, self.world.by_id)
        self.world.restart_peer(self.peer(victim), keep_state=True)
        for peer in self.world.peers:  # flushes are answered, nobody goes on yet
            self.world.deliver(peer)
            self.world.flush(peer)
        event("listeners may inherit")
        if heirs_die:
            for peer in listeners:
                self.world.restart_peer(peer, keep_state=True)
        self.everybody(then)

    @rule(index=peers, seconds=st.sampled_from([0.0, 1.0, 2 * DEADLINE_S]), then=cycles)
    def freeze(self, index: int, seconds: float, then: int) -> None:
        self.note_phase("frozen")
        self.peer(index).frozen = not self.peer(index).frozen
        self.everybody(then)
        self.world.wait(seconds)

    @rule(index=peers)
    def trainer(self, index: int) -> None:
        peer = self.peer(index)
        peer.trainer = not peer.trainer
        if peer.connected:
            peer.message_queue.append(
                TrainerAttached(layout_of(peer.fragment_count))
                if peer.trainer
                else TrainerLost("crash")
            )

    @rule(
        index=peers,
        joins=st.none() | peers,
        accused=accusations,
        bad=booleans,
        middle=booleans,
        then=cycles,
    )
    def accuse(
        self,
        index: int,
        joins: int | None,
        accused: set[int],
        bad: bool,
        middle: bool,
        then: int,
    ) -> None:
        """One says it of others, perhaps a second one, too."""
        if middle:
            self.to_the_middle()
        self.say_of(self.peer(index), accused, bad)
        if joins is not None and joins != index:
            self.say_of(self.peer(joins), accused, bad)
        self.everybody(then)

    def say_of(self, peer: ModelPeer, accused: set[int], bad: bool) -> None:
        for number in list(peer.orders):
            event(f"accused {len(accused)} {'bad' if bad else 'lost'}")
            names = tuple(self.peer(i).peer for i in sorted(accused))
            if bad or not set(names) - {peer.peer}:
                peer.give_up(number, names, "?", bad)
            else:
                peer.reducing[number].lost = True
                attempt = peer.reducing[number].attempt
                peer.message_queue.append(ReduceFailed(number, attempt, names, False, "?"))
        self.world.flush(peer)

    @rule(index=peers, then=cycles)
    def leave(self, index: int, then: int) -> None:
        peer = self.peer(index)
        if peer.connected and not peer.leaving:
            self.note_phase("leaves")
            peer.leaving = True
            peer.message_queue.append(leaving())
            self.world.flush(peer)
        self.everybody(then)

    @precondition(lambda self: not self.world.revoked)
    @rule(index=peers)
    def kick(self, index: int) -> None:
        self.note_phase("kicked")
        self.world.call(self.world.master.kick, self.peer(index).peer, "because")

    @rule(effects=st.integers(0, 8), comes_back=st.permutations(range(len(GRANTS))), then=cycles)
    def let_master_die(self, effects: int, comes_back: list[int], then: int) -> None:
        """Kill the master after ``effects`` more effects; then some peers return, in some order."""
        self.note_phase("master will die")
        self.world.crash_after = effects
        self.everybody(3)
        self.world.crash_after = None
        for index in comes_back[:4]:
            if not self.peer(index).connected:
                self.world.attach(self.peer(index))
                self.everybody(then)

    @rule(count=st.integers(0, 12), comes_back=st.permutations(range(len(GRANTS))), then=cycles)
    def let_journal_be_cut(self, count: int, comes_back: list[int], then: int) -> None:
        """The master dies, the end of its journal is lost, and some come back in some order."""
        if not self.world.master.context.history.founded:
            return
        self.world.cut_journal(count)
        for index in comes_back[:4]:
            self.world.attach(self.peer(index))
            self.everybody(then)

    @rule(first=st.permutations(range(len(GRANTS))), gone=st.integers(1, 3), then=cycles)
    def let_holders_go(self, first: list[int], gone: int, then: int) -> None:
        """Some miss a round; then all others go; then those who missed it come back."""
        stale = [self.peer(index) for index in first[:gone]]
        for peer in stale:
            self.world.detach(peer)
        self.everybody(4)
        for peer in self.world.peers:
            if peer not in stale:
                self.world.detach(peer)
        for peer in stale:
            self.world.attach(peer)
        event("the holders of the newest version are gone")
        self.everybody(then)

    @rule(paused=booleans)
    def pause(self, paused: bool) -> None:
        master = self.world.master
        self.world.call(master.pause if paused else master.resume)

    @rule(index=peers, data=st.data(), then=cycles)
    def damage(self, index: int, data: st.DataObject, then: int) -> None:
        """Bits flip at one peer, while at least three others hold the state."""
        peer = self.peer(index)
        sound = [p for p in self.world.peers if p.connected and p.state and None not in p.state]
        if len([p for p in sound if p is not peer and not p.corrupt]) < 3 or peer not in sound:
            return
        if any(p.corrupt for p in self.world.peers):
            return
        fragment = data.draw(st.integers(0, len(peer.state) - 1))
        held = peer.state[fragment]
        assert held is not None
        peer.state[fragment] = (held[0], hashed("damaged", held))
        peer.corrupt.add(fragment)
        event("damaged")
        if data.draw(booleans):  # it is the first to apply the next commit
            self.to_the_middle()
            for other in self.world.peers:
                for number in list(other.orders):
                    other.reduce(number, self.world.by_id)
                self.world.flush(other)
            self.world.work(peer)
        self.everybody(then)

    # ------------------------------------------------------------ afterwards

    def note_phase(self, what: str) -> None:
        for round_ in self.world.master.scheduler.rounds.values():
            event(f"{what} while {round_.phase.value}")

    def teardown(self) -> None:
        if not hasattr(self, "world") or sys.exc_info()[1] is not self.handled:
            return  # a rule has failed: what the rest does after that is another, later failure
        history = self.world.master.context.history
        event(f"commits: {min(history.commit_count, 5)}")
        event(f"rewound: {min(history.rewind_count, 2)}")
        event(f"restarts of the master: {min(self.world.term - 1, 3)}")
        self.world.calm_down()
