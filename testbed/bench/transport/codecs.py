# SPDX-License-Identifier: Apache-2.0
"""`sennit bench codecs`: encoding and decoding on one thread, beside torch's and NumPy's own conversions.

Rates count float32 bytes, whatever the codec makes of them. Codecs and peers take turns within each round. A peer
converts without scales and without a care for finite numbers that become infinite, so it does less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from sennit.runtime.calibrate.machine import describe, one_core
from sennit.transport import _core
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.plans.elements import Dtype

Floats = npt.NDArray[np.float32]

CODECS: Final = (
    *(
        Codec(kind=kind, stochastic=stochastic, seed=1)
        for kind in CodecKind
        if kind is not CodecKind.LOSSLESS
        for stochastic in (False, True)
    ),
    Codec(kind=CodecKind.LOSSLESS),
)
TORCH: Final = {
    CodecKind.FP16: torch.float16, CodecKind.BF16: torch.bfloat16,
    CodecKind.FP8_E4M3: torch.float8_e4m3fn, CodecKind.FP8_E5M2: torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """The rates of one codec, in bytes of float32 a second; medians over rounds."""

    name: str
    encode: float
    encode_with_residual: float | None
    """The rate of encoding that also keeps the residual; None: the codec has no residual."""

    decode: float
    ratio: float
    """Float32 bytes over coded bytes."""

    peers: dict[str, tuple[float, float]]
    """Rates of peers by name: encode, decode."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "encode_bytes_per_s": self.encode,
            "encode_with_residual_bytes_per_s": self.encode_with_residual,
            "decode_bytes_per_s": self.decode,
            "ratio": self.ratio,
            "peers": {
                name: {"encode_bytes_per_s": encode, "decode_bytes_per_s": decode}
                for name, (encode, decode) in self.peers.items()
            },
        }


def name_of(codec: Codec) -> str:
    block = f", {codec.block} a block" if codec.block else ""
    return codec.kind.name.lower() + (", stochastic" if codec.stochastic else "") + block


def run(
    *, size_bytes: int, rounds: int, seed: int, on_progress: Callable[[str], None] = lambda _: None
) -> list[Result]:
    """Codes `size_bytes` of normally distributed numbers of the size of gradients, `rounds` times."""
    values = (np.random.default_rng(seed).standard_normal(size_bytes // 4) * 1e-4).astype(np.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_core():
            results = []
            for codec in CODECS:
                on_progress(name_of(codec))
                results.append(_measure(codec, values, rounds))
            return results
    finally:
        torch.set_num_threads(threads)


def _measure(codec: Codec, values: Floats, rounds: int) -> Result:
    # Memory is allocated once, as in a plan.
    assert codec.block is not None
    native = (codec.kind, codec.block, codec.stochastic, codec.seed)
    coded = np.empty(codec.coded_bytes(values.size), np.uint8)
    used = coded[: _core.encode(native, Dtype.F32, values, 0, coded)]
    decoded, residual = np.empty_like(values), np.zeros_like(values)
    if not _core.decode(native, Dtype.F32, used, values.size, Dtype.F32, decoded):
        raise RuntimeError(f"{name_of(codec)} does not read what it wrote: run tests/transport/test_codecs.py")
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: _core.encode(native, Dtype.F32, values, 0, coded),
        "decode": lambda: _core.decode(native, Dtype.F32, used, values.size, Dtype.F32, decoded),
    }
    if codec.kind is not CodecKind.LOSSLESS:
        calls["residual"] = lambda: _core.encode(native, Dtype.F32, values, 0, coded, residual)
    peers = {} if codec.stochastic else _peers(codec.kind, values)
    for name, (encode, decode) in peers.items():
        calls |= {f"{name} encode": encode, f"{name} decode": decode}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:  # the first one touches memory
                seconds[name].append(time.perf_counter() - start)
    rate = {name: values.nbytes / statistics.median(times) for name, times in seconds.items()}
    return Result(
        name=name_of(codec),
        encode=rate["encode"],
        encode_with_residual=rate.get("residual"),
        decode=rate["decode"],
        ratio=values.nbytes / used.size,
        peers={name: (rate[f"{name} encode"], rate[f"{name} decode"]) for name in peers},
    )


def _peers(kind: CodecKind, values: Floats) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Peers by name: functions that turn float32 into the format, and back. Both write to memory that they have."""
    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    if kind in TORCH:
        source = torch.from_numpy(values)
        narrow = torch.empty(len(values), dtype=TORCH[kind])
        wide = torch.empty_like(source)
        found["torch"] = (lambda: narrow.copy_(source), lambda: wide.copy_(narrow))
    if kind is CodecKind.FP16:
        halves, floats = np.empty(len(values), np.float16), np.empty_like(values)
        found["numpy"] = (lambda: np.copyto(halves, values, casting="same_kind"), lambda: np.copyto(floats, halves))
    return found


def render(results: list[Result], console: Console) -> None:
    """A table: GB of float32 a second."""
    machine = describe()
    table = Table(title="GB/s of float32, one thread", caption=f"{machine['processor']}", title_justify="left")
    table.add_column("codec")
    for heading in ("encode", "with residual", "decode", "fewer bytes", "torch", "numpy"):
        table.add_column(heading, justify="right")
    for result in results:
        kept = "" if result.encode_with_residual is None else f"{result.encode_with_residual / 1e9:.1f}"
        cells = [
            f"{rates[0] / 1e9:.1f} / {rates[1] / 1e9:.1f}" if (rates := result.peers.get(peer)) else ""
            for peer in ("torch", "numpy")
        ]
        table.add_row(
            result.name,
            f"{result.encode / 1e9:.1f}",
            kept,
            f"{result.decode / 1e9:.1f}",
            f"{result.ratio:.2f}×",
            *cells,
        )
    console.print(table)


def as_json(results: list[Result], *, size_bytes: int, rounds: int, seed: int) -> dict[str, object]:
    """The figures, with the settings and the machine."""
    return {
        "settings": {"size_bytes": size_bytes, "rounds": rounds, "seed": seed},
        "machine": describe(),
        "codecs": [result.as_json() for result in results],
    }
