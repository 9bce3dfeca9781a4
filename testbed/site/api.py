# SPDX-License-Identifier: Apache-2.0
"""Pages of the programming interface: which modules they show. mkdocstrings reads the docstrings from the sources."""

from __future__ import annotations

import ast
from typing import Final

from sennit.testbed.site.repository import ROOT

# Package -> the modules that programs use. A room of `runtime/` lists its public names itself.
MODULES: Final = {
    "transport": ("communicator", "array_collectives", "config", "errors", "counters", "codecs"),
    "transport.meeting": ("store",),
    "transport.plans": ("plan",),
    "runtime.backend": (),
    "runtime.sharded": (),
    "runtime.replicas": (),
    "runtime.checkpoint": (),
    "runtime.pipeline": (),
    "runtime.model": (),
    "runtime.data": (),
    "runtime.stream": (),
    "runtime.memory": (),
    "runtime.kernels": (),
    "runtime.training": (),
    "runtime.planner": ("cluster", "step_time", "search", "plan_file", "roofline"),
    "offload": ("schema", "plan", "operators", "targets", "batches", "errors"),
    "ebpf": ("compiler", "loader", "maps", "arena", "links", "ringbuffer", "trial", "kernel_features"),
}


def public_names(package: str) -> dict[str, str]:
    """Name -> module, as the `__init__` of a room gives them to `exporter`; empty for other packages."""
    tables = [ast.literal_eval(node) for node in ast.walk(_tree(package)) if isinstance(node, ast.Dict)]
    return tables[0] if tables else {}


def bases(package: str, name: str) -> list[str]:
    """module.class of the classes of the same package, not public themselves, that a public class builds on."""
    tree = _tree(package, public_names(package)[name])
    imported = {
        alias.name: node.module.removeprefix(f"sennit.{package}.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"sennit.{package}.")
        for alias in node.names
    }
    declared = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    names = [base.id for node in declared for base in node.bases if isinstance(base, ast.Name)]
    return [f"{imported[base]}.{base}" for base in names if base in imported and base not in public_names(package)]


def page(package: str) -> str:
    """The Markdown of the page of a package."""
    modules = list(MODULES[package])
    if not modules:
        names = public_names(package)
        modules = sorted(f"{module}.{name}" for name, module in names.items())
        modules += sorted({base for name in names for base in bases(package, name)})
    parts = [f"# sennit.{package}", _docstring(package)]
    parts += [f"::: sennit.{package}.{name}" for name in modules]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The Markdown of the list of packages."""
    lines = ["# Programming interface", "", "What programs import, from the docstrings of the sources.", ""]
    for package in MODULES:
        first = _docstring(package).partition("\n\n")[0].replace("\n", " ")
        lines.append(f"- [sennit.{package}]({package}.md): {first}")
    return "\n".join(lines) + "\n"


def _tree(package: str, module: str = "__init__") -> ast.Module:
    return ast.parse((ROOT / package.replace(".", "/") / f"{module}.py").read_text(encoding="utf-8"))


def _docstring(package: str) -> str:
    return ast.get_docstring(_tree(package)) or ""
