# SPDX-License-Identifier: Apache-2.0
"""Generates BPF programs for the tracepoints of a binary: one for each place, which reads each argument where the
compiler put it.

libbpf and bcc read arguments at run time, from a table, with one helper call each. For six arguments this takes
0.27 us per hit, as much as everything else together (docs/performance.md). A source includes the generated text. In
it, `TRACEPOINT(name, types and names of arguments)` is followed by the code for a hit.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from typing import Final

from sennit.ebpf.usdt import Argument, Tracepoint
from sennit.errors import FormatError

HEADER: Final = "entries.h"
# struct pt_regs of the x86-64 ABI has the full registers' names; `low` are names of their parts.
_X86_REGISTERS: Final[dict[str, str]] = {
    part: full
    for full, parts in {
        **{f"r{a}x": (f"e{a}x", f"{a}x", f"{a}l") for a in "abcd"},
        **{f"r{a}": (f"e{a}", a, f"{a}l") for a in ("si", "di", "bp", "sp")},
        **{f"r{n}": (f"r{n}d", f"r{n}w", f"r{n}b") for n in range(8, 16)},
    }.items()
    for part in (full, *parts)
}
_X86_MEMORY: Final = re.compile(r"([-+\d]*)\(%(\w+)\)")
_ARM_MEMORY: Final = re.compile(r"\[(\w+)(?:,\s*#?(-?\d+))?\]")
_NUMBER: Final = re.compile(r"[$#]?(-?\d+)")


class UnknownOperand(FormatError):
    """An argument is in an unknown kind of place. The message has the assembler text."""


def program_name(name: str, place: int) -> str:
    """The name of the program for one place of a tracepoint."""
    return f"{name}_{place}"


def source(tracepoints: Iterable[Tracepoint], machine: str = platform.machine()) -> str:
    """C text with the programs for every place of these tracepoints, in the order of their names.

    Raises `UnknownOperand`.
    """
    return "".join(
        f'SEC("uprobe") int {program_name(point.name, number)}(struct pt_regs *ctx) {{\n'
        f"  {point.name}({arguments});\n  return 0;\n}}\n"
        for point in sorted(tracepoints, key=lambda point: point.name)
        for number, place in enumerate(point.places)
        for arguments in [
            ", ".join(
                _value(argument, operand, point.name, machine)
                for argument, operand in zip(point.arguments, place.operands, strict=True)
            )
        ]
    )


def _value(argument: Argument, operand: str, name: str, machine: str) -> str:
    """The C expression that reads an argument, with the argument's own width."""
    kind = f"__{'s' if argument.is_signed else 'u'}{8 * argument.size_bytes}"
    number = _NUMBER.fullmatch(operand)
    if number:
        return f"({kind}){number[1]}"
    found = _x86(operand) if machine == "x86_64" else _arm64(operand)
    if found is None:
        raise UnknownOperand(f"tracepoint {name}: an argument is at {operand!r}, which is not understood ({machine})")
    register, offset = found
    if offset is None:
        return f"({kind}){register}"
    return f"({kind})user_u{8 * argument.size_bytes}({register} + {offset})"


def _x86(operand: str) -> tuple[str, int | None] | None:
    """The register, and the offset from it if the argument is in memory."""
    if operand.startswith("%"):
        register, offset = operand[1:], None
    else:
        memory = _X86_MEMORY.fullmatch(operand)
        if memory is None:
            return None
        register, offset = memory[2], sum(int(part) for part in re.findall(r"[-+]?\d+", memory[1]))
    full = _X86_REGISTERS.get(register)
    return (f"ctx->{full}", offset) if full is not None else None


def _arm64(operand: str) -> tuple[str, int | None] | None:
    memory = _ARM_MEMORY.fullmatch(operand)
    register = memory[1] if memory else operand
    if register == "sp":
        member = "sp"
    elif re.fullmatch(r"[xw]([12]?\d|30)", register):
        member = f"regs[{register[1:]}]"
    else:
        return None
    return f"((struct user_pt_regs *)ctx)->{member}", int(memory[2] or 0) if memory else None
