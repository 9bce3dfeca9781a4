# SPDX-License-Identifier: Apache-2.0
"""Pages of which a command writes a part: what lies between two marks."""

from __future__ import annotations


def with_part(page: str, begin: str, end: str, part: str, *, what: str) -> str:
    """`page` with `part` on the lines between the marks. Raises ValueError without both marks in this order.

    `what`: the part, in words, for that error.
    """
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"no place for {what} in a page without the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{part}\n{end}{after}"
