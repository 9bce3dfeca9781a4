# SPDX-License-Identifier: Apache-2.0
"""The tutorial on tracing shows what it says: the same columns, kinds of waiting, and as many operations and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import pages

PAGE = pages.ROOT / "docs" / "tutorials" / "first-trace.md"
DEADLINE_S = 180.0
pytestmark = [
    pytest.mark.root,
    pytest.mark.long,
    pytest.mark.needs("tc-bpf", "tracepoints", "backend"),
    pytest.mark.timeout(2 * DEADLINE_S),
]


def words(line: str) -> list[str]:
    return line.split()


def test_first_trace(tmp_path: Path, apart: list[str]) -> None:
    printed = pages.run(PAGE, tmp_path, deadline_s=DEADLINE_S, enter=apart)
    _, stalls, paths = [block for block in pages.blocks(PAGE) if block.line in printed]
    table, shown = printed[stalls.line], stalls.shown.splitlines()
    assert words(table[0])[:8] == words(shown[0])[:8]
    kinds = {"operation", "send", "receive", "reduce", "copy"}
    assert kinds <= {word for line in table for word in words(line)[:2]}
    counts = {line[: shown[0].index("peer")]: words(line[shown[0].index("peer") :])[1] for line in shown[1:]}
    for line in table[1:]:
        kind = line[: shown[0].index("peer")]
        if "operation" in kind:
            assert words(line[shown[0].index("peer") :])[1] == counts[kind] == "100"

    table, shown = printed[paths.line], paths.shown.splitlines()
    assert words(table[0])[:8] == words(shown[0])[:8]
    first = [words(line)[:3] for line in table[1:] if line.split()[:1] == ["0"]]
    assert first == [words(line)[:3] for line in shown[1:]]
