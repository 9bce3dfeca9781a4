# SPDX-License-Identifier: Apache-2.0
"""Processes of other versions and other users are watched, too: what they say is counted, shown and not believed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")
pytest.importorskip("sennit.offload._native", reason="the native receiver is not built")

from sennit.command_line import printable
from sennit.ebpf import compiler
from sennit.runtime.trace import commands, ingest, paths, stalls, target
from sennit.runtime.trace.target import target_of, why_empty
from sennit.runtime.trace.tracing import Tracing
from sennit.transport import tracepoints
from tests.testbed.answering_ranks import DEADLINE_S
from tests.testbed.trace_runs import everybody, holding

STATES: Final = (1, 4, 9, 0xFFFFFFFF)
UNKNOWN: Final = 0xFFFFFFFF
# Has the tracepoints of the core and of ingest. Paths go through STATES, the rest has one number that nobody knows.
SOURCE: Final = """
#include <stdint.h>
#include <sys/sdt.h>
#include <unistd.h>

int main(void) {
  static const uint32_t states[] = {STATES};
  volatile uint32_t rank = 3, peer = 1, path = 0, count = 7, unknown = UNKNOWN;
  volatile uint64_t wide = 1000;
  uint32_t before = 0;

  DTRACE_PROBE6(sennit, packet_sent, rank, peer, path, count, count, count);
  DTRACE_PROBE6(sennit, packet_received, rank, peer, path, count, count, count);
  DTRACE_PROBE4(sennit, rtt_sample, rank, peer, path, wide);
  DTRACE_PROBE5(sennit, packet_lost, rank, peer, path, count, wide);
  for (unsigned n = 0; n < sizeof states / sizeof states[0]; ++n) {
    volatile uint32_t after = states[n], last = before;

    usleep(2000);
    DTRACE_PROBE5(sennit, path_state, rank, peer, path, last, after);
    before = after;
  }
  DTRACE_PROBE7(sennit, operation_begin, rank, wide, wide, wide, wide, wide, wide);
  DTRACE_PROBE6(sennit, step_begin, rank, wide, count, unknown, peer, wide);
  DTRACE_PROBE6(sennit, step_end, rank, wide, count, unknown, peer, wide);
  DTRACE_PROBE3(sennit, credit_stall_begin, rank, peer, wide);
  DTRACE_PROBE3(sennit, credit_stall_end, rank, peer, wide);
  DTRACE_PROBE4(sennit, operation_end, rank, wide, unknown, wide);
  DTRACE_PROBE2(sennit, batch_begun, rank, count);
  DTRACE_PROBE3(sennit, batch_complete, rank, count, count);
  DTRACE_PROBE2(sennit, batch_wanted, rank, count);
  DTRACE_PROBE2(sennit, batch_taken, rank, count);
  DTRACE_PROBE4(sennit, rows_requested, rank, count, count, unknown);
  DTRACE_PROBE4(sennit, datagram_refused, rank, unknown, wide, wide);
  DTRACE_PROBE2(sennit, batch_released, rank, count);
  DTRACE_PROBE6(sennit, packets_sent, rank, count, count, count, count, unknown);
}
"""


@pytest.mark.root
@pytest.mark.needs("tracepoints", "clang", "bpf")
def test_numbers_that_this_version_does_not_know_are_shown(tmp_path: Path) -> None:
    """As a process with a newer library has them, or one of any user that wants to break root's session."""
    source, program = tmp_path / "stranger.c", tmp_path / "stranger"
    source.write_text(SOURCE)
    given = [f"-DSTATES={', '.join(f'{state}u' for state in STATES)}", f"-DUNKNOWN={UNKNOWN}u"]
    subprocess.run([compiler.find_clang(), "-O1", *given, "-o", program, source], check=True, timeout=DEADLINE_S)
    kinds = {kind: Tracing(kind.PROGRAM, kind.PROBES, everybody(program)) for kind in (paths, stalls, ingest)}
    try:
        subprocess.run([program], check=True, timeout=DEADLINE_S)
        (path,) = paths.collect(kinds[paths])
        waits = stalls.collect(kinds[stalls], by_peer=True)
        trainer, feeder = ingest.collect(kinds[ingest])
        unmatched = kinds[stalls].uncounted()["unmatched"]
    finally:
        for running in kinds.values():
            running.close()
    assert (path.state, path.as_json()["state"], path.state_changes) == (STATES[-1], f"{STATES[-1]}", len(STATES))
    # Numbers from 7 on share a place.
    assert set(path.state_s) == {"good", "skip", "4", "7"}
    assert min(path.state_s.values()) > 0.001
    assert [(wait.kind.name, wait.count, wait.failed) for wait in waits if wait.peer is None] == [
        ("OPERATION", 1, 1),
        ("CREDIT", 1, 0),
    ]
    assert unmatched == 1
    assert isinstance(trainer, ingest.Trainer)
    assert {name: count for name, count in trainer.asked.items() if count} == {"7": 1}
    assert trainer.refused == {"31": 1}
    assert isinstance(feeder, ingest.Feeder)
    assert feeder.errors == 1
    for kind, rows in ((paths, [path]), (stalls, waits), (ingest, [trainer, feeder])):
        assert kind.table(rows).columns if kind is not ingest else kind.table(rows).renderables


@pytest.mark.root
@pytest.mark.needs("tracepoints")
def test_many_rows_are_cut_on_the_screen_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process may call itself as many ranks as there is room for in the session's map."""
    written = tmp_path / "paths.json"
    many = [paths.Path(rank=rank, peer=1, path=0) for rank in range(7)]
    monkeypatch.setattr(paths, "collect", lambda tracing: many)
    monkeypatch.setattr(commands, "ROWS_MAX", 3)
    with pytest.raises(SystemExit, match="0"):
        commands.app(["paths", "--seconds", "0.1", "--json", str(written)])
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()] == ["rank", "0", "1", "2"]
    assert shown.err.endswith("and 4 more rows; --json FILE has all of the session\n")
    assert len(json.loads(written.read_text())["rows"]) == 7


@pytest.mark.root
def test_a_file_cannot_give_orders_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of any user may map a file whose folder is named so."""
    strange = tmp_path / "\x1b]0;owned\x07\x9b31m\u202edlrow"
    strange.mkdir()
    (strange / tracepoints.LIBRARY).write_bytes(bytes(4096))
    with holding(strange / tracepoints.LIBRARY) as process:
        monkeypatch.setattr(target, "_numbers", lambda: [process.pid])
        found = target_of(tracepoints, process.pid)
        told = why_empty(target_of(tracepoints, None), tracepoints)
    assert found.path == printable(f"{strange}/{tracepoints.LIBRARY}")
    assert r"\x1b]0;owned\x07\x9b31m\u202edlrow/" in found.path
    assert found.path in told
    assert told.isprintable()


def test_plain_letters_of_all_languages_stay() -> None:
    assert printable("/home/Müller/данные/数据 a.so") == "/home/Müller/данные/数据 a.so"
    assert printable("\udcff\n\t\x7f") == r"\udcff\n\t\x7f"
