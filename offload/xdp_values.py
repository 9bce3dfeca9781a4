# SPDX-License-Identifier: Apache-2.0
"""Expressions and loops for a plan's columns in C for BPF: every operator, without the program around it.

Ids are generated in continuation-passing style: `ids(column, use)` writes the loops that walk a column, and calls `use`
where one id is in a variable. So columns made of columns become nested loops over the packet and need no memory in
between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sennit.offload.columns import IdsType
from sennit.offload.errors import NotOffloadable
from sennit.offload.operators import (
    Bucketize,
    Clamp,
    ClampList,
    Cross,
    Enumerate,
    FirstX,
    MapId,
    NGram,
    Operator,
    PositiveModulus,
    SigridHash,
    TableOperator,
    cpu_ns_per_record,
)
from sennit.offload.plan import Graph
from sennit.offload.schema import ByteOrder, Dense, DenseKind, Ids, Schema
from sennit.offload.tables import NAN_BITS, function_table, id_table

# Bytes of read-only data for all tables of a plan.
MAP_ENTRIES_MAX = 1 << 16
TABLE_BITS_MAX = 20
# Above this count, a loop walks the ids of a fixed field. Loops live in functions of their own.
UNROLLED_IDS_MAX = 8
UNROLLED_IDS_IN_FUNCTION_MAX = 4

Use = Callable[[str], None]


@dataclass
class Writer:
    """Lines of C, indented by nesting depth."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0
    names: int = 0

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text if text else "")

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(f"{head} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def name(self, stem: str) -> str:
        """A variable name that is not used yet."""
        self.names += 1
        return f"{stem}_{self.names}"


def signed64(value: int) -> str:
    """A C constant. C has no literal for the least integer."""
    return "(-0x7fffffffffffffffll - 1)" if value == -(1 << 63) else f"{value}ll"


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def order_key(bits: int) -> int:
    """`float_key` of ebpf/include/branchless.h."""
    return (~bits if bits >> 31 else bits | 0x80000000) & 0xFFFFFFFF


_ZERO_KEYS = {order_key(0x80000000), order_key(0)}


def least_key(value: float) -> int:
    """x < value, compared as keys: key(x) < least_key(value). Both zeros count as the lower one."""
    key = order_key(float_bits(value))
    return min(_ZERO_KEYS) if key in _ZERO_KEYS else key


def greatest_key(value: float) -> int:
    """x > value, compared as keys: key(x) > greatest_key(value)."""
    key = order_key(float_bits(value))
    return max(_ZERO_KEYS) if key in _ZERO_KEYS else key


class ValueWriter:
    """Writes the values of columns into the body of the loop over records.

    The loop has in scope: what FEED_BYTES of feed_receiver.h declares, `fixed` (the record's fixed part, inside the
    packet), `begin` (its offset), for each list `n_NAME` and `at_NAME` once it is reached, and the label `malformed`.
    Functions also have `one`: it is 1, but the verifier does not know that, and so does not walk every round of a loop
    of known length.
    """

    def __init__(self, schema: Schema, graph: Graph, offsets: dict[str, int], out: Writer) -> None:
        self._schema, self._graph, self._offsets, self._out = schema, graph, offsets, out
        self._unrolled_max = UNROLLED_IDS_MAX
        self._dense = {part.name: part for part in schema.dense}
        self._ids = {part.name: part for part in schema.ids}
        self._known: dict[str, str] = {}
        self.tables: dict[str, NDArray[np.uint32] | NDArray[np.int64]] = {}
        """Read-only arrays that the program needs: variable -> content."""

    def begin_record(self) -> None:
        self._known.clear()

    @contextlib.contextmanager
    def function(self, out: Writer) -> Iterator[None]:
        """Writes at a place where nothing is known yet and loops are allowed."""
        before = self._out, self._known, self._unrolled_max
        self._out, self._known, self._unrolled_max = out, {}, UNROLLED_IDS_IN_FUNCTION_MAX
        yield
        self._out, self._known, self._unrolled_max = before

    def load(self, width_bytes: int, address: str, *, signed: bool = False) -> str:
        """A number of the record in the machine's byte order."""
        kind = f"__{'s' if signed else 'u'}{8 * width_bytes}"
        if width_bytes == 1 or self._schema.byte_order is ByteOrder.LITTLE:
            return f"*(const {kind} *)({address})"
        return f"({kind})__builtin_bswap{8 * width_bytes}(*(const __u{8 * width_bytes} *)({address}))"

    def require_dense(self, column: str) -> None:
        """Writes, inside the record's scope, the dense columns that `column` needs and that are missing."""
        if column in self._dense:
            if column not in self._known:
                self._known[column] = self._dense_source(self._dense[column])
            return
        operator = self._graph.columns.get(column)
        for source in operator.inputs if operator else ():
            self.require_dense(source)
        if operator is not None and isinstance(operator, (Clamp, TableOperator)) and column not in self._known:
            self._known[column] = self._dense_operator(column, operator)

    def dense(self, column: str) -> str:
        """The bits of a dense column. Call `require_dense` first."""
        return self._known[column]

    def _dense_source(self, part: Dense) -> str:
        bits = self._out.name(part.name)
        address = f"fixed + {self._offsets[part.name]}"
        wide = self.load(4, address) if part.kind is DenseKind.FLOAT32 else f"(__u32){self.load(2, address)} << 16"
        self._out.line(f"const __u32 {bits} = {wide};")
        return bits

    def _dense_operator(self, column: str, operator: Clamp | TableOperator) -> str:
        out, x, result = self._out, self.dense(operator.column), self._out.name(column)
        if isinstance(operator, Clamp):
            low = f"{float_bits(operator.low)}u, {least_key(operator.low)}u"
            high = f"{float_bits(operator.high)}u, {greatest_key(operator.high)}u"
            out.line(f"const __u32 {result} = clamp_float({x}, {low}, {high});")
            return result
        if operator.bits > TABLE_BITS_MAX:
            raise self._refused(
                column, operator, f"its table has 2^{operator.bits} entries; allowed: 2^{TABLE_BITS_MAX}"
            )
        table = f"table_{column}"
        self.tables[table] = function_table(operator)
        shift = 32 - operator.bits
        rounded = f"((__u64){x} + {1 << shift - 1}u) >> {shift}"
        found = f"{table}[({rounded}) & {(1 << operator.bits) - 1}u]"
        out.line(f"const __u32 {result} = choose(mask_nan({x}), {NAN_BITS}u, {found});")
        return result

    def ids(self, column: str, use: Use, limit: int | None = None) -> None:
        """Writes a loop over the ids of a row that calls `use` for each in order, for the first `limit` ids only."""
        if column in self._ids:
            self._ids_source(self._ids[column], use, limit)
            return
        operator, out = self._graph.columns[column], self._out
        if isinstance(operator, FirstX):
            self.ids(operator.column, use, operator.count if limit is None else min(limit, operator.count))
        elif isinstance(operator, Bucketize):
            use(self._bucket(column, operator))
        elif isinstance(operator, Enumerate):
            position = out.name("position")
            out.line(f"__s64 {position} = 0;")

            def count(_: str) -> None:
                use(position)
                out.line(f"{position}++;")

            self.ids(operator.column, count, limit)
        elif isinstance(operator, NGram):
            self._ngram(operator, use, limit)
        elif isinstance(operator, Cross):
            if self._loops(operator.left) and self._loops(operator.right):
                raise self._refused(
                    column, operator, "both rows are walked by loops, and the verifier gives up on loops in loops"
                )
            self._cross(operator, use, limit)
        else:
            source = operator.inputs[0]

            def change(value: str) -> None:
                result = out.name(column)
                self._element(column, operator, value, result)
                use(result)

            self.ids(source, change, limit)

    def _ids_source(self, part: Ids, use: Use, limit: int | None) -> None:
        out, width, signed = self._out, part.width_bytes, part.dtype.kind == "i"
        count = part.length if limit is None else min(part.length, limit)
        if not part.is_list and count <= self._unrolled_max:
            for n in range(count):
                value = out.name(part.name)
                address = f"fixed + {self._offsets[part.name] + n * width}"
                out.line(f"const __s64 {value} = {self.load(width, address, signed=signed)};")
                use(value)
            return
        i, at, most = out.name("i"), out.name("at"), out.name("most")
        first = f"at_{part.name}" if part.is_list else f"begin + {self._offsets[part.name]}"
        bound = str(count)
        if part.is_list:
            bound = f"n_{part.name}" if count == part.length else f"least_of(n_{part.name}, {count})"
        out.line(f"__u64 {at} = {first};")
        # Each loop has a bound of its own, which the verifier does not know. From every round that may be the last it
        # learns the bound, and would walk the next loop with the same one as often as this one has rounds.
        factor = out.name("one")
        out.line(f"FORGET({factor}, one);")
        out.line(f"const __u64 {most} = {bound} * {factor};")
        with out.block(f"for (__u64 {i} = 0; {i} < {most}; {i}++)"):
            out.line("STOP_ENDLESS(malformed);")
            element = self.inside(at, width)
            value = out.name(part.name)
            out.line(f"const __s64 {value} = {self.load(width, element, signed=signed)};")
            out.line(f"{at} += {width};")
            use(value)

    def inside(self, at: str, size_bytes: int) -> str:
        """Writes a check that the bytes are inside the packet, and returns their address."""
        element = self._out.name("here")
        self._out.line(f"FEED_INSIDE({element}, {at}, {size_bytes});")
        return element

    def _bucket(self, column: str, operator: Bucketize) -> str:
        """A branchless binary search over keys in a table padded to a power of two."""
        out, x = self._out, self.dense(operator.column)
        size = 1 << len(operator.borders).bit_length()
        keys = np.full(size, 0xFFFFFFFF, np.uint32)
        # x <= border with equal zeros is key(x) <= key(border), where a border of -0 counts as +0.
        keys[: len(operator.borders)] = [greatest_key(border) for border in operator.borders]
        table, key, found = f"borders_{column}", out.name("key"), out.name(column)
        self.tables[table] = keys
        out.line(f"const __u64 {key} = float_key({x}) | bit_below(0x7f800000u, {x} & 0x7fffffffu) << 32;")
        out.line(f"__u64 {found} = 0;")
        step = size // 2
        while step:
            probed = f"{table}[({found} + {step - 1}) & {size - 1}]"
            out.line(f"{found} += bit_below({probed}, {key}) << {step.bit_length() - 1};")
            step //= 2
        # NaN is above the padding too.
        if len(operator.borders) < size - 1:
            out.line(f"{found} = least_of({found}, {len(operator.borders)});")
        return found

    def _element(self, column: str, operator: Operator, value: str, result: str) -> None:
        out = self._out
        if isinstance(operator, SigridHash):
            mixed = f"hash_combine((__u64){signed64(operator.salt)}, twang_mix64({value}))"
            out.line(f"const __s64 {result} = {self._modulus(mixed, operator.max_value)};")
        elif isinstance(operator, PositiveModulus):
            found = self._graph.types[operator.column]
            assert isinstance(found, IdsType)
            if found.low >= 0 and operator.divisor & operator.divisor - 1:
                # For ids below 2^32 the processor divides in half the time.
                width = "__u32" if found.high < 1 << 32 and operator.divisor < 1 << 32 else "__u64"
                out.line(f"const __s64 {result} = ({width}){value} % ({width}){signed64(operator.divisor)};")
            else:
                out.line(f"const __s64 {result} = {self._modulus(value, operator.divisor)};")
        elif isinstance(operator, ClampList):
            out.line(
                f"const __s64 {result} = clamp_branchless({value}, {signed64(operator.low)}, "
                f"{signed64(operator.high)});"
            )
        elif isinstance(operator, MapId):
            self._look_up(column, operator, value, result)
        else:
            raise AssertionError(f"no C for {type(operator).__name__}")

    @staticmethod
    def _modulus(value: str, divisor: int) -> str:
        if divisor & divisor - 1 == 0:
            return f"(__s64)({value} & {divisor - 1}ull)"
        return f"floor_mod_branchless((__s64){value}, {signed64(divisor)})"

    def _look_up(self, column: str, operator: MapId, value: str, result: str) -> None:
        if len(operator.mapping) > MAP_ENTRIES_MAX:
            raise self._refused(
                column, operator, f"its dictionary has {len(operator.mapping)} entries; allowed: {MAP_ENTRIES_MAX}"
            )
        out, table = self._out, id_table(operator)
        keys, values, home = f"keys_{column}", f"values_{column}", out.name("home")
        self.tables[keys], self.tables[values] = table.keys, table.values
        out.line(f"const __u64 {home} = ((__u64){value} * {table.multiplier}ull) >> {table.shift};")
        out.line(f"__s64 {result} = {signed64(operator.default)};")
        # The first place with the id wins, so it is checked last.
        for probe in reversed(range(table.probes)):
            at = f"[{home} + {probe}]"
            out.line(f"{result} = choose(mask_equal({keys}{at}, {value}), {values}{at}, {result});")

    def _ngram(self, operator: NGram, use: Use, limit: int | None) -> None:
        out = self._out
        window = [out.name("before") for _ in range(operator.count - 1)]
        seen = out.name("seen")
        out.line(f"__u64 {' = 0, '.join(window)} = 0;")
        out.line(f"__u64 {seen} = 0;")

        def slide(value: str) -> None:
            with out.block(f"if ({seen} >= {operator.count - 1})"):
                combined = f"(__u64){value}"
                for before in reversed(window):
                    combined = f"hash_combine({before}, {combined})"
                result = out.name("gram")
                out.line(f"const __s64 {result} = {combined};")
                use(result)
            out.line(f"else {seen}++;")
            for before, after in zip(window, [*window[1:], value], strict=True):
                out.line(f"{before} = {after};")

        self.ids(operator.column, slide, None if limit is None else limit + operator.count - 1)

    def _cross(self, operator: Cross, use: Use, limit: int | None) -> None:
        out = self._out
        remaining = None if limit is None else out.name("remaining")
        if remaining:
            out.line(f"__u64 {remaining} = {limit};")

        def each_left(left: str) -> None:
            def each_right(right: str) -> None:
                result = out.name("crossed")
                if remaining is None:
                    out.line(f"const __s64 {result} = hash_combine({left}, {right});")
                    use(result)
                    return
                with out.block(f"if ({remaining})"):
                    out.line(f"{remaining}--;")
                    out.line(f"const __s64 {result} = hash_combine({left}, {right});")
                    use(result)

            self.ids(operator.right, each_right, limit)

        # If a right row has any ids, the first `limit` ids of the left row are enough.
        self.ids(operator.left, each_left, limit)

    def _loops(self, column: str) -> bool:
        """Whether walking the column needs a loop."""
        fields = (self._ids[name] for name in self._graph.needed((column,)) if name in self._ids)
        return any(part.is_list or part.length > self._unrolled_max for part in fields)

    def is_one_pass(self, column: str) -> bool:
        """Whether a single loop over one list is enough, with a fixed number of ids out for each id in."""
        while column in self._graph.columns:
            operator = self._graph.columns[column]
            if isinstance(operator, (Cross, NGram, Bucketize, Enumerate)):
                return False
            column = operator.inputs[0]
        return self._ids[column].is_list

    def _refused(self, column: str, operator: Operator, reason: str) -> NotOffloadable:
        return NotOffloadable(
            column, type(operator).__name__, reason, cpu_ns_per_record(operator, self._graph.types[column])
        )
