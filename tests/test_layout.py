# SPDX-License-Identifier: Apache-2.0
"""The layout that docs/architecture.md promises: who imports whom, names, links, documented variables."""

import ast
import builtins
import functools
import graphlib
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sennit.testbed import import_graph

ROOT = Path(__file__).resolve().parents[1]
# Folder -> the other folders whose modules it may import.
MAY_IMPORT = {
    "ebpf": set[str](),
    "offload": {"ebpf"},
    "transport": set[str](),
    "runtime": {"ebpf", "offload", "transport"},
    "testbed": {"ebpf", "offload", "transport", "runtime"},
    "sennit": {"ebpf", "offload", "transport", "runtime"},
}
# The command line alone joins the testbed to the product: it has the commands of both.
COMMAND_LINE = ROOT / "sennit" / "commands" / "cli.py"
# transport/csrc, bottom up. A file may include files of its own folder and of lower layers. Folders of one layer do not
# know each other. `sennit` is the C interface (include/sennit).
CORE_LAYERS = (
    {"sennit"},  # include/: what other native code may use, too
    {"wire", "trace", "telemetry", "memory"},
    {"codec", "reduce", "flow"},
    {"aggregation", "messages"},
    {"ports"},
    {"executor"},
    {"bindings"},
)
SOURCE_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".h", ".c", ".sh"}


def sources(*suffixes: str) -> Iterator[Path]:
    for folder in [*MAY_IMPORT, "examples", "tests", "tools"]:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (suffixes or SOURCE_SUFFIXES) and "__pycache__" not in path.parts:
                yield path


