# SPDX-License-Identifier: Apache-2.0
"""Generates a BPF program in C for one plan and one batch layout.

What plan and layout settle is written into the program, and not decided at run time. The text is for clang and for
people: docs/reference/feature-plans.md shows one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sennit.offload.batches import CURSORS_OFFSET, BatchLayout
from sennit.offload.errors import NotOffloadable
from sennit.offload.operators import KeepLength, KeepRange, RowFilter, Sample, cpu_ns_per_record
from sennit.offload.schema import DENSE_BYTES, LABEL_BYTES, Ids, LabelKind, Schema
from sennit.offload.xdp_sketch import SlotSketches
from sennit.offload.xdp_values import UNROLLED_IDS_MAX, ValueWriter, Writer, greatest_key, least_key

# Lists that one function walks. A call costs about 10 ns. The verifier's work grows with each further loop.
LISTS_IN_FUNCTION = 8

_TITLE = """\
// SPDX-License-Identifier: Apache-2.0
// Generated from a feature plan."""
_HEAD = """\
#include "branchless.h"
#include "feed_receiver.h"
#include "sketch.h"

struct {
  __uint(type, FEED_MAP_TYPE_ARENA);
  __uint(map_flags, BPF_F_MMAPABLE);
  __uint(max_entries, 1);  // the loader sets it
} ring SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct feed_counters);
} counters SEC(".maps");

const volatile struct feed_settings settings = {};
"""

_TAKE = """
static __always_inline enum feed_verdict take(struct xdp_md* context, struct feed_datagram found,
                                              struct feed_counters* count) {
  // No packet is so long, but messages of several packets are, which a driver of hardware would have segmented.
  if (found.at + found.bytes > FEED_OFFSET_MAX + 1) return FEED_OVERSIZED;
  if (!feed_is_whole(context, &found)) return FEED_TRUNCATED;
  FEED_BYTES(context, return FEED_TRUNCATED);
  __u64 header_at = found.at;
  FEED_INSIDE(begin, header_at, sizeof(struct feed_header));
  const struct feed_header* header = (const void*)begin;
  enum feed_verdict verdict = feed_check_header(header, found.bytes, SCHEMA_ID, settings.session);
  if (verdict != FEED_ACCEPTED) return verdict;
  if (feed_checksum(context, found.at, found.at + found.bytes) != bpf_be64_to_cpu(header->checksum))
    return FEED_CORRUPT;
  verdict = feed_check_rows(header, BATCH_ROWS);
  if (verdict != FEED_ACCEPTED) return verdict;
  __u32 batch = bpf_ntohl(header->batch), row = bpf_ntohl(header->row);
  __u64 slot_at = (__u64)(batch & (SLOTS - 1)) * SLOT_BYTES, state = 0;
  struct feed_slot __arena* slot = AT(struct feed_slot, slot_at);
  // Packets of a batch come from one sender and so to one processor. Should another take one at the same time, it is as
  // if that packet were lost.
  switch (feed_slot_claim(slot, batch, row, &state)) {
    case FEED_CLAIM_LATER_BATCH:
      return FEED_NO_CREDIT;
    case FEED_CLAIM_BUSY:
      return FEED_BUSY;
    case FEED_CLAIM_OLD_BATCH:
    case FEED_CLAIM_OLD_ROW:
      return FEED_DUPLICATE;
    case FEED_CLAIMED:
      break;
  }
  if (row == feed_slot_row(state))
    // The same as found.at + sizeof *header, but the verifier does not know the number, and so sees that one round of
    // the loop over records is like the next.
    verdict = fill(context, header, found.at + found.bytes - bpf_ntohs(header->body_bytes), slot_at, &state, count);
  else {
    verdict = FEED_OUT_OF_SEQUENCE;
    feed_slot_skipped(slot, state, row);
  }
  feed_slot_publish(slot, state);
  return verdict;
malformed:
  return FEED_TRUNCATED;
}

static __always_inline int receive(struct xdp_md* context) {
  asm volatile("" ::"r"(&ring));  // tells the verifier which arena this program has
  struct feed_datagram found = feed_find_datagram(context, settings.udp_port);
  if (!found.at) return XDP_PASS;
  __u32 zero = 0;
  struct feed_counters* count = bpf_map_lookup_elem(&counters, &zero);
  if (!count) return XDP_PASS;
  enum feed_verdict verdict = take(context, found, count);
  feed_count(count, verdict);
  return XDP_DROP;
}

SEC("xdp")
int feed(struct xdp_md* context) { return receive(context); }
"""

