# SPDX-License-Identifier: Apache-2.0
"""Public names of a package, imported when they are first used.

A room's `__init__` lists what it exports. Loading all of it at once would import torch for `sennit --help`, and
rooms that use each other would import in circles.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType


def exporter(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__` (PEP 562). `names` maps each public name to the module of `package` that defines it.

    The function raises an AttributeError for any other name, and `import *` imports all of these. A module may be
    called as one of its names: `package.name` is what it defines, even after an import of the module by its path.
    """

    def get(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    # What `import *` takes.
    sys.modules[package].__all__ = list(names)  # type: ignore[attr-defined]
    namesakes = {name for name, module in names.items() if name == module}
    if namesakes:

        class Package(ModuleType):
            def __setattr__(self, name: str, value: object) -> None:
                if name in namesakes and isinstance(value, ModuleType):
                    # Set by the import of the module.
                    value = getattr(value, name)
                super().__setattr__(name, value)

        sys.modules[package].__class__ = Package
    return get
