# SPDX-License-Identifier: Apache-2.0
"""The native core has exactly the tracepoints of docs/reference/tracepoints.md."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")
pytest.importorskip("elftools", reason="pyelftools is not installed")

from sennit.ebpf import usdt
from sennit.offload import tracepoints as ingest
from sennit.transport import tracepoints

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "tracepoints.md"
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<arguments>[^|]+) \|", re.MULTILINE)


OF_INGEST = "## Of ingest"


def documented(text: str) -> dict[str, list[int]]:
    return {
        row["name"]: [int(size) for size in re.findall(r"\((\d)\)", row["arguments"])] for row in ROW.finditer(text)
    }


def built(library: Path) -> dict[str, list[int]]:
    found = usdt.read(library)
    assert {tracepoint.provider for tracepoint in found} <= {"sennit"}
    return {point.name: [argument.size_bytes for argument in point.arguments] for point in found}


@pytest.mark.needs("tracepoints")
def test_the_page_and_the_libraries_agree() -> None:
    of_core, _, of_ingest = PAGE.read_text().partition(OF_INGEST)
    assert built(tracepoints.library()) == documented(of_core)
    assert built(ingest.library()) == documented(of_ingest)


@pytest.mark.needs("tracepoints")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has a nop that becomes a call")
def test_every_place_has_room_for_a_call() -> None:
    for library in (tracepoints.library(), ingest.library()):
        for point in usdt.read(library):
            assert all(place.has_call_nop for place in point.places), point


def test_a_file_without_tracepoints_has_none(tmp_path: Path) -> None:
    assert usdt.read(Path("/bin/true").resolve()) == []
    (tmp_path / "text").write_text("no program")
    with pytest.raises(ValueError, match="text: Magic number"):
        usdt.read(tmp_path / "text")
