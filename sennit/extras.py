# SPDX-License-Identifier: Apache-2.0
"""Which command installs what is missing: the optional packages belong to extras of sennit (pyproject.toml)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Final

PROJECT: Final = "sennit"
# Modules whose distribution has another name; every other optional package is called as its module is.
DISTRIBUTIONS: Final = {
    "elftools": "pyelftools",
    "fbgemm_gpu": "fbgemm-gpu-cpu",
    "opentelemetry": "opentelemetry-sdk",
}
# These are for work on sennit itself.
NOT_OFFERED: Final = frozenset({"dev", "docs", "frameworks"})


def install_command(distribution: str) -> str | None:
    """The command that installs a distribution for sennit; None for one that sennit does not know."""
    if distribution == "torch":
        return _torch_command()
    extra = extras_by_distribution().get(_normal(distribution))
    return f"pip install '{PROJECT}[{extra}]'" if extra else None


def explain(error: ModuleNotFoundError) -> str | None:
    """What to install after a failed import, in one line; None if what is missing is not an optional package."""
    module = (error.name or "").partition(".")[0]
    distribution = DISTRIBUTIONS.get(module, module)
    command = install_command(distribution)
    return f"{distribution} is not installed: {command}" if command else None


def extras_by_distribution() -> dict[str, str]:
    """For each optional distribution, the first extra that has it."""
    found: dict[str, str] = {}
    for text in _requirements():
        requirement = re.match(r"([A-Za-z0-9._-]+).*;.*\bextra *== *['\"]([\w-]+)['\"]", text)
        if requirement and requirement[2] not in NOT_OFFERED:
            found.setdefault(_normal(requirement[1]), requirement[2])
    return found


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return []


def torch_of_extension() -> str | None:
    """The torch that the backend's extension was built for, as 2.13.0+cpu; None if it was not built.

    The extension fits no other (docs/decisions/0001). Neither torch nor the extension is loaded.
    """
    backend = importlib.util.find_spec("sennit.runtime.backend")
    for folder in (backend.submodule_search_locations or ()) if backend else ():
        record = Path(folder) / "build_info.json"
        if record.exists():
            return str(json.loads(record.read_text())["torch"])
    return None


def _torch_command() -> str:
    version, _, _ = (torch_of_extension() or "").partition("+")
    return f"pip install torch=={version}" if version else "pip install torch, then build sennit again"


def _normal(distribution: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
