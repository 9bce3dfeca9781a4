# SPDX-License-Identifier: Apache-2.0
"""Collectives over NumPy arrays: the simple way to use the transport without torch.

Every call blocks, takes arrays and returns new ones. All ranks must pass arrays of the same shape and type where the
collective needs it. Otherwise the core raises MismatchError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sennit.transport import algorithms
from sennit.transport.choice.costs import Collective
from sennit.transport.config import Algorithm
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.arithmetic import scaled
from sennit.transport.plans.elements import DTYPES, OTHER_TYPE, Dtype, ReduceOp, dtype_of
from sennit.transport.plans.tree import check_rows, given_spans

if TYPE_CHECKING:
    from sennit.transport.choice.selection import Selection
    from sennit.transport.codecs import Codec
    from sennit.transport.plans.elements import Array
    from sennit.transport.plans.plan import Plan


class Operation(Protocol):
    """A posted operation (`_core.Op`)."""

    def wait(self, timeout_s: float = ...) -> None: ...

    @property
    def source(self) -> int: ...


class ArrayCollectives(ABC):
    """A mixin of `Communicator` that posts the plans."""

    rank: int
    world: int

    @property
    @abstractmethod
    def selection(self) -> Selection: ...

    @abstractmethod
    def post(
        self,
        key: Hashable,
        compile_plan: Callable[[], Plan],
        buffers: Sequence[Any],
        *,
        timeout_s: float = 0.0,
        tag: int | None = None,
        scalar: float = 1.0,
        background: bool = False,
        counts: Sequence[int] = (),
        seed: int = 0,
    ) -> Operation: ...

    def allreduce(
        self,
        array: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        leaves: int | None = None,
        partial: bool = False,
        scalar: float = 1.0,
        codec: Codec | None = None,
    ) -> Array:
        """Returns the fold of all ranks' arrays over the tree of ranks.

        PREMUL_SUM first multiplies this rank's array by its `scalar`, which may be another on each rank; of integers a
        whole number. With `leaves` the tree has that many leaves, and the result
        has the same bits in a world of any size: row i of `array` is leaf `leaves_of(rank, world, leaves).low + i`
        (tree.py). The result has the shape of one row. With `partial`, row i is the sum of the i-th node of this
        rank (`given_spans`), folded over the tree. Raises ArgumentError if `array`
        has other rows than these.

        With `codec`, ranks exchange coded numbers and sum them in float32: the result is Q(fold(Q(leaves))), where Q
        codes and decodes. All ranks give equal codecs, and for stochastic rounding a new seed with each call. Raises
        ArgumentError for types that it does not code, LOSSLESS, and `partial`. With `codec.between_hosts` the sums of
        each host are coded in place of leaves, and nothing inside a host: bits depend on which ranks share one.
        """
        dtype = dtype_of(array)
        given = _given(array, dtype, op, scalar)
        if codec is not None:
            return self._allreduce_coded(given, dtype, op, codec, leaves=leaves, partial=partial)
        if leaves is not None:
            rows = given.shape[0] if given.ndim else 0
            output = np.empty(given.shape[1:], given.dtype)
            self.reduce_leaves(
                given, output, dtype, op, rows=rows, elements=output.size, leaves=leaves, partial=partial
            )
            return output
        if partial:
            raise ArgumentError("partial sums without leaves; allowed: partial=True with leaves=V")
        output = np.empty_like(given)
        plan = _Call(self.selection.allreduce, self, dtype=dtype, op=op, in_place=False, **_up_to(given))
        self._run(plan, [given, output], counts=[given.size])
        return output

    def _allreduce_coded(
        self,
        given: Array,
        dtype: Dtype,
        op: ReduceOp,
        codec: Codec,
        *,
        leaves: int | None,
        partial: bool,
    ) -> Array:
        codec.coding(dtype)
        if partial:
            raise ArgumentError("partial sums with a codec; allowed: leaves, which are coded one by one")
        if leaves is not None and given.shape[:1] != (rows := (len(given_spans(self.rank, self.world, leaves)),)):
            raise ArgumentError(f"shape {given.shape}; allowed: {rows[0]} rows, the leaves of rank {self.rank}")
        output = np.empty(given.shape if leaves is None else given.shape[1:], given.dtype)
        self.post_coded(_aligned(given), output, dtype, op, codec, elements=output.size, leaves=leaves).wait()
        return output

    def post_coded(
        self,
        given: Array,
        output: Array | None,
        dtype: Dtype,
        op: ReduceOp,
        codec: Codec,
        *,
        elements: int,
        leaves: int | None = None,
        background: bool = False,
    ) -> Operation:
        """Starts an `allreduce` with a codec, for memory of any framework.

        `given` has `elements` of `dtype` for each leaf of this rank. The result goes to `output`, or with None to
        `given`. `background`: nobody waits at once, so a thread of the core drives the operation.
        """
        plan = _Call(
            algorithms.allreduce_between_hosts if codec.between_hosts else algorithms.allreduce_coded,
            self,
            elements=elements,
            dtype=dtype,
            op=op,
            coding=codec.coding(dtype),
            in_place=output is None,
            leaves=leaves,
            **self._hosts_of(codec),
        )
        flat = [buffer.reshape(-1).view(np.uint8) for buffer in (given, output) if buffer is not None]
        return self.post(plan.key, plan.compile, flat, background=background, seed=codec.seed)

    def _hosts_of(self, codec: Codec) -> dict[str, Any]:
        """The further arguments of an algorithm that codes only between hosts."""
        return {"hosts": self.selection.hosts} if codec.between_hosts else {}

    def reduce_leaves(
        self,
        given: Array,
        output: Array,
        dtype: Dtype,
        op: ReduceOp,
        *,
        rows: int,
        elements: int,
        leaves: int,
        partial: bool = False,
    ) -> None:
        """`allreduce` with leaves, for memory of any framework.

        `given` has `rows` rows of `elements` elements: of `dtype`, or with `partial` of its accumulator's type. The
        result goes to `output`: `elements` elements of `dtype`.
        """
        check_rows(rows, self.rank, self.world, leaves, partial=partial)
        plan = _Call(
            self.selection.allreduce, self, leaves=leaves, partial=partial, elements=elements, dtype=dtype, op=op
        )
        self._run(plan, [given, output])

    def reduce(self, array: Array, root: int, op: ReduceOp = ReduceOp.SUM, *, scalar: float = 1.0) -> Array | None:
        """Returns the fold at `root`, and None elsewhere."""
        dtype = dtype_of(array)
        given = _given(array, dtype, op, scalar)
        output = np.empty_like(given) if self.rank == root else None
        plan = _Call(self.selection.reduce, self, dtype=dtype, op=op, root=root, in_place=False, **_up_to(given))
        buffers = [given] if output is None else [given, output]
        self._run(plan, buffers, counts=[given.size])
        return output

    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        scalar: float = 1.0,
        codec: Codec | None = None,
    ) -> Array:
        """Returns this rank's share of the fold along the first axis: `counts[rank]` rows, equal shares by default.

        With `codec`, shares travel coded, and results are not coded again (see `allreduce`).
        """
        dtype = dtype_of(array)
        given = _given(array, dtype, op, scalar)
        rows = _splits("counts", counts, given, self.world)
        output = np.empty((rows[self.rank], *given.shape[1:]), given.dtype)
        row_elements = _row_elements(given)
        elements = tuple(count * row_elements for count in rows)
        if codec is not None and codec.between_hosts:
            sums = {"counts": elements, "dtype": dtype, "op": op, "coding": codec.coding(dtype)}
            plan = _Call(algorithms.reduce_scatter_between_hosts, self, **sums, **self._hosts_of(codec))
            self._run(plan, [_aligned(given), output], seed=codec.seed)
            return output
        if codec is not None:
            coding = codec.coding(dtype)
            pieces = algorithms.coded_pieces(elements, coding)
            plan = _Call(algorithms.reduce_scatter_coded, self, pieces=pieces, dtype=dtype, op=op, coding=coding)
            counted = algorithms.reduce_scatter_counts(self.rank, elements, pieces, dtype, coding)
            self._run(plan, [_aligned(given), output], counts=counted, seed=codec.seed)
            return output
        is_direct = self.selection.of_parts(Collective.REDUCE_SCATTER, given.nbytes) is Algorithm.DIRECT
        if is_direct and len(set(elements)) > 1:
            pieces = algorithms.pieces_of(elements, dtype.item_bytes)
            self._run(
                _Call(algorithms.reduce_scatter_counted, self, pieces=pieces, dtype=dtype, op=op),
                [given, output],
                counts=algorithms.piece_counts(elements, dtype.item_bytes, pieces),
            )
            return output
        self._run(
            _Call(self.selection.reduce_scatter, self, counts=elements, dtype=dtype, op=op),
            [given, output],
        )
        return output

    def broadcast(self, array: Array, root: int) -> Array:
        """Returns the root's array. The other ranks' arrays give shape and type."""
        data = array.copy(order="C")
        plan = _Call(self.selection.broadcast, self, root=root, **_up_to(data), **_movement(data))
        self._run(plan, [data], counts=[data.size])
        return data

    def allgather(self, array: Array, *, counts: Sequence[int] | None = None, codec: Codec | None = None) -> Array:
        """Returns all ranks' arrays, joined along the first axis. `counts` gives their rows if they differ.

        With `codec`, all arrays are coded and decoded, also this rank's (see `allreduce`). Between hosts alone the bits
        are the same, and arrays go to each other host once.
        """
        given = _contiguous(array)
        rows = tuple(counts) if counts is not None else (given.shape[0],) * self.world
        if len(rows) != self.world or rows[self.rank] != given.shape[0]:
            raise ArgumentError(
                f"counts {list(rows)}; allowed: {self.world} numbers, of which number {self.rank} is {given.shape[0]}, "
                f"the rows of this rank"
            )
        output = np.empty((sum(rows), *given.shape[1:]), given.dtype)
        row_elements = _row_elements(given)
        if codec is not None:
            parts, dtype = tuple(count * row_elements for count in rows), dtype_of(given)
            coding = codec.exchange_coding(dtype)
            algorithm = algorithms.allgather_between_hosts if codec.between_hosts else algorithms.allgather_coded
            coded = _Call(algorithm, self, dtype=dtype, coding=coding, **self._hosts_of(codec))
            counted = algorithms.allgather_counts(parts, dtype, coding)
            self._run(coded, [_aligned(given), output], counts=counted, seed=codec.seed)
            return output
        is_direct = self.selection.of_parts(Collective.ALLGATHER, output.nbytes) is Algorithm.DIRECT
        self._run(
            _Call(self.selection.allgather, self, staged=not is_direct, **_movement(given)),
            [given, output],
            counts=[count * row_elements for count in rows],
        )
        return output

    def gather(self, array: Array, root: int) -> Array | None:
        """Returns, at `root`, all ranks' equally shaped arrays stacked along a new first axis; None elsewhere."""
        given = _contiguous(array)
        output = np.empty((self.world, *given.shape), given.dtype) if self.rank == root else None
        buffers, counts = [given] if output is None else [given, output], [given.size] * self.world
        if self.selection.of_parts(Collective.GATHER, given.nbytes * self.world) is Algorithm.TREE:
            plan = _Call(algorithms.gather_tree, self, counts=tuple(counts), root=root, **_movement(given))
            self._run(plan, buffers)
        else:
            self._run(_Call(algorithms.gather, self, root=root, **_movement(given)), buffers, counts=counts)
        return output

    def scatter(self, array: Array, root: int) -> Array:
        """Returns row `rank` of the root's array. Elsewhere `array` gives the row's shape and type."""
        given = _contiguous(array)
        if self.rank == root and given.shape[:1] != (self.world,):
            raise ArgumentError(f"the root's array has shape {given.shape}; allowed: {self.world} rows")
        output = np.empty(given.shape[1:] if self.rank == root else given.shape, given.dtype)
        plan = _Call(algorithms.scatter, self, root=root, **_movement(output))
        self._run(plan, [given, output] if self.rank == root else [output], counts=[output.size] * self.world)
        return output

    def alltoall(
        self,
        array: Array,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        codec: Codec | None = None,
    ) -> Array:
        """Exchanges rows of the first axis with every rank:

        `send_counts[j]` rows to rank j. Without counts, which then all ranks leave out, equal shares. With `codec`, all
        rows are coded and decoded, also those that stay (see `allreduce`). Between hosts alone those that stay on the
        host are not.
        """
        given = _contiguous(array)
        sent = _splits("send_counts", send_counts, given, self.world)
        received = tuple(recv_counts) if recv_counts is not None else sent
        if len(received) != self.world or min(received) < 0:
            raise ArgumentError(f"recv_counts {list(received)}; allowed: {self.world} numbers, not negative")
        if sent[self.rank] != received[self.rank]:
            raise ArgumentError(
                f"rank {self.rank} sends itself {sent[self.rank]} rows but expects {received[self.rank]} from itself; "
                "allowed: equal numbers"
            )
        output = np.empty((sum(received), *given.shape[1:]), given.dtype)
        row_elements = _row_elements(given)
        if codec is not None:
            given_parts, taken_parts = ([count * row_elements for count in counts] for counts in (sent, received))
            dtype = dtype_of(given)
            coding = codec.exchange_coding(dtype)
            algorithm = algorithms.alltoall_between_hosts if codec.between_hosts else algorithms.alltoall_coded
            coded = _Call(algorithm, self, dtype=dtype, coding=coding, **self._hosts_of(codec))
            counted = algorithms.alltoall_counts(self.rank, given_parts, taken_parts, dtype, coding)
            self._run(coded, [_aligned(given), output], counts=counted, seed=codec.seed)
            return output
        is_equal = send_counts is None and recv_counts is None
        if is_equal and self.selection.of_parts(Collective.ALLTOALL, given.nbytes) is not Algorithm.DIRECT:
            from sennit.transport.choice.selection import size_class

            staged = _Call(self.selection.alltoall, self, size_class=size_class(given.nbytes), **_movement(given))
            self._run(staged, [given, output], counts=[sent[0] * row_elements])
            return output
        self._run(
            _Call(algorithms.alltoall, self, **_movement(given)),
            [given, output],
            counts=[count * row_elements for count in (*sent, *received)],
        )
        return output

    def barrier(self, *, timeout_s: float = 0.0) -> None:
        """Returns when every rank has called it. The deadline is `timeout_s` (0: the group's default)."""
        self._run(_Call(algorithms.barrier, self), [], timeout_s=timeout_s)

    def send(self, array: Array, peer: int, *, tag: int = 0) -> None:
        """Sends `array` to `peer`. Returns when the caller may change the array."""
        given = _contiguous(array)
        self._run(_Call(algorithms.send, self, peer=peer, **_movement(given)), [given], tag=tag, counts=[given.size])

    def recv(self, output: Array, peer: int | None = None, *, tag: int = 0) -> int:
        """Fills `output` from `peer` (None: whichever rank sends first). Returns the sender's rank."""
        if not output.flags.c_contiguous:
            raise ArgumentError("the array to receive into is not contiguous")
        from sennit.transport.plans.plan import ANY_PEER

        sender = ANY_PEER if peer is None else peer
        plan = _Call(algorithms.recv, self, peer=sender, **_movement(output))
        operation = self._run(plan, [output], tag=tag, counts=[output.size])
        return operation.source if peer is None else peer

    def _run(
        self,
        call: _Call,
        buffers: Sequence[Array],
        *,
        tag: int | None = None,
        timeout_s: float = 0.0,
        counts: Sequence[int] = (),
        seed: int = 0,
    ) -> Operation:
        # The data is passed as bytes, because not every NumPy type has the buffer protocol.
        flat = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        operation = self.post(call.key, call.compile, flat, tag=tag, timeout_s=timeout_s, counts=counts, seed=seed)
        operation.wait()
        return operation


