# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reference/frameworks.md and of the README have one row for each test of this folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# A row begins with its name and ends with its test.
ROW = re.compile(r"^\| (.*?) \| .* \| `(test_\w+)` \|$", re.MULTILINE)


def rows_of(page: str) -> dict[str, str]:
    """The name of each row, by its test."""
    found = [(test, name) for name, test in ROW.findall((ROOT / page).read_text())]
    assert len(found) == len(dict(found)), "two rows with one test"
    return dict(found)


@pytest.mark.parametrize("page", ["README.md", "docs/reference/frameworks.md"])
def test_rows_are_the_tests_that_exist(page: str) -> None:
    tests = [
        node.name
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted(rows_of(page)) == sorted(tests)


def test_both_pages_call_a_row_the_same() -> None:
    assert rows_of("README.md") == rows_of("docs/reference/frameworks.md")
