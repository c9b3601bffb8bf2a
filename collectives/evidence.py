"""Proof that a chunk owner returned a wrong sum: the statements that peers sign, and their check.

    contributor --> owner        its encoded chunk and its seal: "I gave this"
    owner --> auditor, if asked  all contributions as they came, and its own seal: "I added these"
    auditor --> master           both, as a proof, if they do not make the owner's result

An owner takes no contribution without its contributor's seal, and signs nothing but what it added.
So a signed sum that is wrong can only be the work of its owner, and no peer's word is needed, however
many peers lie. An auditor cannot replace a contribution by one of its own making: the owner has not
signed that one.

The statements name a round's order (not its repairs, which change no contribution). Nothing here does
I/O. ``sealed`` and ``is_sealed`` are called for each contribution, the rest for audited chunks only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from attrs import frozen
from blake3 import blake3

from ..protocol.errors import BadContributionError, RemoteProtocolError
from ..protocol.messages import ContributorRun, Reduce
from ..protocol.network.lane import Buffer
from ..protocol.trust.notary import SEAL_BYTES, Notary
from .arithmetic import ChunkLayout
from .combine import Rule, combined
from .contributor_sets import digest_of, sets_of, unpack_bits

DIGEST_BYTES = 32
_WHERE = struct.Struct(">QQII")  # round, attempt of the order, fragment, chunk
_LENGTH = struct.Struct(">I")


class UnsignedError(Exception):
    """The contributions shown are not those that the owner signed: they prove nothing."""


@frozen
class ChunkEvidence:
    """One chunk whose owner is asked what it added.

    Attributes:
      present: for each contributor of the order, whether it is in the result.
      digest: BLAKE3 of the chunk's encoded result, as all receivers have it.
    """

    order: Reduce
    layout: ChunkLayout
    index: int
    owner: str
    present: tuple[bool, ...]
    digest: bytes

    @property
    def givers(self) -> list[str]:
        """The peers whose contributions are in the chunk, in the order's order."""
        contributors = self.order.contributors
        return [c.peer for c, here in zip(contributors, self.present, strict=True) if here]


def statement_of_gift(order: Reduce, index: int, payload: Buffer) -> bytes:
    """Return the statement that a contributor seals: it gave this payload of a chunk."""
    return b"gave " + _where(order, index) + blake3(payload).digest()


def statement_of_sum(order: Reduce, index: int, pieces: Sequence[Buffer]) -> bytes:
    """Return the statement that an owner seals: it added these sealed contributions to a chunk."""
    digests = b"".join(blake3(piece).digest() for piece in pieces)
    return b"added " + _where(order, index) + blake3(digests).digest()


def _where(order: Reduce, index: int) -> bytes:
    return _WHERE.pack(order.round, order.attempt, order.fragment, index)


def sealed(notary: Notary, order: Reduce, index: int, payload: Buffer) -> bytes:
    """Return a contribution as it is sent: the payload, then this node's seal."""
    return b"".join((payload, notary.seal(statement_of_gift(order, index, payload))))


def is_sealed(notary: Notary, order: Reduce, index: int, peer: str, piece: memoryview) -> bool:
    """Return whether a sealed contribution was given by this peer."""
    statement = statement_of_gift(order, index, piece[:-SEAL_BYTES])
    return notary.holds(peer, statement, piece[-SEAL_BYTES:])


def examine(evidence: ChunkEvidence, notary: Notary, shown: Sequence[memoryview]) -> str:
    """Check a chunk against the contributions that its owner shows.

    Args:
      shown: contributions with their seals, in the order's order, then the owner's seal.

    Returns:
      What is wrong with the chunk; empty if nothing is.

    Raises:
      UnsignedError: the owner has not signed what is shown.
    """
    order, index = evidence.order, evidence.index
    pieces, seal = shown[:-1], shown[-1] if shown else b""
    if not notary.holds(evidence.owner, statement_of_sum(order, index, pieces), seal):
        raise UnsignedError("its owner has not signed what it shows")
    if len(pieces) != len(evidence.givers):
        return f"{len(pieces)} contributions for {len(evidence.givers)}"
    given = dict(zip(evidence.givers, pieces, strict=True))
    for peer, piece in given.items():
        if not is_sealed(notary, order, index, peer, piece):
            return f"peer {peer[:8]} never gave what was added as its contribution"
    encoded = {peer: piece[:-SEAL_BYTES] for peer, piece in given.items()}
    try:
        rule = Rule.of(order.plan)
        result = combined(order.contributors, encoded, evidence.layout, index, rule)
    except (BadContributionError, RemoteProtocolError, ValueError) as error:
        return f"what was added cannot be added: {error}"
    if blake3(result).digest() != evidence.digest:
        return "the result is not what its contributions make"
    return ""


# ---------------------------------------------------------------- proofs


def write_proof(digests: Sequence[bytes], shown: Sequence[memoryview]) -> bytes:
    """Return a proof for the master, which has no result: all chunks' digests, and what was shown."""
    parts: list[Buffer] = [_LENGTH.pack(len(digests)), *digests]
    for piece in shown:
        parts += (_LENGTH.pack(len(piece)), piece)
    return b"".join(parts)


@frozen
class WrongChunkClaim:
    """The claim that a chunk of a round's result is wrong, as the master has it.

    Attributes:
      digest, manifest: of the result that the round's receivers agree on.
    """

    order: Reduce
    layout: ChunkLayout
    index: int
    owner: str
    digest: bytes
    manifest: tuple[ContributorRun, ...]


def check_proof(claim: WrongChunkClaim, notary: Notary, proof: bytes) -> str:
    """Check a proof against a claim.

    Returns:
      What is proven to be wrong with the chunk; empty if nothing is.

    Raises:
      UnsignedError: the proof proves nothing.
    """
    digests, shown = _read_proof(proof)
    sets = sets_of(claim.manifest, len(digests), len(claim.order.contributors))
    if (
        len(digests) != len(claim.layout.cuts)
        or digest_of(digests, sets if claim.manifest else ()) != claim.digest
    ):
        raise UnsignedError("it is not about the result that the others hold")
    evidence = ChunkEvidence(
        claim.order,
        claim.layout,
        claim.index,
        claim.owner,
        tuple(unpack_bits(sets[claim.index], len(claim.order.contributors))),
        digests[claim.index],
    )
    return examine(evidence, notary, shown)


def _read_proof(proof: bytes) -> tuple[list[bytes], list[memoryview]]:
    view = memoryview(proof)
    count, view = _take_length(view)
    if count * DIGEST_BYTES > len(view):
        raise UnsignedError("a proof that ends too early")
    digests = [bytes(view[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]) for i in range(count)]
    view = view[count * DIGEST_BYTES :]
    shown = []
    while view:
        length, view = _take_length(view)
        if length > len(view):
            raise UnsignedError("a proof that ends too early")
        shown.append(view[:length])
        view = view[length:]
    return digests, shown


def _take_length(view: memoryview) -> tuple[int, memoryview]:
    if len(view) < _LENGTH.size:
        raise UnsignedError("a proof that ends too early")
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    return int(length), view[_LENGTH.size :]
