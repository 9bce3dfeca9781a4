# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/models.md: models of the Neo paper on its cluster, from examples/*.toml (`make models`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from sennit.runtime.planner.roofline import bounds_of
from sennit.runtime.planner.roofline_files import read_machines, read_model, scaled
from sennit.runtime.planner.roofline_report import page
from sennit.testbed.marked_page import with_part

EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
MODELS: Final = ("neo-a", "neo-f", "neo-i")
BEGIN: Final = "<!-- tables: make models -->"
END: Final = "<!-- end of tables -->"
MORE_TABLES: Final = 3


def tables() -> str:
    machines = read_machines(EXAMPLES / "zionex.toml")
    cases = []
    for name in MODELS:
        model = read_model(EXAMPLES / f"{name}.toml")
        wider = scaled(model.work, MORE_TABLES)
        cases.append((model, machines, bounds_of(model.work, machines), bounds_of(wider, machines)))
    return "\n".join(page(cases))


def with_tables(text: str) -> str:
    """The page with new tables between its markers. Raises ValueError for a page without them."""
    return with_part(text, BEGIN, END, f"\n{tables()}\n", what="tables")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_tables(target.read_text(encoding="utf-8")), encoding="utf-8")
