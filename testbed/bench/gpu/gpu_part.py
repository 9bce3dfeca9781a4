# SPDX-License-Identifier: Apache-2.0
"""The process of one part of `sennit bench gpu`.

`python -m sennit.testbed.bench.gpu.gpu_part NAME FILE SETTINGS LIMIT_S` starts it. It saves what it has whenever it has
more, so that nothing is lost when it is killed. Shortly before its limit it prints the stacks of all threads: they
tell where it hangs.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sennit.errors import Unsupported
from sennit.testbed.bench.gpu.gpu import Settings

MODULES: Final = {
    "machine": ("gpu_machine",),
    "kernels": ("gpu_kernels",),
    "embedding": ("gpu_embedding",),
    "staging": ("gpu_staging",),
    "tests": ("gpu_tests",),
    "training step": ("gpu_training", "gpu_step", "gpu_overlap"),
    "profile": ("gpu_profile",),
    "compiler": ("gpu_compiler",),
}
"""Modules of this folder, in turn. `run(settings)` of each returns results; if it takes `save`, it saves them, too."""

STACKS_BEFORE_S: Final = 2.0

Save = Callable[[dict[str, Any]], None]


def main(name: str, path: Path, settings: Settings, limit_s: float) -> None:
    """Runs a part and saves what came of it. Never raises for what the part does."""
    if limit_s > STACKS_BEFORE_S:
        faulthandler.dump_traceback_later(limit_s - STACKS_BEFORE_S)
    found: dict[str, Any] = {}

    def save(more: dict[str, Any]) -> None:
        """Saves `more` beside what modules have found that have ended."""
        write(path, merged(found, more))

    try:
        for module in MODULES[name]:
            more = importlib.import_module(f"sennit.testbed.bench.gpu.{module}").run(settings, save)
            found = merged(found, more)
            write(path, found)
    except (Unsupported, ModuleNotFoundError) as reason:
        _add(path, skipped=str(reason))
    except BaseException as error:  # The report shows every error.
        traceback.print_exc()  # Beside what else the part prints: all of it tells why.
        _add(path, error=f"{type(error).__name__}: {error}")
    faulthandler.cancel_dump_traceback_later()


def merged(found: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The fields of both. Their results become one list."""
    both = found | more
    if "results" in found:
        both["results"] = [*found["results"], *more.get("results", [])]
    return both


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes the file whole or not at all: the process may be killed at any time."""
    being_made = path.with_suffix(".part")
    being_made.write_text(json.dumps(found), encoding="utf-8")
    os.replace(being_made, path)


def _add(path: Path, **more: str) -> None:
    """Adds fields to what the part saved last."""
    write(path, (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | more)


if __name__ == "__main__":
    _, called, file, given, limit = sys.argv
    main(called, Path(file), Settings(**json.loads(given)), float(limit))
