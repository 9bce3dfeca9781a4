# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md, its pictures, and the README's tables beside peers: made of docs/performance.json.

`python -m sennit.testbed.bench.figures.performance_page docs` writes them anew. The words are in the templates of
`pages/` (Jinja), the figures in the JSON. All is a function of these files, so a test can compare.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

import jinja2

from sennit.testbed.bench.figures.figures import Figures, Number
from sennit.testbed.bench.figures.pictures import Chart, svg
from sennit.testbed.marked_page import with_part

FIGURES: Final = "performance.json"
PAGE: Final = "performance.md"
TEMPLATES: Final = Path(__file__).with_name("pages")
README_MARKS: Final = ("<!-- measured: begin -->", "<!-- measured: end -->")
WIDTH: Final = 120


def made_anew(docs: Path) -> dict[Path, str]:
    """Path -> content of all that docs/performance.json determines, the README beside `docs` included."""
    figures = Figures.read(docs / FIGURES)
    readme = docs.parent / "README.md"
    part = rendered(figures, "readme.md.j2").strip()
    return {
        docs / PAGE: rendered(figures, "performance.md.j2"),
        readme: with_part(readme.read_text(encoding="utf-8"), *README_MARKS, part, what="figures"),
        **{docs / f"performance-{name}.svg": svg(chart) for name, chart in charts(figures).items()},
    }


def rendered(figures: Figures, template: str) -> str:
    """Raises ValueError or a jinja2.TemplateError for a template that names what `figures` does not have."""

    def table(name: str) -> str:
        found = figures.table(name)
        return "\n".join([*found.lines(), "", _note(figures.taken(row.run for row in found.rows))])

    def beside(wanted: str, *columns: str) -> str:
        """Ratios, with the names of their columns if there are several; bold where the peer is faster."""
        parts = []
        for column in columns:
            value = figures.lowest(wanted, column)
            text = f"{column} {_ratio(value)}" if len(columns) > 1 else _ratio(value)
            parts.append(f"**{text}**" if value < 1 else text)
        return ", ".join(parts)

    def runs_of(*ids: str) -> str:
        return textwrap.fill(figures.taken(figures.row(wanted)[1].run for wanted in ids), WIDTH)

    names = {"table": table, "each": figures.each, "beside": beside, "runs_of": runs_of}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # Markdown
    )
    return environment.get_template(template).render(**names)


def charts(figures: Figures) -> dict[str, Chart]:
    """Name -> picture. A bar is the lowest figure of a row in a column; the JSON says of which."""
    made = {}
    for name, found in figures.charts.items():
        groups = [
            {"name": group["name"], "values": [figures.lowest(group["row"], column) for column in found["columns"]]}
            for group in found["groups"]
        ]
        taken = figures.taken(figures.row(group["row"])[1].run for group in found["groups"])
        made[name] = Chart.from_json({**found, "groups": groups, "taken": taken})
    return made


def _note(text: str) -> str:
    return textwrap.fill(f"<small>{text}</small>", WIDTH)


def _ratio(value: Number) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:g}"


def main(arguments: list[str]) -> None:
    for path, text in made_anew(Path(arguments[0])).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
