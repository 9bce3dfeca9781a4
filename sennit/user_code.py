# SPDX-License-Identifier: Apache-2.0
"""Functions of the user's own that an option names as `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from sennit.errors import ConfigError
from sennit.known_names import hint


def is_name(name: str) -> bool:
    """Whether `name` is written as `package.module:function`. Imports nothing."""
    module_name, colon, path = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module_name.split("."), *path.split(".")))


def find(what: str, name: str) -> Any:
    """What `package.module:function` names. Imports the module. Raises ConfigError that says so of `what`, as "model".

    The working folder counts as a place of modules, as under `python -m`.
    """
    module_name, _, path = name.partition(":")
    found: Any = _import(what, name, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what} {name}: {module_name} has no {path}{hint(part, dir(found))}")
        found = getattr(found, part)
    return found


def check_arguments(what: str, name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raises ConfigError unless `function` can be called with these arguments, by place."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Not every callable written in C has one.
    try:
        signature.bind(*arguments)
    except TypeError as error:
        count = {1: "one", 2: "two", 3: "three"}[len(arguments)]
        raise ConfigError(
            f"{what} {name} has the arguments {signature}, but gets {count}, {', '.join(arguments)}: {error}"
        ) from None


def _import(what: str, name: str, module_name: str) -> Any:
    # `python -m` puts the folder there, too. It stays there: the module may import others later.
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    # A file that was written a moment ago may not be in the folder's listing that Python keeps.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # A script may end itself.
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            cause = f"there is no module {error.name} in {os.getcwd()} or among installed packages"
        raise ConfigError(f"{what} {name}: {module_name} cannot be imported: {cause}") from error
