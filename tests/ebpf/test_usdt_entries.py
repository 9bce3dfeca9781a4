# SPDX-License-Identifier: Apache-2.0
"""Programs for tracepoints read arguments from where the compiler has put them."""

from __future__ import annotations

import pytest

from sennit.ebpf import usdt_entries
from sennit.ebpf.usdt import Argument, Place, Tracepoint, split_arguments


def text(size_bytes: int, operand: str, machine: str = "x86_64", *, is_signed: bool = False) -> str:
    point = Tracepoint(
        provider="p",
        name="hit",
        arguments=(Argument(size_bytes=size_bytes, is_signed=is_signed),),
        places=(Place(offset=1, operands=(operand,), has_call_nop=True),),
    )
    return usdt_entries.source([point], machine).splitlines()[1].strip()


@pytest.mark.parametrize(
    ("size_bytes", "operand", "call"),
    [
        (4, "%edi", "hit((__u32)ctx->rdi);"),
        (8, "%r12", "hit((__u64)ctx->r12);"),
        (4, "%r12d", "hit((__u32)ctx->r12);"),
        (1, "%al", "hit((__u8)ctx->rax);"),
        (2, "%bp", "hit((__u16)ctx->rbp);"),
        (4, "$7", "hit((__u32)7);"),
        (4, "$-1", "hit((__u32)-1);"),
        (4, "(%rbx)", "hit((__u32)user_u32(ctx->rbx + 0));"),
        (8, "-16(%rbp)", "hit((__u64)user_u64(ctx->rbp + -16));"),
        (8, "16+8(%rsp)", "hit((__u64)user_u64(ctx->rsp + 24));"),
    ],
)
def test_where_x86_has_arguments(size_bytes: int, operand: str, call: str) -> None:
    assert text(size_bytes, operand) == call


@pytest.mark.parametrize(
    ("size_bytes", "operand", "call"),
    [
        (4, "w19", "hit((__u32)((struct user_pt_regs *)ctx)->regs[19]);"),
        (8, "x0", "hit((__u64)((struct user_pt_regs *)ctx)->regs[0]);"),
        (8, "[sp, 16]", "hit((__u64)user_u64(((struct user_pt_regs *)ctx)->sp + 16));"),
        (4, "[x21]", "hit((__u32)user_u32(((struct user_pt_regs *)ctx)->regs[21] + 0));"),
        (4, "5", "hit((__u32)5);"),
    ],
)
def test_where_arm_has_arguments(size_bytes: int, operand: str, call: str) -> None:
    assert text(size_bytes, operand, "aarch64") == call


def test_operands_with_a_space_are_read_whole() -> None:
    """As a compiler for arm64 writes them into a note."""
    assert split_arguments("-4@[sp, 60] 8@x0 4@[x21] 2@-8(%rbp) 4@$5") == [
        ("-", "4", "[sp, 60]"),
        ("", "8", "x0"),
        ("", "4", "[x21]"),
        ("", "2", "-8(%rbp)"),
        ("", "4", "$5"),
    ]


def test_signed_arguments_stay_signed() -> None:
    assert text(4, "%eax", is_signed=True) == "hit((__s32)ctx->rax);"


@pytest.mark.parametrize("operand", ["%xmm0", "symbol(%rip)", "(%rax,%rcx,8)", "x0", ""])
def test_what_is_not_understood_is_named(operand: str) -> None:
    with pytest.raises(usdt_entries.UnknownOperand, match="tracepoint hit: an argument is at"):
        text(4, operand)


def test_each_place_has_its_program() -> None:
    places = tuple(Place(offset=n, operands=(f"%r{n}",), has_call_nop=False) for n in (8, 9))
    point = Tracepoint(provider="p", name="hit", arguments=(Argument(size_bytes=8, is_signed=False),), places=places)
    source = usdt_entries.source([point], "x86_64")
    assert [source.count(usdt_entries.program_name("hit", n)) for n in range(3)] == [1, 1, 0]
