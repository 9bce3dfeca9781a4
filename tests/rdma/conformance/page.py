# SPDX-License-Identifier: Apache-2.0
"""The table of docs/reference/conformance.md, written from the cases.

`cd tests/rdma && python -m conformance.page PAGE` writes it. The tests hold both sides to the cases,
and the page to the table.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from .cases import CASES, Case, OnRxe

HEAD: Final = (
    "| packets | the standard | rxe | udp |",
    "| --- | --- | --- | --- |",
)


def table() -> str:
    return "\n".join([*HEAD, *map(_row, CASES)])


def with_table(page: str) -> str:
    """The page with its table, which ends with an empty line, renewed."""
    before, found, rest = page.partition(HEAD[0])
    if not found:
        raise ValueError(f"the page has no table that begins with {HEAD[0]!r}")
    return before + table() + rest[rest.index("\n\n") :]


def _row(case: Case) -> str:
    cells = [case.name, case.standard, _on_rxe(case), _on_udp(case)]
    return f"| {' | '.join(cells)} |"


def _on_rxe(case: Case) -> str:
    text = _fate(case.rxe) + (" ≠" if case.why else "")
    if case.patched is not None:
        text += f"; with [patch {case.patch[:4]}](../upstream/README.md): {_fate(case.patched)}"
    return text


def _fate(rxe: OnRxe) -> str:
    if rxe.delivered:
        return "delivered" + (f", as of {rxe.size_bytes:,} bytes" if rxe.size_bytes is not None else "")
    text = "dropped, counted" if rxe.counted else "dropped"
    if rxe.bad_partition:
        text += ": `bad_pkey_cntr`"
    if rxe.error:
        text += f" ({rxe.error})"
    if rxe.warns:
        text += ", with a stack trace in the log"
    return text + (", over IPv6 the end of the kernel" if rxe.fatal else "")


def _on_udp(case: Case) -> str:
    text = "delivered" if case.udp.delivered else f"`{case.udp.counter}`"
    return f"{text}: {case.why}" if case.why else text


if __name__ == "__main__":
    PAGE = Path(sys.argv[1])
    PAGE.write_text(with_table(PAGE.read_text()))