@pytest.fixture(scope="module", autouse=True)
def sources_are_parsed_once() -> Iterator[None]:
    yield
    nodes.cache_clear()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """What the tests below look at in a file of Python: imports, classes and calls."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef | ast.Call
    return tuple(node for node in ast.walk(tree) if isinstance(node, kinds))


def imported_modules(path: Path) -> Iterator[str]:
    """Yields absolute names of all modules that a file imports, also inside functions."""
    package = ["sennit", *path.relative_to(ROOT).parent.parts]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        allowed = MAY_IMPORT[folder] | ({"testbed"} if path == COMMAND_LINE else set())
        for module in imported_modules(path):
            first, _, rest = module.partition(".")
            assert first not in MAY_IMPORT or first == "sennit", f"{path}: import {module} as sennit.{module}"
            target = rest.partition(".")[0]
            if first == "sennit" and target in MAY_IMPORT and target != folder:
                assert target in allowed, f"{path}: {folder} may not import {module}"


# The rooms of `runtime/`, bottom up. A room may import rooms of lower layers.
ROOM_LAYERS = (
    {"aggregate", "backend", "kernels", "telemetry"},
    {"data", "memory", "trace"},
    {"sharded", "stream"},
    {"checkpoint", "ingest", "model", "replicas", "timeline"},
    {"pipeline"},
    {"planner"},
    {"calibrate", "training"},
)


def test_rooms_of_the_runtime_import_only_lower_ones() -> None:
    rooms = {path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")}
    assert rooms == set().union(*ROOM_LAYERS)
    layer_of = {room: number for number, layer in enumerate(ROOM_LAYERS) for room in layer}
    for path in (ROOT / "runtime").glob("*/**/*.py"):
        own = path.relative_to(ROOT / "runtime").parts[0]
        for module in imported_modules(path):
            room = module.removeprefix("sennit.runtime.").partition(".")[0]
            if module.startswith("sennit.runtime.") and room in rooms and room != own:
                assert layer_of[room] < layer_of[own], f"{path}: {own} may not import {module}"


def test_no_circle_of_files() -> None:
    """Counts imports inside functions and for types alone, too: they hide circles from Python, not from readers."""
    assert set(graphlib.TopologicalSorter(import_graph.file_edges()).static_order())


def test_no_circle_of_folders() -> None:
    assert set(graphlib.TopologicalSorter(import_graph.folder_edges()).static_order())


# Files of `sennit/` that every folder may use.
SHARED = {
    "cache", "closing", "command_line", "debian", "errors", "exports", "extras", "fitting_console", "known_names",
    "options", "thread_names", "user_code",
}  # fmt: skip


def test_what_all_folders_share_imports_none_of_them() -> None:
    for name in SHARED:
        for module in imported_modules(ROOT / "sennit" / f"{name}.py"):
            assert not module.startswith("sennit.") or module.split(".")[1] in SHARED, f"{name}: {module}"


@pytest.mark.parametrize("room", sorted(path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")))
def test_public_names_of_a_room_are_what_type_checkers_see(room: str) -> None:
    """Each name occurs twice: in an import for type checkers, and in the table of `exporter` for run time."""
    path = ROOT / "runtime" / room / "__init__.py"
    seen = {
        alias.asname: (node.module or "").removeprefix(f"sennit.runtime.{room}.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sennit.runtime.")
        for alias in node.names
    }
    tables = [ast.literal_eval(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Dict)]
    assert seen == (tables[0] if tables else {})
    for name, module in seen.items():
        defined = (ROOT / "runtime" / room / f"{module}.py").read_text()
        assert re.search(rf"^(class |def |{name}\b)", defined, re.M), f"{module} has no {name}"


def quoted_includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def test_includes_of_the_core_run_bottom_up() -> None:
    core = ROOT / "transport" / "csrc"
    layer_of = {folder: level for level, layer in enumerate(CORE_LAYERS) for folder in layer}
    files = [path for path in core.rglob("*.?pp") if path.relative_to(core).parts[0] not in ("tests", "include")]
    folders = {path.relative_to(core).parts[0] for path in files} | {"sennit"}
    assert folders == layer_of.keys(), f"CORE_LAYERS has no place for {folders ^ layer_of.keys()}"
    for path in files:
        folder = path.relative_to(core).parts[0]
        for include in quoted_includes(path):
            if include.startswith("../../../ebpf/include/"):  # bytes that BPF programs share (decision 0076)
                continue
            target = include.partition("/")[0]
            assert target in layer_of, f"{path} includes {include}: name it from transport/csrc"
            assert target == folder or layer_of[target] < layer_of[folder], (
                f"{path}: {folder} may not include {include}"
            )


def test_files_of_the_core_do_not_include_each_other_in_a_circle() -> None:
    core = ROOT / "transport" / "csrc"
    headers = {str(path.relative_to(core)): quoted_includes(path) for path in core.rglob("*.hpp")}
    sorted_headers = graphlib.TopologicalSorter(headers).static_order()
    assert set(sorted_headers) >= headers.keys()


def test_other_native_code_sees_the_core_through_its_c_interface() -> None:
    """The testbed is the exception: its simulators and benchmarks drive flows and sockets themselves."""
    folders = {path.name for path in (ROOT / "transport" / "csrc").iterdir() if path.is_dir()}
    for path in sources(".cpp", ".hpp"):
        owner = path.relative_to(ROOT).parts[0]
        if owner not in ("transport", "testbed"):
            for include in quoted_includes(path):
                assert include == "sennit/core.h" or include.partition("/")[0] not in folders, f"{path}: {include}"


def test_links_for_type_checkers_match_the_table() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    expected = {name: f"../../{folder}" for name, folder in table.items() if name != "sennit"}
    expected["sennit/__init__.py"] = "../../sennit/__init__.py"
    assert {f"sennit/{link.name}": os.readlink(link) for link in (ROOT / ".types" / "sennit").iterdir()} == expected


def test_nothing_requires_torch() -> None:
    """docs/decisions/0001: a requirement would let an installer replace the torch that the extension fits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    assert not [requirement for requirement in required if re.match(r"torch\b", requirement)]


def test_every_folder_is_typed() -> None:
    for folder in MAY_IMPORT:
        assert (ROOT / folder / "py.typed").exists()


def test_every_source_names_its_licence() -> None:
    for path in [*sources(), *ROOT.rglob("CMakeLists.txt")]:
        if {"build", ".venv"} & set(path.relative_to(ROOT).parts):
            continue
        head = path.read_text().splitlines()[:2]
        assert any("SPDX-License-Identifier: Apache-2.0" in line for line in head), f"{path} has no SPDX line"


def test_no_catch_all_modules() -> None:
    for path in sources():
        assert path.stem not in {"utils", "util", "helpers", "common", "misc"}, path


