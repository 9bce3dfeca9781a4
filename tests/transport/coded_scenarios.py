# SPDX-License-Identifier: Apache-2.0
"""Collectives with codecs and their definitions, each a function of a communicator and a seed: one rank's part."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sennit.transport import errors
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.communicator import Communicator
from sennit.transport.oracle import codec_reference
from sennit.transport.plans import plan_codec
from sennit.transport.plans.arithmetic import fold, narrow, run_program
from sennit.transport.plans.elements import Dtype, ReduceOp
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.tree import combinations, cover, leaves_of

Array = npt.NDArray[Any]

LEAVES = 8
# From one block to several chunks of several shares, with odd ends. 300,007 are several turns.
ELEMENTS = (0, 1, 5, 1_023, 40_001, 300_007)
# Less is computed sooner than read.
READ_LEAST_BYTES = 1 << 16
CODECS = (
    Codec(kind=CodecKind.FP16),
    Codec(kind=CodecKind.BF16, stochastic=True, seed=5),
    Codec(kind=CodecKind.FP8_E4M3, stochastic=True, seed=2**64 - 1),
    Codec(kind=CodecKind.FP8_E5M2, block=33),
    Codec(kind=CodecKind.INT8, block=100, stochastic=True, seed=70_000),
    Codec(kind=CodecKind.MX4),
)


def computed_once(compute: Callable[[], Array], data: Array, *arguments: object) -> Array:
    """The bytes that `compute` makes of `data` and the arguments, which name them together.

    Where RESULTS names a folder, the first process computes them, and the others read its file.
    """
    if "RESULTS" not in os.environ or data.nbytes < READ_LEAST_BYTES:
        return compute()
    name = hashlib.blake2b(repr(arguments).encode(), digest_size=16)
    name.update(np.ascontiguousarray(data).data)
    path = Path(os.environ["RESULTS"]) / name.hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The kernel unlocks it if this process dies.
        if not path.exists():
            half = path.with_suffix(".half")
            compute().tofile(half)
            half.rename(path)
    return np.fromfile(path, np.uint8)


def coded_and_back(codec: Codec, data: Array, first_index: int, dtype: Dtype = Dtype.F32) -> Array:
    """Q, as bytes of float32."""

    def compute() -> Array:
        coded = codec_reference.encode(codec, data, dtype=dtype, first_index=first_index)
        return codec_reference.decode(codec, coded, data.size // dtype.item_bytes).view(np.uint8)

    return computed_once(compute, data, codec, first_index, dtype)


def definition(codec: Codec, leaves: Sequence[Array], dtype: Dtype, op: ReduceOp, scalar: float = 1.0) -> Array:
    """The allreduce of leaves, as bytes."""
    elements = leaves[0].size // dtype.item_bytes
    decoded = [coded_and_back(codec, leaf, number * elements, dtype) for number, leaf in enumerate(leaves)]
    total = coded_and_back(codec, fold(decoded, Dtype.F32, op, scalar=scalar), len(leaves) * elements)
    if dtype is Dtype.F32:
        return total
    narrow = Codec(kind=CodecKind.FP16 if dtype is Dtype.F16 else CodecKind.BF16)
    return codec_reference.encode(narrow, total.view(np.float32))


def scattered(
    codec: Codec, leaves: Sequence[Array], counts: Sequence[int], dtype: Dtype, op: ReduceOp, scalar: float = 1.0
) -> list[Array]:
    """The reduce_scatter of leaves: each share as bytes."""
    elements, low, shares = sum(counts), 0, []
    for count in counts:
        part = slice(low * dtype.item_bytes, (low + count) * dtype.item_bytes)
        decoded = [
            coded_and_back(codec, leaf[part], number * elements + low, dtype) for number, leaf in enumerate(leaves)
        ]
        total = fold(decoded, Dtype.F32, op, scalar=scalar)
        shares.append(total if dtype is Dtype.F32 else narrow(total.view(np.float32), dtype))
        low += count
    return shares


def vectors(count: int, elements: int, seed: int) -> Array:
    """Numbers of every size, some of them infinite or NaN."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((count, elements)).astype(np.float32) * np.float32(2.0) ** rng.integers(-9, 9, elements)
    for value, every in ((np.inf, 997), (-np.inf, 1_499), (np.nan, 2_003)):
        made[rng.integers(count), ::every] = value
    return made.astype(np.float32)


def check(got: Array, codec: Codec, leaves: Array, dtype: Dtype, op: ReduceOp = ReduceOp.SUM) -> None:
    expected = definition(codec, [leaf.view(np.uint8) for leaf in leaves], dtype, op)
    np.testing.assert_array_equal(got.view(np.uint8), expected, err_msg=f"{codec} {dtype} {got.size}")


