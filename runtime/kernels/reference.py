# SPDX-License-Identifier: Apache-2.0
"""The operator in plain torch: slow and readable. The other implementations must return the same bits.

docs/reference/embedding.md is the definition, and each function here is one of its rules. Sums start at +0, so they are
never -0, and adding +0 for a missing term changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from sennit.runtime.kernels.batch import Batch, Block, RowSums
from sennit.runtime.kernels.checks import BadGradients, places_of_outputs
from sennit.runtime.kernels.layout import ShardMemory
from sennit.runtime.kernels.optimizers import Optimizer, StepConstants
from sennit.runtime.kernels.reference_rounding import rounded
from sennit.runtime.kernels.spec import Pooling, Rounding

CHUNK: Final = 32
"""Lookups of one row that are summed one after another."""

device_type: Final = "cpu"

MOST_CHUNKS: Final = 1 << 27
"""Chunks of the most lookups that a row can have in a slice: leaves of one slice in the tree of its sum."""

LANES: Final = 16
"""Sums over columns are padded to at least this many columns."""


def lookup(tables: Sequence[ShardMemory], batch: Batch) -> Tensor:
    """The flat float32 result, block after block: [bags, dim] each, or [lookups, dim] for sequences."""
    parts = [torch.zeros(0)]
    for block in batch.blocks():
        vectors = _rows_of(tables[block.table], batch.values[block.lookups])
        if batch.weights is not None:
            vectors = _ignoring(batch, block, batch.weights[block.lookups].unsqueeze(1) * vectors)
        if batch.pooling is not Pooling.NONE:
            lengths = batch.lengths[block.bags].to(torch.int64)
            vectors = left_fold(vectors, lengths)
            if batch.pooling is Pooling.MEAN:
                vectors = vectors / lengths.clamp(min=1).to(torch.float32).unsqueeze(1)
        parts.append(vectors.flatten())
    return torch.cat(parts)


def weight_gradient(tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> Tensor:
    """Float32 [lookups]: dot product of each lookup's row and its bag's gradient; 0 for ignored ids."""
    result = torch.zeros(len(batch.values))
    for block, part in places_of_outputs(batch, [table.spec for table in tables]):
        table, ids = tables[block.table], batch.values[block.lookups]
        product = _of_sums(batch, block, gradient[part], table.spec.dim) * _rows_of(table, ids)
        result[block.lookups] = torch.where(ids < 0, 0.0, lane_tree(product))
    return result


def update(
    tables: Sequence[ShardMemory],
    batch: Batch,
    gradient: Tensor,
    *,
    kind: Optimizer,
    constants: StepConstants,
    rounding: Rounding,
    seed: int,
) -> list[BadGradients]:
    """Updates each row that was looked up once, by the sum of its lookups' gradients.

    `gradient` is the gradient of `lookup`'s result. Returns the rows that were skipped because their sum was not
    finite.
    """
    bad = []
    for found in sum_rows(tables, batch, gradient):
        rows, sums = found.rows, found.sums
        finite = sums.isfinite().all(1)
        if not bool(finite.all()):
            wrong = rows[~finite]
            bad.append(BadGradients(table=found.table, row_count=len(wrong), first_row=int(wrong[0])))
        _apply(tables[found.table], rows[finite], sums[finite], kind, constants, rounding, seed)
    return bad


def sum_rows(tables: Sequence[ShardMemory], batch: Batch, gradient: Tensor) -> list[RowSums]:
    """The sum of the gradients of each row that was looked up, table after table; tables without lookups are left out.

    `gradient` is the gradient of `lookup`'s result.
    """
    result = []
    slices = batch.slice_of_block or (0,) * len(batch.table_of_block)
    found = places_of_outputs(batch, [table.spec for table in tables])
    places = [(*place, number) for place, number in zip(found, slices, strict=True)]
    for table in sorted(set(batch.table_of_block)):
        own = [place for place in places if place[0].table == table]
        rows = torch.cat([batch.values[block.lookups] for block, _, _ in own]).to(torch.int64)
        numbers = torch.cat([torch.full((block.lookup_count,), number) for block, _, number in own])
        each = torch.cat([_gradients(batch, block, gradient[part], tables[table].spec.dim) for block, part, _ in own])
        kept = rows >= 0
        if bool(kept.any()):
            distinct, sums = sums_by_row(rows[kept], numbers[kept], each[kept])
            result.append(RowSums(table=table, rows=distinct, sums=sums))
    return result


def sums_by_row(rows: Tensor, slices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows in rising order, and the sum of each row's gradients, [n, dim].

    A row's lookups in one slice, in the order of the batch, are cut into chunks of `CHUNK`. Each chunk is a left fold.
    The chunks' sums are leaves of a tree: slice after slice, chunk after chunk.
    """
    rows, order = torch.sort(rows, stable=True)
    slices = slices[order]
    _, runs = torch.unique_consecutive(torch.stack((rows, slices), 1), dim=0, return_counts=True)
    chunk_counts = (runs + CHUNK - 1) // CHUNK
    until = torch.cumsum(chunk_counts, 0)
    lengths = torch.full((int(chunk_counts.sum()),), CHUNK)
    lengths[until - 1] = runs - (chunk_counts - 1) * CHUNK
    first = torch.cumsum(lengths, 0) - lengths
    chunks = torch.arange(len(lengths)) - torch.repeat_interleave(until - chunk_counts, chunk_counts)
    return leaf_tree(left_fold(gradients[order], lengths), rows[first], slices[first] * MOST_CHUNKS + chunks)


