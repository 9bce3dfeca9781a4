# SPDX-License-Identifier: Apache-2.0
"""`sennit bench gpu`: everything of sennit that needs a GPU, in one run of at most 8 minutes and one file of figures.

Parts run in order of their value. Each has a process of its own (`gpu_part`) in a session of its own, and a limit. At
its limit all its processes are killed. What it saved before stays, and so does what it printed. A part that cannot run
says why. One that fails takes no other with it.

With `interpreter` each part runs on the CPU, in Triton's interpreter and with small shapes. Nothing is timed then: it
shows that the program works before there is a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from sennit.command_line import json_text
from sennit.runtime.calibrate import machine

LIMITS_S: Final = {
    "machine": 10.0,
    "kernels": 90.0,
    "embedding": 90.0,
    "attention": 90.0,
    "staging": 60.0,
    "tests": 120.0,
    "training step": 60.0,
    "profile": 60.0,
    "compiler": 90.0,
}
"""The parts in their order, and what each may take. An import of torch, and the first use of a GPU, are in it."""

TOTAL_S: Final = 480.0
"""All parts together. The last ones get what is left."""

INTERPRETER_TIMES: Final = 10.0
"""Limits in the interpreter are so many times longer: it is slow, and so are machines that run it."""

PROGRAM: Final = (sys.executable, "-m", "sennit.testbed.bench.gpu.gpu_part")
SUMMARY: Final = "summary.md"
HOT: Final = "hot: "
"""The begin of the names of cases that `compiler` compiles, of shapes that users have most."""

_TAIL_BYTES: Final = 16_384


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run."""

    world: int = 2
    """Ranks of staging and of the training step, a power of two. They share GPUs if there are fewer."""

    rounds: int = 20
    """Timed turns of each operation; the median is reported."""

    seed: int = 1
    interpreter: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError unless the ranks can share the slices."""
        if self.world < 2 or self.world & (self.world - 1):
            raise ValueError(f"{self.world} ranks; allowed: 2, 4, 8 and so on")


def run(
    settings: Settings,
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    folder: Path | None = None,
    program: tuple[str, ...] = PROGRAM,
    limits_s: Mapping[str, float] = LIMITS_S,
    total_s: float = TOTAL_S,
) -> dict[str, Any]:
    """The whole report. `folder`: keeps the JSON and the output of each part, which are there as soon as it ends."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="sennit-bench-gpu-") as made:
            return run(settings, on_progress, folder=Path(made), program=program, limits_s=limits_s, total_s=total_s)
    folder = folder.resolve()  # Parts may work in other folders.
    times = INTERPRETER_TIMES if settings.interpreter else 1.0
    end_s = time.monotonic() + times * total_s
    parts: dict[str, dict[str, Any]] = {}
    for name, most_s in limits_s.items():
        limit_s = min(times * most_s, end_s - time.monotonic())
        if reason := parts.get("machine", {}).get("problems", {}).get(name):
            parts[name] = {"skipped": reason}
        elif limit_s < 1:
            parts[name] = {"skipped": f"nothing is left of {times * total_s:.0f} s"}
        else:
            on_progress(name)
            parts[name] = run_part(name, settings, folder, limit_s, program)
    about = parts.get("machine", {})
    return {
        "schema": 1,
        "settings": asdict(settings),
        "machine": machine.describe(),
        "gpus": about.get("gpus", []),
        "versions": about.get("versions", {}),
        "parts": parts,
    }


def run_part(
    name: str, settings: Settings, folder: Path, limit_s: float, program: tuple[str, ...] = PROGRAM
) -> dict[str, Any]:
    """What a part saved. `error`, and the end of its output, are added if it did not end by itself and in order."""
    path, log = (folder / f"{name.replace(' ', '-')}.{suffix}" for suffix in ("json", "log"))
    path.unlink(missing_ok=True)
    command = [*program, name, str(path), json.dumps(asdict(settings)), f"{limit_s:.1f}"]
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if settings.interpreter and name != "compiler":
        environment["TRITON_INTERPRET"] = "1"  # Triton reads it on import.
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            has_ended = _ends_within(process.pid, limit_s)
        finally:
            # Before it is waited for: until then its number is the group's, and nobody else's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    found: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not has_ended:
        found["error"] = f"killed at its limit, {limit_s:.0f} s"
    elif code != 0 or not found:
        found.setdefault(
            "error", f"signal {-code}" if code < 0 else f"exit code {code}, and it saved {len(found)} results"
        )
    if "error" in found:
        found["traceback"] = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    found["took_s"] = round(time.monotonic() - began_s, 1)
    path.write_text(json_text(found), encoding="utf-8")
    return found


def _ends_within(pid: int, limit_s: float) -> bool:
    """Whether a child of this process ends within the time. It is not reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def failures(report: Mapping[str, Any]) -> list[str]:
    """What went wrong, a line each: parts that failed, and tests."""
    parts = report["parts"]
    found = [f"{name}: {text}" for name, part in parts.items() for text in errors_of(part)]
    return found + [f"test {name}" for name in parts.get("tests", {}).get("failed_tests", [])]


def errors_of(part: Mapping[str, Any]) -> list[str]:
    """A line for each module of a part that failed, and for its end, if that was no end in order."""
    texts = [*([part["error"]] if "error" in part else []), *part.get("errors", {}).values()]
    return list(dict.fromkeys(one_line(text) for text in texts))


def render(report: Mapping[str, Any], console: Console) -> None:
    """A line for each figure."""
    table = Table("part", "what", "", box=None)
    for name, part in report["parts"].items():
        if "skipped" in part:
            table.add_row(name, "skipped", one_line(part["skipped"]))
        for text in errors_of(part):
            table.add_row(name, "error", text)
        if "counts" in part:
            text = ", ".join(f"{count} {outcome}" for outcome, count in part["counts"].items())
            table.add_row(name, f"marked gpu, in {part['seconds']:.0f} s", text)
        if "kernels" in part:
            table.add_row(name, f"kernels for {part['architecture']}", str(len(part["kernels"])))
        for one in part.get("results", []):
            table.add_row(name, one["name"], text_of(one))
    console.print(table)


def text_of(one: Mapping[str, Any]) -> str:
    """The figures of a result, with units."""
    time_ms = one.get("graph_ms", one.get("ms"))
    if time_ms is None:
        return str(one.get("absent", one.get("outcome", "ran")))
    text = f"{time_ms:.3f} ms"
    if "share_of_copy" in one:
        text += f", {one['share_of_copy']:.0%} of a copy"
    if "bytes_per_s" in one:
        text += f", {one['bytes_per_s'] / 1e9:.1f} GB/s"
    if "samples_per_s" in one:
        text += f", {one['samples_per_s']:,.0f} samples/s"
    if "fixed_over_dynamic" in one:
        text += f"; fixed / dynamic {one['fixed_over_dynamic']:.2f}"
    if "longest_over_median" in one:
        text += f"; the longest step {one['longest_over_median']:.1f} times the median"
    if "over_sennit" in one:
        text += f", {one['over_sennit']:.2f} times sennit's"
    if one.get("goal_ms") is not None:
        text += f"; FBGEMM on an H100 {one['goal_ms']:.3f} ms"
    return text


def one_line(text: str) -> str:
    """The first line. The whole text is in the part's file."""
    return text.strip().partition("\n")[0]
