"""Evidence: what owners show of what they added, and what auditors and the master make of it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import trio
from attrs import define, evolve
from blake3 import blake3

from holdfast.collectives.arithmetic import ChunkLayout
from holdfast.collectives.audit_log import AuditLog
from holdfast.collectives.combine import Rule, combined
from holdfast.collectives.contributor_sets import digest_of
from holdfast.collectives.evidence import (
    ChunkEvidence,
    UnsignedError,
    WrongChunkClaim,
    check_proof,
    examine,
    sealed,
    statement_of_sum,
    write_proof,
)
from holdfast.collectives.reduction import Reduction
from holdfast.protocol.errors import BadContributionError
from holdfast.protocol.messages import (
    Contributor,
    ContributorRun,
    FragmentSize,
    OwnerRun,
    Plan,
    Reduce,
)
from holdfast.protocol.trust.identity import Identity
from holdfast.protocol.trust.notary import SEAL_BYTES, Notary
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.simulated_keys import SimulatedKeys
from holdfast.simulation.virtual_time import run_virtually
from tests.collectives.swarm import Swarm, a_real_swarm, a_swarm, give_input, make_order
from tests.collectives.test_repair import SIZE as REPAIRED
from tests.collectives.test_repair import WEIGHTS, Round

A, B, C = ("a" * 32, "b" * 32, "c" * 32)
PEERS = (A, B, C)
SIZE = FragmentSize(600, 0, 0)
CHUNK = 200
SMALL = FragmentSize(2_000, 0, 1)


# ---------------------------------------------------------------- seals


def test_a_seal_is_of_one_statement_of_one_peer_in_one_run() -> None:
    identity, other = Identity.generate(), Identity.generate()
    seal = Notary("run", identity).seal(b"so it is")
    checker = Notary("run")
    for _again in range(2):  # the second time the key is known
        assert checker.holds(identity.peer_id, b"so it is", seal)
    assert not checker.holds(identity.peer_id, b"so it was", seal)
    assert not checker.holds(other.peer_id, b"so it is", seal)
    assert not Notary("another").holds(identity.peer_id, b"so it is", seal)
    assert not checker.holds(
        other.peer_id, b"so it is", Notary("run", other).seal(b"")[:32] + seal[32:]
    )


@pytest.mark.parametrize("at", range(0, SEAL_BYTES, 5))
def test_a_seal_with_any_byte_changed_holds_nothing(at: int) -> None:
    identity = Identity.generate()
    seal = bytearray(Notary("run", identity).seal(b"so it is"))
    seal[at] ^= 1
    assert not Notary("run").holds(identity.peer_id, b"so it is", seal)
    assert not Notary("run").holds(identity.peer_id, b"so it is", seal[:at])


# ---------------------------------------------------------------- one chunk


@define
class Scene:
    """Three contributors, and B, who owns a chunk, shows what it added to it."""

    notaries: SimulatedKeys
    order: Reduce
    layout: ChunkLayout
    pieces: list[bytes]
    result: bytes

    @classmethod
    def of(cls, codec: str = "fp32", combine: str = "mean") -> Scene:
        notaries = SimulatedKeys("run")
        runs = (OwnerRun(A, 1), OwnerRun(B, 1), OwnerRun(C, 1))
        plan = Plan(CHUNK, runs, codec, codec, combine=combine, sealed=True)
        contributors = tuple(Contributor(p, w, 1.0) for p, w in zip(PEERS, (3, 5, 7), strict=True))
        order = Reduce(4, 2, 0, 9, 1, contributors, PEERS, plan)
        layout = ChunkLayout.of(plan, SIZE)
        given = {peer: _encoded(layout, seed) for seed, peer in enumerate(PEERS)}
        views = {peer: memoryview(data) for peer, data in given.items()}
        scene = cls(
            notaries, order, layout, [], combined(contributors, views, layout, 1, Rule.of(plan))
        )
        scene.pieces = [scene.give(peer, data) for peer, data in given.items()]
        return scene

    def give(self, peer: str, data: bytes, order: Reduce | None = None, index: int = 1) -> bytes:
        return sealed(self.notaries.notary(peer), order or self.order, index, data)

    def sign(self, pieces: Sequence[bytes], by: str = B) -> list[memoryview]:
        """All that is shown, when this peer says that it added these."""
        seal = self.notaries.notary(by).seal(statement_of_sum(self.order, 1, pieces))
        return [memoryview(piece) for piece in (*pieces, seal)]

    @property
    def evidence(self) -> ChunkEvidence:
        digest = blake3(self.result).digest()
        return ChunkEvidence(self.order, self.layout, 1, B, (True, True, True), digest)

    def look(self, shown: Sequence[memoryview]) -> str:
        return examine(self.evidence, self.notaries.notary(), shown)


def _encoded(layout: ChunkLayout, seed: int) -> bytes:
    values = np.random.default_rng(seed).standard_normal(CHUNK).astype(np.float32)
    room = memoryview(bytearray(layout.cuts[1].up_bytes))
    return bytes(room[: layout.codec_up.encode(values, room)])


@pytest.mark.parametrize("combine", ["mean", "clipped:0.7"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "nf4", "topk"])
def test_an_honest_owner_has_nothing_to_fear(codec: str, combine: str) -> None:
    scene = Scene.of(codec, combine)
    assert scene.look(scene.sign(scene.pieces)) == ""


def test_a_result_that_is_not_the_sum_is_a_lie() -> None:
    scene = Scene.of()
    scene.result = bytes(len(scene.result))
    assert "not what its contributions make" in scene.look(scene.sign(scene.pieces))


FORGERIES: dict[str, Callable[[Scene], list[bytes]]] = {
    "another's in its place": lambda s: [s.pieces[0], s.pieces[0], s.pieces[2]],
    "one less": lambda s: s.pieces[:2],
    "of another chunk": lambda s: [s.give(A, s.pieces[0][:-SEAL_BYTES], index=2), *s.pieces[1:]],
    "of another round": lambda s: [
        s.give(A, s.pieces[0][:-SEAL_BYTES], evolve(s.order, round=5)),
        *s.pieces[1:],
    ],
    "of an earlier attempt": lambda s: [
        s.give(A, s.pieces[0][:-SEAL_BYTES], evolve(s.order, attempt=1)),
        *s.pieces[1:],
    ],
    "a bit changed": lambda s: [bytes([s.pieces[0][0] ^ 1]) + s.pieces[0][1:], *s.pieces[1:]],
    "no seals": lambda s: [piece[:-SEAL_BYTES] for piece in s.pieces],
    "nothing": lambda _s: [],
    "no numbers": lambda s: [s.give(A, b"\xff" * (4 * CHUNK)), *s.pieces[1:]],
    "too short": lambda s: [s.give(A, b"\0" * 8), *s.pieces[1:]],
}


@pytest.mark.fault("an owner shows forgeries", "contributors' seals", "the same")
@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_an_owner_signs_and_nobody_gave_convicts_it(forgery: str) -> None:
    scene = Scene.of()
    assert scene.look(scene.sign(FORGERIES[forgery](scene)))


@pytest.mark.fault("a member accuses an honest owner")
@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_an_owner_has_not_signed_says_nothing_about_it(forgery: str) -> None:
    """Whoever looks may have made all that up: its own contribution it can even seal."""
    scene = Scene.of()
    honest = scene.sign(scene.pieces)
    forged = [memoryview(piece) for piece in FORGERIES[forgery](scene)]
    for shown in ([*forged, honest[-1]], scene.sign(FORGERIES[forgery](scene), by=A), forged):
        with pytest.raises(UnsignedError):
            scene.look(shown)


def test_a_contributor_missing_from_a_chunk_is_not_expected() -> None:
    scene = Scene.of()
    views = {
        p: memoryview(s)[:-SEAL_BYTES] for p, s in zip(PEERS[1:], scene.pieces[1:], strict=True)
    }
    scene.result = combined(scene.order.contributors, views, scene.layout, 1, Rule())
    evidence = evolve(scene.evidence, present=(False, True, True))
    assert examine(evidence, scene.notaries.notary(), scene.sign(scene.pieces[1:])) == ""
    assert examine(evidence, scene.notaries.notary(), scene.sign(scene.pieces)) != ""


# ---------------------------------------------------------------- proofs


@pytest.mark.parametrize("manifest", [(), (ContributorRun(b"\x07", 1), ContributorRun(b"\x06", 2))])
def test_a_proof_convinces_a_master_that_has_no_result(
    manifest: tuple[ContributorRun, ...],
) -> None:
    scene = Scene.of()
    honest = scene.result
    pieces = scene.pieces[1:] if manifest else scene.pieces
    if manifest:
        views = {p: memoryview(s)[:-SEAL_BYTES] for p, s in zip(PEERS[1:], pieces, strict=True)}
        honest = combined(scene.order.contributors, views, scene.layout, 1, Rule())
    for result, guilty in ((honest, False), (bytes(len(honest)), True)):
        digests = [b"0" * 32, blake3(result).digest(), b"2" * 32]
        digest = digest_of(digests, [b"\x07", b"\x06", b"\x06"] if manifest else ())
        claim = WrongChunkClaim(scene.order, scene.layout, 1, B, digest, manifest)
        proof = write_proof(digests, scene.sign(pieces))
        notary = scene.notaries.notary()
        assert bool(check_proof(claim, notary, proof)) == guilty
        for wrong in (
            write_proof([*digests[:1], b"x" * 32, *digests[2:]], scene.sign(pieces)),
            write_proof(digests[:2], scene.sign(pieces)),
            write_proof(digests, scene.sign(pieces, by=C)),
            write_proof(digests, []),
        ):
            with pytest.raises(UnsignedError):
                check_proof(claim, notary, wrong)
        for end in range(0, len(proof) - 1, 97):
            with pytest.raises(UnsignedError):
                check_proof(claim, notary, proof[:end])


# ---------------------------------------------------------------- in reductions


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("int8+zstd", "fp32+zstd"), ("topk", "bf16")])
def test_sealed_contributions_make_the_same_result_and_every_peer_can_audit_it(
    codecs: tuple[str, str],
) -> None:
    async def scenario() -> None:
        async with a_swarm(3) as swarm:
            await look_around(swarm, codecs)

    run_virtually(scenario, seed=1)


@pytest.mark.real_time
async def test_the_same_over_sockets_with_threads(tmp_path: Path) -> None:
    async with a_real_swarm(3, tmp_path) as swarm:
        await swarm.settle()
        await look_around(swarm, ("fp32", "fp32"), FragmentSize(300_000, 0, 1), 50_000)


async def look_around(
    swarm: Swarm,
    codecs: tuple[str, str],
    size: FragmentSize = SMALL,
    chunk_elements: int = 300,
) -> None:
    adding = [(node, weight, 1.0) for node, weight in zip(swarm.nodes, (3, 5, 7), strict=True)]
    order = make_order(
        size, adding, swarm.nodes, chunk_elements=chunk_elements, codecs=codecs, sealed=True
    )
    round_ = Round(swarm, order, size)
    with trio.fail_after(60):
        while not all(order.attempt in serving.results for serving in round_.left()):
            await trio.sleep(0.01)
    kept = {s.node.peer: s.reduction.audit_log for s in round_.left()}
    chunks = -(-size.value_count // chunk_elements) + 1
    looked = 0
    for mine in kept.values():
        assert mine is not None
        for index in range(chunks):
            evidence = mine.evidence(index)
            if evidence is None:
                continue
            shown = shown_by(kept[evidence.owner], index)
            assert examine(evidence, mine.notary, shown) == ""
            looked += 1
        assert mine.evidence(chunks) is None
        assert mine.show(chunks) is None
    assert looked == 2 * chunks


def shown_by(kept: AuditLog | None, index: int) -> list[memoryview]:
    assert kept is not None
    pieces = kept.show(index)
    assert pieces is not None
    return [memoryview(piece) for piece in pieces]


def test_a_contributor_that_signs_with_another_key_is_named() -> None:
    async def scenario() -> None:
        async with a_swarm(3) as swarm:
            size = FragmentSize(900, 0, 0)
            give_input(swarm.nodes, size, seed=7)
            bad = swarm.nodes[1]
            bad.notary = swarm.nodes[2].notary
            order = make_order(size, [(n, 1, 1.0) for n in swarm.nodes], swarm.nodes, sealed=True)
            with trio.move_on_after(5):  # the liar waits for results that nobody makes
                await swarm.reduce(order, size, swarm.nodes)
            for node in (swarm.nodes[0], swarm.nodes[2]):
                assert isinstance(node.error, BadContributionError)
                assert node.error.peer == bad.peer

    run_virtually(scenario, seed=1)


def test_a_successor_shows_what_it_added_and_a_spreader_shows_nothing() -> None:
    async def scenario() -> None:
        world = MemoryWorld(random.Random(0), bytes_per_s=10_000)
        async with a_swarm(4, world) as swarm:
            await swarm.settle()
            adding = [(n, w, 1.0) for n, w in zip(swarm.nodes, WEIGHTS, strict=True)]
            order = make_order(REPAIRED, adding, swarm.nodes, chunk_elements=200, sealed=True)
            round_ = Round(swarm, order, REPAIRED)
            dead = swarm.nodes[3].peer
            with trio.fail_after(60):  # until it has given the result of some of its chunks
                while not any(any(s.reduction.flush(())) for s in round_.left()):
                    await trio.sleep(0.001)
            round_.kill(dead)
            repair = round_.repair(dead)
            await round_.finish()
            kept = {s.node.peer: s.reduction.audit_log for s in round_.left()}
            for assignment in repair.assignments:
                successor = kept[assignment.owner]
                assert successor is not None
                if not assignment.from_scratch:
                    assert successor.show(assignment.first_chunk) is None
                    continue
                shown = shown_by(successor, assignment.first_chunk)
                for mine in kept.values():
                    assert mine is not None
                    evidence = mine.evidence(assignment.first_chunk)
                    assert evidence is None or examine(evidence, mine.notary, shown) == ""
            assert any(assignment.from_scratch for assignment in repair.assignments)

    run_virtually(scenario, seed=1)


def test_the_audit_log_is_freed_with_its_reduction() -> None:
    """A fragment's encoding a round: it must not wait for the garbage collector."""

    async def scenario() -> None:
        async with a_swarm(2) as swarm:
            give_input(swarm.nodes, SMALL, seed=7)
            order = make_order(SMALL, [(n, 1, 1.0) for n in swarm.nodes], swarm.nodes, sealed=True)
            node = swarm.nodes[0]
            mine = (node.values, node.counters)
            reduction = Reduction(
                order, node.peer, SMALL, node.hub, node.network, *mine, notary=node.notary
            )
            assert reduction.audit_log is not None  # it has 10 of the 21 chunks
            others = [reduction.audit_log.may_see("b" * 32, 0.1) for _request in range(20)]
            assert others == [True] * 12 + [False] * 8
            assert reduction.audit_log.may_see("c" * 32, 0.1), "each peer by itself"
            kept = weakref.ref(reduction.audit_log)
            gc.disable()
            try:
                del reduction
                assert kept() is None
            finally:
                gc.enable()

    run_virtually(scenario, seed=1)
