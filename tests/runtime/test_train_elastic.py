# SPDX-License-Identifier: Apache-2.0
"""Training that loses ranks: it continues without them in the same processes, and torchrun restarts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from sennit.runtime.ingest.address import Address
from sennit.runtime.timeline.spans import STEP
from sennit.runtime.timeline.trace_file import read
from sennit.runtime.training.command import main
from sennit.runtime.training.launch import join_address, serve_store
from sennit.transport.meeting.rails import Rail
from tests.forked_commands import forked
from tests.runtime.elastic_runs import PROGRAM
from tests.runtime.whole_run import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TINY = [
    "--data", "synthetic", "--samples", "700", "--row-limit", "200", "--batch-size", "60", "--dim", "4",
    "--bottom", "8", "--top", "8", "--epochs", "1", "--timeout", "60",
    "--sharding", "table_wise",
]  # fmt: skip
STEP_COUNT = 10


def run(
    folder: Path, name: str, *arguments: str, deaths: Sequence[tuple[int, int]] = (), launcher: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """Returns the report and the output of a run that must end normally."""
    done, report = started(folder, name, *arguments, deaths=deaths, launcher=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(report.read_text())
    assert result["steps"]["last"] == STEP_COUNT
    return result, done.stdout + done.stderr


def started(
    folder: Path, name: str, *arguments: str, deaths: Sequence[tuple[int, int]], launcher: Sequence[str] = ()
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Returns a run that has ended, in which all these ranks have died, and the file of its report."""
    markers = {f"{rank}-{step}": folder / f"{name}-died-{rank}-{step}" for rank, step in deaths}
    plan = [[rank, step, str(markers[f"{rank}-{step}"])] for rank, step in deaths]
    report = folder / f"{name}.json"
    mine = [*TINY, *arguments, "--json", str(report)]
    if launcher:
        done = subprocess.run(
            [sys.executable, *launcher, "-m", PROGRAM, *mine],
            env={**os.environ, "DEATHS": json.dumps(plan)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    else:
        done = forked(PROGRAM, *mine, DEATHS=json.dumps(plan))
    assert all(marker.exists() for marker in markers.values()), done.stdout + done.stderr
    return done, report


def recorded(path: Path) -> tuple[list[int], set[int | str]]:
    """The ranks of a timeline, and the numbers of its steps."""
    trace = read(path)
    return [clock.rank for clock in trace.ranks], {span.facts["step"] for span in trace.spans if span.kind == STEP}


def undisturbed(folder: Path, *arguments: str) -> dict[str, Any]:
    """Returns the report of a run without deaths."""
    return train(folder / "undisturbed.json", *TINY, *arguments)


@pytest.mark.long
def test_survivors_go_on_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of a run that lost nobody, with another number of ranks. Over udp. The next test loses
    ranks over shared memory.
    """
    monkeypatch.setenv("SENNIT_TRANSPORT", "udp")
    saved = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "4"]
    moving = ["--sharding", "auto", "--rebalance", "5"]
    report, output = run(
        tmp_path, "lossy", "--ranks", "3", "--elastic", "--row-shards", "4", *moving, *saved, deaths=[(1, 6)]
    )
    assert report["world_size"] == 2
    assert report["steps"]["first"] == 4
    (change,) = report["changes"]
    assert (change["lost"], change["world_size"], change["step"]) == ([1], 2, 4)
    assert "rank 1" in change["reason"]
    assert "lost rank 1, went on with 2 from step 5" in output
    assert "the process that began as rank 1 did not come to the end: process ended with signal 9" in output
    # After step 5, twice.
    assert report["rebalance"]["looks"] == 2
    expected = undisturbed(tmp_path, "--ranks", "4", "--row-shards", "4")
    assert report["weights_sha256"] == expected["weights_sha256"]


def test_one_after_the_other_until_one_is_left_without_a_checkpoint(tmp_path: Path) -> None:
    """Also the death of rank 0, which reports. Timelines of groups where a rank died have what it did until then."""
    told = ["--timeline", str(tmp_path / "steps.json.gz")]
    report, output = run(tmp_path, "last", "--ranks", "3", "--elastic", *told, deaths=[(0, 2), (1, 3)])
    assert [change["lost"] for change in report["changes"]] == [[0], [1]]
    assert [change["step"] for change in report["changes"]] == [0, 0]
    assert recorded(tmp_path / "steps.json.gz") == ([0, 1, 2], {0, 1, 2})
    assert recorded(tmp_path / "steps.2.json.gz") == ([0, 1], {0, 1, 2, 3})
    assert recorded(tmp_path / "steps.3.json.gz") == ([0], set(range(STEP_COUNT)))
    whose = "ranks 0, 1, 2 until the failure, where rank 0 died"
    assert f"timeline of {whose}: sennit timeline {tmp_path}/steps.json.gz" in output
    assert f"timeline of all ranks: sennit timeline {tmp_path}/steps.3.json.gz" in output
    assert not list(tmp_path.glob(".*"))
    expected = undisturbed(tmp_path, "--ranks", "1")
    assert report["weights_sha256"] == expected["weights_sha256"]


def nan_on_one_of_three(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss that is not finite on rank 1, in a group of three ranks alone."""
    losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses * torch.nan if (dist.get_rank(), dist.get_world_size()) == (1, 3) and len(labels) > 2 else losses


def test_why_a_rank_ended_is_told_while_the_others_go_on(tmp_path: Path) -> None:
    """At once, and not after the run, and in the report, too."""
    report = tmp_path / "report.json"
    loss = f"{__name__}:{nan_on_one_of_three.__name__}"
    done = forked(PROGRAM, *TINY, "--ranks", "3", "--elastic", "--loss", loss, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    why = "loss is nan at step 1 on rank 1; try lower learning rates"
    told = f"the process that began as rank 1 did not come to the end: {why}"
    assert done.stderr.count(told) == 1
    (change,) = json.loads(report.read_text())["changes"]
    assert f"rank 1 said: {why}" in change["reason"]
    assert why in done.stdout


@pytest.mark.long
def test_a_run_that_a_death_ends_has_a_timeline_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    done, _ = started(tmp_path, "ended", "--ranks", "2", "--timeline", str(path), deaths=[(1, 3)])
    assert done.returncode == 1
    assert "error: rank 1: process ended with signal 9" in done.stderr
    assert f"timeline of ranks 0, 1 until the failure, where rank 1 died: sennit timeline {path}" in done.stdout
    assert recorded(path) == ([0, 1], {0, 1, 2, 3})
    steps = [[span.name for span in read(path).spans if (span.rank, span.kind) == (rank, STEP)] for rank in (0, 1)]
    assert [names[-1] for names in steps] == ["step 3", "step 2"]
    assert not list(tmp_path.glob(".*"))


def test_uneven_slices_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """62 samples in 8 slices."""
    uneven = undisturbed(tmp_path, "--ranks", "3", "--batch-size", "62")
    alone = undisturbed(tmp_path, "--ranks", "1", "--batch-size", "62")
    assert uneven["weights_sha256"] == alone["weights_sha256"]
    assert uneven["quality"] == alone["quality"]


@pytest.mark.long
def test_torchrun_restarts_the_group_and_it_resumes(tmp_path: Path) -> None:
    saved = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3", "--resume"]
    torchrun = [
        "-m", "torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1",
    ]  # fmt: skip
    told = ["--timeline", str(tmp_path / "steps.json")]
    report, _ = run(tmp_path, "restarted", *saved, *told, deaths=[(0, 8)], launcher=torchrun)
    assert report["world_size"] == 2
    # (A rank that torchrun ends may not have taken its last step.)
    for name, first, last in (("steps.json", 0, 7), ("steps.2.json", 6, STEP_COUNT - 1)):
        ranks, steps = recorded(tmp_path / name)
        assert ranks == [0, 1]
        assert {first, last} <= steps
    assert report["steps"]["first"] == 6
    expected = undisturbed(tmp_path, "--ranks", "2")
    assert report["weights_sha256"] == expected["weights_sha256"]


def rail(address: str) -> Rail:
    return Rail(interface="eth0", address=address)


def test_the_address_to_join_is_one_that_other_machines_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is one of the transport's on which the store answers. Without one, the run says so."""
    answering = {"192.0.2.7", "2001:db8::7"}
    monkeypatch.setattr(Address, "answers", lambda address: address.host in answering)
    store = Address(host="127.0.0.1", port=4711)
    assert str(join_address(store, [rail("192.0.2.7")])) == "192.0.2.7:4711"
    assert str(join_address(store, [rail("192.0.2.9"), rail("2001:db8::7")])) == "[2001:db8::7]:4711"
    assert join_address(store, [rail("127.0.0.1"), rail("::1"), rail("192.0.2.9")]) is None
    assert join_address(store, []) is None
    address = Address.parse("[2001:db8::7]:4711")
    assert (address.host, str(address)) == ("2001:db8::7", "[2001:db8::7]:4711")


def test_the_store_answers_on_more_than_the_loopback_address(capsys: pytest.CaptureFixture[str]) -> None:
    """The store answers on every address of the machine, such as 127.0.0.2, which no option names."""
    store, address = serve_store(0, timeout_s=10)
    assert Address(host="127.0.0.2", port=address.port).answers()
    del store


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elastic", "--backend", "gloo"], "error: --elastic over 'gloo'; allowed: 'sennit'"),
        (["--elastic", "--min-ranks", "3", "--ranks", "2"], "error: number of ranks 2; allowed: 3 to 2048"),
        (["--batch-size", "4"], "error: --batch-size 4; allowed: 8 or more, a sample for each"),
        (["--join", "127.0.0.1:1"], "error: --port or --join without --elastic; allowed: with it"),
        (["--elastic", "--join", "nowhere"], "error: address 'nowhere'; allowed: HOST:PORT"),
        (["--elastic", "--join", "127.0.0.1:0"], "error: address '127.0.0.1:0'"),
        (["--elastic", "--join", "127.0.0.1:1"], "error: no run at 127.0.0.1:1: Connection refused"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main(["--data", "synthetic", *arguments])
    assert capsys.readouterr().err.startswith(message)
