# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: it builds without a warning, needs no other host, and shows what the pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

from sennit.testbed.site import api
from sennit.testbed.site.lists import for_python_markdown
from sennit.testbed.site.repository import PLACES, ROOT, for_site, origin, place
from tests import browser

DEADLINE_S = 240.0
# What a browser loads by itself. A link that a reader may follow is no asset.
ASSETS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
COUNTED = ("h1", "h2", "h3", "h4", "li", "ul", "ol", "table", "tr", "td", "pre", "img", "em", "strong", "blockquote")
PAGES = sorted([*(ROOT / path for path in PLACES), *(ROOT / "docs").rglob("*.md")])

pytestmark = [
    pytest.mark.timeout(1.25 * DEADLINE_S),
    pytest.mark.slow,
    pytest.mark.needs("dot"),
    pytest.mark.skipif(find_spec("material") is None, reason="the extra docs is not installed"),
]


class Html(HTMLParser):
    """What a page holds: elements of its article, identifiers, links, and what the browser loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements = Counter[str]()
        self.anchors = {""}
        self.links: list[str] = []
        self.assets: list[str] = []
        self.classes = set[str]()
        self._in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self._in_article |= tag == "article"
        if self._in_article and tag in COUNTED:
            self.elements[tag] += 1
            self.elements[f"{tag} from {values.get('start', '1')}"] += tag == "ol"
        self.elements["svg.flowchart"] += values.get("class") == "flowchart"
        self.anchors |= {values.get("id", ""), values.get("name", "")}
        self.classes |= set(values.get("class", "").split())
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ASSETS and ASSETS[tag] in values:
            self.assets.append(values[ASSETS[tag]])

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|ERROR", done.stderr), done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path.read_text()) for path in sorted(site.rglob("*.html"))}


def shown(site: Path, page: Path) -> Path:
    """The file of the site that shows a page of the repository."""
    name = place(str(page.relative_to(ROOT))).removesuffix(".md")
    return site / (re.sub(r"(^|/)README$", r"\1index", name) + ".html")


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[Path, Html]) -> None:
    broken = []
    count = 0
    # Pages of a folder have the same navigation, which is most of their links.
    known: dict[tuple[Path, str], Path | None] = {}
    for path, html in pages.items():
        if path.name == "404.html":  # its links begin at the root of the server
            continue
        for link in html.links + html.assets:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "javascript"):
                continue
            count += 1
            key = path.parent, parts.path
            if parts.path and key not in known:
                target = (path.parent / unquote(parts.path)).resolve()
                target = target / "index.html" if target.is_dir() else target
                known[key] = target if target.exists() else None
            found = known[key] if parts.path else path
            if found is None or (found in pages and unquote(parts.fragment) not in pages[found].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken
    assert count > 5000


def test_nothing_comes_from_another_host(site: Path, pages: dict[Path, Html]) -> None:
    assets = [(path, asset) for path, html in pages.items() for asset in html.assets]
    assert len(assets) > len(pages)
    elsewhere = [f"{path.relative_to(site)}: {asset}" for path, asset in assets if "//" in asset]
    for path in site.rglob("*.css"):
        elsewhere += re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", path.read_text())
    assert not elsewhere
    # The theme fetches Mermaid for flowcharts that it finds in a page.
    assert not [path for path, html in pages.items() if "mermaid" in html.classes]


def fit_a_phone(seen: list[browser.Seen], *, count: int) -> None:
    assert len(seen) == count
    assert not [one.address for one in seen if one.wide_px > browser.PHONE_PX or one.small_px < 10]
    assert not [one for one in seen if one.fetched or one.complaints]


@pytest.mark.needs("chromium")
def test_pages_fit_a_phone(site: Path, pages: dict[Path, Html], seed: int, tmp_path: Path) -> None:
    """Two pages whose scripts put a frame around wide tables, and one that the seed draws."""
    every = sorted(path for path in pages if path.name != "404.html")
    some = [site / "index.html", site / "comparison.html", every[seed % len(every)]]
    fit_a_phone(browser.look_at(some, tmp_path), count=3)


@pytest.mark.long
@pytest.mark.needs("chromium")
def test_all_pages_fit_a_phone(pages: dict[Path, Html], tmp_path: Path) -> None:
    """Without their scripts, which is cheaper."""
    every = sorted(path for path in pages if path.name != "404.html")
    fit_a_phone(browser.look_at(every, tmp_path, scripts=False), count=len(every))


def test_pages_show_what_the_repository_shows(site: Path, pages: dict[Path, Html]) -> None:
    """By CommonMark, as Git servers show it: as many headings, items, tables, cells, blocks of code and pictures."""
    commonmark = MarkdownIt("gfm-like", {"linkify": False})
    for page in PAGES:
        text = commonmark.render(page.read_text())
        expected = Html(f"<article>{text}</article>").elements
        expected["svg.flowchart"] = text.count('class="language-mermaid"')
        expected["pre"] -= expected["svg.flowchart"]
        assert pages[shown(site, page)].elements == expected, page


def test_a_page_is_in_the_section_that_lists_it(site: Path) -> None:
    """A list may also link pages of other sections."""
    for page, section in (("performance", "Explanation"), ("lab/codecs", "Lab"), ("how-to/train", "How-to")):
        tabs = re.findall(r"md-tabs__item--active.*?</li>", (site / f"{page}.html").read_text(), re.DOTALL)
        assert [section in tab for tab in tabs] == [True]


@pytest.mark.needs("chromium")
def test_search_finds_pages_without_a_server(site: Path, tmp_path: Path) -> None:
    seen = browser.look(
        site / "how-to" / "train.html", tmp_path, query="?q=retransmission", awaited=".md-search-result__link"
    )
    assert "retransmission" in seen.text.lower()
    assert (seen.fetched, seen.complaints) == ([], [])


def test_search_knows_every_page(site: Path, pages: dict[Path, Html]) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {document["location"].partition("#")[0] or "index.html" for document in index["docs"]}
    assert found == {str(path.relative_to(site)) for path in pages} - {"404.html"}


def test_the_interface_has_every_public_name(pages: dict[Path, Html], site: Path) -> None:
    names = {
        f"sennit.{package}.{module}.{name}"
        for package in api.MODULES
        for name, module in api.public_names(package).items()
    }
    assert len(names) > 50
    anchors = set().union(*(html.anchors for path, html in pages.items() if path.parent == site / "api"))
    assert names <= anchors


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/reference/wire.md#packets)", "[a](reference/wire.md#packets)"),
        ("contents.md", "[a](../README.md) [b](how-to/gpu.md)", "[a](index.md) [b](how-to/gpu.md)"),
        ("how-to/gpu.md", "[a](../../examples/dcnv2.py)", "[a](../examples/dcnv2.py.md)"),
        ("lab/codecs.md", "[a](../README.md#examples) [b](#c)", "[a](../contents.md#examples) [b](#c)"),
        ("lab/codecs.md", "`[a](../README.md)`", "`[a](../README.md)`"),
        ("index.md", "[a](https://b/c.md)", "[a](https://b/c.md)"),
    ],
)
def test_links_are_moved_to_where_the_site_has_pages(page: str, text: str, expected: str) -> None:
    assert for_site(text, page) == expected
    assert place(origin(page)) == page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n  - b\n\n    c\n- d", "- a\n    - b\n\n        c\n\n- d"),
        ("1. a\n   ```sh\n     b\n   - c\n   ```\n2. d", "1. a\n    ```sh\n      b\n    - c\n    ```\n2. d"),
        ("10. a\n    b\n\nc", "10. a\n    b\n\nc"),
    ],
)
def test_insides_of_items_are_indented_by_four(text: str, expected: str) -> None:
    assert for_python_markdown(text) == expected
