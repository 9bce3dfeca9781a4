# SPDX-License-Identifier: Apache-2.0
"""A page as Chromium shows it: whether it fits a screen, what it fetches, what its scripts complain about."""

from __future__ import annotations

import html
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 60.0
PHONE_PX = 390
# The page is in a frame of the wanted width, because a window is never narrower than 500 pixels. It fits if nothing of
# it lies outside; what scrolls by itself is cut at its own edge.
FRAME = """<!doctype html><iframe id="frame" width="{width}" height="{height}" src="{address}"></iframe>
<script>
frame.onload = async () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const style = element => frame.contentWindow.getComputedStyle(element);
  for (let turn = 0; turn < 100 && !page.querySelector("{awaited}"); turn++)
    await new Promise(resolve => setTimeout(resolve, 100));
  const found = {{
    text: page.querySelector("{awaited}")?.textContent ?? "",
    wide_px: root.scrollWidth,
    high_px: root.scrollHeight,
    sideways: [...page.querySelectorAll("*")].filter(
      element => element.scrollWidth > element.clientWidth + 1 && /auto|scroll/.test(style(element).overflowX)
    ).map(element => element.outerHTML.slice(0, 60)),
    small_px: Math.min(...[...page.querySelectorAll("p, td, th, li, dd, summary, pre")].map(
      element => parseFloat(style(element).fontSize))),
  }};
  document.body.innerHTML = "<pre id='found'></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>
"""
FOUND = re.compile(r"<pre id=\"found\">(.*?)</pre>", re.DOTALL)
ADDRESS = re.compile(r'"url":"(https?://[^"]+)"')
# Of the browser itself, which nobody answers here.
OWN = re.compile(r"https?://([^/]*\.)?(google|googleapis|gvt1)\.com/")
COMPLAINT = re.compile(r"CONSOLE[^\]]*\] (.*)")


@dataclass(frozen=True, kw_only=True)
class Seen:
    text: str
    """Of the element that was waited for."""

    wide_px: int
    """How wide the page is: at most its screen if nothing has to be moved sideways."""

    high_px: int
    fetched: list[str]
    """Addresses elsewhere that it asks for."""

    sideways: list[str]
    """The beginnings of its parts that scroll sideways."""

    small_px: float
    """The smallest text."""

    complaints: list[str]
    """What the console has."""


def look(page: Path, folder: Path, *, width_px: int = PHONE_PX, query: str = "", awaited: str = "body") -> Seen:
    """Opens a file in Chromium, on a screen so wide, until an element is there. `folder`: for what a browser keeps."""
    frame = folder / "frame.html"
    log = folder / "net.json"
    address = page.resolve().as_uri() + query
    frame.write_text(FRAME.format(width=width_px, height=800, address=address, awaited=awaited))
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=20000",
            f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}",
            "--dump-dom", frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    found = FOUND.search(done.stdout)
    assert found, done.stdout + done.stderr
    return Seen(
        **json.loads(html.unescape(found[1])),
        fetched=sorted({address for address in ADDRESS.findall(log.read_text()) if not OWN.match(address)}),
        complaints=COMPLAINT.findall(done.stderr),
    )
