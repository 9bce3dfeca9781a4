# SPDX-License-Identifier: Apache-2.0
"""Says why the native core cannot be loaded, and what to do. The first call that needs it asks."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
from pathlib import Path

from sennit.errors import Unsupported

CORE = "sennit.transport._core"


@functools.cache
def require_core() -> None:
    """Loads the native core. Raises Unsupported, which says what is missing and what to do."""
    try:
        importlib.import_module(CORE)
    except ImportError as error:
        raise Unsupported("core", explain(error)) from error


def explain(error: ImportError) -> str:
    """Why the core could not be imported, in one line, with what to do."""
    from sennit import extras, surroundings

    again = extras.in_checkout("build", "pip install --force-reinstall sennit")
    # glibc, dl_iterate: "version `GLIBC_2.34' not found", also for libstdc++'s GLIBCXX.
    if "' not found (required by" in str(error):
        return f"{error}: {surroundings.libraries().what}; {surroundings.NEWER}"
    others = [path.name for folder in _folders() for path in sorted(folder.glob("_core.*.so"))]
    if isinstance(error, ModuleNotFoundError):
        here = importlib.machinery.EXTENSION_SUFFIXES[0]
        what = f"there is {', '.join(others)}, and this Python takes _core{here}" if others else "it is not installed"
        return f"the native core is missing: {what}; {again}"
    return f"{error}; {again}"


def _folders() -> list[Path]:
    found = importlib.util.find_spec("sennit.transport")
    return [Path(place) for place in (found.submodule_search_locations or ())] if found else []
