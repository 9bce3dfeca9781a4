# SPDX-License-Identifier: Apache-2.0
"""Other processes read the same counters that a rank has counted."""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from sennit.command_line import stdout_console
from sennit.runtime.telemetry import openmetrics, rates, samples, top
from sennit.transport import counters
from tests.forked_commands import forked
from tests.testbed.answering_ranks import COLLECTIVES, DEADLINE_S, WORLD, Ranks, start_over

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "counters.md"
ROW = re.compile(r"^\| (?P<group>\w*)[^|]*\| `(?P<name>\w+)` \| (?:`(?P<exported>\w+)`)? *\|", re.MULTILINE)
SENNIT = (sys.executable, "-m", "sennit")


@pytest.fixture(scope="module", params=["shm", "udp"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """All tests look at the same ranks. The first of them alone lets them run something more."""
    if request.param == "udp":
        pytest.importorskip("sennit.transport.meeting.rails")
    with Ranks(start_over(request.param), tmp_path_factory.mktemp("ranks"), seed=1) as made:
        yield made


SHM, UDP = (pytest.mark.parametrize("ranks", [name], indirect=True) for name in ("shm", "udp"))


def test_a_page_has_what_its_rank_counted(ranks: Ranks) -> None:
    for page, counted in zip(ranks.pages(), ranks.counted(), strict=True):
        assert page.is_alive
        assert page.world == WORLD
        assert page.total("engine", "operations_completed") == 2 * COLLECTIVES
        for group, name in (*rates.SENT, *rates.RECEIVED):
            # The barrier that the ranks ran meanwhile has no bytes except headers.
            assert 0 <= counted.get(name, 0) - page.total(group, name) < 4096
        assert sum(page.total(*name) for name in rates.SENT) > 10_000_000


@UDP
def test_paths_add_up_to_their_flow(ranks: Ranks) -> None:
    for page in ranks.pages():
        assert {block.peer for block in page.blocks if block.group in ("flow", "path")} == {1 - page.rank}
        for name in ("data_packets_sent", "retransmitted_packets"):
            assert page.total("path", name) == page.total("flow", name)
        assert page.total("flow", "data_packets_sent") > 300


def test_every_counter_is_on_the_page_of_the_docs(ranks: Ranks) -> None:
    documented: dict[str, dict[str, str]] = {}
    group = ""
    for row in ROW.finditer(PAGE.read_text()):
        group = row["group"] or group
        documented.setdefault(group, {})[row["name"]] = row["exported"] or ""
    for block in ranks.pages()[0].blocks:
        assert list(block.values) == list(documented[block.group])
        for name, exported in documented[block.group].items():
            assert samples.exported_name(name) == samples.PREFIX + (exported or name)


def test_a_killed_rank_leaves_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Ranks(start_over("shm"), tmp_path, seed=1) as ranks:
        file = ranks.pages()[0].file
        # Any rank that starts may remove the page of a dead rank: it keeps a second name.
        kept = file.with_name(f"kept-{file.name}")
        kept.hardlink_to(file)
        try:
            ranks.processes[0].kill()
            ranks.processes[0].wait(DEADLINE_S)
            page = counters.read(kept)
            assert not page.is_alive
            assert page.total("engine", "operations_completed") == 2 * COLLECTIVES
            stdout_console().print(top.ranks_table([rates.difference(page, None, 1.0)]))
            assert re.search(r" 0/2 +gone ", capsys.readouterr().out)
        finally:
            kept.unlink()
            file.unlink(missing_ok=True)


def printed(*arguments: str) -> str:
    done = forked("sennit", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def has_sample(text: str, name: str, labels: dict[str, str], value: int) -> bool:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]  # type: ignore[no-untyped-call]
    return any((one.name, one.labels, one.value) == (name, labels, value) for one in found)


@UDP
def test_openmetrics_over_http_and_as_text(ranks: Ranks) -> None:
    text = printed("metrics")
    page = ranks.pages()[0]
    sent = page.total("flow", "data_bytes_sent")
    labels = {
        "rank": "0", "process": f"{ranks.processes[0].pid}", "page": page.number, "group": "flow", "peer": "1",
    }  # fmt: skip
    assert has_sample(text, "sennit_rdma_tx_bytes_total", labels, sent)
    assert text.endswith("# EOF\n")
    for family in re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE):
        assert re.search(rf"^{family}_total{{", text, re.MULTILINE), family
    server = subprocess.Popen([*SENNIT, "metrics", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = server.stderr.readline().split()[-1]
        with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
            assert answer.headers["Content-Type"] == openmetrics.CONTENT_TYPE
            assert has_sample(answer.read().decode(), "sennit_rdma_tx_bytes_total", labels, sent)
    finally:
        server.terminate()
        server.communicate(timeout=DEADLINE_S)
    assert server.returncode == 0


@UDP
def test_top_shows_ranks_and_paths(ranks: Ranks) -> None:
    shown = printed("top", "--once", "--paths")
    for process in ranks.processes:
        rows = [line for line in shown.splitlines() if line.split()[:1] == [f"{process.pid}"]]
        assert len(rows) == 1 + len([block for block in ranks.pages()[0].blocks if block.group == "path"])


@SHM
def test_rates_are_differences(ranks: Ranks) -> None:
    looks = top.looks(0.01)
    first = {rank.page.process: rank for rank in next(looks).ranks}
    second = {rank.page.process: rank for rank in next(looks).ranks}
    for process in ranks.processes:
        assert first[process.pid].sent_bytes_a_second > 0
        assert second[process.pid].sent_bytes_a_second == 0
        assert second[process.pid].operations_a_second == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (b"x" * 64, "not a page of counters"),
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


@pytest.mark.parametrize("listen", ["9464", "127.0.0.1:", "127.0.0.1:70000", "::1:9464", "[::1:9464"])
def test_a_wrong_address_is_named(listen: str) -> None:
    done = forked("sennit", "metrics", "--listen", listen)
    assert done.returncode == 2
    assert "ADDRESS:PORT" in done.stderr


def make_device(sysfs: Path) -> None:
    folder = sysfs / "rxe0" / "ports" / "1" / "hw_counters"
    folder.mkdir(parents=True)
    for name, text in (("duplicate_request", "7\n"), ("lifespan", "10\n"), ("sent_pkts", "no number\n")):
        (folder / name).write_text(text)


def test_devices_stand_beside_ranks_under_the_same_names(tmp_path: Path) -> None:
    make_device(tmp_path)
    (found,) = samples.of_devices(tmp_path)
    assert (found.name, found.value) == (samples.exported_name("duplicate_packets"), 7)
    assert found.labels == {"device": "rxe0", "port": "1", "group": "device"}
    line = 'sennit_duplicate_request_total{device="rxe0",group="device",port="1"} 7.0'
    assert openmetrics.render([found]).endswith(f"# TYPE sennit_duplicate_request counter\n{line}\n# EOF\n")


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what it receives, and answers with the status that the test sets."""

    bodies: ClassVar[list[bytes]] = []
    status: ClassVar[int] = 200

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


def test_a_collector_gets_counts_and_gauges() -> None:
    pytest.importorskip("opentelemetry.exporter", reason="the OpenTelemetry SDK is not installed")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from sennit.runtime.telemetry.otlp import Exporter

    count = samples.Sample(name="sennit_lost_packets", is_gauge=False, labels={"rank": "0", "peer": "1"}, value=5)
    gauge = samples.Sample(name="sennit_rtt_us", is_gauge=True, labels={"rank": "0"}, value=80)
    Collector.bodies.clear()
    Collector.status = 200
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            exporter = Exporter(f"http://127.0.0.1:{server.server_port}/v1/metrics")
            assert exporter.send([count, gauge])
            assert exporter.send([dataclasses.replace(count, value=6)])
            Collector.status = 400
            assert not exporter.send([count])
            exporter.close()
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)
    requests = []
    for body in Collector.bodies:
        request = ExportMetricsServiceRequest()
        request.ParseFromString(body)
        requests.append({m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics})
    first, second, *_ = requests
    (point,) = first["sennit_lost_packets"].sum.data_points
    assert first["sennit_lost_packets"].sum.is_monotonic
    assert {attribute.key: attribute.value.string_value for attribute in point.attributes} == count.labels
    assert point.as_int == 5
    assert first["sennit_rtt_us"].gauge.data_points[0].as_int == 80
    assert second["sennit_lost_packets"].sum.data_points[0].as_int == 6
    assert "sennit_rtt_us" not in second  # no rank counts it any more


def test_a_collector_gets_every_set_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In requests of a limited size. (Instruments of the SDK would make one of all above 2,000.)"""
    pytest.importorskip("opentelemetry.exporter", reason="the OpenTelemetry SDK is not installed")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from sennit.runtime.telemetry import otlp

    monkeypatch.setattr(otlp, "POINTS_MAX", 1000)
    Collector.bodies.clear()
    Collector.status = 200
    many = [
        samples.Sample(name="sennit_lost_packets", is_gauge=False, labels={"peer": f"{peer}"}, value=peer)
        for peer in range(2500)
    ]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            exporter = otlp.Exporter(f"http://127.0.0.1:{server.server_port}/v1/metrics")
            assert exporter.send(many)
            exporter.close()
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)
    found = []
    for body in Collector.bodies[:3]:
        request = ExportMetricsServiceRequest()
        request.ParseFromString(body)
        (metric,) = request.resource_metrics[0].scope_metrics[0].metrics
        found.append([(point.attributes[0].value.string_value, point.as_int) for point in metric.sum.data_points])
    assert list(map(len, found)) == [1000, 1000, 500]
    assert list(itertools.chain(*found)) == [(one.labels["peer"], one.value) for one in many]


def test_a_collector_that_is_not_there_is_no_end() -> None:
    """And if a proxy stands before it, that is said, with what to do."""
    pytest.importorskip("opentelemetry.exporter", reason="the OpenTelemetry SDK is not installed")
    command = [*SENNIT, "metrics", "--otlp", "http://127.0.0.1:1/v1/metrics", "--interval", "0.1"]
    variables = {**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": "", "NO_PROXY": ""}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
    try:
        assert process.stderr is not None
        refused = 0
        for line in process.stderr:
            refused += "did not take it (http_proxy set" in line and "export no_proxy=127.0.0.1" in line
            if refused == 2:  # it continued after a refusal
                break
        assert refused == 2
    finally:
        process.kill()
        process.communicate()


def test_the_dashboard_asks_for_what_is_exported() -> None:
    text = PAGE.read_text()
    names = {samples.exported_name(row["name"]) for row in ROW.finditer(text)}
    dashboard = json.loads((PAGE.parents[1] / "grafana" / "sennit.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {
        name.removesuffix("_total") for expression in expressions for name in re.findall(r"sennit_\w+", expression)
    }
    assert asked <= names
    assert len(asked) >= 8
    # Ranks of two users have the same numbers, and another user's page says what it likes.
    sums = [labels for expression in expressions for labels in re.findall(r" by \(([^)]*)\)", expression)]
    assert len(sums) > 20
    assert not [labels for labels in sums if "user" not in labels.split(", ")]


def test_grafana_keeps_every_field_of_the_dashboard() -> None:
    """Grafana's own types, made from its schema, read it and write it again. What they do not know they drop."""
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    given = json.loads((PAGE.parents[1] / "grafana" / "sennit.json").read_text())
    written = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(given)))
    assert list(lost(given, written)) == []
    given["panels"][0]["targets"][0]["expression"] = "up"
    given["refrsh"] = "5s"
    written = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(given)))
    assert list(lost(given, written)) == [".panels[0].targets[0].expression", ".refrsh"]


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Where `kept` lacks something of `given`, or has another value."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for place, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(value, other, f"{path}[{place}]")
    elif given != kept:
        yield path


def test_process_groups_of_one_process_are_told_apart() -> None:
    """Prometheus would refuse two samples with the same name and labels."""
    block = counters.Block(group="engine", peer=None, path=None, values={"operations_posted": 1})
    pages = [
        counters.Page(
            file=counters.FOLDER / f"sennit.counters-{number:016x}",
            rank=0, world=2, process=7, began_ns=0, is_alive=True, owner=0, account=0, blocks=(block,),
        )
        for number in (1, 2)
    ]  # fmt: skip
    found = [tuple(sample.labels.items()) for sample in samples.of_pages(pages)]
    assert len(set(found)) == len(found) == 2