def left_fold(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive `lengths` [n] of `vectors` [.., dim], one after another, starting at +0: [n, dim]."""
    sums = torch.zeros(len(lengths), vectors.shape[1])
    starts = torch.cumsum(lengths, 0) - lengths
    for place in range(int(lengths.max()) if len(lengths) else 0):
        longer = (lengths > place).nonzero().squeeze(1)
        sums[longer] = sums[longer] + vectors[starts[longer] + place]
    return sums


def leaf_tree(vectors: Tensor, rows: Tensor, leaves: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct rows, and for each the sum of its `vectors` over a perfect binary tree in which they are `leaves`.

    Both numbers rise. The two halves of a node are added; where one has no leaves, the node is the other.
    """
    distinct, vectors = torch.unique_consecutive(rows), vectors.clone()
    while len(vectors) > len(distinct):
        leaves = leaves >> 1
        is_right = torch.zeros(len(vectors), dtype=torch.bool)
        is_right[1:] = (rows[1:] == rows[:-1]) & (leaves[1:] == leaves[:-1])
        right = is_right.nonzero().squeeze(1)
        vectors[right - 1] = vectors[right - 1] + vectors[right]
        vectors, rows, leaves = vectors[~is_right], rows[~is_right], leaves[~is_right]
    return distinct, vectors


def lane_tree(x: Tensor) -> Tensor:
    """Sums over columns, padded with +0 to a power of two from 16.

    Upper halves are added to lower ones until one is left.
    """
    half = max(LANES, 1 << (x.shape[1] - 1).bit_length())
    x = F.pad(x, (0, half - x.shape[1]))
    while half > 1:
        half //= 2
        x = x[:, :half] + x[:, half:]
    return x.squeeze(1)


def _rows_of(table: ShardMemory, ids: Tensor) -> Tensor:
    """Float32 [ids, dim]; zeros for ignored ids."""
    vectors = torch.zeros(len(ids), table.spec.dim)
    kept = (ids >= 0).nonzero().squeeze(1)
    vectors[kept] = table.weight[ids[kept].to(torch.int64)].to(torch.float32)
    return vectors


def _ignoring(batch: Batch, block: Block, vectors: Tensor) -> Tensor:
    return torch.where((batch.values[block.lookups] < 0).unsqueeze(1), 0.0, vectors)


def _bags(batch: Batch, block: Block) -> Tensor:
    """The bag of each lookup of a block, within the block."""
    return torch.repeat_interleave(torch.arange(block.bag_count), batch.lengths[block.bags].to(torch.int64))


def _gradients(batch: Batch, block: Block, gradient: Tensor, dim: int) -> Tensor:
    """The gradient of each lookup of a block: [lookups, dim]."""
    if batch.pooling is Pooling.NONE:
        return gradient.view(-1, dim)
    each = _of_sums(batch, block, gradient, dim)
    return each if batch.weights is None else batch.weights[block.lookups].unsqueeze(1) * each


def _of_sums(batch: Batch, block: Block, gradient: Tensor, dim: int) -> Tensor:
    """The gradient of the sum of each lookup's bag: [lookups, dim]."""
    bags = _bags(batch, block)
    each = gradient.view(-1, dim)[bags]
    if batch.pooling is not Pooling.MEAN:
        return each
    factors = torch.ones(()) / batch.lengths[block.bags].to(torch.float32)
    return factors[bags].unsqueeze(1) * each


def _apply(
    table: ShardMemory,
    rows: Tensor,
    g: Tensor,
    kind: Optimizer,
    constants: StepConstants,
    rounding: Rounding,
    seed: int,
) -> None:
    """The optimizers' formulas. Scalars are float32 tensors, so that every operation is a float32 operation."""

    def f32(name: str) -> Tensor:
        return torch.tensor(getattr(constants, name), dtype=torch.float32)

    dim = torch.tensor(table.spec.dim, dtype=torch.float32)
    states = {name: state[rows] for name, state in table.states.items()}
    w = table.weight[rows].to(torch.float32)
    if constants.max_gradient < float("inf"):
        g = torch.minimum(torch.maximum(g, -f32("max_gradient")), f32("max_gradient"))
    if constants.max_norm < float("inf"):
        norm = _root(lane_tree(g * g)).unsqueeze(1)
        g = torch.where(norm > f32("max_norm"), (f32("max_norm") / norm) * g, g)
    if constants.decay != 0 and not constants.decay_after:
        g = g + f32("decay") * w
    if constants.keep != 1:
        w = w * f32("keep")
    match kind:
        case Optimizer.SGD:
            if constants.beta1 != 0:
                b = states["momentum_buffer"] = f32("beta1") * states["momentum_buffer"] + g
                g = g + f32("beta1") * b if constants.nesterov else b
            w = w - f32("rate") * g
        case Optimizer.ADAGRAD:
            states["sum"] = states["sum"] + g * g
            w = w - (f32("rate") * g) / (_root(states["sum"]) + f32("epsilon"))
        case Optimizer.ROW_WISE_ADAGRAD:
            states["sum"] = states["sum"] + lane_tree(g * g) / dim
            w = w - (f32("rate") / (_root(states["sum"]) + f32("epsilon"))).unsqueeze(1) * g
        case Optimizer.ADAM:
            m, v = _moments(states, g, g * g, f32)
            w = w - (f32("scale1") * m) / (_root(v) * f32("scale2") + f32("epsilon"))
        case Optimizer.PARTIAL_ROW_WISE_ADAM:
            m, v = _moments(states, g, lane_tree(g * g) / dim, f32)
            w = w - (f32("scale1") / (_root(v) * f32("scale2") + f32("epsilon"))).unsqueeze(1) * m
        case Optimizer.LAMB:
            m, v = _moments(states, g, g * g, f32)
            u = (f32("scale1") * m) / (_root(v) * f32("scale2") + f32("epsilon"))
            if constants.decay != 0 and constants.decay_after:
                u = u + f32("decay") * w
            of_w, of_u = _root(lane_tree(w * w)), _root(lane_tree(u * u))
            trust = torch.where((of_w > 0) & (of_u > 0), of_w / of_u, 1.0)
            w = w - (f32("rate") * trust).unsqueeze(1) * u
        case Optimizer.FTRL:
            zero, l1 = torch.zeros(()), f32("l1")
            # Where there was no gradient yet, z is what the formula of w makes this weight of.
            first = zero - (f32("epsilon") * w + torch.where(w > 0, l1, torch.where(w < 0, zero - l1, zero)))
            z, n = torch.where(states["n"] == 0, first, states["z"]), states["n"] + g * g
            z = (z + f32("rate") * g) - (_root(n) - _root(states["n"])) * w
            within = torch.where(z > l1, l1, torch.where(z < zero - l1, zero - l1, z))
            w = (within - z) / (_root(n) + f32("epsilon"))
            states["z"], states["n"] = z, n
    numbers = rows + table.spec.first_row if table.row_numbers is None else table.row_numbers[rows]
    table.weight[rows] = rounded(table.spec, w, numbers, rounding, step=constants.step, seed=seed)
    for name, state in states.items():
        table.states[name][rows] = state


def _root(x: Tensor) -> Tensor:
    """The correctly rounded square root.

    torch's own float32 root is off by one unit for 1 in 5 numbers if it comes from MKL. A root in double precision is
    so far from the middle of two float32 that rounding twice is harmless (Figueroa 1995).
    """
    return x.to(torch.float64).sqrt().to(torch.float32)


def _moments(
    states: dict[str, Tensor], g: Tensor, square: Tensor, f32: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor]:
    states["moment1"] = f32("beta1") * states["moment1"] + f32("beta1_rest") * g
    states["moment2"] = f32("beta2") * states["moment2"] + f32("beta2_rest") * square
    return states["moment1"], states["moment2"]
