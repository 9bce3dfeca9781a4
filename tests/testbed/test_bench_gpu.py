# SPDX-License-Identifier: Apache-2.0
"""`sennit bench gpu` without a GPU: what it refuses and how its parts end. tests/test_gpu_bundle.py runs all parts."""

from __future__ import annotations

import fcntl
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton")

from sennit.commands.cli import app
from sennit.doctor import capabilities
from sennit.runtime.kernels.implementations import implementation
from sennit.runtime.kernels.native import NativeOperator
from sennit.testbed.bench.gpu import (
    gpu,
    gpu_compiler,
    gpu_kernels,
    gpu_machine,
    gpu_overlap,
    gpu_part,
    gpu_summary,
    gpu_tests,
)
from sennit.transport.errors import Unsupported

pytestmark = [pytest.mark.needs("backend", "shm"), pytest.mark.timeout(180)]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")


def test_ranks_that_cannot_share_slices_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "gpu", "--interpreter", "--world", "3"])
    assert result.exit_code == 2
    assert "3 ranks; allowed: 2, 4, 8 and so on" in result.output


@without_gpu
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    assert capabilities.missing("gpu") is not None
    result = CliRunner().invoke(app, ["bench", "gpu"])
    assert result.exit_code == 1
    assert result.output.startswith("error: missing capability gpu")
    assert len(result.output.strip().splitlines()) == 1


# Parts of a GPU run: this is their program. It starts at once, so that limits can be short.
PARTS = """
case $1 in
  machine) printf '{"gpus": [], "versions": {"torch": "2"}, "problems": {"old": "too old a GPU"}}' >$2 ;;
  hangs) printf '{"results": [{"name": "before"}]}' >$2; echo it hangs
    (exec 9>$LOCK; flock 9; sleep 1000) & sleep 1000 ;;
  dies) echo it dies; kill -SEGV $$ ;;
  silent) ;;
  nan) printf '{"results": [{"name": "x", "ms": NaN}]}' >$2 ;;
  *) printf '{"results": [{"name": "x", "ms": 2, "samples_per_s": 500}]}' >$2 ;;
esac
"""


def test_a_part_that_hangs_or_dies_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, lock = tmp_path / "part.sh", tmp_path / "lock"
    program.write_text(PARTS)
    monkeypatch.setenv("LOCK", str(lock))
    limits_s = {"machine": 60.0, "old": 60.0, "hangs": 2.0, "dies": 60.0, "silent": 60.0, "nan": 60.0, "fine": 60.0}
    report = gpu.run(gpu.Settings(), folder=tmp_path, program=("sh", str(program)), limits_s=limits_s)
    parts = report["parts"]
    assert list(parts) == list(limits_s)
    assert parts["old"] == {"skipped": "too old a GPU"}
    assert parts["hangs"]["error"] == "killed at its limit, 2 s"
    assert parts["hangs"]["results"] == [{"name": "before"}]
    assert parts["hangs"]["traceback"] == "it hangs\n"
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # what the part had started is gone, too
    assert parts["dies"]["error"] == "signal 11"
    assert parts["dies"]["traceback"].startswith("it dies")
    assert parts["silent"]["error"] == "exit code 0, and it saved 0 results"
    assert json.loads((tmp_path / "fine.json").read_text()) == parts["fine"]
    # JSON knows no NaN, and other programs read these files.
    assert '"ms": null' in (tmp_path / "nan.json").read_text()
    assert report["versions"] == {"torch": "2"}
    assert len(gpu.failures(report)) == 3
    text = gpu_summary.page(report)
    assert "- Hangs: killed at its limit, 2 s" in text
    assert "- Old: too old a GPU" in text
    assert "- Fine, x: 2.000 ms, 500 samples/s" in text
    assert "## The first error: hangs\n\n```\nit hangs\n" in text


