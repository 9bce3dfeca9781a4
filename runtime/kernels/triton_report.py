# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the Triton kernels for a GPU that need not be present.

    python -m sennit.runtime.kernels.triton_report --json FILE

compiles every kernel, in the specialisations that `cases` launches, for an H100 (sm_90a), and prints for each what a
thread and a program take. The operator runs as it is, on tensors of the CPU; where it would launch a kernel, the kernel
is compiled instead. TRITON_INTERPRET must not be set: kernels that were imported for the interpreter cannot be
compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelParam, mangle_type

from sennit.runtime.kernels import triton_attention, triton_operator, triton_products, triton_tiles
from sennit.runtime.kernels.attention_call import AttentionCall
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.layout import allocate
from sennit.runtime.kernels.optimizers import Decay, Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Precision, Rounding, ShardSpec

TARGET: Final = GPUTarget("cuda", 90, 32)
"""Triton compiles capability 9.0 for sm_90a."""
ARCHITECTURE: Final = "sm_90a"
MULTIPROCESSORS: Final = 132
OPTIONS: Final[tuple[str, ...]] = ("num_warps", "enable_fp_fusion")
BAGS: Final = 1024

# `ptxas --verbose`
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# PTX
_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-z_]\w*(?:::\w+)?)*?(?:\.v(\d))?\.[bufs](\d+)\b")
_INEXACT = re.compile(r"\b(?:fma|mad)\.\S*f32|\.ftz\b|\.approx\b|div\.full|\.f64\b")
_TENSOR_CORES = re.compile(r"\bw?g?mma\.\S+")
_FUSED = {"fma.rn.f32", "fma.rn.f32x2"}
"""What attention is made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A kernel in one specialisation."""

    kernel: str
    case: str
    """The case that launched it first."""

    constants: dict[str, Any]
    warps: int
    registers: int
    """Registers of a thread."""

    spill_bytes: int
    """Bytes that a thread spills: stores and loads to local memory."""

    shared_bytes: int
    """Bytes of shared memory of a program."""

    loads: dict[int, int]
    stores: dict[int, int]
    """By bytes that an instruction moves for a thread, how many such instructions there are."""

    inexact: list[str]
    """Instructions that do not round as the operator's arithmetic says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Tables, an optimizer and a batch of BAGS bags a table."""

    name: str
    tables: tuple[ShardSpec, ...]
    optimizer: OptimizerSpec
    pooling: Pooling = Pooling.SUM
    weighted: bool = False
    slices: int = 1


def cases() -> Iterator[Case]:
    """Cases with every optimizer, pooling and precision. Those called "hot" are of shapes that users have most."""

    def tables(*dims: int, precision: Precision = Precision.FP32) -> tuple[ShardSpec, ...]:
        return tuple(
            ShardSpec(name=f"{precision.name} {dim}", row_count=1000, dim=dim, precision=precision) for dim in dims
        )

    adagrad = OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD)
    yield Case(
        name="hot: sequences", tables=tables(128), optimizer=OptimizerSpec(kind=Optimizer.SGD), pooling=Pooling.NONE
    )
    yield Case(name="hot: bags in 8 slices", tables=tables(64), optimizer=adagrad, slices=8)
    yield Case(
        name="hot: weighted", tables=tables(128), optimizer=OptimizerSpec(kind=Optimizer.ADAM), weighted=True, slices=8
    )
    yield Case(name="hot: fp16", tables=tables(128, precision=Precision.FP16), optimizer=adagrad)
    yield Case(name="hot: classes", tables=tables(1, 16, 128), optimizer=adagrad, slices=8)
    decayed: dict[str, Any] = {"weight_decay": 0.1, "max_gradient": 1.0, "max_gradient_norm": 1.0}
    mixed = (*tables(20), *tables(64, precision=Precision.FP16), *tables(7, precision=Precision.BF16))
    for kind, decay, pooling, slices in (
        (Optimizer.ROW_WISE_ADAGRAD, Decay.DECOUPLED, Pooling.MEAN, 256),
        (Optimizer.ADAGRAD, Decay.L2, Pooling.NONE, 1),
        (Optimizer.LAMB, Decay.DECOUPLED, Pooling.SUM, 1),
    ):
        optimizer = OptimizerSpec(kind=kind, decay=decay, **decayed)
        yield Case(name=f"mixed {kind.value}", tables=mixed, optimizer=optimizer, pooling=pooling, slices=slices)
    for name, options in (("nesterov", {"momentum": 0.9, "nesterov": True}), ("ftrl", {"kind": Optimizer.FTRL})):
        optimizer = OptimizerSpec(**({"kind": Optimizer.SGD} | options))
        yield Case(name=f"mixed {name}", tables=mixed, optimizer=optimizer)
    wide = OptimizerSpec(kind=Optimizer.PARTIAL_ROW_WISE_ADAM)
    yield Case(name="wide", tables=tables(4096), optimizer=wide)


