# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="no-untyped-call,attr-defined,union-attr,assignment,arg-type"
"""Every collective against its definition, bit for bit: functions of each rank.

All ranks make all ranks' inputs from one seed, so each checks its own result alone. Reductions are compared with
`sennit.transport.arithmetic.fold`, the tree over ranks that docs/reference/plans.md promises.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sennit.runtime.backend import all_reduce_leaves, torch_versions
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.arithmetic import fold, scaled
from sennit.transport.plans.elements import Dtype, ReduceOp, reduce_ops
from sennit.transport.plans.tree import given_spans, leaves_of

# Odd sizes, and the limits of one message, one chunk, several chunks.
REDUCED_ELEMENTS = (0, 1, 1_023, 70_001)
ARITHMETIC = {
    torch.uint8: Dtype.U8,
    torch.int8: Dtype.I8,
    torch.int16: Dtype.I16,
    torch.int32: Dtype.I32,
    torch.int64: Dtype.I64,
    torch.float16: Dtype.F16,
    torch.bfloat16: Dtype.BF16,
    torch.float32: Dtype.F32,
    torch.float64: Dtype.F64,
    torch.complex32: Dtype.C32,
    torch.complex64: Dtype.C64,
    torch.complex128: Dtype.C128,
    torch.bool: Dtype.BOOL,
    torch.uint16: Dtype.U16,
    torch.uint32: Dtype.U32,
    torch.uint64: Dtype.U64,
}
MOVED_ONLY = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.bits8,
    torch.bits16,
    torch.bits1x8,
    torch.bits2x4,
    torch.bits4x2,
    torch.float4_e2m1fn_x2,
)
EVERY_TYPE = (*ARITHMETIC, *MOVED_ONLY)


def factor_of(rank: int, dtype: torch.dtype) -> float:
    """The factor of a PREMUL_SUM: another on each rank. Products are rounded where the type can."""
    return 0.7 + 1.3 * rank if dtype.is_floating_point or dtype.is_complex else 3.0 - 5 * rank


def torch_op(op: ReduceOp, rank: int, dtype: torch.dtype) -> dist.ReduceOp:
    if op is ReduceOp.PREMUL_SUM:
        return dist._make_nccl_premul_sum(factor_of(rank, dtype))
    named: dist.ReduceOp = getattr(dist.ReduceOp, op.name)
    return named


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the tensor's bytes, whatever its type."""
    view = torch.empty(0, dtype=torch.uint8)
    size = tensor.numel() * tensor.element_size()
    view.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (size,), (1,))
    return view.numpy().copy()


