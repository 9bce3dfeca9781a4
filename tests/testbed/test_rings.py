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
    lines, complete = rings.report({**ALL_RAN, "root": {"passed": 1200, "skipped": 3}}, {}, in_ci=True)
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
        lines, complete = rings.report(found, {}, in_ci=in_ci)
        assert not complete
        assert [line for line in lines if "MUST RUN" in line] == [line for line in lines if line.startswith(f"{name} ")]


def test_what_a_package_brings_is_an_excuse_outside_of_ci_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "libfuzzer", "bcc", "vm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/no/such/cache")  # a kernel that was not made can be made
    found = without("fuzz", "trace", "rdma", "vm")
    lines, complete = rings.report(found, {}, in_ci=False)
    assert complete
    assert sum("not run: missing capability" in line for line in lines) == 4
    lines, complete = rings.report(found, {}, in_ci=True)
    assert not complete
    assert sum("MUST RUN HERE, AND DID NOT" in line for line in lines) == 4


@pytest.mark.parametrize(
    ("lacking", "absent", "excused"),
    [
        (("bpf",), "trace", True),  # a kernel without BPF
        (("bcc",), "trace", False),
        (("libfuzzer",), "fuzz", False),
    ],
)
def test_what_a_ring_stands_on_excuses_it_in_ci(
    monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...], absent: str, excused: bool
) -> None:
    lacks(monkeypatch, *lacking)
    assert rings.report(without(absent), {}, in_ci=True)[1] is excused


def test_a_vm_without_pyverbs_is_an_excuse_outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "pyverbs")
    monkeypatch.setattr(rings, "_no_kernel_boots", lambda: None)
    assert rings.report(without("rdma"), {}, in_ci=False)[1]
    assert not rings.report(without("rdma"), {}, in_ci=True)[1]


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("missing capability gpu: no NVIDIA device on this machine: None", True),
        ("missing capability netem: this kernel has no sch_netem: None", True),
        ("missing capability chromium: chromium is not installed: None", False),
        ("missing capability tc-bpf: fabric.bpf.c:7: error: unknown type: None", False),
        ("collection skipped: ('x.py', 3, \"Skipped: could not import 'pyarrow': No module named 'pyarrow'\")", False),
        ("the package torchrec is not installed: make frameworks: None", True),
        ("DLRM_CLONE names no clone: None", True),
        ("this machine has RDMA devices: None", True),
    ],
)
def test_a_test_that_lacks_a_package_may_not_skip_in_ci(
    monkeypatch: pytest.MonkeyPatch, reason: str, allowed: bool
) -> None:
    lacks(monkeypatch)
    assert rings.may_skip(reason) is allowed
    lines, complete = rings.report(ALL_RAN, {reason: 1199}, in_ci=True)
    assert complete is allowed
    assert [line for line in lines if "MUST RUN" in line] == (
        [] if allowed else [f"1,199 skipped, AND MUST RUN HERE: {reason}"]
    )
    assert rings.report(ALL_RAN, {reason: 1199}, in_ci=False)[1]


def test_what_needs_the_kernel_may_skip_where_the_kernel_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "bpf")
    assert rings.may_skip("missing capability tc-bpf: bpf: Function not implemented: None")


def test_what_no_package_brings_is_an_excuse_in_ci_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(monkeypatch, "gpu", "root", "netns")
    monkeypatch.setattr(kernels, "find", lambda kind: Path(kind))
    monkeypatch.setattr(boot, "problem", lambda kind, kernel: f"{kind} does not boot here")
    lines, complete = rings.report(without("gpu", "root", "xdp", "trace", "rdma", "vm"), {}, in_ci=True)
    assert complete, lines
    assert any(line.startswith("rdma") and "uml does not boot here; qemu does not boot here" in line for line in lines)
    monkeypatch.setattr(boot, "problem", lambda kind, kernel: "" if kind == "qemu" else "does not boot here")
    assert not rings.report(without("rdma"), {}, in_ci=True)[1]


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
    found, reasons = rings.read(tmp_path)
    assert found == {"root": {"passed": 1, "skipped": 1}, "xdp": {"failed": 1}, "cpp": {"passed": 1}}
    assert reasons == {"no: None": 1}


def test_pytest_says_the_ring_of_each_test_that_is_skipped_too(tmp_path: Path) -> None:
    """A test that its own marker skips, one that needs what is not there, and a file that was not collected."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.root\n@pytest.mark.skipif(True, reason='the package x is not installed')\n"
        "def test_a(): pass\n"
        "@pytest.mark.xfail(run=False, reason='hangs')\ndef test_b(): pass\n"
        "def test_c(): pytest.importorskip('no_such_package')\n"
        "@pytest.mark.xdist_group('x')\ndef test_d(): pass\n"
    )
    (tmp_path / "test_none.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    report = ["--junitxml", str(tmp_path / "python.xml"), "-p", "no:cacheprovider", "--numprocesses", "1"]
    # The project's own, which is no package that others can import.
    (tmp_path / "conftest.py").write_text(
        "import sys, types\n"
        "sys.modules['tests'] = types.ModuleType('tests')\n"
        f"sys.modules['tests'].__path__ = [{str(ROOT / 'tests')!r}]\n"
        "from tests.conftest import *\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", *report, "-c", str(ROOT / "pyproject.toml"), "--rootdir", "."]
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    found, reasons = rings.read(tmp_path)
    assert found == {"root": {"skipped": 1}, rings.INNER: {"passed": 1, "skipped": 3}}
    assert sorted(map(rings.may_skip, reasons)) == [False, False, False, True]


def test_the_command_fails_without_reports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sennit.testbed.rings", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "test: cpp                     0 passed" in done.stdout
