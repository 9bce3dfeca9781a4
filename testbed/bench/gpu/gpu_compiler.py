# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: what the compiler makes of the Triton kernels (`triton_report`). It needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from sennit.runtime.kernels import triton_report
from sennit.testbed.bench.gpu.gpu import Settings

ONE_CASE: Final = "hot: sequences"
"""The case of runs in the interpreter: it compiles most of the kernels, in seconds."""


def run(settings: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The printed table is in the part's output. Raises RuntimeError if a kernel is inexact."""
    compiled: list[triton_report.Compiled] = []
    found: dict[str, Any] = {"architecture": triton_report.ARCHITECTURE, "kernels": []}

    def on_compiled(one: triton_report.Compiled) -> None:
        compiled.append(one)
        found["kernels"].append(asdict(one))
        save(found)

    triton_report.report(ONE_CASE if settings.interpreter else "", on_compiled)
    triton_report.render(compiled, Console(width=160, markup=False, highlight=False))
    if wrong := problems(found["kernels"]):
        raise RuntimeError("; ".join(wrong))
    return found


def problems(kernels: Iterable[Mapping[str, Any]]) -> list[str]:
    """Kernels that do not round as IEEE 754 says. (What spills is slow, not wrong: `gpu_summary`.)"""
    return [f"{one['kernel']} ({one['case']}) has {', '.join(one['inexact'])}" for one in kernels if one["inexact"]]