def report(only: str = "", on_compiled: Callable[[Compiled], None] = lambda _: None) -> list[Compiled]:
    """Compiles what the cases launch whose names begin with `only`, and folds of tensor trains.

    `on_compiled` gets each kernel as soon as it is compiled.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1: kernels were imported for the interpreter; allowed: unset")
    found: dict[tuple[Any, ...], Compiled] = {}
    case = ""

    def compiler(kernel: JITFunction[Any]) -> Any:
        def launch(*arguments: Any, **keywords: Any) -> None:
            key, source, options = _specialised(kernel, arguments, keywords)
            if key not in found:
                found[key] = _compiled(source, options, case)
                on_compiled(found[key])

        return mock.MagicMock(__getitem__=lambda *_: launch)

    with ExitStack() as stack:
        for module in (triton_operator, triton_products, triton_attention):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    stack.enter_context(mock.patch.object(module, name, compiler(value)))
        # Nothing writes what the kernels would.
        for name in ("empty", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, getattr(torch, name.replace("empty", "zeros"))))
        stack.enter_context(
            mock.patch.object(
                triton_tiles, "tiles_for", lambda width, _: triton_tiles.tiles_of_gpu(width, MULTIPROCESSORS)
            )
        )
        of_gpu = triton_attention.tiles_for
        stack.enter_context(
            mock.patch.object(triton_attention, "tiles_for", lambda _, *, is_half: of_gpu("cuda", is_half=is_half))
        )
        stack.enter_context(mock.patch.dict(triton_products.TILE, cpu=triton_products.TILE["cuda"]))
        for one in cases():
            case = one.name
            if case.startswith(only):
                _run(one)
        case = "tensor train"
        if case.startswith(only):
            _fold()
        case = "attention"
        if case.startswith(only):
            _attend()
    return list(found.values())


def _run(case: Case) -> None:
    operator = object.__new__(triton_operator.TritonOperator)  # The constructor would ask for a device.
    memory = [allocate(spec, case.optimizer, torch.device("cpu")) for spec in case.tables]
    blocks = len(case.tables) * case.slices
    lookups = BAGS * len(case.tables)
    batch = Batch(
        table_of_block=tuple(range(len(case.tables))) * case.slices,
        bags_of_block=(BAGS // case.slices,) * blocks,
        lengths=torch.ones(lookups, dtype=torch.int32),
        values=torch.zeros(lookups, dtype=torch.int64),
        weights=torch.ones(lookups) if case.weighted else None,
        pooling=case.pooling,
        slice_of_block=tuple(block // len(case.tables) for block in range(blocks)) if case.slices > 1 else None,
    )
    gradient = torch.zeros(batch.output_size(case.tables))
    operator.lookup(memory, batch)
    if case.weighted:
        operator.weight_gradient(memory, batch, gradient)
    operator.sum_rows(memory, batch, gradient)
    operator.launch_update(
        memory,
        batch,
        gradient,
        kind=case.optimizer.kind,
        constants=case.optimizer.constants(step=1, rate=0.1),
        rounding=Rounding.STOCHASTIC,
        seed=0,
    )


def _fold() -> None:
    """One member per item, and runs of members with left matrices transposed."""
    numbers = torch.zeros(64, dtype=torch.int64)
    left, right = torch.zeros(10, 4, 16), torch.zeros(10, 16, 32)
    triton_products.fold_products(left, numbers, right, numbers, None)
    left = torch.zeros(10, 16, 4).transpose(1, 2)
    triton_products.fold_products(left, numbers, right, numbers, torch.tensor([0, 5, 64]))


def _attend() -> None:
    """SiLU with all biases and rules, softmax with none, and SiLU of bfloat16."""
    rows, sequences = 256, 2
    integers: dict[str, Any] = {"dtype": torch.int64}
    offsets, targets = torch.tensor([0, 100, rows]), torch.ones(sequences, **integers)
    times, boundaries = torch.zeros(rows, **integers), torch.arange(1, 40)
    position_bias, time_bias = torch.zeros(4, 200), torch.zeros(4, 40)
    operator = object.__new__(triton_attention.TritonAttention)  # The constructor would ask for a device.
    operator.device_type = "cuda"
    given: tuple[tuple[torch.dtype, str, tuple[Any, ...]], ...] = (
        (torch.float32, "silu", (position_bias, time_bias, offsets, targets, times, boundaries)),
        (torch.float32, "softmax", (None, None, offsets, None, None, None)),
        (torch.bfloat16, "silu", (None, None, offsets, targets, None, None)),
    )
    for dtype, activation, tensors in given:
        fields: list[Any] = [*tensors, activation, 0.125, 1.0, True, 0, None]
        call = AttentionCall(*fields)
        query = torch.zeros(rows, 4, 64, dtype=dtype)
        output, statistics = operator.attend(call, query, query, query)
        wants_bias = tensors[0] is not None
        operator.differentiate(call, query, query, query, output, statistics, wants_bias=wants_bias)


def _specialised(
    kernel: JITFunction[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], ASTSource, dict[str, Any]]:
    """What a launch tells the compiler, as a key and as its source."""
    named = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(kernel.params):
        value = named[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple(mangle_type(element) for element in value)
        else:
            signature[parameter.name] = mangle_type(value)
            if _is_known_to_be_aligned(parameter, value):
                known[(place,)] = [["tt.divisibility", 16]]
    options = {name: keywords[name] for name in OPTIONS if name in keywords}
    key = (kernel.__name__, *signature.items(), *constants.items(), *known, *options.items())
    return key, ASTSource(kernel, signature, constants, known), options


def _is_known_to_be_aligned(parameter: KernelParam, value: Any) -> bool:
    if isinstance(value, Tensor):
        # On a GPU all memory of torch begins at a multiple of 512 bytes.
        return not parameter.do_not_specialize_on_alignment
    return isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0


def _compiled(source: ASTSource, options: dict[str, Any], case: str) -> Compiled:
    made = triton.compile(source, target=TARGET, options=options)
    ptx = str(made.asm["ptx"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(TARGET.arch).path, "--verbose", f"--gpu-name={ARCHITECTURE}", path, "-o", "/dev/null"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    said = done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {said.strip()}")
    (registers,) = _REGISTERS.findall(said)
    ((stored, loaded),) = _SPILLS.findall(said)
    loads, stores = Counter[int](), Counter[int]()
    for kind, vector, bits in _ACCESS.findall(ptx):
        (loads if kind == "ld" else stores)[int(vector or 1) * int(bits) // 8] += 1
    inexact = set(_INEXACT.findall(ptx))
    # By the place of the parameter, as (place,).
    constants = {source.fn.arg_names[place]: value for (place,), value in source.constants.items()}
    if "HALF" in constants:
        inexact -= _FUSED
        if not constants["HALF"]:
            inexact |= set(_TENSOR_CORES.findall(ptx))
    return Compiled(
        kernel=source.fn.__name__,
        case=case,
        constants=constants,
        warps=made.metadata.num_warps,
        registers=int(registers),
        spill_bytes=int(stored) + int(loaded),
        shared_bytes=made.metadata.shared,
        loads=dict(sorted(loads.items())),
        stores=dict(sorted(stores.items())),
        inexact=sorted(inexact),
    )


def render(found: list[Compiled], console: Console) -> None:
    """Renders the result of `report` as a table."""
    table = Table("kernel", "case", "width", "warps", "registers", "spilled", "shared", "loads", "stores", box=None)
    for one in found:
        table.add_row(
            one.kernel.removesuffix("_kernel"),
            one.case,
            str(one.constants.get("WIDTH", "")),
            str(one.warps),
            str(one.registers),
            str(one.spill_bytes),
            str(one.shared_bytes),
            *(" ".join(f"{size}:{count}" for size, count in moved.items()) for moved in (one.loads, one.stores)),
        )
    console.print(table)
    console.print(f"{len(found)} compiled for {ARCHITECTURE}; loads and stores: bytes a thread moves:instructions")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the Triton kernels for an H100, which need not be present.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    parser.add_argument("--only", default="", metavar="BEGIN", help="cases whose names begin so, as hot")
    options = parser.parse_args()
    found = report(options.only)
    if options.json is not None:
        options.json.write_text(
            json.dumps(
                {
                    "triton": triton.__version__,
                    "torch": torch.__version__,
                    "architecture": ARCHITECTURE,
                    "kernels": [asdict(one) for one in found],
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
    render(found, Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False))


if __name__ == "__main__":
    main()
