"""``holdfast bench``: what this machine's codecs do, measured the way rounds use them.

codecs   one chunk at a time on one core, best of several runs; bits, speed, signal-to-noise
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import asdict, frozen
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ...collectives.codecs.codecs import CODECS, Codec
from ...collectives.codecs.compression import FrameCompressor

CHUNK_COUNT = 1 << 18  # values: a chunk of 1 MiB, the default of run.toml
SAMPLE_COUNT = 1 << 22  # values of each distribution that the noise is measured on
STUDENT_FREEDOM = 3.0  # heavy tails, as pseudo-gradients have at their worst
MEASURE_S = 0.2  # a measurement is repeated for so long

Values = NDArray[np.float32]
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, count: rng.standard_normal(count),
    "laplace": lambda rng, count: rng.laplace(size=count),
    "student": lambda rng, count: rng.standard_t(STUDENT_FREEDOM, count),
}


@frozen
class CodecFigures:
    """One codec, measured.

    Attributes:
      bits: a value takes on the wire, of normal values, not compressed.
      encode_gb_s: 10^9 bytes of float32 a second, one core.
      decode_gb_s: the same.
      zstd_saving: share of the bytes that ``+zstd`` would save; 0 where it switches itself off.
      noise_db: signal-to-noise by distribution; None: nothing is lost.
    """

    codec: str
    bits: float
    encode_gb_s: float
    decode_gb_s: float
    zstd_saving: float
    noise_db: dict[str, float | None]


def bench_codecs(json_path: Path | None) -> None:
    """Measure all codecs, print a table, write JSON if that is wanted."""
    samples = {name: draw_sample(name, SAMPLE_COUNT) for name in DISTRIBUTIONS}
    figures = [measure(codec, samples) for codec in CODECS.values()]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("codec", "bits", "encode", "decode", "zstd"):
        table.add_column(heading, justify="left" if heading == "codec" else "right", no_wrap=True)
    for name in DISTRIBUTIONS:
        table.add_column(f"{name} dB", justify="right", no_wrap=True)
    for row in figures:
        table.add_row(
            row.codec,
            f"{row.bits:.3f}",
            f"{row.encode_gb_s:.2f}",
            f"{row.decode_gb_s:.2f}",
            f"{row.zstd_saving:.0%}" if row.zstd_saving else "",
            *("" if noise is None else f"{noise:.1f}" for noise in row.noise_db.values()),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"[dim]bits a value; encode, decode: GB/s of float32, one core, {4 * CHUNK_COUNT >> 20} MiB "
        f"chunks; zstd: share saved;\nstudent: {STUDENT_FREEDOM:g} degrees of freedom[/dim]"
    )
    if json_path is not None:
        record = {
            "chunk_values": CHUNK_COUNT,
            "sample_values": SAMPLE_COUNT,
            "student_freedom": STUDENT_FREEDOM,
            "codecs": [asdict(row) for row in figures],
        }
        json_path.write_text(json.dumps(record, indent=2) + "\n")


def draw_sample(distribution: str, count: int) -> Values:
    """Always the same values."""
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
    """Seconds that the work takes when nothing is in its way."""
    best = math.inf
    end = time.perf_counter() + MEASURE_S
    while (start := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - start)
    return best


def noise_db(codec: Codec, values: Values) -> float | None:
    """Signal-to-noise of a trip through the codec, chunk by chunk; None if nothing is lost."""
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
