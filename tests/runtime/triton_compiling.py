# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for a GPU that need not be present: `python triton_compiling.py FOLDER` writes their PTX.

This is a separate program, because kernels that were imported for the interpreter cannot be compiled. The operator
runs as it is, on tensors of the CPU. Where it would launch a kernel, the kernel is compiled for an H100 instead.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelParam, mangle_type

import sennit.runtime.kernels.triton_tiles as triton_tiles
from sennit.runtime.kernels import triton_operator, triton_products
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.layout import allocate
from sennit.runtime.kernels.optimizers import Decay, Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Precision, Rounding, ShardSpec

H100 = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132
OPTIONS = ("num_warps", "enable_fp_fusion")


def attributes(parameter: KernelParam, value: Any) -> list[list[Any]]:
    """Returns what a launch tells the compiler about an argument: addresses and numbers divisible by 16."""
    is_known = isinstance(value, torch.Tensor) or (isinstance(value, int) and not parameter.do_not_specialize)
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return [["tt.divisibility", 16]] if is_known and number % 16 == 0 else []


def compiled(kernel: JITFunction[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """Returns the PTX of one launch."""
    named = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(kernel.params):
        value = named[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple(mangle_type(element) for element in value)
        else:
            signature[parameter.name] = mangle_type(value)
            if found := attributes(parameter, value):
                known[(place,)] = found
    source = ASTSource(kernel, signature, constants, known)
    options = {name: keywords[name] for name in OPTIONS if name in keywords}
    return str(triton.compile(source, target=H100, options=options).asm["ptx"])


class Compiler:
    """Takes a kernel's place. Compiles each launch once for each combination of constants, and writes the PTX."""

    def __init__(self, kernel: JITFunction[Any], folder: Path) -> None:
        self.kernel, self.folder = kernel, folder

    def __getitem__(self, grid: tuple[int, ...]) -> Compiler:
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        ptx = compiled(self.kernel, arguments, keywords)
        number = len(list(self.folder.glob(f"{self.kernel.__name__}-*.ptx")))
        (self.folder / f"{self.kernel.__name__}-{number}.ptx").write_text(ptx)


def cases() -> list[tuple[tuple[ShardSpec, ...], OptimizerSpec, Pooling, bool]]:
    """Returns cases with every optimizer, pooling and precision at least once. The first has the benchmark's shape."""

    def tables(*dims: int, precision: Precision = Precision.FP32) -> tuple[ShardSpec, ...]:
        return tuple(ShardSpec(name=str(dim), row_count=1000, dim=dim, precision=precision) for dim in dims)

    mixed = (*tables(20), *tables(64, precision=Precision.FP16), *tables(7, precision=Precision.BF16))
    decayed = {"weight_decay": 0.1, "max_gradient": 1.0, "max_gradient_norm": 1.0}
    return [
        (tables(128), OptimizerSpec(kind=Optimizer.SGD), Pooling.NONE, False),
        (tables(128), OptimizerSpec(kind=Optimizer.ADAM), Pooling.SUM, True),
        (mixed, OptimizerSpec(kind=Optimizer.ROW_WISE_ADAGRAD, decay=Decay.DECOUPLED, **decayed), Pooling.MEAN, False),
        (mixed, OptimizerSpec(kind=Optimizer.ADAGRAD, decay=Decay.L2, **decayed), Pooling.SUM, False),
        (tables(4096), OptimizerSpec(kind=Optimizer.PARTIAL_ROW_WISE_ADAM), Pooling.SUM, False),
        (mixed, OptimizerSpec(kind=Optimizer.LAMB, decay=Decay.DECOUPLED, **decayed), Pooling.SUM, False),
    ]


def fold() -> None:
    """Runs the folds of tensor-train tables: one member per item, and runs of members, left matrices transposed."""
    numbers = torch.zeros(64, dtype=torch.int64)
    left, right = torch.zeros(10, 4, 16), torch.zeros(10, 16, 32)
    triton_products.fold_products(left, numbers, right, numbers, None)
    left = torch.zeros(10, 16, 4).transpose(1, 2)
    triton_products.fold_products(left, numbers, right, numbers, torch.tensor([0, 5, 64]))


def main(folder: Path) -> None:
    for module in (triton_operator, triton_products):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, Compiler(value, folder))
    for name in ("empty", "empty_like"):  # Nothing writes what the kernels would.
        setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
    fold()
    triton_tiles.tiles_for = lambda width, device: triton_tiles.tiles_of_gpu(width, MULTIPROCESSORS)
    operator = object.__new__(triton_operator.TritonOperator)  # The constructor would ask for a device.
    for specs, optimizer, pooling, weighted in cases():
        memory = [allocate(spec, optimizer, torch.device("cpu")) for spec in specs]
        lookups = 1024 * len(specs)
        batch = Batch(
            table_of_block=tuple(range(len(specs))),
            bags_of_block=(1024,) * len(specs),
            lengths=torch.ones(lookups, dtype=torch.int32),
            values=torch.zeros(lookups, dtype=torch.int64),
            weights=torch.ones(lookups) if weighted else None,
            pooling=pooling,
        )
        gradient = torch.zeros(batch.output_size(specs))
        operator.lookup(memory, batch)
        if weighted:
            operator.weight_gradient(memory, batch, gradient)
        of_slices = dataclasses.replace(batch, slice_of_block=tuple(range(len(specs))))
        for each in (batch, of_slices) if pooling is Pooling.MEAN else (batch,):
            operator.launch_update(
                memory,
                each,
                gradient,
                kind=optimizer.kind,
                constants=optimizer.constants(step=1, rate=0.1),
                rounding=Rounding.STOCHASTIC,
                seed=0,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