# For measuring only: BPF_PROG_TEST_RUN repeats the same packet.
_REPEAT = """
// Makes the packet the next one of its batch, in columns that begin again when they are full, and takes it.
SEC("xdp")
int feed_again(struct xdp_md* context) {
  struct feed_datagram found = feed_find_datagram(context, settings.udp_port);
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  struct feed_header* header = data + found.at;
  asm volatile("" ::"r"(&ring));
  if (!found.at || (void*)(header + 1) > data_end) return XDP_ABORTED;
  __u64 slot_at = (__u64)(bpf_ntohl(header->batch) & (SLOTS - 1)) * SLOT_BYTES;
  struct feed_slot __arena* slot = AT(struct feed_slot, slot_at);
  if (slot->rows + bpf_ntohs(header->records) > BATCH_ROWS) {
    slot->rows = 0;
    REWIND_CURSORS
  }
  slot->state = (__u64)bpf_ntohl(header->batch) << 32 | bpf_ntohl(header->row);
  return receive(context);
}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class XdpSource:
    """The program's text, and the content of its read-only arrays."""

    text: str
    tables: dict[str, NDArray[Any]]


def generate(
    layout: BatchLayout, *, sketches: SlotSketches | None = None, fragments: bool = False, repeatable: bool = False
) -> XdpSource:
    """Raises NotOffloadable for an operator that BPF cannot run.

    `fragments`: packets may come in several pieces. `repeatable` adds the program for measuring.
    """
    return _Generator(layout, sketches).generate(fragments, repeatable)


