# SPDX-License-Identifier: Apache-2.0
"""Pages of the programming interface: which modules they show. mkdocstrings reads the docstrings from the sources."""

from __future__ import annotations

import ast
from typing import Final

from sennit.testbed.site.repository import ROOT

# Package -> the modules that programs use. A room of `runtime/` lists its public names itself.
MODULES: Final = {
    "transport": ("communicator", "array_collectives", "config", "store", "errors", "counters", "codecs", "plan"),
    "runtime.backend": (),
    "runtime.sharded": (),
    "runtime.pipeline": (),
    "runtime.model": (),
    "runtime.data": (),
    "runtime.memory": (),
    "runtime.kernels": (),
    "runtime.training": (),
    "runtime.planner": ("cluster", "cost", "search", "plan_file", "roofline"),
    "offload": ("schema", "plan", "operators", "targets", "batches", "errors"),
    "ebpf": ("compiler", "loader", "maps", "arena", "links", "ringbuffer", "trial", "features"),
}


def public_names(package: str) -> dict[str, str]:
    """Name -> module, as the `__init__` of a room gives them to `exporter`; empty for other packages."""
    text = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
    tables = [ast.literal_eval(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict)]
    return tables[0] if tables else {}


def page(package: str) -> str:
    """The Markdown of the page of a package."""
    modules = MODULES[package] or sorted(f"{module}.{name}" for name, module in public_names(package).items())
    text = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
    parts = [f"# sennit.{package}", ast.get_docstring(ast.parse(text)) or ""]
    parts += [f"::: sennit.{package}.{name}" for name in modules]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The Markdown of the list of packages."""
    lines = ["# Programming interface", "", "What programs import, from the docstrings of the sources.", ""]
    for package in MODULES:
        text = (ROOT / package.replace(".", "/") / "__init__.py").read_text()
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"- [sennit.{package}]({package}.md): {first}")
    return "\n".join(lines) + "\n"
