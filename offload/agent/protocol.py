# SPDX-License-Identifier: Apache-2.0
"""What a trainer and the agent say: one line of JSON each way (docs/reference/agent.md).

What the agent reads comes from users without rights, so every field is checked: type, range, none missing, none
unknown. A plan that is valid may still be too much work for a compiler: `check_work` bounds that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sennit.ebpf.arena import ALIGNMENT_BYTES
from sennit.errors import ArgumentError
from sennit.offload.agent.errors import AgentError
from sennit.offload.batches import BatchLayout
from sennit.offload.operators import TableOperator
from sennit.offload.plan import FeaturePlan
from sennit.offload.plan_json import plan_as_json, plan_from_json
from sennit.offload.sketch import SketchShape

VERSION: Final = 1
LINE_MAX_BYTES: Final = 1 << 20
NAME_MAX: Final = 200
# Below the end of user space with four levels of page tables (Documentation/arch/x86/x86_64/mm.rst).
ADDRESS_END: Final = 1 << 47
# Column operators in the program of a plan, each once for every column that is made of it. Criteo has 39.
WORK_MAX: Final = 4096
# Of Log1p, Logit and BoxCox, which are in the program's read-only data.
TABLES_MAX_BYTES: Final = 64 << 20
_UINT32_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TermsRequest:
    """What may I have?"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRequest:
    """Could I have a program there?"""

    interface: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """Load the program of this plan, attach it there, and let me have its memory. A bound UDP socket comes along."""

    interface: str
    port: int
    session: int
    address: int
    """Where the trainer maps the arena: a multiple of 4 GiB."""

    layout: BatchLayout
    sketch: SketchShape | None


Request = TermsRequest | CheckRequest | LeaseRequest


def encode_request(request: Request) -> bytes:
    content: dict[str, Any] = {"version": VERSION, "ask": _NAMES[type(request)]}
    if not isinstance(request, TermsRequest):
        content |= {"interface": request.interface, "port": request.port}
    if isinstance(request, LeaseRequest):
        layout, sketch = request.layout, request.sketch
        content |= {
            "session": request.session,
            "address": request.address,
            "plan": plan_as_json(layout.plan),
            "batch_rows": layout.batch_rows,
            "slots": layout.slots,
            "sketch": None if sketch is None else [sketch.width, sketch.depth, sketch.one_row_in],
        }
    return encode(content)


def decode_request(line: bytes) -> Request:
    """Raises AgentError."""
    content = decode(line)
    version = content.pop("version", None)
    if version != VERSION or isinstance(version, bool):
        raise AgentError(f"version {_short(version)}; this agent speaks {VERSION}")
    kind = content.pop("ask", None)
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise AgentError(f"ask {_short(kind)}; allowed: {', '.join(_FIELDS)}")
    if content.keys() != fields:
        differing = ", ".join(sorted(_short(name) for name in content.keys() ^ fields))
        raise AgentError(f"{kind}: fields that are missing or too many: {differing[:NAME_MAX]}")
    if kind == "terms":
        return TermsRequest()
    interface, port = _name(content["interface"]), _integer("port", content["port"], 1, 65_535)
    if kind == "check":
        return CheckRequest(interface=interface, port=port)
    address = _integer("address", content["address"], ALIGNMENT_BYTES, ADDRESS_END - ALIGNMENT_BYTES)
    if address % ALIGNMENT_BYTES:
        raise AgentError(f"address {address:#x}; allowed: multiples of {ALIGNMENT_BYTES:#x}")
    session = _integer("session", content["session"], 0, _UINT32_MAX)
    layout, sketch = _layout(content), _sketch(content["sketch"])
    return LeaseRequest(interface=interface, port=port, session=session, address=address, layout=layout, sketch=sketch)


def encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        raise AgentError("a line that is no JSON") from None
    if not isinstance(content, dict):
        raise AgentError("a line that is no JSON object")
    return content


def check_work(plan: FeaturePlan) -> None:
    """Raises AgentError if the program would be too long: a column of columns of columns has each once for each use."""
    work: dict[str, int] = {}
    for name in plan.graph.order:
        work[name] = 1 + sum(work.get(source, 0) for source in plan.graph.columns[name].inputs)
    total = sum(work.get(name, 0) for name in plan.outputs)
    if total > WORK_MAX:
        raise AgentError(f"a plan of {total} operators, counted once for each use; allowed: {WORK_MAX}")
    tables = {one for one in plan.graph.columns.values() if isinstance(one, TableOperator)}
    tables_bytes = sum(4 << one.bits for one in tables)
    if tables_bytes > TABLES_MAX_BYTES:
        raise AgentError(f"a plan with tables of {tables_bytes} bytes; allowed: {TABLES_MAX_BYTES} (fewer bits)")


def _layout(content: dict[str, Any]) -> BatchLayout:
    try:
        layout = BatchLayout(
            plan=plan_from_json(content["plan"]),
            batch_rows=_integer("batch_rows", content["batch_rows"], 1, _UINT32_MAX),
            slots=_integer("slots", content["slots"], 1, _UINT32_MAX),
        )
    except ArgumentError as error:
        raise AgentError(f"plan: {error}") from None
    check_work(layout.plan)
    return layout


def _sketch(value: Any) -> SketchShape | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise AgentError(f"sketch {_short(value)}; allowed: null, or [width, depth, one row in]")
    width, depth, one_row_in = (_integer("sketch", number, 1, _UINT32_MAX) for number in value)
    try:
        return SketchShape(width=width, depth=depth, one_row_in=one_row_in)
    except ArgumentError as error:
        raise AgentError(str(error)) from None


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= NAME_MAX:
        raise AgentError(f"interface {_short(value)}; allowed: a text of 1 to {NAME_MAX} characters")
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise AgentError(f"{name} {_short(value)}; allowed: integers from {low} to {high}")
    return value


def _short(value: Any) -> str:
    return repr(value)[:NAME_MAX]


_NAMES: Final[dict[type, str]] = {TermsRequest: "terms", CheckRequest: "check", LeaseRequest: "lease"}
_FIELDS: Final = {
    "terms": frozenset[str](),
    "check": frozenset({"interface", "port"}),
    "lease": frozenset({"interface", "port", "session", "address", "plan", "batch_rows", "slots", "sketch"}),
}
