"""Who owns which chunk: a weighted butterfly.

Every contributor sends each chunk to its owner; the owner adds up and sends the result to every
receiver. With ``n`` contributors, ``r`` receivers, ``S`` bytes and an owner's share ``w``, that
owner moves

    up    S * ((1 - w) + (r - 1) w)        down    S * ((1 - w) + (n - 1) w)

so within T seconds it can own at most the ``w`` that fits both. The shares are those of the least T
for which they add up to 1. For equal up and down rates and r = n this is the closed form

    T* = S * max(1 / min b, 2 (n - 1) / sum b),    w_i  proportional to  max(0, b_i T* / S - 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..protocol.messages import FragmentSize, OwnerRun, Plan
from .spec import RunSpec

VALUE_BYTES = 4  # float32
CHUNK_ALIGNMENT = 256  # elements; blocks of a codec do not straddle chunks
CHUNK_ELEMENTS_MIN = 4_096  # smaller chunks cost more in headers than they balance
CHUNKS_PER_OWNER = 4  # a small fragment is cut finer, so that shares can be unequal
BISECTIONS = 60  # halvings of an interval: exact to the last bits of a float


@frozen
class Bandwidth:
    """What a peer can send and receive, in bytes per second."""

    up_bytes_per_s: float
    down_bytes_per_s: float


def make_plan(
    size: FragmentSize,
    contributors: Sequence[str],
    bandwidths: Mapping[str, Bandwidth],
    spec: RunSpec,
    receiver_count: int | None = None,
) -> Plan:
    """Cut a fragment into chunks and give each an owner.

    Args:
      size: of the fragment.
      contributors: peer ids in order of member number; owners come from among them.
      bandwidths: what is known; a contributor that is missing counts as the median of the others,
        and with nothing known all shares are equal.
      spec: chunk size and codecs.
      receiver_count: everybody who gets the result, contributors too (default: just them).

    Returns:
      A plan whose runs follow the order of ``contributors``; who owns nothing is left out.
    """
    count = len(contributors)
    chunk_elements = _chunk_elements(size.value_count, count, spec)
    chunk_count = -(-size.value_count // chunk_elements) + (1 if size.counter_count else 0)
    rates = _rates(contributors, bandwidths)
    shares = owner_shares(rates, max(receiver_count or count, count))
    return Plan(
        chunk_elements=chunk_elements,
        owners=tuple(
            OwnerRun(peer, owned)
            for peer, owned in zip(contributors, _apportion(chunk_count, shares), strict=True)
            if owned
        ),
        codec_up=spec.reduce.codec_up,
        codec_down=spec.reduce.codec_down,
    )


def owner_shares(rates: Sequence[Bandwidth], receiver_count: int) -> list[float]:
    """Shares of the chunks, adding up to 1, that end the reduction soonest."""
    count = len(rates)

    def fitting(seconds: float) -> list[float]:  # seconds for one byte of the fragment
        return [
            max(
                0.0,
                min(
                    1.0,
                    _share(rate.up_bytes_per_s * seconds, receiver_count),
                    _share(rate.down_bytes_per_s * seconds, count),
                ),
            )
            for rate in rates
        ]

    low = max(1.0 / min(rate.up_bytes_per_s, rate.down_bytes_per_s) for rate in rates)
    shares = fitting(low)
    if sum(shares) < 1.0:
        high = low * 2.0 * max(receiver_count, 2)  # here any one of them could own everything
        for _halving in range(BISECTIONS):
            middle = (low + high) / 2.0
            if sum(fitting(middle)) < 1.0:
                low = middle
            else:
                high = middle
        shares = fitting(high)
    total = sum(shares)
    return [share / total for share in shares]


def _share(budget: float, member_count: int) -> float:
    """The greatest w with ``(1 - w) + (member_count - 1) w <= budget``, for a budget of at least 1."""
    if member_count <= 2:
        return 1.0  # one or two members move the same bytes whoever owns what
    return (budget - 1.0) / (member_count - 2)


def _rates(contributors: Sequence[str], bandwidths: Mapping[str, Bandwidth]) -> list[Bandwidth]:
    known = [
        bandwidths[peer]
        for peer in contributors
        if peer in bandwidths
        and min(bandwidths[peer].up_bytes_per_s, bandwidths[peer].down_bytes_per_s) > 0
    ]
    if known:
        ups = sorted(rate.up_bytes_per_s for rate in known)
        downs = sorted(rate.down_bytes_per_s for rate in known)
        usual = Bandwidth(ups[len(ups) // 2], downs[len(downs) // 2])
    else:
        usual = Bandwidth(1.0, 1.0)
    return [bandwidths[peer] if bandwidths.get(peer) in known else usual for peer in contributors]


def _chunk_elements(value_count: int, owner_count: int, spec: RunSpec) -> int:
    most = max(CHUNK_ALIGNMENT, spec.reduce.chunk_bytes // VALUE_BYTES)
    wanted = -(-value_count // (owner_count * CHUNKS_PER_OWNER))
    wanted = -(-wanted // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    return min(most, max(CHUNK_ELEMENTS_MIN, wanted))


def _apportion(chunk_count: int, shares: Sequence[float]) -> list[int]:
    """Whole chunks by largest remainder; a tie goes to the one who came first."""
    exact = [share * chunk_count for share in shares]
    owned = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (owned[i] - exact[i], i))
    for index in by_remainder[: chunk_count - sum(owned)]:
        owned[index] += 1
    return owned
