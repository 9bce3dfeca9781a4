# SPDX-License-Identifier: Apache-2.0
"""The floor of `make test`: rings that must run on this machine, and did not, make it fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sennit.doctor import capabilities
from sennit.testbed import rings
from sennit.testbed.vm import boot, kernels

ROOT = Path(__file__).resolve().parents[2]
ALL_RAN = {ring.name: {"passed": 1} for ring in rings.RINGS}


def lacks(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def missing(*asked: str) -> str | None:
        return next((f"missing capability {name}" for name in asked if name in names), None)

    monkeypatch.setattr(capabilities, "missing", missing)


def without(*names: str) -> dict[str, dict[str, int]]:
    return {name: count for name, count in ALL_RAN.items() if name not in names}


def test_a_run_of_all_rings_is_complete_and_has_a_line_for_each() -> None:
    lines, complete = rings.report({**ALL_RAN, "root": {"passed": 1200, "skipped": 3}}, in_ci=True)
    assert complete
    assert [line.split()[0] for line in lines] == [ring.name.split()[0] for ring in rings.RINGS]
    assert "root                1,200 passed    0 failed     3 skipped" in lines


@pytest.mark.parametrize("name", ["rdma", "vm", "cpp", "model", "fuzz", "trace", "root", rings.INNER])
@pytest.mark.parametrize("count", [None, {"skipped": 7}, {"failed": 2}])
def test_a_ring_that_did_not_run_is_no_success(
    monkeypatch: pytest.MonkeyPatch, name: str, count: dict[str, int] | None
) -> None:
    lacks(monkeypatch)
    monkeypatch.setattr(rings, "_no_kernel_boots", lambda: None)
    found = without(name) | ({} if count is None else {name: count})
    for in_ci in (False, True):
        lines, complete = rings.report(found, in_ci=in_ci)
        assert not complete
        assert [line for line in lines if "MUST RUN" in line] == [line for line in lines if line.startswith(f"{name} ")]


def test_what_a_package_brings_is_an_excuse_outside_of_ci_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "clang", "bcc", "vm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/no/such/cache")  # a kernel that was not made can be made
    found = without("fuzz", "trace", "rdma", "vm")
    lines, complete = rings.report(found, in_ci=False)
    assert complete
    assert sum("not run: missing capability" in line for line in lines) == 4
    lines, complete = rings.report(found, in_ci=True)
    assert not complete
    assert sum("MUST RUN HERE, AND DID NOT" in line for line in lines) == 4


def test_what_no_package_brings_is_an_excuse_in_ci_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "gpu", "root", "netns")
    monkeypatch.setattr(kernels, "find", lambda kind: Path(kind))
    monkeypatch.setattr(boot, "problem", lambda kind, kernel: f"{kind} does not boot here")
    lines, complete = rings.report(without("gpu", "root", "xdp", "trace", "rdma", "vm"), in_ci=True)
    assert complete, lines
    assert any(line.startswith("rdma") and "uml does not boot here; qemu does not boot here" in line for line in lines)
    monkeypatch.setattr(boot, "problem", lambda kind, kernel: "" if kind == "qemu" else "does not boot here")
    assert not rings.report(without("rdma"), in_ci=True)[1]


@pytest.mark.parametrize(
    ("marks", "name"),
    [
        ((), rings.INNER),
        (("backend", "slow"), rings.INNER),
        (("root",), "root"),
        (("root", "bpf", "arena"), "xdp"),
        (("root", "tracepoints", "bcc"), "trace"),
        (("vm", "slow"), "vm"),
        (("rdma",), "rdma"),
    ],
)
def test_tests_belong_to_the_outermost_ring_that_they_name(marks: tuple[str, ...], name: str) -> None:
    assert rings.of_test(marks) == name


def test_reports_of_all_runners_are_counted(tmp_path: Path) -> None:
    ring = '<properties><property name="ring" value="{}"/></properties>'
    (tmp_path / "python.xml").write_text(
        f"""<testsuites><testsuite><testcase name="a">{ring.format("root")}</testcase>
        <testcase name="b">{ring.format("root")}<skipped message="no"/></testcase>
        <testcase name="c">{ring.format("xdp")}<failure message="no"/></testcase></testsuite></testsuites>"""
    )
    (tmp_path / "cpp.xml").write_text('<testsuite><testcase name="d" status="run"/></testsuite>')
    assert rings.counts(tmp_path) == {"root": {"passed": 1, "skipped": 1}, "xdp": {"failed": 1}, "cpp": {"passed": 1}}


def test_pytest_says_the_ring_of_each_test(tmp_path: Path) -> None:
    chosen = "tests/testbed/test_rings.py::test_tests_belong_to_the_outermost_ring_that_they_name"
    report = ["--junitxml", str(tmp_path / "python.xml"), "-p", "no:cacheprovider", "--numprocesses", "1"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *report, chosen], cwd=ROOT, check=True, capture_output=True, timeout=90
    )
    assert rings.counts(tmp_path) == {rings.INNER: {"passed": 7}}


def test_the_command_fails_without_reports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sennit.testbed.rings", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "test: cpp                     0 passed" in done.stdout
