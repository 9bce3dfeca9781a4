# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reference/frameworks.md and of the README have one row for each test of this folder."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.runtime.frameworks import rows
from tests.runtime.frameworks.rows import CI, LONG, ROWS, Row

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# A row begins with its name, and ends with who runs it, and its test.
ROW = re.compile(r"^\| (.*?) \| .* \| (CI|test-long|clone) \| `(test_\w+)` \|$", re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/reference/frameworks.md"])
def test_tables_say_what_runs_and_where(page: str) -> None:
    found = ROW.findall((ROOT / page).read_text())
    assert sorted(found) == sorted((row.name, row.where, row.test) for row in ROWS)


def test_rows_are_the_tests_that_exist() -> None:
    tests = [
        node.name
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted(row.test for row in ROWS) == sorted(tests)


def test_what_make_test_installs_is_enough_for_the_rows_of_ci() -> None:
    """In any checkout: `make test` installs the same everywhere."""
    missing = [
        row.name for row in ROWS if row.where == CI and row.package and importlib.util.find_spec(row.package) is None
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("where", "in_ci", "is_long", "end"),
    [
        (CI, True, False, "fails"),
        (CI, False, False, "skips"),
        (LONG, True, False, "skips"),
        (LONG, False, True, "fails"),
        (CI, False, True, "fails"),
    ],
)
def test_a_row_that_must_run_fails_without_its_package(
    where: str, in_ci: bool, is_long: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS", (Row(name="A", test="test_a", where=where, package="no_such_package"),))
    monkeypatch.setenv("CI", "true" if in_ci else "")
    raised = pytest.fail.Exception if end == "fails" else pytest.skip.Exception
    with pytest.raises(raised, match="the package no_such_package is not installed: make frameworks"):
        rows.need_package("test_a", is_long=is_long)


def test_the_long_tests_run_all_rows() -> None:
    """`make frameworks`, a part of `make test-long`, lets no row be skipped."""
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "tests/runtime/frameworks" in line)
    assert "pytest -v --long tests/runtime/frameworks" in line
