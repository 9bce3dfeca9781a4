# SPDX-License-Identifier: Apache-2.0
"""Lists as Python-Markdown, which MkDocs uses, wants them.

What belongs to an item is indented by four, where CommonMark, by which pages are written, wants it below the item's
first word. After an item of several paragraphs, the next one needs an empty line.
"""

from __future__ import annotations

import re
from typing import Final

STEP: Final = 4
_ITEM: Final = re.compile(r" *(?:[-*]|\d+\.) +(?=\S)")


def for_python_markdown(text: str) -> str:
    """The same page with the insides of items moved, fenced blocks in them included."""
    columns: list[int] = []  # where the words of each open item begin
    fence = False
    paragraphs = False  # whether an open item has several
    lines: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        if not line.strip():
            lines.append(line)
            continue
        while columns and not fence and indent < columns[-1]:
            columns.pop()
        item = None if fence else _ITEM.match(line)
        if item and paragraphs and lines[-1].strip():
            lines.append("")
        paragraphs = bool(columns) and (paragraphs or not lines[-1].strip()) and not item
        lines.append(" " * (STEP * len(columns) + indent - (columns[-1] if columns else 0)) + line.lstrip(" "))
        if line.lstrip(" ").startswith("```"):
            fence = not fence
        elif item:
            columns.append(item.end())
    return "\n".join(lines)
