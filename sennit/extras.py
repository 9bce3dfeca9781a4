# SPDX-License-Identifier: Apache-2.0
"""Which command installs what is missing: the optional packages belong to extras of sennit (pyproject.toml)."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Final

PROJECT: Final = "sennit"
# Modules whose distribution has another name; every other optional package is called as its module is.
DISTRIBUTIONS: Final = {
    "elftools": "pyelftools",
    "fbgemm_gpu": "fbgemm-gpu-cpu",
    "google": "protobuf",  # google.protobuf
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
}
# Extras that only work on sennit itself needs.
NOT_OFFERED: Final = frozenset({"dev", "docs", "frameworks"})


def in_checkout(target: str, otherwise: str) -> str:
    """`make TARGET` where there is a Makefile, else what a user of the wheels does."""
    return f"make {target}" if from_checkout() else otherwise


def install_command(distribution: str) -> str | None:
    """The command that installs a distribution for sennit; None for one that sennit does not know."""
    if distribution == "torch":
        # The extension requires the torch that it fits (docs/decisions/0059).
        return in_checkout("build", "pip install sennit-torch")
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


def from_checkout() -> bool:
    """Whether sennit is used from its sources, where `make build` brings what is missing."""
    return (Path(__file__).parents[1] / "pyproject.toml").exists()


def _normal(distribution: str) -> str:
    """The normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
