# SPDX-License-Identifier: Apache-2.0
"""What MkDocs calls while it builds the site (mkdocs.yml): navigation, pages that are made, links."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from sennit.testbed.site import api
from sennit.testbed.site.lists import for_python_markdown
from sennit.testbed.site.picture import drawn
from sennit.testbed.site.repository import LANGUAGES, PLACES, ROOT, anchor, examples, for_site, listed, place

STYLE: Final = "site.css"
# The plugin `offline` takes a script of this name from another host, unless there is one (mkdocs.yml, `polyfills`).
WORKER: Final = "iframe-worker.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the navigation from the lists of docs/README.md, so that a page is listed once."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, separator: anchor(text)
    config.extra_css.append(STYLE)
    config.nav = [
        {"Home": ["index.md", "contents.md", "contributing.md", "security.md", "changelog.md"]},
        {"Tutorials": listed("docs/README.md", "Tutorials")},
        {"Examples": [{path.name: place(str(path.relative_to(ROOT)))} for path in examples()]},
        {"How-to": listed("docs/README.md", "How-to")},
        {"Reference": listed("docs/README.md", "Reference")},
        {"API": ["api/index.md", *({f"sennit.{name}": f"api/{name}.md"} for name in api.MODULES)]},
        {
            "Explanation": [
                page for page in listed("docs/README.md", "Explanation") if not page.startswith(("lab/", "decisions/"))
            ]
        },
        {"Lab": ["lab/README.md", *_inside("lab")]},
        {"Decisions": ["decisions/README.md", *_inside("decisions")]},
        {"Glossary": "glossary.md"},
    ]
    return config


def _inside(folder: str) -> list[str]:
    """The pages that the list of a folder has of this folder."""
    return [page for page in listed(f"docs/{folder}/README.md") if page.startswith(f"{folder}/")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in `docs/`."""
    readme = files.get_file_from_path("README.md")
    assert readme is not None
    files.remove(readme)
    made = {page: (ROOT / path).read_text(encoding="utf-8") for path, page in PLACES.items()}
    for path in examples():
        code = path.read_text(encoding="utf-8")
        made[place(str(path.relative_to(ROOT)))] = f"# {path.name}\n\n```{LANGUAGES[path.suffix]}\n{code}```\n"
    made |= {f"api/{name}.md": api.page(name) for name in api.MODULES} | {"api/index.md": api.index()}
    made[STYLE] = (Path(__file__).parent / STYLE).read_text(encoding="utf-8")
    made[WORKER] = (Path(__file__).parent / "frame_worker.js").read_text(encoding="utf-8")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    return for_python_markdown(drawn(for_site(markdown, page.file.src_uri)))
