# SPDX-License-Identifier: Apache-2.0
"""A page as Chromium shows it: whether it fits a screen, what it fetches, what its scripts complain about."""

from __future__ import annotations

import html
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 60.0
# Of the browser's own clock, which waits for nothing: for scripts that wait.
BUDGET_MS = 10_000
PHONE_PX = 390
# What a frame may do whose page runs no script: the frame's own script looks at it.
WITHOUT_SCRIPTS = "allow-same-origin"
BLOCKED = "Blocked script execution"
# The page is in a frame of the wanted width, because a window is never narrower than 500 pixels. It fits if nothing of
# it lies outside; what scrolls by itself is cut at its own edge.
FRAME = """<!doctype html><iframe id="frame" width="{width}" height="{height}"{sandbox}></iframe>
<script>
const look = async address => {{
  await new Promise(resolve => {{ frame.onload = resolve; frame.src = address; }});
  const page = frame.contentDocument, root = page.documentElement;
  const style = element => frame.contentWindow.getComputedStyle(element);
  for (let turn = 0; turn < 100 && !page.querySelector("{awaited}"); turn++)
    await new Promise(resolve => setTimeout(resolve, 100));
  return {{
    address: address,
    text: page.querySelector("{awaited}")?.textContent ?? "",
    wide_px: root.scrollWidth,
    high_px: root.scrollHeight,
    sideways: [...page.querySelectorAll("*")].filter(
      element => element.scrollWidth > element.clientWidth + 1 && /auto|scroll/.test(style(element).overflowX)
    ).map(element => element.outerHTML.slice(0, 60)),
    small_px: Math.min(99, ...[...page.querySelectorAll("p, td, th, li, dd, summary, pre")].map(
      element => parseFloat(style(element).fontSize))),
  }};
}};
const looks = async () => {{
  const found = [];
  for (const address of {addresses}) found.push(await look(address));
  document.body.innerHTML = "<pre id='found'></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
}};
looks();
</script>
"""
FOUND = re.compile(r"<pre id=\"found\">(.*?)</pre>", re.DOTALL)
ADDRESS = re.compile(r'"url":"(https?://[^"]+)"')
# Of the browser itself, which nobody answers here.
OWN = re.compile(r"https?://([^/]*\.)?(google|googleapis|gvt1)\.com/")
COMPLAINT = re.compile(r"CONSOLE[^\]]*\] (.*)")


@dataclass(frozen=True, kw_only=True)
class Seen:
    address: str

    text: str
    """Of the element that was waited for."""

    wide_px: int
    """How wide the page is: at most its screen if nothing has to be moved sideways."""

    high_px: int
    fetched: list[str]
    """Addresses elsewhere that it, or another page of the same call, asks for."""

    sideways: list[str]
    """The beginnings of its parts that scroll sideways."""

    small_px: float
    """The smallest text."""

    complaints: list[str]
    """What the console has, of all pages of the call."""


def look(page: Path, folder: Path, *, width_px: int = PHONE_PX, query: str = "", awaited: str = "body") -> Seen:
    """Opens a file in Chromium, on a screen so wide, until an element is there. `folder`: for what a browser keeps."""
    (seen,) = look_at([page], folder, width_px=width_px, query=query, awaited=awaited)
    return seen


def look_at(
    pages: Sequence[Path],
    folder: Path,
    *,
    width_px: int = PHONE_PX,
    query: str = "",
    awaited: str = "body",
    scripts: bool = True,
) -> list[Seen]:
    """Opens files in one Chromium, one after the other. Without their scripts, a page takes half of the time."""
    frame = folder / "frame.html"
    log = folder / "net.json"
    addresses = json.dumps([page.resolve().as_uri() + query for page in pages])
    sandbox = "" if scripts else f' sandbox="{WITHOUT_SCRIPTS}"'
    frame.write_text(FRAME.format(width=width_px, height=800, addresses=addresses, awaited=awaited, sandbox=sandbox))
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--allow-file-access-from-files", "--enable-logging=stderr",
            f"--virtual-time-budget={BUDGET_MS * (1 + len(pages))}",
            f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}",
            "--dump-dom", frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=DEADLINE_S + len(pages), check=False,
    )  # fmt: skip
    found = FOUND.search(done.stdout)
    assert found, done.stdout + done.stderr
    fetched = sorted({address for address in ADDRESS.findall(log.read_text()) if not OWN.match(address)})
    complaints = [text for text in COMPLAINT.findall(done.stderr) if scripts or BLOCKED not in text]
    return [Seen(**one, fetched=fetched, complaints=complaints) for one in json.loads(html.unescape(found[1]))]
