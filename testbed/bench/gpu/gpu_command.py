# SPDX-License-Identifier: Apache-2.0
"""`sennit bench gpu`: the command line. It imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import fail, stdout_console, writable_folder
from sennit.testbed.bench.running import Figures, mistakes_told, need, progress, write


def gpu(
    world: Annotated[int, typer.Option(help="ranks of staging and training step; they may share a GPU", min=2)] = 2,
    rounds: Annotated[int, typer.Option(help="timed turns of each operation; the median is reported", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="seed of ids and weights", min=0)] = 1,
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="small shapes on the CPU in Triton's interpreter; nothing is timed")
    ] = False,
    report_folder: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="folder for summary.md, and for the JSON and the output of each part",
            callback=writable_folder,
        ),
    ] = None,
    json_path: Figures = None,
) -> None:
    """Run everything that needs a GPU: kernels, tests, copies and collectives, a training step, a profile.

    Takes 8 minutes at most. Needs a CUDA device, or --interpreter. A part that cannot run says why.
    """
    if not interpreter:
        need("gpu")
    from sennit.testbed.bench.gpu import gpu, gpu_summary

    with mistakes_told():
        settings = gpu.Settings(world=world, rounds=rounds, seed=seed, interpreter=interpreter)
    with progress() as update:
        report = gpu.run(settings, update, folder=report_folder)
    gpu.render(report, stdout_console())
    if report_folder is not None:
        (report_folder / gpu.SUMMARY).write_text(gpu_summary.page(report), encoding="utf-8")
    write(json_path, report)
    if wrong := gpu.failures(report):
        fail("; ".join(wrong))
