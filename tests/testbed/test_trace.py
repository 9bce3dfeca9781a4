# SPDX-License-Identifier: Apache-2.0
"""`sennit trace`: a session counts the same as the ranks themselves."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="missing capability tc-bpf: pyroute2 is not installed")
pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.command_line import EXIT_UNAVAILABLE
from sennit.offload import tracepoints as ingest
from sennit.runtime.trace import commands, histogram
from sennit.testbed.topology import Impairment, Planes
from sennit.transport import tracepoints
from tests.testbed.answering_ranks import COLLECTIVES, DEADLINE_S, WORLD
from tests.testbed.trace_runs import SENNIT, exchange, session

PLANES = 2
LATER = 8


def test_a_percentile_is_in_the_slot_of_its_value() -> None:
    values = [value * value for value in range(1, 2_000)]
    counts = Counter(next(slot for slot in range(300) if value < histogram.lower_bound(slot + 1)) for value in values)
    for share in (0.01, 0.5, 0.99, 1.0):
        exact = values[math.ceil(share * len(values)) - 1]
        assert histogram.percentile(counts, share) == pytest.approx(exact, rel=1 / 15)
    assert histogram.percentile({}, 0.5) == 0


def test_bars_show_every_slot_that_has_something() -> None:
    assert histogram.bars({}) == ""
    assert histogram.bars({3: 1000, 5: 1}) == "█ ▁"
    assert len(histogram.bars({0: 1, 200: 1})) <= histogram.BARS_MAX


@pytest.mark.root
@pytest.mark.needs("tc-bpf", "nsenter", "tracepoints", "bcc")
def test_losses_and_operations_are_all_seen(tmp_path: Path, seed: int, apart: list[str]) -> None:
    environment = {**os.environ, "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    losses, operations = tmp_path / "loss.json", tmp_path / "ops.json"
    with (
        Planes(hosts=WORLD, planes=PLANES, per_packet=True) as planes,
        session("loss", "--json", str(losses), enter=apart),
        session("ops", "--by-rank", "--json", str(operations), enter=apart),
    ):
        planes.impair(Impairment(loss_fraction=0.01, seed=seed))
        counters = exchange(
            lambda rank, command, **options: planes.popen(
                rank, [*apart, *command], env=environment | planes.environment(rank), **options
            ),
            tmp_path,
            seed,
        )
    told = json.loads(losses.read_text())
    assert told["uncounted"] == {"map_full": 0, "unmatched": 0}
    paths = told["rows"]
    print(counters, paths)
    for rank, counter in enumerate(counters):
        mine = [path for path in paths if path["rank"] == rank]
        assert {path["peer"] for path in mine} == {1 - rank}
        # The ranks counted before they said goodbye.
        assert 0 <= sum(path["retransmitted"] for path in mine) - counter["retransmitted_packets"] <= LATER
        assert 0 <= sum(path["timeouts"] for path in mine) - counter["tail_probe_packets"] <= LATER
        assert sum(path["lost"] for path in mine) > 0
        assert sum(sum(path["detected_us"].values()) for path in mine) == sum(path["lost"] for path in mine)
    groups = json.loads(operations.read_text())["rows"]
    for rank in range(WORLD):
        for name in ("allreduce", "alltoall"):
            rows = [group for group in groups if group["operation"] == name and group["rank"] == rank]
            assert sum(row["count"] for row in rows) == COLLECTIVES
            assert len(rows) == 3  # Three sizes.
            assert all(row["failed"] == 0 and row["sent_bytes"] == row["received_bytes"] > 0 for row in rows)


@pytest.mark.root
@pytest.mark.needs("tracepoints", "bcc")
# Their ends are those of the sessions of the core (test_trace_core.py), which the compiler does not hold up.
@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ops", "--", "sh", "-c", "exit 3"], 3, "nothing was seen"),
        (["ops", "--seconds", "0.2"], 0, "nothing was seen"),
        (["loss", "--", "/no/such/program"], 69, "/no/such/program: No such file"),
        (["loss", "--pid", "4194305"], 69, "no such process"),
    ],
)
def test_how_a_session_ends(arguments: list[str], code: int, said: str, apart: list[str]) -> None:
    done = subprocess.run(
        [*apart, *SENNIT, "trace", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize("name", ["ops", "loss"])
def test_without_bcc_one_line_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setitem(sys.modules, "bcc", None)
    with pytest.raises(SystemExit) as ended:
        commands.app([name, "--seconds", "1"])
    assert ended.value.code == EXIT_UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sennit trace: bcc: ")
    assert "apt-get install python3-bpfcc" in line


@pytest.mark.needs("tracepoints")
def test_the_list_can_be_pasted_into_bpftrace() -> None:
    done = subprocess.run([*SENNIT, "trace", "list"], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    first = done.stdout.splitlines()[0].split()[0]
    assert Path(first.split(":")[0]).exists()
    assert first.endswith(":sennit:credit_stall_begin")


@pytest.mark.root
def test_without_root_it_says_so() -> None:
    nobody = 65534
    done = subprocess.run(
        ["setpriv", f"--reuid={nobody}", "--clear-groups", *SENNIT, "trace", "ops", "--seconds", "1"],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 69
    assert "needs root" in done.stderr


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "trace.md"
ONE_LINERS = re.findall(r'^bpftrace -e "([^"]*)"$', PAGE.read_text(), re.MULTILINE)
# Every exchange shows these. The others need losses, or a receiver that is short of memory.
ALWAYS_SEEN = ("packets", "us", "rtt_us", "bytes", "path_rtt_us", "registered")


@pytest.mark.root
@pytest.mark.needs("tracepoints", "bpftrace", "loopback-ipv6")
def test_the_one_liners_of_the_page_work(tmp_path: Path, seed: int) -> None:
    """All run at once, while two ranks of this host run collectives."""
    assert len(ONE_LINERS) >= 11
    here = {**os.environ, "SENNIT_TRANSPORT": "udp", "SENNIT_INTERFACES": "lo", "SENNIT_TIMEOUT_S": f"{DEADLINE_S}"}
    text = "\n".join(
        line.replace("$LIB", str(tracepoints.library())).replace("$INGEST", str(ingest.library()))
        for line in ONE_LINERS
    )
    (tmp_path / "all.bt").write_text('BEGIN { printf("attached\\n"); }\n' + text)
    (tmp_path / "run.sh").write_text(
        '[ -e /sys/kernel/tracing/events ] || mount -t tracefs tracefs /sys/kernel/tracing; exec bpftrace "$1"'
    )
    command = ["unshare", "--mount", "sh", str(tmp_path / "run.sh"), str(tmp_path / "all.bt")]
    pipe = subprocess.PIPE
    session = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        assert session.stdout is not None
        before = []
        for line in iter(session.stdout.readline, "attached\n"):
            before.append(line)
            assert line, "".join(before)
        exchange(lambda rank, command, **options: subprocess.Popen(command, env=here, **options), tmp_path, seed)
        session.send_signal(signal.SIGINT)
        # It lets go one probe after the other, and waits each time for what else is busy in the kernel.
        output, _ = session.communicate(timeout=2 * DEADLINE_S)
    finally:
        session.kill()
        session.communicate(timeout=DEADLINE_S)
    for name in ALWAYS_SEEN:
        assert f"@{name}[" in output, output
