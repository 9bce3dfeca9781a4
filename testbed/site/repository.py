# SPDX-License-Identifier: Apache-2.0
"""Where a file of the repository is on the site, and links between its pages as the site needs them.

Pages are written for the repository: their links name files. Most pages of `docs/` keep their place on the site. The
pages at the root, and the programs of `examples/`, get one there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
# File of the repository -> page of the site.
PLACES: Final = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".sbatch": "bash", ".yaml": "yaml", ".service": "ini"}

_CODE: Final = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


def examples() -> list[Path]:
    """The programs, clusters and manifests of `examples/`."""
    return sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in LANGUAGES)


def place(path: str) -> str:
    """The page or file of the site that shows a file of the repository."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("examples/"):
        return path + ".md"
    return path.removeprefix("docs/")


def origin(page: str) -> str:
    """The file of the repository that a page of the site shows: the inverse of `place`."""
    for path, shown in PLACES.items():
        if shown == page:
            return path
    return page.removesuffix(".md") if page.startswith("examples/") else f"docs/{page}"


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with a change made to all of it but code."""
    pieces, end = [], 0
    for code in _CODE.finditer(text):
        pieces += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, change(text[end:])])


def for_site(text: str, page: str) -> str:
    """The Markdown of a page with links to where the site has what they name."""
    folder = posixpath.dirname(origin(page))

    def moved(link: re.Match[str]) -> str:
        name, mark, anchor = link[1].partition("#")
        if not name or "://" in name or name.startswith("mailto:"):
            return link[0]
        target = place(posixpath.normpath(posixpath.join(folder, name)))
        return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return outside_code(text, lambda part: _LINK.sub(moved, part))


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading, so that one link serves the repository and the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-")


def listed(index: str, section: str = "") -> list[str]:
    """Pages of the site that a list of the repository links, in its order: those below one heading, or all."""
    text = (ROOT / index).read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    folder = posixpath.dirname(index)
    names = [link.partition("#")[0] for link in _LINK.findall(text)]
    pages = [place(posixpath.normpath(posixpath.join(folder, name))) for name in names if name and "://" not in name]
    return list(dict.fromkeys(page for page in pages if page.endswith(".md")))
