# SPDX-License-Identifier: Apache-2.0
"""What other processes read of a rank's counters is what the rank itself counted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.testbed.telemetry import openmetrics, rates, top
from sennit.transport import counters

WORKER = Path(__file__).with_name("lossy_worker.py")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "counters.md"
ROW = re.compile(r"^\| (?P<group>\w*)[^|]*\| `(?P<name>\w+)` \| (?:`(?P<exported>\w+)`)? *\|", re.MULTILINE)
WORLD = 2
DEADLINE_S = 60.0
# 9 AllReduces and 9 AlltoAlls, then a barrier for each line on the standard input.
OPERATIONS = 18
SENNIT = (sys.executable, "-m", "sennit")


class Ranks:
    """Two ranks that have exchanged something and are idle."""

    def __init__(self, folder: Path, transport: str) -> None:
        environment = {**os.environ, "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
        environment["SENNIT_TRANSPORT"] = transport
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), f"{rank}", f"{WORLD}", str(folder / "store"), "1"],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"

    def counted(self) -> list[dict[str, int]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("counters\n")
            process.stdin.flush()
        found = []
        for process in self.processes:
            assert process.stdout is not None
            found.append(json.loads(process.stdout.readline()))
        return found

    def pages(self) -> list[counters.Page]:
        numbers = {process.pid for process in self.processes}
        return sorted((page for page in counters.pages() if page.process in numbers), key=lambda page: page.rank)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)


@pytest.fixture(params=["shm", "udp"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    if request.param == "udp":
        pytest.importorskip("sennit.transport.rails")
    made = Ranks(tmp_path, request.param)
    try:
        yield made
    finally:
        made.end()


SHM, UDP = (pytest.mark.parametrize("ranks", [name], indirect=True) for name in ("shm", "udp"))


def test_a_page_has_what_its_rank_counted(ranks: Ranks) -> None:
    for page, counted in zip(ranks.pages(), ranks.counted(), strict=True):
        assert page.is_alive
        assert page.world == WORLD
        assert page.total("engine", "operations_completed") == OPERATIONS
        for group, name in (*rates.SENT, *rates.RECEIVED):
            # The barrier that the ranks ran meanwhile has no bytes but its headers.
            assert 0 <= counted.get(name, 0) - page.total(group, name) < 4096
        assert sum(page.total(*name) for name in rates.SENT) > 10_000_000


@UDP
def test_paths_add_up_to_their_flow(ranks: Ranks) -> None:
    for page in ranks.pages():
        assert {block.peer for block in page.blocks if block.group in ("flow", "path")} == {1 - page.rank}
        for name in ("data_packets_sent", "retransmitted_packets"):
            assert page.total("path", name) == page.total("flow", name)
        assert page.total("flow", "data_packets_sent") > 1000


def test_every_counter_is_on_the_page_of_the_docs(ranks: Ranks) -> None:
    documented: dict[str, dict[str, str]] = {}
    group = ""
    for row in ROW.finditer(PAGE.read_text()):
        group = row["group"] or group
        documented.setdefault(group, {})[row["name"]] = row["exported"] or ""
    for block in ranks.pages()[0].blocks:
        assert list(block.values) == list(documented[block.group])
        for name, exported in documented[block.group].items():
            assert openmetrics.exported_name(name) == openmetrics.PREFIX + (exported or name)


@SHM
def test_a_killed_rank_leaves_its_page(ranks: Ranks) -> None:
    file = ranks.pages()[0].file
    ranks.processes[0].kill()
    ranks.processes[0].wait(DEADLINE_S)
    page = counters.read(file)
    assert not page.is_alive
    assert page.total("engine", "operations_completed") == OPERATIONS
    file.unlink()


@UDP
def test_openmetrics_over_http_and_as_text(ranks: Ranks) -> None:
    text = subprocess.run([*SENNIT, "metrics"], capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout
    sent = ranks.pages()[0].total("flow", "data_bytes_sent")
    process = ranks.processes[0].pid
    line = f'sennit_rdma_tx_bytes_total{{rank="0",process="{process}",group="flow",peer="1"}} {sent}'
    assert line in text.splitlines()
    assert text.endswith("# EOF\n")
    for family in re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE):
        assert re.search(rf"^{family}_total{{", text, re.MULTILINE), family
    server = subprocess.Popen([*SENNIT, "metrics", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = server.stderr.readline().split()[-1]
        with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
            assert answer.headers["Content-Type"] == openmetrics.CONTENT_TYPE
            assert line in answer.read().decode().splitlines()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=DEADLINE_S)
    assert server.returncode == 0


@UDP
def test_top_shows_ranks_and_paths(ranks: Ranks) -> None:
    shown = subprocess.run(
        [*SENNIT, "top", "--once", "--paths"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    ).stdout
    for process in ranks.processes:
        rows = [line for line in shown.splitlines() if line.split()[:1] == [f"{process.pid}"]]
        assert len(rows) == 1 + len([block for block in ranks.pages()[0].blocks if block.group == "path"])


@SHM
def test_rates_are_differences(ranks: Ranks) -> None:
    looks = top.looks(0.01)
    first = {rank.page.process: rank for rank in next(looks)}
    second = {rank.page.process: rank for rank in next(looks)}
    for process in ranks.processes:
        assert first[process.pid].sent_bytes_a_second > 0
        assert second[process.pid].sent_bytes_a_second == 0
        assert second[process.pid].operations_a_second == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (b"x" * 64, "no page of counters"),
        (counters.MAGIC.to_bytes(8, "little") + (80).to_bytes(8, "little") + bytes(48) + b"\7" * 16, "a record of"),
        (counters.MAGIC.to_bytes(8, "little") + (70).to_bytes(8, "little") + bytes(48) + b"\7" * 6, "damaged at 0"),
        (
            counters.MAGIC.to_bytes(8, "little") + (80).to_bytes(8, "little") + bytes(48)
            + b"\x10\0\0\0\2\0\1\0" + bytes(8), "damaged at 0",
        ),
    ],
)  # fmt: skip
def test_what_is_no_page_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "sennit.counters-0").write_bytes(content)
    with pytest.raises(counters.PageError, match=said):
        counters.read(tmp_path / "sennit.counters-0")
    assert list(counters.pages(tmp_path)) == []


@pytest.mark.parametrize("listen", ["9464", "127.0.0.1:", "127.0.0.1:70000"])
def test_a_wrong_address_is_named(listen: str) -> None:
    done = subprocess.run(
        [*SENNIT, "metrics", "--listen", listen], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2
    assert "ADDRESS:PORT" in done.stderr
