# SPDX-License-Identifier: Apache-2.0
"""The pages of docs: links between them, references from sources, and line lengths."""

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sennit.testbed.site.api import MODULES

ROOT = Path(__file__).resolve().parents[1]
OURS = ["docs", "ebpf", "offload", "runtime", "sennit", "testbed", "tests", "tools", "transport", "examples", ".github"]
TEXT_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".h", ".c", ".sh", ".md", ".txt", ".toml", ".yml", ".yaml", ".ini"}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MENTION = re.compile(r"(?<![\w/.])docs/[\w./-]*\w")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
WIDTH = 120
RELEASE_MAX_LINES = 80


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    titles = HEADING.findall(FENCE.sub("", page.read_text()))
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower().strip() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.relative_to(ROOT)}: no file for the link {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.relative_to(ROOT)}: no heading for the link {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_a_screen(page: Path) -> None:
    long = [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > WIDTH]
    assert not long, f"{page.relative_to(ROOT)} has more than {WIDTH} characters in lines {long}"


def test_the_index_leads_to_every_page() -> None:
    """Decisions and lab notes have their own lists."""
    listed = {
        (index.parent / link.partition("#")[0]).resolve()
        for index in (ROOT / "docs").rglob("README.md")
        for link in LINK.findall(index.read_text())
    }
    assert not [page for page in PAGES if page.parent != ROOT and page.name != "README.md" and page not in listed]


def test_the_list_of_decisions_has_their_titles() -> None:
    folder = ROOT / "docs/decisions"
    listed = " ".join((folder / "README.md").read_text().split())
    for page in folder.glob("0*.md"):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        assert title.startswith(f"{page.name[:4]}: ")
        assert f"[{title}]({page.name})" in listed


def test_a_release_is_read_in_a_minute() -> None:
    """keepachangelog.com has these groups."""
    releases = re.split("^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert releases
    for release in releases:
        groups = re.findall("^### (.+)$", release, re.MULTILINE)
        assert len(set(groups)) == len(groups) > 0
        assert set(groups) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
        lines = release.rstrip().count("\n") + 1
        assert lines <= RELEASE_MAX_LINES, f"{release.splitlines()[0]}: {lines} lines; allowed: {RELEASE_MAX_LINES}"


def imports(page: Path) -> Iterator[tuple[str, str]]:
    """Yields module and name of each `from sennit… import …` in a page's programs."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for module, names in re.findall(r"^from (sennit[\w.]*) import ([^(\n]+)$", block, re.MULTILINE):
            yield from ((module, name.strip()) for name in names.split(","))


IMPORTS = sorted({found for page in PAGES for found in imports(page)})


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=lambda text: text)
def test_programs_in_pages_import_what_there_is(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")


def test_pages_of_the_interface_show_modules_that_exist() -> None:
    """The site has them (tests/test_site.py builds it, which takes longer)."""
    shown = [ROOT / package.replace(".", "/") / f"{name}.py" for package, names in MODULES.items() for name in names]
    assert len(shown) > 20
    assert not [module for module in shown if not module.exists()]


def texts() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT_SUFFIXES | {""})
    for folder in OURS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in TEXT_SUFFIXES)


def test_pages_that_sources_mention_exist() -> None:
    missing = []
    for path in texts():
        for mention in MENTION.findall(path.read_text()):
            target = ROOT / mention
            # A reference may name decisions and patches by number alone: docs/decisions/0030.
            if not target.exists() and not [*target.parent.glob(target.name + "-*")]:
                missing.append(f"{path.relative_to(ROOT)}: {mention}")
    assert not missing, missing


def test_symptoms_are_looked_up_in_counters_that_exist() -> None:
    """The second column of the table in docs/how-to/cluster.md."""
    table = (ROOT / "docs/how-to/cluster.md").read_text().partition("## Tune by symptom")[2]
    looked_at = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    named = {name for cell in looked_at for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)}
    assert len(named) > 8
    assert named <= set(re.findall(r"`(\w+)`", (ROOT / "docs/reference/counters.md").read_text()))


def hops(title: str) -> list[tuple[str, list[str]]]:
    """File and functions of each row of a table of hops in docs/architecture.md."""
    section = (ROOT / "docs/architecture.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE)
    return [(file, re.findall("`([^`]+)`", names)) for file, names in rows]


@pytest.mark.parametrize("title", ["One AllReduce", "One training batch"])
def test_hops_lead_through_functions_that_exist(title: str) -> None:
    found = hops(title)
    assert len(found) > 20
    for file, names in found:
        text = (ROOT / file).read_text()
        for name in names:
            for part in re.split(r"\.|::", name):
                assert re.search(rf"\b{part}\b", text), f"{file} has no {name}"


def test_ids_of_a_batch_pass_few_files() -> None:
    files = [file for file, _ in hops("One training batch")]
    walk = files[files.index("runtime/training/trainer.py") : files.index("runtime/sharded/wire.py") + 1]
    assert len(set(walk)) <= 12
    assert len(walk) - len(set(walk)) <= 2
