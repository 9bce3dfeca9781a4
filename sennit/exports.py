# SPDX-License-Identifier: Apache-2.0
"""Public names of a package, imported when they are first used.

A room's `__init__` lists what it exports. Loading all of it at once would import torch for `sennit --help`, and
rooms that use each other would import in circles.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def exporter(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__` (PEP 562). `names` maps each public name to the module of `package` that defines it.

    The function raises an AttributeError for any other name.
    """

    def get(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{names[name]}")
        # All names of the module, because the import has set its own name, which one of them may have, too.
        for other, file in names.items():
            if file == names[name]:
                setattr(sys.modules[package], other, getattr(module, other))
        value: object = getattr(module, name)
        return value

    return get
