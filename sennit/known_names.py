# SPDX-License-Identifier: Apache-2.0
"""Names in errors: the known one that a wrong one is nearest to, and the first ones of many.

Settings of every layer are read by name, so this is below all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: object, known: Iterable[str]) -> str:
    """Names the known name that is nearest, if one is near."""
    close = difflib.get_close_matches(name, list(known), 1) if isinstance(name, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def few(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many others there are."""
    listed = list(names)
    more = f" and {len(listed) - most} others" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