def test_a_part_may_work_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the tests does. What it saves must come where `--report` says, also if that is relative."""
    monkeypatch.chdir(tmp_path)
    program = ("sh", "-c", """cd / && printf '{"results": []}' >"$1" """)
    report = gpu.run(gpu.Settings(), folder=Path(), program=program, limits_s={"tests": 60.0})
    assert report["parts"]["tests"]["results"] == []
    assert (tmp_path / "tests.json").exists()


def test_no_part_begins_when_the_time_of_all_is_over(tmp_path: Path) -> None:
    report = gpu.run(gpu.Settings(), folder=tmp_path, program=("sh", "-c", "exit 1"), total_s=0)
    assert {part["skipped"] for part in report["parts"].values()} == {"nothing is left of 0 s"}


def part_with(monkeypatch: pytest.MonkeyPatch, *runs: Any) -> None:
    """Makes the part `made`, of modules with these functions `run`."""
    names = [f"made_{number}" for number in range(len(runs))]
    for name, run in zip(names, runs, strict=True):
        module = types.ModuleType(name)
        module.__dict__["run"] = run
        monkeypatch.setitem(sys.modules, f"sennit.testbed.bench.gpu.{name}", module)
    monkeypatch.setitem(gpu_part.MODULES, "made", tuple(names))


def test_a_module_that_fails_costs_neither_what_it_saved_nor_the_modules_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(_: gpu.Settings, save: gpu_part.Save) -> dict[str, Any]:
        save({"results": [{"name": "second"}]})
        raise ValueError("of no use")

    def fails_too(*_: Any) -> dict[str, Any]:
        raise SystemExit(3)

    part_with(
        monkeypatch,
        lambda *_: {"results": [{"name": "first"}]}, fails, fails_too, lambda *_: {"results": [{"name": "last"}]},
    )  # fmt: skip
    gpu_part.main("made", tmp_path / "made.json", gpu.Settings(), 60.0)
    found = json.loads((tmp_path / "made.json").read_text())
    assert found["results"] == [{"name": "first"}, {"name": "second"}, {"name": "last"}]
    assert found["error"] == "ValueError: of no use"
    assert found["errors"] == {"made_1": "ValueError: of no use", "made_2": "SystemExit: 3"}
    assert "in fails\n" in capfd.readouterr().err
    report: dict[str, Any] = {"parts": {"made": found}, "gpus": [], "versions": {}}
    assert gpu.failures(report) == ["made: ValueError: of no use", "made: SystemExit: 3"]
    assert "- Made: ValueError: of no use\n- Made: SystemExit: 3\n" in gpu_summary.page(report)


def test_what_this_machine_lacks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> dict[str, Any]:
        raise Unsupported("staging", "no such thing")

    part_with(monkeypatch, unsupported, lambda *_: {"results": [{"name": "last"}]})
    gpu_part.main("made", tmp_path / "made.json", gpu.Settings(), 60.0)
    found = json.loads((tmp_path / "made.json").read_text())
    assert found["skipped"].endswith("no such thing")
    assert found["results"] == [{"name": "last"}]
    assert "error" not in found


def test_devices_that_are_too_old_or_too_small_are_named() -> None:
    device = {"name": "T4", "capability": [7, 5], "free_bytes": 15_000_000_000}
    found = gpu_machine.problems([device])
    assert found["kernels"] == "T4 has compute capability 7.5; needed: 8.0"
    assert "staging" not in found
    assert "tests" not in found
    small = gpu_machine.problems([device | {"capability": [9, 0]}])
    assert small == dict.fromkeys(("embedding", "profile"), "T4 has 15.0 GB of memory free; needed: 20 GB")
    assert gpu_machine.problems([device | {"capability": [9, 0], "free_bytes": 80 * 10**9}]) == {}


def test_a_kernel_with_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = implementation("native")

    class Wrong(NativeOperator):
        def lookup(self, tables: Any, batch: Any) -> torch.Tensor:
            result = super().lookup(tables, batch)
            result[3] = -result[3]
            return result

    case = next(gpu_kernels.cases(gpu_kernels.SHAPES[0]))
    assert gpu_kernels.differences(case, right, Wrong(), torch.device("cpu"), 1) == ["result in 1 of 36 elements"]
    monkeypatch.setattr(gpu_kernels, "implementation", {"native": right, "triton": Wrong()}.__getitem__)
    saved: list[dict[str, Any]] = []
    with pytest.raises(
        RuntimeError, match=r"6 of 17 cases are wrong\. The first: 60x17 24x3 lookup sum fp32: other bits"
    ):
        gpu_kernels.run(gpu.Settings(interpreter=True), saved.append)
    assert len(saved) == 17


def test_every_outcome_of_a_test_is_counted() -> None:
    saved: list[dict[str, Any]] = []
    outcomes = gpu_tests.Outcomes(saved.append)

    def report(name: str, when: str, outcome: str, text: Any = "") -> Any:
        return types.SimpleNamespace(
            nodeid=name, when=when, outcome=outcome, duration=0.5, longrepr=text, longreprtext=str(text),
            passed=outcome == "passed", failed=outcome == "failed", skipped=outcome == "skipped",
        )  # fmt: skip

    for when in ("setup", "call", "teardown"):
        outcomes.pytest_runtest_logreport(report("a::good", when, "passed"))
    outcomes.pytest_runtest_logreport(report("a::bad", "call", "failed", "why"))
    outcomes.pytest_runtest_logreport(report("a::left", "setup", "skipped", ("a", 1, "no GPU")))
    outcomes.pytest_collectreport(report("b", "collect", "failed", "no module"))
    found = saved[-1]
    assert found["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert found["failures"] == {"a::bad": "why", "b": "no module"}
    assert found["failed_tests"] == ["a::bad", "b"]
    assert found["reasons_to_skip"] == ["no GPU"]
    assert found["seconds"] == 2.5


def test_what_is_slow_stands_beside_its_goal() -> None:
    one = {"name": "backward+sgd", "graph_ms": 0.7, "share_of_copy": 0.2, "goal_ms": 0.614}
    report: dict[str, Any] = {"parts": {"embedding": {"results": [one]}}, "gpus": [{"name": "H"}], "versions": {}}
    text = gpu_summary.page(report)
    assert "- embedding, backward+sgd: 0.700 ms; goal: 0.614 ms" in text
    assert "- embedding, backward+sgd: 20% of a copy's speed; goal: 30%" in text
    assert "## Wrong\n\nNothing.\n" in text


def test_a_peer_of_attention_stands_beside_its_goal() -> None:
    one = {"name": "flex_attention", "ms": 0.5, "over_sennit": 0.8, "goal_over_sennit": 1.0}
    slower = one | {"name": "HSTU", "over_sennit": 1.25}
    report: dict[str, Any] = {"parts": {"attention": {"results": [one, slower, {"name": "silu", "ms": 0.6}]}}}
    told = ["attention, flex_attention: 0.500 ms, 0.80 times sennit's; goal: 1.00"]
    assert gpu_summary.slow(report) == told


def test_figures_of_a_gpu_have_their_units() -> None:
    one = {"name": "forward", "graph_ms": 0.25, "share_of_copy": 0.42, "goal_ms": 0.345}
    parts: dict[str, Any] = {name: {} for name in ("tests", "embedding", "staging", "training step")}
    parts["embedding"] = {"results": [one]}
    parts["staging"] = {"results": [{"name": "AllReduce, 64 KiB", "bytes": 65536, "ms": 1, "bytes_per_s": 65.5e6}]}
    console = Console(record=True, width=160)
    gpu.render({"parts": parts}, console)
    text = console.export_text()
    assert "0.250 ms, 42% of a copy; FBGEMM on an H100 0.345 ms" in text
    assert "1.000 ms, 0.1 GB/s" in text


def test_copies_are_hidden_where_the_device_does_something_else() -> None:
    """A made timeline: the first half of the copies is not counted, and what overlaps counts once."""
    copy, kernel = "Memcpy HtoD (Pinned -> Device)", "update_kernel"
    spans = [
        (copy, 0.0, 50.0),
        (kernel, 60.0, 120.0),
        (copy, 70.0, 75.0),
        (copy, 100.0, 130.0),  # 20 beside the kernel before, 10 alone
        (copy, 150.0, 170.0),  # 15 beside the next kernel and another copy, 5 alone
        (kernel, 155.0, 180.0),
        ("Memcpy DtoH (Device -> Pinned)", 160.0, 200.0),
    ]
    found = gpu_overlap.overlap(spans)
    assert found == {"copied_us": 50.0, "alone_us": 15.0, "whole_us": 100.0}
    told = gpu_overlap.verdict([{"copied_us": 10.0, "alone_us": 0.0, "whole_us": 100.0}, found, None], False)
    assert told["outcome"] == "70% of their time beside other work; the device only copies for 15.0% of the time"
    report = {"parts": {"training step": {"results": [{"name": "copies"} | told]}}}
    assert gpu_summary.slow(report) == [f"training step, copies: {told['outcome']}; goal: 1%"]
    assert gpu_overlap.overlap([(kernel, 0.0, 1.0)]) is None
    with pytest.raises(RuntimeError, match="saw no HtoD copy"):
        gpu_overlap.verdict([None, None], False)


def test_hot_kernels_that_spill_are_slow_and_inexact_ones_wrong() -> None:
    one = {
        "kernel": "update_kernel", "case": "hot: fp16", "registers": 80, "spill_bytes": 0, "shared_bytes": 2048,
        "loads": {"4": 3, "16": 1}, "stores": {"8": 1}, "inexact": [],
    }  # fmt: skip
    cold = one | {"case": "wide", "spill_bytes": 24}
    spills = one | {"registers": 255, "spill_bytes": 8}
    assert gpu_compiler.problems([one, cold, spills]) == []
    report = {"parts": {"compiler": {"kernels": [one, cold, spills]}}}
    assert gpu_summary.slow(report) == ["compiler, update_kernel (fp16): 8 bytes spilled; goal: 0"]
    assert gpu_compiler.problems([cold | {"inexact": ["fma.rn.f32"]}]) == ["update_kernel (wide) has fma.rn.f32"]
    assert gpu_summary.hot_kernels([one, spills, cold])[2:] == ["| update | 2 | 80 to 255 | 8 | 2,048 | 16, 8 |"]


def test_what_has_no_published_time_has_no_goal() -> None:
    one = {"name": "backward+row_wise_adagrad, uniform ids", "graph_ms": 9.0, "share_of_copy": 0.4, "goal_ms": None}
    assert gpu_summary.slow({"parts": {"embedding": {"results": [one]}}}) == []
    assert gpu.text_of(one) == "9.000 ms, 40% of a copy"


def test_what_a_part_saves_is_json_to_other_programs(tmp_path: Path) -> None:
    gpu_part.write(tmp_path / "part.json", {"results": [{"ms": float("nan"), "gb_per_s": float("inf")}]})
    found = json.loads((tmp_path / "part.json").read_text(), parse_constant=pytest.fail)
    assert found == {"results": [{"ms": None, "gb_per_s": None}]}