def allreduces(group: Communicator, seed: int) -> None:
    for codec in CODECS:
        for elements in ELEMENTS:
            given = vectors(group.world, elements, seed)
            check(group.allreduce(given[group.rank], codec=codec), codec, given, Dtype.F32)
        halves = given.astype(np.float16)
        averaged = group.allreduce(halves[group.rank], ReduceOp.AVG, codec=codec)
        check(averaged, codec, halves, Dtype.F16, ReduceOp.AVG)


def leaves(group: Communicator, seed: int) -> None:
    """A world of any size has the bits of the definition, so all worlds have the same."""
    span = leaves_of(group.rank, group.world, LEAVES)
    for codec in CODECS:
        for elements in (1, 1_023, 100_003):
            given = vectors(LEAVES, elements, seed)
            got = group.allreduce(given[span.low : span.high], leaves=LEAVES, codec=codec)
            check(got, codec, given, Dtype.F32)


def exchanges(group: Communicator, seed: int) -> None:
    """Uneven parts of alltoall, allgather and reduce_scatter, some of them empty."""
    ranks = range(group.world)
    for codec in CODECS:
        for unit in (0, 1, 333, 40_001):
            counts = [(peer + 1) % group.world * unit for peer in ranks]
            table = [[(7 * peer + other) % 3 * unit for other in ranks] for peer in ranks]
            given = vectors(group.world, sum(counts), seed)
            gather(group, codec, given, counts)
            share = group.reduce_scatter(given[group.rank], counts=counts, codec=codec)
            leaves = [leaf.view(np.uint8) for leaf in given]
            expected = scattered(codec, leaves, counts, Dtype.F32, ReduceOp.SUM)[group.rank]
            np.testing.assert_array_equal(share.view(np.uint8), expected)
            give(group, codec, table, seed)


def gather(group: Communicator, codec: Codec, given: Array, counts: Sequence[int]) -> None:
    """An allgather has the same bits with a codec everywhere and between hosts alone."""
    gathered = group.allgather(given[group.rank, : counts[group.rank]], counts=counts, codec=codec)
    starts = np.cumsum([0, *counts])
    parts = [
        coded_and_back(codec, given[peer, :count].view(np.uint8), int(starts[peer]))
        for peer, count in enumerate(counts)
    ]
    np.testing.assert_array_equal(gathered.view(np.uint8), np.concatenate(parts))


def give(group: Communicator, codec: Codec, table: Sequence[Sequence[int]], seed: int) -> None:
    """An alltoall: rank r gives `table[r][j]` elements to rank j."""
    ranks, hosts = range(group.world), group.selection.hosts
    sent = [vectors(1, sum(table[peer]), seed + peer)[0] for peer in ranks]
    received = [table[peer][group.rank] for peer in ranks]
    got = group.alltoall(sent[group.rank], send_counts=table[group.rank], recv_counts=received, codec=codec)
    cut = []
    for peer in ranks:
        low = sum(table[peer][: group.rank])
        part = sent[peer][low : low + received[peer]].view(np.uint8)
        stays = codec.between_hosts and hosts.of_rank(peer) == hosts.of_rank(group.rank)
        cut.append(part if stays else coded_and_back(codec, part, (peer << 40) + low))
    np.testing.assert_array_equal(got.view(np.uint8), np.concatenate(cut))


def between(group: Communicator, seed: int) -> None:
    """Of hosts as HOSTS says, and in the order of the algorithms' own test."""
    assert len(group.selection.hosts.spans) == len(set(os.environ["HOSTS"].split(",")))
    ranks = range(group.world)
    for plain in CODECS:
        codec = replace(plain, between_hosts=True)
        for elements in ELEMENTS:
            given = vectors(group.world, elements, seed)
            leaves = [leaf.view(np.uint8) for leaf in given]
            got = group.allreduce(given[group.rank], codec=codec)
            expected = by_hosts(codec, group.selection.hosts, leaves)
            np.testing.assert_array_equal(one_nan(got), one_nan(expected), err_msg=f"{codec} {elements}")
        counts = [(peer + 1) % group.world * 333 for peer in range(group.world)]
        given = vectors(group.world, sum(counts), seed)
        low = sum(counts[: group.rank])
        share = group.reduce_scatter(given[group.rank], counts=counts, codec=codec)
        gather(group, codec, given, counts)
        for unit in (1, 40_001):
            give(group, codec, [[(7 * peer + other) % 3 * unit for other in ranks] for peer in ranks], seed)
        part = [leaf[low : low + counts[group.rank]].view(np.uint8) for leaf in given]
        expected = by_hosts(codec, group.selection.hosts, part, low, sum(counts))
        np.testing.assert_array_equal(one_nan(share), one_nan(expected))


