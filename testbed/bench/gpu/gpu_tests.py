# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: the tests marked `gpu`. Outcomes are saved after each test."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sennit.testbed.bench.gpu.gpu import Settings
from sennit.transport.errors import Unsupported

PROCESSES: Final = 8
"""The most processes that run tests."""

MARK: Final = re.compile(r"pytest\.mark\.gpu\b")


class Outcomes:
    """A plugin of pytest that counts outcomes and keeps the text of failures."""

    def __init__(self, save: Callable[[dict[str, Any]], None]) -> None:
        self._save = save
        self.found: dict[str, Any] = {
            "counts": {"passed": 0, "failed": 0, "skipped": 0},
            "failed_tests": [],
            "failures": {},
            "reasons_to_skip": [],
            "seconds": 0.0,
        }

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test has a report for each of its phases. It passes or fails in its call, or fails before or after it."""
        self.found["seconds"] += report.duration
        if report.when == "call" or not report.passed:
            self._add(report)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is a failure, too."""
        if report.failed:
            self._add(report)

    def _add(self, report: Any) -> None:
        self.found["counts"][report.outcome] += 1
        if report.failed:
            self.found["failed_tests"].append(report.nodeid)
            self.found["failures"][report.nodeid] = report.longreprtext
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if reason not in self.found["reasons_to_skip"]:
                self.found["reasons_to_skip"].append(reason)
        self._save(self.found)


def root() -> Path | None:
    """The folder with the tests: that of the checkout, or what a bundle's `run.sh` made; None: there is none."""
    return next(
        (above for above in Path(__file__).resolve().parents if (above / "tests" / "conftest.py").exists()), None
    )


def run(_: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Runs the tests. Without a GPU all are skipped, which shows that they can be collected."""
    folder = root()
    if folder is None:
        raise Unsupported("tests", "this is no checkout of sennit, so there are none")
    if importlib.util.find_spec("pytest") is None:
        raise Unsupported("tests", "pytest is not installed")
    import pytest
    import torch

    os.chdir(folder)
    files = sorted(
        str(path) for path in (folder / "tests").rglob("test_*.py") if MARK.search(path.read_text(encoding="utf-8"))
    )
    outcomes = Outcomes(save)
    # What another torch warns of is no failure here.
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "gpu", "-W", "default", "-o", "faulthandler_timeout=0"]
    arguments.append("--continue-on-collection-errors")
    # Tests mostly start processes and compile kernels. So many of them share the GPU.
    if importlib.util.find_spec("xdist") is not None and torch.cuda.is_available():
        arguments += ["-n", str(max(1, min(PROCESSES, len(os.sched_getaffinity(0)) // 2)))]
    code = pytest.main([*arguments, *files], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not outcomes.found["failed_tests"]:
        raise RuntimeError(f"pytest ended with {code!r}")
    return outcomes.found
