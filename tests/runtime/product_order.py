# SPDX-License-Identifier: Apache-2.0
# Kernels are in Triton's language, whose tensors have no types:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Compiles a product of tiles for an H100, and prints the order in which it adds up: for each sum its indices, as JSON.

The operands lie in shared memory, 16 numbers a row. So the address of what a multiply-add takes tells its index.
"""

from __future__ import annotations

import json
import re

import triton
import triton.language as tl
from triton.compiler import ASTSource

from sennit.runtime.kernels.triton_fused import products
from sennit.runtime.kernels.triton_report import TARGET

LOAD = re.compile(r"ld\.shared(?:\.v\d)?\.b32\s+([^\[]+),\s*\[(%r\w+)(?:\+(\d+))?\]")
ROW_BYTES = 64


@triton.jit
def product_kernel(left, right, sums):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = i * 16 + j
    tl.store(sums + at, products(tl.load(left + at), tl.load(right + at), tl.load(sums + at)))


def main() -> None:
    pointers = {name: "*fp32" for name in ("left", "right", "sums")}
    options = {"num_warps": 1, "enable_fp_fusion": False}
    ptx = str(triton.compile(ASTSource(product_kernel, pointers, {}), target=TARGET, options=options).asm["ptx"])
    lines = ptx.splitlines()
    places: dict[str, int] = {}
    for line in lines:
        if found := LOAD.search(line):
            for number, register in enumerate(re.findall(r"%[rf]\w+", found[1])):
                places[register] = int(found[3] or 0) + 4 * number
    fused = {one[0]: one for one in (re.findall(r"%[rf]\w+", line) for line in lines if "fma.rn.f32" in line)}
    orders = []
    for last in set(fused) - {one[3] for one in fused.values()}:
        order: list[tuple[int, int]] = []
        register = last
        while register in fused:
            _, left, right, register = fused[register]
            # The column of the left operand, and the row of the right one.
            order.insert(0, (places[left] % ROW_BYTES // 4, places[right] % (16 * ROW_BYTES) // ROW_BYTES))
        orders.append(order)
    print(json.dumps({"orders": orders, "others": len(re.findall(r"\b(?:mul|add)\.(?:rn\.)?f32", ptx))}))


if __name__ == "__main__":
    main()
