# SPDX-License-Identifier: Apache-2.0
"""The process of one part of `sennit bench gpu`.

`python -m sennit.testbed.bench.gpu.gpu_part NAME FILE SETTINGS LIMIT_S` starts it. It saves what it has whenever it has
more, so that nothing is lost when it is killed. Its modules run one after the other, also after one that failed.
Shortly before its limit it prints the stacks of all threads: they tell where it hangs.
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

from sennit.command_line import json_text
from sennit.errors import Unsupported
from sennit.testbed.bench.gpu.gpu import Settings

MODULES: Final = {
    "machine": ("gpu_machine",),
    "kernels": ("gpu_kernels",),
    "embedding": ("gpu_embedding",),
    "attention": ("gpu_attention",),
    "staging": ("gpu_staging",),
    "tests": ("gpu_tests",),
    "training step": ("gpu_training", "gpu_step", "gpu_overlap", "gpu_dynamic"),
    "profile": ("gpu_profile",),
    "compiler": ("gpu_compiler",),
}
"""Modules of this folder, in turn. `run(settings, save)` of each returns results, and may save them before."""

STACKS_BEFORE_S: Final = 2.0

Save = Callable[[dict[str, Any]], None]


def main(name: str, path: Path, settings: Settings, limit_s: float) -> None:
    """Runs a part and saves what came of it. Never raises for what the part does.

    `errors`: of each module that failed, its first one as `error`. `skipped`: why the first module that cannot run here
    does not.
    """
    if limit_s > STACKS_BEFORE_S:
        faulthandler.dump_traceback_later(limit_s - STACKS_BEFORE_S)
    found: dict[str, Any] = {}
    for module in MODULES[name]:
        found = _after(module, found, path, settings)
        write(path, found)
    faulthandler.cancel_dump_traceback_later()


def _after(module: str, found: dict[str, Any], path: Path, settings: Settings) -> dict[str, Any]:
    """What the part has found once this module has ended. `found`: by the modules before it."""
    latest: dict[str, Any] = {}

    def save(more: dict[str, Any]) -> None:
        nonlocal latest
        latest = more
        write(path, merged(found, more))

    try:
        return merged(found, importlib.import_module(f"sennit.testbed.bench.gpu.{module}").run(settings, save))
    except (Unsupported, ModuleNotFoundError) as reason:
        return {"skipped": str(reason)} | merged(found, latest)
    except BaseException as error:  # The report shows every error.
        traceback.print_exc()  # Beside what else the part prints: all of it tells why.
        text = f"{type(error).__name__}: {error}"
        errors = {**found.get("errors", {}), module: text}
        return {"error": text} | merged(found, latest) | {"errors": errors}


def merged(found: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The fields of both. Their results become one list."""
    both = found | more
    if "results" in found:
        both["results"] = [*found["results"], *more.get("results", [])]
    return both


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes the file whole or not at all: the process may be killed at any time."""
    being_made = path.with_suffix(".part")
    being_made.write_text(json_text(found), encoding="utf-8")
    os.replace(being_made, path)


if __name__ == "__main__":
    _, called, file, given, limit = sys.argv
    main(called, Path(file), Settings(**json.loads(given)), float(limit))
