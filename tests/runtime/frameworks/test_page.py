# SPDX-License-Identifier: Apache-2.0
"""The table of docs/reference/frameworks.md has one row for each test of this folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "reference" / "frameworks.md"


def test_rows_are_the_tests_that_exist() -> None:
    rows = re.findall(r"^\| .* \| `(test_\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    tests = [
        node.name
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted(rows) == sorted(tests)