def from_bytes(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(len(data) // dtype.itemsize, dtype=dtype)
    view = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (len(data),), (1,))
    view.copy_(torch.from_numpy(data))
    return tensor


class Inputs:
    """Random inputs of every rank, the same in all processes."""

    def __init__(self, world: int, seed: int) -> None:
        self.world = world
        self.rng = np.random.default_rng(seed)

    def numbers(self, dtype: torch.dtype, elements: int) -> list[torch.Tensor]:
        """Returns one tensor for each rank, of finite numbers small enough that sums rarely overflow."""
        made = []
        for _ in range(self.world):
            values = self.rng.standard_normal((elements, 2)) * 4
            if dtype.is_complex:
                made.append(torch.from_numpy(values[:, 0] + 1j * values[:, 1]).to(dtype))
            elif dtype == torch.bool:
                made.append(torch.from_numpy(values[:, 0] > 0))
            elif dtype.is_floating_point:
                made.append(torch.from_numpy(values[:, 0].copy()).to(dtype))
            else:
                made.append(from_bytes(self.rng.integers(0, 256, elements * dtype.itemsize, np.uint8), dtype))
        return made

    def raw(self, dtype: torch.dtype, counts: list[int]) -> list[torch.Tensor]:
        """Returns random bytes, `counts[r]` elements for rank r."""
        highest = 2 if dtype == torch.bool else 256
        return [from_bytes(self.rng.integers(0, highest, count * dtype.itemsize, np.uint8), dtype) for count in counts]


def like(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    return from_bytes(np.full(elements * tensor.element_size(), 0xEE, np.uint8), tensor.dtype)


def check(result: torch.Tensor, expected: np.ndarray, what: str) -> None:
    found = raw_bytes(result)
    assert np.array_equal(found, expected), f"{what}: {np.flatnonzero(found != expected)[:8]} of {expected.size} bytes"


def check_fold(result: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp, what: str) -> None:
    leaves, code = [raw_bytes(x) for x in inputs], ARITHMETIC[result.dtype]
    if op is ReduceOp.PREMUL_SUM:
        leaves = [scaled(leaf, code, factor_of(rank, result.dtype)) for rank, leaf in enumerate(leaves)]
    check(result, fold(leaves, code, op), what)


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp) -> None:
    """Acts as `dist.all_reduce`, which gives complex numbers to a backend as pairs of reals, or refuses them."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    dist.group.WORLD.allreduce([tensor], options).wait()


def reduce(tensor: torch.Tensor, root: int, op: dist.ReduceOp) -> None:
    options = dist.ReduceOptions()
    options.reduceOp = op
    options.rootRank = root
    dist.group.WORLD.reduce([tensor], options).wait()


def reductions(rank: int, world: int, seed: int) -> int:
    """Runs allreduce, reduce and reduce_scatter with every operation that each arithmetic type has."""
    inputs = Inputs(world, seed)
    cases = 0
    for dtype, code in ARITHMETIC.items():
        for op in sorted(reduce_ops(code)):
            elements = REDUCED_ELEMENTS[cases % len(REDUCED_ELEMENTS)]
            what = f"{dtype} {op.name} of {elements}"
            numbers = inputs.numbers(dtype, elements)

            tensor = numbers[rank].clone()
            all_reduce(tensor, torch_op(op, rank, dtype))
            check_fold(tensor, numbers, op, f"all_reduce {what}")

            root = cases % world
            tensor = numbers[rank].clone()
            reduce(tensor, root, torch_op(op, rank, dtype))
            if rank == root:
                check_fold(tensor, numbers, op, f"reduce {what}")
            else:
                check(tensor, raw_bytes(numbers[rank]), f"reduce {what} away from the root")

            rows = inputs.numbers(dtype, elements * world)
            output = like(rows[0], elements)
            dist.reduce_scatter_single(output, rows[rank], torch_op(op, rank, dtype))
            check_fold(
                output, [row.split(elements)[rank] if elements else row for row in rows], op, f"reduce_scatter {what}"
            )
            cases += 1
    return cases


def uneven_reduce_scatter(rank: int, world: int, seed: int) -> None:
    inputs = Inputs(world, seed)
    for counts in ([3 + 7 * r for r in range(world)], [0] * (world - 1) + [40_000]):
        rows = inputs.numbers(torch.float32, sum(counts))
        output = torch.full((counts[rank],), 7.0)
        dist.reduce_scatter(output, list(rows[rank].split(counts)), dist.ReduceOp.SUM)
        check_fold(output, [row.split(counts)[rank].clone() for row in rows], ReduceOp.SUM, f"reduce_scatter {counts}")


def movements(rank: int, world: int, seed: int) -> int:
    """Runs every call that only moves data, with every type that torch has."""
    inputs = Inputs(world, seed)
    cases = 0
    for dtype in EVERY_TYPE:
        elements = (0, 3, 5_001)[cases % 3]
        root = cases % world
        parts = inputs.raw(dtype, [elements] * world)
        whole = np.concatenate([raw_bytes(part) for part in parts])
        name = f"{dtype} of {elements}"

        tensor = from_bytes(raw_bytes(parts[rank]), dtype)
        dist.broadcast(tensor, root)
        check(tensor, raw_bytes(parts[root]), f"broadcast {name}")

        outputs = [like(parts[0], elements) for _ in range(world)]
        dist.all_gather(outputs, parts[rank])
        for output, part in zip(outputs, parts, strict=True):
            check(output, raw_bytes(part), f"all_gather {name}")

        flat = like(parts[0], elements * world)
        dist.all_gather_single(flat, parts[rank])
        check(flat, whole, f"all_gather_single {name}")

        gathered = [like(parts[0], elements) for _ in range(world)] if rank == root else None
        dist.gather(parts[rank], gathered, root)
        for output, part in zip(gathered or [], parts, strict=False):
            check(output, raw_bytes(part), f"gather {name}")

        output = like(parts[0], elements)
        dist.scatter(output, parts if rank == root else None, root)
        check(output, raw_bytes(parts[rank]), f"scatter {name}")

        rows = inputs.raw(dtype, [elements * world] * world)
        size = elements * parts[0].element_size()
        columns = np.concatenate([raw_bytes(row)[rank * size : (rank + 1) * size] for row in rows])
        output = like(parts[0], elements * world)
        dist.all_to_all_single(output, rows[rank])
        check(output, columns, f"all_to_all_single {name}")

        if world > 1:
            tensor = from_bytes(raw_bytes(parts[rank]), dtype)
            if rank == 0:
                dist.send(tensor, 1, tag=cases)
            elif rank == 1:
                dist.recv(tensor, 0, tag=cases)
                check(tensor, raw_bytes(parts[0]), f"send and recv {name}")
        cases += 1
    dist.barrier()
    return cases


def uneven_alltoall(rank: int, world: int, seed: int) -> None:
    """Splits with zeros, rows of several elements, list and single form, many sizes in flight."""
    inputs = Inputs(world, seed)
    for trial in range(6):
        largest = (1, 5, 40, 900, 0, 7_000)[trial]
        splits = inputs.rng.integers(0, largest + 1, (world, world))
        splits[inputs.rng.integers(world)] = 0
        width = 1 + trial % 3
        rows = [torch.from_numpy(inputs.rng.standard_normal((int(splits[r].sum()), width))) for r in range(world)]
        pieces = [list(rows[r].split(splits[r].tolist())) for r in range(world)]
        expected = torch.cat([pieces[r][rank] for r in range(world)])

        output = torch.full_like(expected, 7)
        dist.all_to_all_single(output, rows[rank], splits[:, rank].tolist(), splits[rank].tolist())
        assert torch.equal(output, expected), f"all_to_all_single, splits {splits.tolist()}"

        outputs = [torch.full_like(pieces[r][rank], 7) for r in range(world)]
        dist.all_to_all(outputs, [piece.clone() for piece in pieces[rank]])
        assert torch.equal(torch.cat(outputs), expected), f"all_to_all, splits {splits.tolist()}"


def uneven_allgather(rank: int, world: int, seed: int) -> None:
    counts = [11 * r + 1 for r in range(world)]
    counts[0] = 0
    parts = Inputs(world, seed).numbers(torch.float32, max(counts))
    outputs = [torch.full((count,), 7.0) for count in counts]
    dist.all_gather(outputs, parts[rank][: counts[rank]].clone())
    for output, part, count in zip(outputs, parts, counts, strict=True):
        assert torch.equal(output, part[:count])


def in_place(rank: int, world: int, seed: int) -> None:
    """The input is a slice of the output, or the output a slice of the input, as in FSDP2."""
    inputs = Inputs(world, seed)
    for elements in (3, 100_003):
        parts = inputs.numbers(torch.float32, elements)
        whole = torch.zeros(world, elements)
        whole[rank] = parts[rank]
        dist.all_gather_single(whole.view(-1), whole[rank])
        assert torch.equal(whole, torch.stack(parts))

        rows = inputs.numbers(torch.float32, elements * world)
        mine = rows[rank].clone().view(world, elements)
        dist.reduce_scatter_single(mine[rank], mine.view(-1))
        check_fold(mine[rank], [row.view(world, elements)[rank] for row in rows], ReduceOp.SUM, "in place")

        listed = [torch.zeros(elements) for _ in range(world)]
        listed[rank] = parts[rank].clone()
        dist.all_gather(listed, listed[rank])
        assert torch.equal(torch.stack(listed), torch.stack(parts))


def synchronous(rank: int, world: int, seed: int) -> None:
    """A synchronous call of the group's own methods has ended when it returns, and there is nothing to wait for."""
    inputs = Inputs(world, seed)
    c10d = dist.distributed_c10d
    group = c10d._get_default_group()
    reduced, gathered, quiet = c10d.AllreduceOptions(), c10d.AllgatherOptions(), c10d.BarrierOptions()
    reduced.asyncOp = gathered.asyncOp = quiet.asyncOp = False
    for elements in (1, 70_001):
        numbers = inputs.numbers(torch.float32, elements)
        total, whole = numbers[rank].clone(), torch.zeros(world * elements)
        assert group.allreduce([total], reduced) is None
        check_fold(total, numbers, ReduceOp.SUM, "synchronous")
        assert group._allgather_base(whole, numbers[rank], gathered) is None
        assert torch.equal(whole, torch.cat(numbers))
    assert group.barrier(quiet) is None
    reduced.asyncOp = True
    work = group.allreduce([torch.ones(1)], reduced)
    assert work.wait()


def coalesced(rank: int, world: int, seed: int) -> None:
    inputs = Inputs(world, seed)
    sizes = (1, 0, 5_000)
    by_size = [inputs.numbers(torch.float32, size) for size in sizes]
    group = dist.distributed_c10d._get_default_group()

    tensors = [numbers[rank].clone() for numbers in by_size]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, numbers in zip(tensors, by_size, strict=True):
        check_fold(tensor, numbers, ReduceOp.SUM, "coalesced all_reduce")

    outputs = [torch.zeros(world * size) for size in sizes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, numbers in zip(outputs, by_size, strict=True):
            dist.all_gather_single(output, numbers[rank])
    manager.wait()
    for output, numbers in zip(outputs, by_size, strict=True):
        assert torch.equal(output, torch.cat(numbers))

    rows = [inputs.numbers(torch.float32, size * world) for size in sizes]
    reduced = [torch.zeros(size) for size in sizes]
    with dist._coalescing_manager():
        for output, row in zip(reduced, rows, strict=True):
            dist.reduce_scatter_single(output, row[rank])
    for output, row, size in zip(reduced, rows, sizes, strict=True):
        check_fold(output, [x.view(world, size)[rank].clone() for x in row], ReduceOp.SUM, "coalesced reduce_scatter")

    lists = [[torch.zeros(size) for size in sizes] for _ in range(world)]
    work = group.allgather_coalesced(lists, [numbers[rank] for numbers in by_size])
    work.wait()
    for peer in range(world):
        for got, numbers in zip(lists[peer], by_size, strict=True):
            assert torch.equal(got, numbers[peer])


def point_to_point(rank: int, world: int, seed: int) -> None:
    """Rings both ways at once, tags out of order, receives from anyone, large and small."""
    right, left = (rank + 1) % world, (rank - 1) % world
    for elements in (0, 7, 300_000):
        parts = Inputs(world, seed).numbers(torch.float32, elements)
        one, other = torch.zeros(elements), torch.zeros(elements)
        operations = [
            dist.P2POp(dist.irecv, one, left),
            dist.P2POp(dist.irecv, other, right),
            dist.P2POp(dist.isend, parts[rank], left),
            dist.P2POp(dist.isend, parts[rank], right),
        ]
        if world == 2:
            operations = [operations[0], operations[3]]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(one, parts[left])
        assert world == 2 or torch.equal(other, parts[right])

        received = [torch.zeros(elements) for _ in range(3)]
        works = [dist.irecv(received[tag], left, tag=tag) for tag in range(3)]
        sends = [dist.isend(parts[rank] + tag, right, tag=tag) for tag in (2, 0, 1)]
        for work in [*works, *sends]:
            assert work is not None
            work.wait()
        for tag in range(3):
            assert torch.equal(received[tag], parts[left] + tag)

        if rank == 0:
            seen = set()
            for _ in range(world - 1):
                tensor = torch.zeros(elements)
                source = dist.recv(tensor, None, tag=9)
                assert torch.equal(tensor, parts[source])
                seen.add(source)
            assert seen == set(range(1, world))
        else:
            dist.send(parts[rank], 0, tag=9)
        dist.barrier()


def sparse(rank: int, world: int, seed: int) -> None:
    """A rank without a row adds nothing, which is what adding zeros gives."""
    rng = np.random.default_rng(seed)
    for dtype in (torch.float32, torch.bfloat16):
        dense = []
        for peer in range(world):
            table = torch.from_numpy(rng.standard_normal((50, 4))).to(dtype)
            table[torch.from_numpy(rng.random(50) < 0.1 + 0.1 * peer)] = 0
            dense.append(table)
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            tensor = dense[rank].to_sparse(1)
            dist.all_reduce(tensor, torch_op(op, rank, dtype))
            check_fold(tensor.to_dense(), dense, op, f"sparse all_reduce of {dtype}")
    numbers = [torch.from_numpy(rng.integers(-9, 9, (50, 4))).to(torch.int32) for _ in range(world)]
    tensor = numbers[rank].to_sparse(2)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    check_fold(tensor.to_dense(), numbers, ReduceOp.AVG, "sparse all_reduce of integers")


def leaves(rank: int, world: int, seed: int) -> None:
    """The same leaves give the same bits in a world of any size, and so do the partial sums of their nodes."""
    count = 9
    for dtype in (torch.bfloat16, torch.float32, torch.complex32, torch.int32):
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            rows = [tensor.reshape(7, 11) for tensor in Inputs(count, seed).numbers(dtype, 77)]
            given = torch.stack([rows[leaf] for leaf in range(*leaves_of(rank, world, count))])
            result = all_reduce_leaves(given, count, getattr(dist.ReduceOp, op.name))
            assert result.shape == (7, 11)
            check_fold(result, rows, op, f"leaves of {dtype}, {op.name}")
    sums = []
    rows = Inputs(count, seed).numbers(torch.bfloat16, 50)
    for node in given_spans(rank, world, count, partial=True):
        wide = [row.float() for row in rows[slice(*node)]]
        while len(wide) > 1:
            wide = [wide[i] + wide[i + 1] if i + 1 < len(wide) else wide[i] for i in range(0, len(wide), 2)]
        sums.append(wide[0])
    result = all_reduce_leaves(torch.stack(sums), count, partial=True, dtype=torch.bfloat16)
    check_fold(result, rows, ReduceOp.SUM, "partial sums")
    for wrong, match in (
        (lambda: all_reduce_leaves(torch.zeros(count + 1, 2), count), "gives 10 leaves of a tree of 9 leaves"),
        (lambda: all_reduce_leaves(torch.zeros(2, 2), 1), f"1 leaves for {world} ranks"),
        (lambda: all_reduce_leaves(torch.zeros(2, 2, device="meta"), count), "on meta; allowed: cpu"),
        (lambda: all_reduce_leaves(torch.zeros(2, 2, dtype=torch.bits8), count), "dtype torch.bits8; allowed: uint8"),
        (lambda: all_reduce_leaves(torch.zeros(2, 2), count, partial=True, dtype=torch.float64), "allowed: F64"),
        (lambda: all_reduce_leaves(torch.zeros(2, 2), count, dist.ReduceOp.PREMUL_SUM), "reduce op PREMUL_SUM"),
    ):
        with pytest.raises(ArgumentError, match=match):
            wrong()


def objects(rank: int, world: int, seed: int) -> None:
    found: list[object] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": peer, "text": "x" * peer} for peer in range(world)]
    box = [("from", rank)] if rank == 1 % world else [None]
    dist.broadcast_object_list(box, src=1 % world)
    assert box == [("from", 1 % world)]


def many_in_flight(rank: int, world: int, seed: int) -> None:
    """Operations of several groups overlap, finish in any order, and are waited for in another."""
    inputs = Inputs(world, seed)
    groups = [dist.new_group() for _ in range(3)]
    works = []
    for index in range(60):
        numbers = inputs.numbers(torch.float32, (10, 50_000)[index % 2])
        tensor = numbers[rank].clone()
        works.append((dist.all_reduce(tensor, group=groups[index % 3], async_op=True), tensor, numbers))
    for work, tensor, numbers in reversed(works):
        work.wait()
        assert work.is_completed()
        check_fold(tensor, numbers, ReduceOp.SUM, "in flight")
    for group in (groups[1], groups[0], groups[2]):
        dist.destroy_process_group(group)


def groups_without_records(rank: int, world: int, seed: int) -> None:
    """A group that is connected leaves nothing in the store."""
    store = torch_versions.backend_and_store(dist.group.WORLD)[1]
    counts = []
    for _ in range(3):
        dist.barrier()
        counts.append(store.num_keys())
        # Nobody begins a group while another rank counts.
        dist.barrier()
        dist.destroy_process_group(dist.new_group())
    assert counts == counts[:1] * 3


def groups_with_few_descriptors(rank: int, world: int, seed: int) -> None:
    """A group holds its own segment and the bell of each rank of its host, or a socket."""

    def make() -> tuple[dist.ProcessGroup, int]:
        group = dist.new_group()
        dist.all_reduce(torch.ones(4), group=group)
        dist.barrier()
        return group, len(os.listdir("/proc/self/fd"))

    # What the first group makes may stay for all.
    (first, held), (second, more), (third, most) = make(), make(), make()
    for group in (first, second, third):
        dist.destroy_process_group(group)
    assert max(more - held, most - more) <= world + 1
