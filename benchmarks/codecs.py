"""Bits, speed and signal-to-noise of the codecs, used as in rounds.

    python -m benchmarks.codecs --json codecs.json

Each codec encodes one chunk at a time on one core; the best of several runs counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import asdict, frozen
from numpy.typing import NDArray

from benchmarks.report import Measured, Table, keep_json, run_main, show
from holdfast.collectives.codecs.codecs import CODECS, Codec
from holdfast.collectives.codecs.compression import FrameCompressor

CHUNK_COUNT = 1 << 18  # values: a chunk of 1 MiB, the default of run.toml
SAMPLE_COUNT = 1 << 22  # values of each distribution, for measuring the noise
STUDENT_FREEDOM = 3.0  # heavy tails, as those of the worst pseudo-gradients
MEASURE_S = 0.2  # time for which a measurement is repeated

Values = NDArray[np.float32]
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, count: rng.standard_normal(count),
    "laplace": lambda rng, count: rng.laplace(size=count),
    "student": lambda rng, count: rng.standard_t(STUDENT_FREEDOM, count),
}


@frozen
class CodecFigures:
    """The measurements of one codec.

    Attributes:
      bits: bits per value on the wire, for normal values without compression.
      encode_gb_s: encoding speed on one core, in 10^9 bytes of float32 per second.
      decode_gb_s: decoding speed, likewise.
      zstd_saving: share of the bytes that ``+zstd`` would save; 0 if it would switch itself off.
      noise_db: signal-to-noise ratio by distribution; None for a lossless codec.
    """

    codec: str
    bits: float
    encode_gb_s: float
    decode_gb_s: float
    zstd_saving: float
    noise_db: dict[str, float | None]


def measured() -> Measured:
    """Measure all codecs."""
    samples = {name: draw_sample(name, SAMPLE_COUNT) for name in DISTRIBUTIONS}
    figures = [measure(codec, samples) for codec in CODECS.values()]
    rows = []
    for each in figures:
        noise = ["exact" if db is None else f"{db:.1f}" for db in each.noise_db.values()]
        speeds = [f"{each.encode_gb_s:.2f}", f"{each.decode_gb_s:.2f}"]
        saving = f"{each.zstd_saving:.0%}" if each.zstd_saving else ""
        rows.append([each.codec, f"{each.bits:.3f}", *speeds, saving, *noise])
    names = [f"{name}, dB" for name in DISTRIBUTIONS]
    table = Table(
        "Size, speed on one core, and signal-to-noise of one trip, by the values' distribution",
        ["python -m benchmarks.codecs"],
        ["codec", "bits a value", "encode, GB/s", "decode, GB/s", "zstd saves", *names],
        rows,
        [
            f"GB/s of float32 values, chunks of {4 * CHUNK_COUNT >> 20} MiB, best of many runs. "
            f"*student* has {STUDENT_FREEDOM:g} degrees of freedom. Scales are included in the bits; "
            "error feedback brings what is lost back in later rounds."
        ],
    )
    return [table], [asdict(each) for each in figures]


def draw_sample(distribution: str, count: int) -> Values:
    """Draw values of a distribution, the same at every call."""
    values = DISTRIBUTIONS[distribution](np.random.default_rng(1), count)
    return values.astype(np.float32)


def measure(codec: Codec, samples: dict[str, Values]) -> CodecFigures:
    """Measure one codec."""
    chunk = samples["normal"][:CHUNK_COUNT]
    out = memoryview(bytearray(codec.encoded_bytes(chunk.size)))
    decoded = np.empty_like(chunk)
    length = codec.encode(chunk, out)
    compressor = FrameCompressor(not codec.variable)
    compressed = compressor.compress(out[:length])
    return CodecFigures(
        codec=codec.name,
        bits=8 * length / chunk.size,
        encode_gb_s=chunk.nbytes / best_s(lambda: codec.encode(chunk, out)) / 1e9,
        decode_gb_s=chunk.nbytes / best_s(lambda: codec.decode(out[:length], decoded)) / 1e9,
        zstd_saving=1 - len(compressed) / length if compressor.pays else 0.0,
        noise_db={name: noise_db(codec, values) for name, values in samples.items()},
    )


def best_s(work: Callable[[], object]) -> float:
    """Return the shortest duration of the work, in seconds."""
    best = math.inf
    end = time.perf_counter() + MEASURE_S
    while (start := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - start)
    return best


def noise_db(codec: Codec, values: Values) -> float | None:
    """Return the signal-to-noise ratio after encoding and decoding by chunk; None if lossless."""
    signal = noise = 0.0
    out = memoryview(bytearray(codec.encoded_bytes(min(CHUNK_COUNT, values.size))))
    for start in range(0, values.size, CHUNK_COUNT):
        chunk = values[start : start + CHUNK_COUNT]
        decoded = np.empty_like(chunk)
        room = out[: codec.encoded_bytes(chunk.size)]
        codec.decode(room[: codec.encode(chunk, room)], decoded)
        exact = chunk.astype(np.float64)
        signal += float(np.square(exact).sum())
        noise += float(np.square(exact - decoded).sum())
    return 10 * math.log10(signal / noise) if noise else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    tables, raw = measured()
    keep_json(raw, options.json)
    show(tables)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("codecs", main))
