# SPDX-License-Identifier: Apache-2.0
"""The table of docs/lab/recovery.md, from what the program recovery_ablation printed.

python -m sennit.testbed.simulation.recovery_page DOCS LINES
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sennit.testbed.simulation.report import write_page

BEGIN: Final = "<!-- results: written by make ablation -->"
HEAD: Final = "| without | failed | mean | P50 | P99 | P99.9 | slower, P99 | faster, P1 | sent again | controls |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each mechanism that was off. The first row has them all."""
    full = rows[0]
    lines = [f"{full['networks']:,} networks.", "", HEAD, "| --- " * (HEAD.count("|") - 1) + "|"]
    for row in rows:
        cells = [
            row["off"],
            f"{row['failed']:,}",
            *(_milliseconds(row[key]) for key in ("mean_us", "p50_us", "p99_us", "p999_us")),
            f"{row['slower_p99']:.2f}" if row["slower_p99"] < 100 else "–",
            f"{row['slower_p1']:.2f}",
            f"{100 * row['again'] / row['sent']:.2f} %",
            f"{row['controls'] / full['controls']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _milliseconds(time_us: float) -> str:
    return f"{time_us / 1e3:.3g} ms" if time_us < 1e6 else f"{time_us / 1e6:.3g} s"


def main() -> None:
    docs, lines = map(Path, sys.argv[1:])
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    write_page(docs / "lab" / "recovery.md", table(rows), BEGIN)


if __name__ == "__main__":
    main()