def test_environment_variables_are_read_in_one_file_and_documented() -> None:
    config = ROOT / "transport" / "config.py"
    read = set(re.findall(r"SENNIT_[A-Z][A-Z_]*", config.read_text()))
    assert read, "config.py reads no variable"
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    undocumented = {name for name in read if not re.search(rf"\b{name}\b", pages)}
    assert not undocumented, f"mentioned in no page of docs: {sorted(undocumented)}"
    for path in sources(".py", ".cpp", ".hpp"):
        if path == config or "tests" in path.relative_to(ROOT).parts:
            continue
        found = re.findall(r"""(?:environ|getenv)\W[^\n]*["'](SENNIT_[A-Z_]+)""", path.read_text())
        assert not found, f"{path} reads {found}; only {config} reads SENNIT_* variables"


@pytest.mark.parametrize("folder", [ROOT, Path("/")])
def test_import_is_cheap_and_finds_its_parts_from_any_folder(folder: Path) -> None:
    """The repository has a folder `sennit`. Even there, Python must find the installed package."""
    program = (
        "import sys, sennit, sennit.transport.errors, sennit.testbed, sennit.runtime.data, sennit.runtime.training\n"
        "import sennit.runtime.data.source\n"
        "heavy = {'torch', 'numpy', 'typer', 'sennit.transport._core'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=60)


def test_nothing_beside_the_clone_can_be_imported() -> None:
    """Otherwise a folder called `triton` next to the clone would take the place of torch's triton."""
    assert str(ROOT.parent) not in sys.path


def test_there_is_one_tree_of_errors() -> None:
    """Every exception of the product derives from `SennitError`, so one `except` catches all of them."""
    roots = {"SennitError"}
    declared: dict[str, set[str]] = {}
    for folder in MAY_IMPORT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    declared.setdefault(node.name, set()).update(
                        base.id if isinstance(base, ast.Name) else base.attr
                        for base in node.bases
                        if isinstance(base, ast.Name | ast.Attribute)
                    )

    def reaches(name: str, wanted: Callable[[str], bool], above: frozenset[str] = frozenset()) -> bool:
        if wanted(name):
            return True
        return any(reaches(base, wanted, above | {name}) for base in declared.get(name, ()) if base not in above)

    def is_builtin_error(name: str) -> bool:
        kind = getattr(builtins, name, None)
        return isinstance(kind, type) and issubclass(kind, Exception)

    errors = {name for name in declared if name not in roots and reaches(name, is_builtin_error)}
    assert len(errors) > 30
    assert not {name for name in errors if not reaches(name, roots.__contains__)}


def test_nothing_that_is_printed_is_taken_for_markup() -> None:
    """rich would read `[mpi]` in `pip install 'sennit[mpi]'`, or an IPv6 address, as a style, and not show it."""
    consoles = 0
    for folder in MAY_IMPORT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in nodes(path):
                if not isinstance(node, ast.Call):
                    continue
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                if isinstance(node.func, ast.Name) and node.func.id == "Console":
                    consoles += 1
                    given = {option.arg: ast.unparse(option.value) for option in node.keywords}
                    assert given.get("markup") == "False", f"{where}: markup is not False"
                if isinstance(node.func, ast.Attribute) and node.func.attr == "status" and node.args:
                    shown = node.args[0]
                    assert not isinstance(shown, ast.JoinedStr | ast.Name), f"{where}: not in a Text, so it is markup"
    assert consoles >= 5


def test_long_test_files_are_named_as_they_are() -> None:
    """tests/conftest.py begins with them; a name that is wrong would come last."""
    rows = [line.split() for line in (ROOT / "tests" / "long_files.txt").read_text().splitlines()]
    assert len(rows) > 30
    assert [path for _, path in rows if not (ROOT / path).is_file()] == []
    assert [int(seconds) for seconds, _ in rows] == sorted((int(seconds) for seconds, _ in rows), reverse=True)


def test_files_of_text_are_utf_8_whatever_the_locale_says() -> None:
    """With LC_ALL=C and without Python's UTF-8 mode, `read_text()` takes ASCII, and our own sources have more."""
    for folder in [*MAY_IMPORT, "tools"]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in nodes(path):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    # That of a distribution's metadata takes the name of a file.
                    is_text = node.func.attr == "write_text" or (node.func.attr == "read_text" and not node.args)
                    assert not is_text or "encoding" in {option.arg for option in node.keywords}, (
                        f"{path.relative_to(ROOT)}:{node.lineno}: give encoding"
                    )