def one_nan(values: Array) -> Array:
    """As bits. Which NaN a sum gives is not specified, and a plain sum comes before a codec."""
    floats = values.view(np.float32)
    return np.where(np.isnan(floats), np.float32(np.nan), floats).view(np.uint32)


def by_hosts(codec: Codec, hosts: Hosts, leaves: Sequence[Array], low: int = -1, elements: int = 0) -> Array:
    """The definition with a codec between hosts alone, of float32: of an allreduce, or of the share from `low` on."""
    if len(hosts.spans) == 1:
        return fold(leaves, Dtype.F32, ReduceOp.SUM)
    gathers, count = low < 0, len(leaves)
    elements, first = (leaves[0].size // 4, 0) if gathers else (elements, low)
    nodes = [node for span in hosts.spans for node in cover(span, count)]
    values = [
        coded_and_back(codec, fold(leaves[node.low : node.high], Dtype.F32, ReduceOp.SUM), node.low * elements + first)
        for node in nodes
    ]
    program = combinations(tuple(nodes), count)
    total = run_program(values, program, Dtype.F32, ReduceOp.SUM, partial=[True] * len(nodes), divisor=count)
    return coded_and_back(codec, total, count * elements) if gathers else total


def lossless(group: Communicator, seed: int) -> None:
    """Every bit of floats and ids: of numbers with and without patterns, empty parts, and parts of several pieces."""
    codec, ranks = Codec(kind=CodecKind.LOSSLESS), range(group.world)
    for dtype in (np.float32, np.float16, np.int32, np.int64):
        for unit in (0, 1, 333, 8_192, 150_001):
            rng = np.random.default_rng(seed)
            table = [[(7 * peer + other) % 3 * unit for other in ranks] for peer in ranks]
            whole = [vectors(1, sum(row), seed)[0] for row in table]
            if np.issubdtype(dtype, np.integer):
                sent = [rng.zipf(1.5, sum(row)).clip(0, 2**31 - 1).astype(dtype) for row in table]
            else:
                sent = [np.nan_to_num(numbers, posinf=np.inf, neginf=-np.inf).astype(dtype) for numbers in whole]
            if unit == 333:  # no pattern, so the codes are longer than the numbers
                sent = [rng.integers(0, 256, numbers.nbytes, np.uint8).view(dtype) for numbers in sent]
            received = [table[peer][group.rank] for peer in ranks]
            got = group.alltoall(sent[group.rank], send_counts=table[group.rank], recv_counts=received, codec=codec)
            lows = [sum(table[peer][: group.rank]) for peer in ranks]
            parts = [sent[peer][low : low + received[peer]] for peer, low in enumerate(lows)]
            np.testing.assert_array_equal(got.view(np.uint8), np.concatenate(parts).view(np.uint8))
            counts = [numbers.size for numbers in sent]
            gathered = group.allgather(sent[group.rank], counts=counts, codec=codec)
            np.testing.assert_array_equal(gathered.view(np.uint8), np.concatenate(sent).view(np.uint8))


def new_counts(group: Communicator, seed: int) -> None:
    """Counts never seen before do not compile a plan. A reduce_scatter has one for shares of up to 2^k chunks."""
    rng = np.random.default_rng(seed)  # the same on all ranks
    codecs = [*CODECS, Codec(kind=CodecKind.LOSSLESS)]

    def call(codec: Codec, largest: int) -> None:
        table = rng.integers(0, largest, (group.world, group.world))
        table[:, 0] = largest
        sent = np.arange(table[group.rank].sum(), dtype=np.float32)
        received = table[:, group.rank]
        group.alltoall(sent, send_counts=table[group.rank].tolist(), recv_counts=received.tolist(), codec=codec)
        group.allgather(sent, counts=table.sum(axis=1).tolist(), codec=codec)
        if codec.kind is not CodecKind.LOSSLESS:
            group.reduce_scatter(np.ones(table[0].sum(), np.float32), counts=table[0].tolist(), codec=codec)

    for codec in codecs:
        call(codec, 10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_codec, "encode", lambda plan: pytest.fail(f"{plan.name} is compiled again"))
        for _ in range(10):
            for codec in codecs:
                call(codec, int(rng.integers(1, 16_000)))
        with pytest.raises(pytest.fail.Exception, match="coded reduce_scatter is compiled again"):
            call(CODECS[0], 200_000)


def other_counts(group: Communicator, seed: int, *, kind: CodecKind, gives: int) -> None:
    """The last rank gives the first one `gives` elements in place of 100. All raise, and one of the two is named."""
    codec = Codec(kind=kind)
    sent = [100] * group.world
    if group.rank == group.world - 1:
        sent[0] = gives
    given = np.arange(sum(sent), dtype=np.float32)
    received = [sent[group.rank] if peer == group.rank else 100 for peer in range(group.world)]

    def exchange() -> None:
        group.alltoall(given, send_counts=sent, recv_counts=received, codec=codec)
        group.barrier()  # for ranks that have nothing to do with the two

    with pytest.raises((errors.MismatchError, errors.PeerError), match=f"rank (0|{group.world - 1}) ") as caught:
        exchange()
    text = str(caught.value)
    if group.rank == 0 and codec.kind is CodecKind.LOSSLESS:
        assert f"rank {group.world - 1} " in text, text
        assert "says that its codes have" in text or "that are no lossless codes of 100 elements" in text, text


def survive(group: Communicator, seed: int) -> None:
    given = np.ones(1_000, np.float32)
    if group.rank == 0:
        given[3], given[500], given[999] = np.inf, -np.inf, np.nan
    for codec in CODECS:
        got = group.allreduce(given, codec=codec)
        assert got[3] == np.inf
        assert got[500] == -np.inf
        assert np.isnan(got[999])
        assert np.isfinite(np.delete(got, [3, 500, 999])).all()


def mismatch(group: Communicator, seed: int, *, differs: str, call: str) -> None:
    """The last rank differs. Every rank that hears of it first hand names both."""
    differences: dict[str, tuple[dict[str, Any], str, str]] = {
        "kind": ({"kind": CodecKind.FP8_E5M2}, "int8 in blocks of 64", "fp8_e5m2 in blocks of 64"),
        "block": ({"block": 96}, "blocks of 64", "blocks of 96"),
        "rounding": ({"stochastic": False}, "blocks of 64, rounded by seed 7", "in blocks of 64"),
        "seed": ({"seed": 8}, "seed 7", "seed 8"),
        "where": ({"between_hosts": True}, "blocks of 64, rounded", "blocks of 64 between hosts alone, rounded"),
        "long seed": ({"seed": 2**63}, "seed 7", "a seed of digest"),
    }
    changed, ours, theirs = differences[differs]
    fields: dict[str, Any] = {"kind": CodecKind.INT8, "block": 64, "stochastic": True, "seed": 7}
    codec = Codec(**(fields | (changed if group.rank == group.world - 1 else {})))
    calls: dict[str, Any] = {"allreduce": group.allreduce, "alltoall": group.alltoall, "allgather": group.allgather}
    with pytest.raises((errors.MismatchError, errors.PeerError)) as caught:
        calls[call](np.ones(12_000, np.float32), codec=codec)
    text = str(caught.value)
    assert ours in text, text
    assert theirs in text, text


def without(group: Communicator, seed: int) -> None:
    """A rank without codec among others with one."""
    codec = Codec(kind=CodecKind.INT8) if group.rank else None
    with pytest.raises((errors.MismatchError, errors.PeerError), match="int8 in blocks of 64") as caught:
        group.allreduce(np.ones(10_000, np.float32), codec=codec)
    assert "allreduce of float32 (sum), 10000 elements" in str(caught.value)


def no_common_slot(group: Communicator, seed: int) -> None:
    """The last rank has no codec, and none of its messages has a slot that the others wait for."""
    codec = Codec(kind=CodecKind.INT8, between_hosts=True) if group.rank < group.world - 1 else None
    with pytest.raises((errors.MismatchError, errors.PeerError), match="int8 in blocks of 64 between hosts") as caught:
        group.reduce_scatter(np.ones(3_000_000, np.float32), codec=codec)
    assert "reduce_scatter of float32 (sum), 3000000 elements" in str(caught.value)


def killed(group: Communicator, seed: int) -> None:
    """The last rank dies without a word. The others raise an error that names it, and do not hang."""
    codec = Codec(kind=CodecKind.INT8, between_hosts=len(group.selection.hosts.spans) > 1)

    def reduce() -> None:
        group.allreduce(np.zeros(100_000, np.float32), codec=codec)
        if group.rank == group.world - 1:
            os._exit(0)
        group.allreduce(np.zeros(1_000_000, np.float32), codec=codec)

    # It may die while others are still about what it has finished.
    with pytest.raises((errors.PeerError, errors.TimeoutError), match=f"rank {group.world - 1}"):
        reduce()