class _Call:
    """An algorithm with its arguments. Together they are the key of its plan."""

    def __init__(self, algorithm: Callable[..., Plan], group: ArrayCollectives, **arguments: Any) -> None:
        self._algorithm = algorithm
        self._arguments = {"world": group.world, "rank": group.rank, **arguments}
        self.key: Hashable = (algorithm.__name__, *self._arguments.values())

    def compile(self) -> Plan:
        return self._algorithm(**self._arguments)


def _contiguous(array: Array) -> Array:
    # ascontiguousarray would turn a scalar into a vector.
    return array if array.flags.c_contiguous else array.copy(order="C")


def _given(array: Array, dtype: Dtype, op: ReduceOp, scalar: float) -> Array:
    """What this rank gives to a sum: the array, or multiplied by `scalar`. No other rank knows the factor."""
    given = _contiguous(array)
    if op is not ReduceOp.PREMUL_SUM or scalar == 1:
        return given
    return scaled(given.reshape(-1).view(np.uint8), dtype, scalar).view(given.dtype).reshape(given.shape)


def _aligned(array: Array) -> Array:
    # Codecs read elements, not bytes.
    return array if array.flags.aligned else array.copy(order="C")


def _movement(array: Array) -> dict[str, int]:
    """Returns the type code for data movement. Types without arithmetic share one code and differ only in size."""
    if array.dtype.hasobject:
        raise ArgumentError(f"dtype {array.dtype.str}; allowed: any without Python objects")
    dtype = DTYPES.get(array.dtype.name)
    return {"item_bytes": array.dtype.itemsize, "type_code": OTHER_TYPE if dtype is None else int(dtype)}


def _up_to(array: Array) -> dict[str, int]:
    """The arguments of a plan for arrays of all sizes up to the largest of this array's grade."""
    from sennit.transport.choice.selection import grade, grade_bytes

    return {"elements": grade_bytes(grade(array.nbytes)) // max(array.itemsize, 1), "counted": True}


def _row_elements(array: Array) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64))


def _splits(name: str, counts: Sequence[int] | None, array: Array, world: int) -> tuple[int, ...]:
    """Returns the rows for each rank: `counts` as given, or equal shares of the first axis."""
    rows = array.shape[0] if array.ndim else 0
    if counts is None:
        if array.ndim == 0 or rows % world:
            raise ArgumentError(f"{rows} rows for {world} ranks; allowed: a multiple, or explicit {name}")
        return (rows // world,) * world
    if len(counts) != world or sum(counts) != rows or min(counts) < 0:
        raise ArgumentError(f"{name} {list(counts)}; allowed: {world} numbers, not negative, that sum to {rows}")
    return tuple(counts)