class _Generator:
    def __init__(self, layout: BatchLayout, sketches: SlotSketches | None) -> None:
        self._layout, self._plan, self._sketches = layout, layout.plan, sketches
        self._out = Writer()
        self._offsets = _fixed_offsets(self._plan.schema)
        self._values = ValueWriter(self._plan.schema, self._plan.graph, self._offsets, self._out)
        self._functions = Writer()

    def generate(self, fragments: bool, repeatable: bool) -> XdpSource:
        layout, schema = self._layout, self._plan.schema
        self._fill()
        constants = {
            "SCHEMA_ID": f"{schema.schema_id:#x}u",
            "BATCH_ROWS": f"{layout.batch_rows}u",
            "SLOTS": f"{layout.slots}u",
            "SLOT_BYTES": f"{layout.slot_bytes}ull",
        }
        text = [_TITLE, *(["#define FEED_FRAGMENTS"] if fragments else []), _HEAD]
        text += [f"#define {name} {value}" for name, value in constants.items()]
        text += [
            "// Arenas begin at a multiple of 4 GiB: an offset is an address.",
            "#define AT(type, offset) ((type __arena*)(__u64)(offset))",
            "",
        ]
        for name, content in self._values.tables.items():
            kind = "__u32" if content.dtype == np.uint32 else "__s64"
            text.append(f"const volatile {kind} {name}[{len(content)}] = {{}};")
        sketch = self._sketches.row_function() if self._sketches else []
        text += ["", *self._functions.lines, *sketch, *self._out.lines, _TAKE]
        if repeatable:
            rewind = (
                f"for (__u32 n = 0; n < {len(layout.cursors)}; n++) *AT(__u64, slot_at + {CURSORS_OFFSET} + 8 * n) = 0;"
                if layout.cursors
                else ""
            )
            text.append(_REPEAT.replace("REWIND_CURSORS", rewind))
        text.append('char licence[] SEC("license") = "Dual BSD/GPL";')
        return XdpSource(text="\n".join(text) + "\n", tables=self._values.tables)

    def _fill(self) -> None:
        """Generates the function that takes all records of a packet, or none if one is malformed."""
        out, cursors = self._out, len(self._layout.cursors)
        save = f"{CURSORS_OFFSET} + 8 * n", f"{self._layout.saved_offset} + 8 * n"
        out.line(
            "static __always_inline enum feed_verdict fill(struct xdp_md* context, const struct feed_header* header,"
        )
        with out.block(
            "                                              __u64 at, __u64 slot_at, __u64* state,"
            " struct feed_counters* count)"
        ):
            out.line("FEED_BYTES(context, return FEED_MALFORMED);")
            out.line("struct feed_slot __arena* slot = AT(struct feed_slot, slot_at);")
            out.line("const __u64 records = bpf_ntohs(header->records), end = at + bpf_ntohs(header->body_bytes);")
            if any(isinstance(condition, Sample) for condition in self._plan.keep):
                out.line("const __u64 number = (__u64)bpf_ntohl(header->batch) << 32 | bpf_ntohl(header->row);")
            out.line("__u64 kept = slot->rows;")
            if self._plan.keep:
                out.line("__u64 filtered = 0;")
            if cursors:
                # An unrolled loop would keep all addresses on the stack.
                out.line("#pragma clang loop unroll(disable)")
                with out.block(f"for (__u32 n = 0; n < {cursors}; n++)"):
                    out.line(f"*AT(__u64, slot_at + {save[1]}) = *AT(__u64, slot_at + {save[0]});")
            with out.block("for (__u64 record = 0; record < records; record++)"):
                out.line("STOP_ENDLESS(malformed);")
                self._record()
            out.line("if (at != end) goto malformed;")
            if self._sketches:
                self._sketches.packet_lines(out)
            out.line("*state = feed_slot_took(slot, *state, records, kept);")
            out.line("count->records += records;")
            if self._plan.keep:
                out.line("count->filtered += filtered;")
            out.line("count->body_bytes += bpf_ntohs(header->body_bytes);")
            out.line("return FEED_ACCEPTED;")
            out.depth -= 1
            out.line("malformed:")
            out.depth += 1
            if cursors:
                out.line("#pragma clang loop unroll(disable)")
                with out.block(f"for (__u32 n = 0; n < {cursors}; n++)"):
                    out.line(f"*AT(__u64, slot_at + {save[0]}) = *AT(__u64, slot_at + {save[1]});")
            out.line("return FEED_MALFORMED;")

    def _record(self) -> None:
        out, values, schema = self._out, self._values, self._plan.schema
        values.begin_record()
        fixed = values.inside("at", schema.fixed_bytes)
        out.line(f"const __u8* fixed = {fixed};")
        out.line("const __u64 begin = at;")
        if self._plan.keep:
            self._filter()
        label = self._label()
        out.line("FORGET(base, slot_at);")
        out.line("FORGET(row_of, kept);")
        out.line(f"*AT(__u32, base + {self._layout.labels_offset} + 4 * row_of) = {label};")
        width = len(self._plan.dense)
        for number, column in enumerate(self._plan.dense):
            values.require_dense(column)
            at = f"base + {self._layout.dense_offset + 4 * number} + {4 * width} * row_of"
            out.line(f"*AT(__u32, {at}) = {values.dense(column)};")
        out.line(f"at += {schema.fixed_bytes};")
        for number in self._tables_of(None):
            self._table(out, number)
        lists = schema.lists
        for first in range(0, len(lists), LISTS_IN_FUNCTION):
            out.line(f"at = lists_{first}(context, slot_at, row_of << 16 | begin, at);")
            out.line("if (!at) goto malformed;")
            self._lists(first, lists[first : first + LISTS_IN_FUNCTION])
        out.line("kept++;")

    def _lists(self, first: int, parts: tuple[Ids, ...]) -> None:
        """The function that walks some lists and writes their tables. It returns where the lists end, or 0.

        The verifier walks a global function once by itself, whoever calls it. Loops inside the loop over records would
        be walked again for every state that earlier loops may leave.
        """
        out = Writer(names=self._out.names)
        parameters = "struct xdp_md* context, __u64 slot_at, __u64 place, __u64 at"
        with self._function(out, f"long lists_{first}({parameters})", "return 0;", ("slot_at", "place", "at")):
            for part in parts:
                out.line(f"const __u64 at_{part.name} = at;")
                self._read_length(out, part)
                for number in self._tables_of(part):
                    self._table(out, number)
                out.line(f"at = at_{part.name} + n_{part.name} * {part.width_bytes};")
            out.line("return at;")
        self._functions.lines += out.lines
        self._out.names = out.names

    @contextlib.contextmanager
    def _function(self, out: Writer, head: str, if_malformed: str, used: tuple[str, ...]) -> Iterator[None]:
        """The first and last lines of every generated function."""
        with self._values.function(out), out.block(f"__noinline {head}"):
            out.line(f"FEED_BYTES(context, {if_malformed.removesuffix(';')});")
            # Unused arguments are not passed, but the verifier wants them initialised.
            operands = ", ".join(f'"r"({name})' for name in used)
            out.line(f'asm volatile("" ::{operands});')
            out.line("const __u64 row_of = place >> 16;")
            out.line("__u64 begin = place & 0xffff;")
            out.line(f"const __u8* fixed = {self._values.inside('begin', self._plan.schema.fixed_bytes)};")
            out.line("const __u64 one = AT(struct feed_slot, slot_at)->one;  // but that only we know")
            yield
            out.depth -= 1
            out.line("malformed:")
            out.depth += 1
            out.line(if_malformed)
        out.line("")

    def _read_length(self, out: Writer, part: Ids) -> None:
        address = f"fixed + {self._offsets[part.name]}"
        out.line(f"const __u64 n_{part.name} = {self._values.load(part.length_bytes, address)};")
        out.line(f"if (n_{part.name} > {part.length}) goto malformed;")

    def _label(self) -> str:
        if self._plan.schema.label is LabelKind.BINARY:
            return "label_of(fixed[0])"
        return self._values.load(4, "fixed")

    def _filter(self) -> None:
        """Skips a record that is not kept, after its lists have been checked."""
        out, schema = self._out, self._plan.schema
        wanted = " && ".join(self._condition(condition) for condition in self._plan.keep)
        with out.block(f"if (!({wanted}))"):
            out.line(f"at += {schema.fixed_bytes};")
            for part in schema.lists:
                self._read_length(out, part)
                out.line(f"at += n_{part.name} * {part.width_bytes};")
            out.line("filtered++;")
            out.line("continue;")

    def _condition(self, condition: RowFilter) -> str:
        values = self._values
        if isinstance(condition, Sample):
            return f"splitmix64({condition.seed}ull, number + record) >> 32 < {condition.below}ull"
        if isinstance(condition, KeepRange):
            values.require_dense(condition.column)
            bits = values.dense(condition.column)
            low, high = least_key(condition.low), greatest_key(condition.high)
            return f"!float_is_nan({bits}) && float_key({bits}) >= {low}u && float_key({bits}) <= {high}u"
        assert isinstance(condition, KeepLength)
        part = next(part for part in self._plan.schema.lists if part.name == condition.column)
        length = f"(__u32){values.load(part.length_bytes, f'fixed + {self._offsets[part.name]}')}"
        return f"{length} >= {max(0, condition.least)}u && {length} <= {max(0, condition.most)}u"

    def _tables_of(self, part: Ids | None) -> list[int]:
        """The tables computed from this list alone; for no list, those computed from fixed fields."""
        found = []
        for number, table in enumerate(self._plan.sparse):
            lists = self._lists_of(table.column)
            if len(lists) > 1:
                operator, kind = self._plan.columns[table.column], self._plan.tables[number]
                reason = "it is made of two lists, and the verifier gives up on loops in loops"
                raise NotOffloadable(table.column, type(operator).__name__, reason, cpu_ns_per_record(operator, kind))
            if lists == ([part.name] if part else []):
                found.append(number)
        return found

    def _lists_of(self, column: str) -> list[str]:
        needed = self._plan.graph.needed((column,))
        return [part.name for part in self._plan.schema.lists if part.name in needed]

    def _table(self, out: Writer, number: int) -> None:
        """Inlines a few stores or one simple loop over a list; everything longer becomes a function."""
        column = self._plan.sparse[number].column
        lists = self._lists_of(column)
        fields = [part for part in self._plan.schema.ids if part.name in self._plan.graph.needed((column,))]
        is_short = self._plan.tables[number].length <= UNROLLED_IDS_MAX and not lists
        if (is_short and all(part.length <= UNROLLED_IDS_MAX for part in fields)) or self._values.is_one_pass(column):
            out.line(f"FORGET(base_{number}, slot_at);")
            self._values_of_table(out, number, f"base_{number}")
            return
        passed = [f"at_{name} | n_{name} << 16" for name in lists]
        arguments = ", ".join(["context", "slot_at", "row_of << 16 | begin", *passed])
        out.line(f"if (table_{number}({arguments})) goto malformed;")
        inner = Writer(names=out.names)
        inner.line(f"// Table {number}: {column}.")
        parameters = ", ".join(
            ["struct xdp_md* context", "__u64 slot_at", "__u64 place", *("__u64 list" for _ in lists)]
        )
        used = ("slot_at", "place", *("list" for _ in lists))
        with self._function(inner, f"int table_{number}({parameters})", "return 1;", used):
            for name in lists:
                inner.line(f"const __u64 at_{name} = list & 0xffff, n_{name} = list >> 16;")
            self._values_of_table(inner, number, "slot_at")
            inner.line("return 0;")
        self._functions.lines += inner.lines
        out.names = inner.names

    def _values_of_table(self, out: Writer, number: int, base: str) -> None:
        layout, column, kind = self._layout, self._plan.sparse[number].column, self._plan.tables[number]
        for source in self._plan.graph.needed((column,)):
            self._values.require_dense(source)
        to, begin = out.name("to"), f"{base} + {layout.values_offsets[number]}"

        def store(value: str) -> None:
            out.line(f"*AT(__s64, {to}) = {value};")
            out.line(f"{to} += 8;")

        if not kind.is_list:
            out.line(f"__u64 {to} = {begin} + {8 * kind.length} * row_of;")
            self._values.ids(column, store)
            return
        cursor, first = f"*AT(__u64, {base} + {CURSORS_OFFSET + 8 * layout.cursors.index(number)})", out.name("first")
        out.line(f"const __u64 {first} = {begin} + 8 * {cursor};")
        out.line(f"__u64 {to} = {first};")
        self._values.ids(column, store)
        lengths = layout.lengths_offset + layout.lengths_pitch * number
        out.line(f"*AT(__u32, {base} + {lengths} + 4 * row_of) = ({to} - {first}) / 8;")
        out.line(f"{cursor} += ({to} - {first}) / 8;")


def _fixed_offsets(schema: Schema) -> dict[str, int]:
    """The offset in a record of each dense feature, fixed id and list length."""
    offsets, at = {}, LABEL_BYTES[schema.label]
    for dense in schema.dense:
        offsets[dense.name] = at
        at += DENSE_BYTES[dense.kind]
    for ids in schema.ids:
        offsets[ids.name] = at
        at += ids.length_bytes or ids.width_bytes * ids.length
    assert at == schema.fixed_bytes
    return offsets
