# SPDX-License-Identifier: Apache-2.0
"""`sennit bench gpu`: everything of sennit that needs a GPU, in one run and one file of figures.

Four parts: the tests marked `gpu`; embedding lookups and updates beside FBGEMM's published times and a copy; staging,
which is copies between host and device and collectives on device memory; a training step with tables on the device.
A part that cannot run says why. One that fails takes no other with it.

With `interpreter` each part runs on the CPU, in Triton's interpreter and with small shapes. Nothing is timed then: it
shows that the program works before there is a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from sennit.testbed.bench import machine
from sennit.transport.errors import Unsupported

TESTS_TIMEOUT_S: Final = 3_600.0
_ROOT: Final = Path(__file__).resolve().parents[2]
_MARK: Final = re.compile(r"pytest\.mark\.gpu\b")


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


def run(settings: Settings, on_progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The whole report. With `interpreter`, Triton must not have been imported for a GPU."""
    if settings.interpreter:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it on import. Ranks and tests inherit it.
    parts = {"tests": _tests, "embedding": _embedding, "staging": _staging, "training step": _training_step}
    found: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        on_progress(name)
        try:
            found[name] = part(settings)
        except (Unsupported, ModuleNotFoundError) as reason:
            found[name] = {"skipped": str(reason)}
        except Exception as error:  # Whatever it is, the other parts are worth having.
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return {
        "schema": 1,
        "settings": asdict(settings),
        "machine": machine.describe(),
        "gpus": [] if settings.interpreter else _gpus(),
        "versions": _versions(),
        "parts": found,
    }


def failures(report: Mapping[str, Any]) -> list[str]:
    """What went wrong, a line each: parts that failed, and tests."""
    parts = report["parts"]
    found = [f"{name}: {part['error']}" for name, part in parts.items() if "error" in part]
    return found + [f"test {name}" for name in parts["tests"].get("failed_tests", [])]


def render(report: Mapping[str, Any], console: Console) -> None:
    """A line for each figure."""
    table = Table("part", "what", "", box=None)
    for name, part in report["parts"].items():
        for key in ("skipped", "error"):
            if key in part:
                table.add_row(name, key, part[key])
    tests = report["parts"]["tests"]
    if "counts" in tests:
        text = ", ".join(f"{count} {outcome}" for outcome, count in tests["counts"].items())
        table.add_row("tests", f"marked gpu, in {tests['seconds']:.0f} s", text)
    for name in ("embedding", "staging", "training step"):
        for one in report["parts"][name].get("results", []):
            table.add_row(name, one["name"], _text(one))
    console.print(table)


def _text(one: Mapping[str, Any]) -> str:
    time = one.get("graph_ms", one.get("ms"))
    if time is None:
        return str(one.get("absent", "ran"))
    text = f"{time:.3f} ms"
    if "share_of_copy" in one:
        text += f", {one['share_of_copy']:.0%} of a copy"
    if "bytes_per_s" in one:
        text += f", {one['bytes_per_s'] / 1e9:.1f} GB/s"
    if "samples_per_s" in one:
        text += f", {one['samples_per_s']:,.0f} samples/s"
    if "goal_ms" in one:
        text += f"; FBGEMM on an H100 {one['goal_ms']:.3f} ms"
    return text


def _gpus() -> list[dict[str, Any]]:
    about = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {"name": one.name, "memory_bytes": one.total_memory, "multiprocessors": one.multi_processor_count}
        for one in about
    ]


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": None, "nccl": None}
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = importlib.metadata.version("triton")
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _tests(settings: Settings) -> dict[str, Any]:
    """Counts of the tests marked `gpu`. Without a GPU they are skipped, which shows that they can be collected."""
    tests = _ROOT / "tests"
    if not tests.is_dir():
        raise Unsupported("tests", "this is no checkout of sennit, so there are none")
    if importlib.util.find_spec("pytest") is None:
        raise Unsupported("tests", "pytest is not installed")
    files = sorted(str(path) for path in tests.rglob("test_*.py") if _MARK.search(path.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={results}"]
        done = subprocess.run(
            [*command, *files], cwd=_ROOT, timeout=TESTS_TIMEOUT_S, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        return _counts(ElementTree.parse(results).getroot())


def _counts(results: ElementTree.Element) -> dict[str, Any]:
    """Counts from a JUnit file."""
    outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    reasons, seconds = set(), 0.0
    for case in results.iter("testcase"):
        kinds = {child.tag: child for child in case}
        outcome = "failed" if kinds.keys() & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[outcome].append(f"{case.get('classname')}::{case.get('name')}")
        seconds += float(case.get("time", 0))
        if outcome == "skipped":
            reasons.add(kinds["skipped"].get("message", ""))
    return {
        "counts": {outcome: len(names) for outcome, names in outcomes.items()},
        "failed_tests": outcomes["failed"],
        "reasons_to_skip": sorted(reasons),
        "seconds": seconds,
    }


def _embedding(settings: Settings) -> dict[str, Any]:
    from sennit.testbed.bench import embedding_cuda

    if settings.interpreter:
        return embedding_cuda.run(rounds=1, seed=settings.seed, device="cpu", lookups=200, rows=50, dim=16)
    return embedding_cuda.run(rounds=settings.rounds, seed=settings.seed)


def _staging(settings: Settings) -> dict[str, Any]:
    from sennit.testbed.bench import gpu_staging

    return gpu_staging.run(settings)


def _training_step(settings: Settings) -> dict[str, Any]:
    from sennit.testbed.bench import gpu_step

    return gpu_step.run(settings)
