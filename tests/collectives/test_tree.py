"""Trees of two levels: the roles of all peers fit together, and all get the same bits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.collectives.chunk_adder import ThreadEntry
from holdfast.collectives.gather_tree import ChunkRole, Tree
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.messages import FragmentSize, OwnerRun, Plan, Reduce, SiteLeaders
from holdfast.protocol.network.lane import FrameHeader, FrameKind
from tests.collectives.swarm import Node, a_swarm, give_input, make_order
from tests.membership.sited import Sited, sited

PEERS = [f"{number:032x}" for number in range(7)]


def a_plan(owners: Sequence[str], sites: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Plan:
    """Sites are members and, by chunk, leaders."""
    return Plan(
        100,
        tuple(OwnerRun(owner, 1) for owner in owners),
        "fp32",
        "fp32",
        tuple(
            SiteLeaders(tuple(members), tuple(OwnerRun(leader, 1) for leader in leaders))
            for members, leaders in sites
        ),
    )


def draw_sites(
    rng: random.Random, peers: Sequence[str], owners: Sequence[str]
) -> list[tuple[list[str], list[str]]]:
    """Disjoint groups of two and more; the owner of a chunk leads its site."""
    left = rng.sample(list(peers), len(peers))
    sites = []
    while len(left) >= 2 and rng.random() < 0.8:
        members = [left.pop() for _ in range(rng.randint(2, min(4, len(left))))]
        leaders = [owner if owner in members else rng.choice(members) for owner in owners]
        sites.append((members, leaders))
    return sites


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 7), contributing=st.integers(1, 7))
def test_the_roles_of_all_peers_fit_together(seed: int, count: int, contributing: int) -> None:
    rng = random.Random(seed)
    peers = PEERS[:count]
    contributors = peers[: min(contributing, count)]
    owners = [rng.choice(contributors) for _ in range(4)]
    plan = a_plan(owners, draw_sites(rng, peers, owners))
    trees = {peer: Tree(plan, owners, contributors, peers, peer) for peer in peers}
    for chunk, owner in enumerate(owners):
        parts = {peer: trees[peer].role(chunk) for peer in peers}
        reached = [owner]
        for peer in reached:
            reached += parts[peer].takers
        assert sorted(reached) == sorted(peers)  # everybody gets the result once
        assert sorted(given_below(owner, parts, contributors)) == sorted(contributors)
        for peer, part in parts.items():
            assert (part.parent is None) == (peer == owner)
            if part.parent is not None:
                above = parts[part.parent]
                assert peer in above.takers
                assert (peer in above.givers) == (part.gathers or peer in contributors)


def given_below(
    peer: str, parts: Mapping[str, ChunkRole], contributors: Sequence[str]
) -> list[str]:
    """Return the peers whose contributions are in what a peer adds up or sends."""
    below = [peer] if peer in contributors else []
    for giver in parts[peer].givers:
        below += given_below(giver, parts, contributors)
    return below


@settings(max_examples=150, deadline=None)
@given(sited())
def test_every_peer_accepts_what_the_planner_plans(case: Sited) -> None:
    """With contributors, listeners and peers without a site, all roles fit together."""
    plan, _estimate = case.planned()
    owners = [run.peer for run in plan.owners for _chunk in range(run.chunk_count)]
    trees = {p: Tree(plan, owners, case.contributors, case.receivers, p) for p in case.receivers}
    for chunk, owner in enumerate(owners):
        parts = {peer: tree.role(chunk) for peer, tree in trees.items()}
        reached = [owner]
        for peer in reached:
            reached += parts[peer].takers
        assert sorted(reached) == sorted(case.receivers)
        assert sorted(given_below(owner, parts, case.contributors)) == sorted(case.contributors)


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        ([(PEERS[:2], PEERS[:1] * 2), (PEERS[1:3], PEERS[1:2] * 2)], "two sites"),
        ([((PEERS[0], PEERS[6]), PEERS[:1] * 2)], "does not receive"),
        ([(PEERS[:1], PEERS[:1] * 2)], "fewer than two"),
        ([(PEERS[:2], PEERS[:1])], "leader for each chunk"),
        ([(PEERS[:2], PEERS[2:3] * 2)], "from outside"),
        ([(PEERS[:2], PEERS[1:2] * 2)], "its own site"),
    ],
)
def test_sites_that_contradict_themselves_are_refused(
    sites: list[tuple[Sequence[str], Sequence[str]]], said: str
) -> None:
    owners = [PEERS[0], PEERS[2]]
    with pytest.raises(RemoteProtocolError, match=said):
        Tree(a_plan(owners, sites), owners, PEERS[:3], PEERS[:4], PEERS[0])


def with_sites(order: Reduce, sites: Sequence[tuple[Sequence[Node], Sequence[Node]]]) -> Reduce:
    """Members and leaders; these take turns, but for chunks that a member owns."""
    owners = [run.peer for run in order.plan.owners for _ in range(run.chunk_count)]
    leads = []
    for members, leaders in sites:
        inside = [node.peer for node in members]
        chosen = [
            owner if owner in inside else leaders[index % len(leaders)].peer
            for index, owner in enumerate(owners)
        ]
        leads.append(SiteLeaders(tuple(inside), tuple(OwnerRun(peer, 1) for peer in chosen)))
    return evolve(order, plan=evolve(order.plan, sites=tuple(leads)))


def weighted_mean(
    order: Reduce, nodes: Sequence[Node]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = {c.peer: c.weight for c in order.contributors}
    total = sum(
        weights[node.peer] * node.values.astype(np.float64)
        for node in nodes
        if node.peer in weights and node.values is not None
    )
    return np.asarray(total / sum(weights.values()))


@pytest.mark.parametrize("codec", ["fp32", "int8", "bf16+zstd"])
@pytest.mark.parametrize("owning", [[0, 3, 5], [5], [1, 2]])
async def test_a_tree_gives_every_peer_the_same_bits(codec: str, owning: list[int]) -> None:
    """Sites of contributors and a listener, of a contributor and a listener, of listeners."""
    size = FragmentSize(2_000, 0, 3)
    async with a_swarm(9) as swarm:
        nodes = swarm.nodes
        give_input(nodes, size, 3)
        contributors = [(nodes[n], 3 + n, 1.0) for n in (0, 1, 2, 3, 5)]
        owners = [nodes[n] for n in owning]
        order = make_order(size, contributors, nodes, owners=owners, codecs=(codec, codec))
        sites = [
            ([nodes[0], nodes[1], nodes[6]], [nodes[1], nodes[6]]),
            ([nodes[2], nodes[3]], [nodes[2]]),
            ([nodes[7], nodes[8]], [nodes[8]]),
        ]
        order = with_sites(order, sites)
        for node in nodes:
            if node.number not in (0, 1, 2, 3, 5):
                node.values = node.counters = None
        await swarm.reduce(order, size, nodes)
        assert [node.error for node in nodes] == [None] * 9
        results = [node.result for node in nodes if node.result is not None]
        assert len(results) == 9
        assert {result.digest for result in results} == {results[0].digest}
        assert {result.values.tobytes() for result in results} == {results[0].values.tobytes()}
        rows = [node.counters for node in nodes if node.counters is not None]
        assert (results[0].counters == np.max(np.array(rows), axis=0)).all()
        step = {"fp32": 1e-8, "int8": 1.2e-3, "bf16+zstd": 4e-4}[codec]
        np.testing.assert_allclose(results[0].values, weighted_mean(order, nodes), atol=step)


async def test_a_site_crosses_its_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three members behind one line, one contribution goes out and one result comes in."""
    size = FragmentSize(2_000, 0, 0)
    crossing: list[tuple[FrameKind, int]] = []
    async with a_swarm(5) as swarm:
        nodes = swarm.nodes
        give_input(nodes, size, 3)
        inside = {node.peer for node in nodes[:3]}
        deliver = ThreadEntry.deliver

        def noted(self: ThreadEntry, peer: str, header: FrameHeader, payload: memoryview) -> None:
            if (peer in inside) != (self._context.me in inside):
                crossing.append((header.kind, header.index))
            deliver(self, peer, header, payload)

        monkeypatch.setattr(ThreadEntry, "deliver", noted)
        order = make_order(size, [(n, 1, 1.0) for n in nodes], nodes, owners=nodes[3:])
        order = with_sites(order, [(nodes[:3], nodes[:3])])
        await swarm.reduce(order, size, nodes)
        chunks = range(20)
        assert sorted(crossing) == sorted(
            [(FrameKind.CONTRIBUTION, index) for index in chunks]
            + [(FrameKind.RESULT, index) for index in chunks]
        )


def test_leaders_are_counted_before_they_are_laid_out() -> None:
    owners = [PEERS[0], PEERS[2]]
    plan = a_plan(owners, [(PEERS[:2], PEERS[:1] * 2)])
    endless = SiteLeaders(tuple(PEERS[:2]), (OwnerRun(PEERS[0], 2**62),))
    with pytest.raises(RemoteProtocolError, match="leader for each chunk"):
        Tree(evolve(plan, sites=(endless,)), owners, PEERS[:3], PEERS[:4], PEERS[0])
