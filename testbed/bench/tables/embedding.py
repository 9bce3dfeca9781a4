# SPDX-License-Identifier: Apache-2.0
"""`sennit bench embedding`: forward pass, and backward pass with the optimizer, beside peers in the same process.

One thread per peer unless told otherwise. Peers take turns within each round, so a disturbance of the machine hits all
of them. A ratio is the median over rounds of peer / sennit. Before the rounds, results of the forward pass and the
updated weights are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from sennit.runtime.calibrate.machine import describe
from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.optimizers import Optimizer
from sennit.runtime.kernels.spec import Pooling, Precision
from sennit.testbed.bench.results import quantile
from sennit.testbed.bench.tables.embedding_peers import PEERS, Data, Peer, Shape
from sennit.transport.errors import Unsupported

OURS: Final = "sennit"
ZIPF: Final = 1.2
# Relative tolerance of updated weights, as in fbgemm's tests.
_TOLERANCE: Final = {Precision.FP32: 1e-4, Precision.FP16: 1e-2, Precision.BF16: 1e-2}


def shapes() -> list[Shape]:
    """26 tables as in Criteo's data, 100,000 rows of 64 columns, 2,048 bags of 20: 1,064,960 lookups."""
    sequence: dict[str, Any] = {"pooling": Pooling.NONE, "bags": 1024, "length": 3}
    return [
        Shape(name="fp32, uniform"),
        Shape(name="fp32, Zipf", zipf=ZIPF),
        Shape(name="fp16 tables, uniform", precision=Precision.FP16),
        Shape(name="fp16 tables, Zipf", precision=Precision.FP16, zipf=ZIPF),
        Shape(name="SGD, uniform", optimizer=Optimizer.SGD),
        Shape(name="SGD, Zipf", optimizer=Optimizer.SGD, zipf=ZIPF),
        Shape(name="two features a table, uniform", table_count=13, features_a_table=2),
        Shape(name="two features a table, Zipf", table_count=13, features_a_table=2, zipf=ZIPF),
        Shape(name="sequences, uniform", **sequence),
        Shape(name="sequences, Zipf", **sequence, zipf=ZIPF),
    ]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result for one shape: seconds by peer, one value per round."""

    shape: Shape
    forward_s: dict[str, list[float]]
    backward_s: dict[str, list[float]]
    absent: dict[str, str]
    """Peers that did not run, and why."""

    def total_s(self, peer: str) -> list[float]:
        return [sum(pair) for pair in zip(self.forward_s[peer], self.backward_s[peer], strict=True)]

    def ratios(self, peer: str, *, backward_only: bool = False) -> list[float]:
        """Peer / sennit of each round."""
        theirs, ours = (self.backward_s[name] if backward_only else self.total_s(name) for name in (peer, OURS))
        return [their / our for their, our in zip(theirs, ours, strict=True)]


def data_of(shape: Shape, seed: int) -> Data:
    """Ids, gradient and initial weights of a shape."""
    generator = torch_stream(seed, "bench embedding", shape.name)
    count = shape.bags * shape.length
    features = []
    for _ in range(shape.feature_count):
        if shape.zipf is None:
            features.append(torch.randint(shape.row_count, (count,), generator=generator))
        else:
            weights = torch.arange(1, shape.row_count + 1, dtype=torch.float64) ** -shape.zipf
            edges = torch.cumsum(weights / weights.sum(), 0)
            ranks = torch.searchsorted(edges, torch.rand(count, generator=generator, dtype=torch.float64))
            features.append(torch.randperm(shape.row_count, generator=generator)[ranks.clamp(max=shape.row_count - 1)])
    vectors = count if shape.pooling is Pooling.NONE else shape.bags
    return Data(
        ids=torch.cat(features),
        gradient=torch.randn(shape.feature_count, vectors, shape.dim, generator=generator) * 0.01,
        weights=[
            torch.empty(shape.row_count, shape.dim).uniform_(-0.1, 0.1, generator=generator)
            for _ in range(shape.table_count)
        ],
    )


def run(
    *,
    against: Sequence[str],
    rounds: int,
    seed: int,
    only: str = "",
    threads: int = 1,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Measures the shapes whose names contain `only`, on `threads` threads per peer."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for shape in shapes():
            if only in shape.name:
                on_progress(shape.name)
                results.append(_measure(shape, (OURS, *against), rounds, seed, threads))
        return results
    finally:
        torch.set_num_threads(threads_before)


def _measure(shape: Shape, names: Sequence[str], rounds: int, seed: int, threads: int) -> Result:
    data = data_of(shape, seed)
    peers: dict[str, Peer] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            peers[name] = PEERS[name](shape, data, threads)
        except Unsupported as reason:
            absent[name] = str(reason)
    _compare(shape, peers)
    forward: dict[str, list[float]] = {name: [] for name in peers}
    backward: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds):
        # The first peer finds the caches as another one left them, so the order rotates too.
        turn = number % len(peers)
        for name in [*peers][turn:] + [*peers][:turn]:
            start = time.perf_counter()
            result = peers[name].forward()
            middle = time.perf_counter()
            peers[name].backward(result)
            forward[name].append(middle - start)
            backward[name].append(time.perf_counter() - middle)
    return Result(shape=shape, forward_s=forward, backward_s=backward, absent=absent)


def _compare(shape: Shape, peers: dict[str, Peer]) -> None:
    """One step of each peer. Raises unless all comparable peers agree."""
    peers = {name: peer for name, peer in peers.items() if peer.HOLDS_ANY_WEIGHTS}
    tolerance = _TOLERANCE[shape.precision]
    results = {name: peer.forward() for name, peer in peers.items()}
    ours = peers[OURS].vectors(results[OURS])
    for name, peer in peers.items():
        torch.testing.assert_close(peer.vectors(results[name]), ours, rtol=tolerance, atol=1e-5)
        peer.backward(results[name])
    for name, peer in peers.items():
        if name == "torch" and shape.optimizer is Optimizer.ROW_WISE_ADAGRAD:
            continue
        for table in range(0, shape.table_count, 5):
            torch.testing.assert_close(peer.weight(table), peers[OURS].weight(table), rtol=tolerance, atol=1e-5)


def render(results: list[Result], console: Console) -> None:
    """Milliseconds are medians; a ratio is the median of rounds, with the 10th and 90th percentiles."""
    table = Table("shape", "peer", "forward ms", "backward ms", "peer / sennit", "backward alone")
    for result in results:
        for name in result.forward_s:
            cells = [f"{statistics.median(part[name]) * 1e3:.1f}" for part in (result.forward_s, result.backward_s)]
            spreads = [
                "" if name == OURS else _spread(result.ratios(name, backward_only=alone)) for alone in (False, True)
            ]
            table.add_row(result.shape.name, name, *cells, *spreads)
        for name, reason in result.absent.items():
            table.add_row(result.shape.name, name, "", "", reason, "")
    console.print(table)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({quantile(ratios, 0.1):.2f} to {quantile(ratios, 0.9):.2f})"


def as_json(results: list[Result], *, rounds: int, seed: int, threads: int) -> dict[str, Any]:
    return {
        "machine": describe(),
        "rounds": rounds,
        "seed": seed,
        "threads": threads,
        "shapes": [
            {
                "name": result.shape.name,
                "lookups": result.shape.lookup_count,
                "forward_s": result.forward_s,
                "backward_s": result.backward_s,
                "median_ms": {
                    name: [1e3 * statistics.median(seconds[name]) for seconds in (result.forward_s, result.backward_s)]
                    for name in result.forward_s
                },
                "ratio": {name: statistics.median(result.ratios(name)) for name in result.forward_s if name != OURS},
                "spread": {name: _percentiles(result.ratios(name)) for name in result.forward_s if name != OURS},
                "backward_spread": {
                    name: _percentiles(result.ratios(name, backward_only=True))
                    for name in result.forward_s
                    if name != OURS
                },
                "absent": result.absent,
            }
            for result in results
        ],
    }


def _percentiles(ratios: list[float]) -> dict[str, float]:
    """The median, and the 10th and 90th percentiles."""
    return {"median": statistics.median(ratios), "low": quantile(ratios, 0.1), "high": quantile(ratios, 0.9)}
