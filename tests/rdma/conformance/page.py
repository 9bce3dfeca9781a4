# SPDX-License-Identifier: Apache-2.0
"""Writes the list of docs/reference/conformance.md from the cases.

Run `cd tests/rdma && python -m conformance.page PAGE`. The tests compare both sides with the cases, and the page with
the list.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

from .cases import CASES, Case, OnRxe

BEGIN: Final = "<!-- cases: written by conformance.page -->"
END: Final = "<!-- end of cases -->"
WIDTH: Final = 118


def table() -> str:
    """Returns all cases as a list: the packets, and below them what the standard, rxe and udp do."""
    return "\n".join(map(_entry, CASES))


def with_table(page: str) -> str:
    """Returns the page with a new list between its markers. Raises ValueError for a page without them."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _entry(case: Case) -> str:
    parts = {"standard": case.standard, "rxe": _on_rxe(case), "udp": _on_udp(case)}
    lines = [_wrapped("- ", f"**{case.name}**"), *(_wrapped("  - ", f"{who}: {what}") for who, what in parts.items())]
    return "\n".join(lines)


def _wrapped(indent: str, text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


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
    return text


def _on_udp(case: Case) -> str:
    text = "delivered" if case.udp.delivered else f"`{case.udp.counter}`"
    return f"{text}: {case.why}" if case.why else text


if __name__ == "__main__":
    PAGE = Path(sys.argv[1])
    PAGE.write_text(with_table(PAGE.read_text()))
