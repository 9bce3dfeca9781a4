# SPDX-License-Identifier: Apache-2.0
"""No code reaches into a class, a module or a library from outside: what others use has a public name.

A name that begins with one underscore is private. A method may use private names of `self`, of `cls`, and of other
objects of its own class: parameters that are annotated with the class, and variables that it makes of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ebpf", "examples", "offload", "runtime", "sennit", "testbed", "transport")

# Files that use private names of others, with the reason.
ALLOWED = {
    "runtime/backend/torch_versions.py": "what torch does not promise to keep is used here alone",
}
# Names of the standard library that are public: of `os`, and of named tuples.
PUBLIC = {"_exit", "_asdict", "_fields", "_replace"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_objects(method: Function, owner: str) -> set[str]:
    """Returns the names in a method that stand for an object of the class `owner`, or for the class."""
    own = {owner}
    arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    own |= {one.arg for one in arguments if one.annotation is not None and annotates(one.annotation, owner)}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value.func
            if isinstance(made, ast.Attribute) and made.attr == "__new__":
                made = made.value
            if isinstance(made, ast.Name) and made.id in ("cls", owner):
                own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return own


def annotates(annotation: ast.expr, owner: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id in (owner, "Self") for part in ast.walk(annotation))


def uses(node: ast.AST, own: frozenset[str] = frozenset({"self", "cls"}), owner: str = "") -> Iterator[tuple[int, str]]:
    """Yields line and text of each private attribute of something else than the objects in `own`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from uses(child, own, child.name)
        elif isinstance(child, Function) and owner:
            yield from uses(child, own | own_objects(child, owner), owner)
        else:
            if isinstance(child, ast.Attribute) and is_private(child.attr):
                of = child.value
                is_super = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
                if not is_super and not (isinstance(of, ast.Name) and of.id in own):
                    yield child.lineno, ast.unparse(child)
            yield from uses(child, own, owner)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields private names that a file imports. Native extensions, which have a stub, are public modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for alias in node.names:
                name = ".".join([*module, alias.name])
                parts = name.split(".")
                stubs = [ROOT.joinpath(*parts[1:end], f"{part}.pyi") for end, part in enumerate(parts)]
                if any(is_private(part) and not stub.exists() for part, stub in zip(parts, stubs, strict=True)):
                    yield node.lineno, name


def found_in(tree: ast.AST) -> list[tuple[int, str]]:
    return [*uses(tree), *imports(tree)]


def test_private_names_are_used_where_they_are_defined() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): found_in(ast.parse(path.read_text())) for path in paths}
    assert len(found) > 500
    assert all(found.pop(path) for path in ALLOWED)
    assert [f"{path}:{line}: {text}" for path, places in found.items() for line, text in places] == []


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("def read(box): return box._value", True),
        ("class Other:\n    def read(self): return self.box._value", True),
        ("class Other:\n    def read(self, box: Box): return box._value", True),
        ("class Box:\n    def __eq__(self, other: Box): return self._value == other._value", False),
        ("class Box:\n    @classmethod\n    def made(cls):\n        one = cls()\n        one._value = 1", False),
        ("class Box:\n    def made(self):\n        def inner(): return self._value", False),
        ("class Large(Box):\n    def read(self): return super()._read()", False),
        ("import box\nbox._read()", True),
        ("from sennit.box import _read", True),
        ("from sennit.transport import _core", False),
        ("import torch\ntorch._C", True),
        ("from torch._C import engine", True),
        ("import torch._C", True),
        ("import os\nos._exit(1)", False),
    ],
)
def test_what_is_refused(text: str, is_refused: bool) -> None:
    assert bool(found_in(ast.parse(text))) == is_refused
