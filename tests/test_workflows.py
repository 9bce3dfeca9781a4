# SPDX-License-Identifier: Apache-2.0
"""Workflows of GitHub Actions, without running them: files that GitHub would take, commands and packages that fit.

testbed/test_empty_roots.py runs the steps of the example.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sennit.testbed.vm import machines, runner, uml_kernel
from tests import container_mounts, pages
from tests.test_code_blocks import check_sennit

OURS = pages.ROOT / ".github/workflows/test.yml"
EXAMPLE = pages.ROOT / "examples/ci/soft-roce.yaml"
# docs.github.com: Workflow syntax for GitHub Actions, the keys in use here and those beside them.
KEYS = {"name", True, "permissions", "env", "jobs"}  # YAML 1.1 reads the key `on` as a truth value.
JOB_KEYS = {"name", "needs", "runs-on", "container", "env", "steps", "timeout-minutes", "strategy", "if"}
STEP_KEYS = {"id", "if", "name", "uses", "run", "shell", "with", "env", "working-directory", "timeout-minutes"}


def job_of(path: Path) -> dict[str, Any]:
    workflow = yaml.safe_load(path.read_text())
    assert {"name", True, "jobs"} <= set(workflow) <= KEYS
    (found,) = workflow["jobs"].values()
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return job_of(EXAMPLE)


@pytest.mark.parametrize("path", [OURS, EXAMPLE], ids=lambda path: path.name)
def test_jobs_and_steps_have_the_keys_that_github_knows(path: Path) -> None:
    job = job_of(path)
    assert set(job) <= JOB_KEYS
    assert set(job["container"]) <= {"image", "options", "env", "volumes", "ports", "credentials"}
    for step in job["steps"]:
        assert set(step) <= STEP_KEYS
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
        subprocess.run(["sh", "-n"], input=step.get("run", ""), text=True, check=True, timeout=10)


def test_our_workflow_has_the_two_commands_of_the_readme() -> None:
    """After what an image lacks. `.ci/run` is the second one, for other services."""
    readme = pages.ROOT / "README.md"
    section = readme.read_text().partition("\n## Two commands\n")[2].partition("\n## ")[0]
    (block,) = [block for block in pages.blocks(readme) if block.text in section]
    commands = [line.partition("#")[0].strip() for line in block.text.splitlines()]
    assert len(commands) == 2
    *_, first, second = (step["run"] for step in job_of(OURS)["steps"] if "run" in step)
    assert [first, second] == commands
    assert (pages.ROOT / ".ci/run").read_text().splitlines()[-2:] == ["export CI=true", f"exec {commands[1]}"]


def test_the_cache_has_a_key_that_an_earlier_step_prints(job: dict[str, Any]) -> None:
    seen: dict[str, str] = {}
    used = 0
    for step in job["steps"]:
        for name, output in re.findall(r"\$\{\{ *steps\.(\w+)\.outputs\.(\w+) *\}\}", str(step.get("with", {}))):
            assert f'"{output}=$(' in seen[name]
            assert "testbed kernel --key" in seen[name]
            used += 1
        if "id" in step:
            seen[step["id"]] = step["run"]
    assert used == 1


def test_commands_are_right(job: dict[str, Any]) -> None:
    count = 0
    for step in job["steps"]:
        if "run" not in step:
            continue
        for command in re.findall(r"/bin/sennit ([^\n)]+)", step["run"]):
            check_sennit(shlex.split(command))
            count += 1
    assert count == 2


def test_what_it_installs_is_all_that_the_vm_and_its_kernel_ask_for(job: dict[str, Any]) -> None:
    (install,) = (step["run"] for step in job["steps"] if "apt-get install" in step.get("run", ""))
    installed = {word for word in shlex.split(install.replace("\\\n", "")) if not word.startswith("-")}
    # Part of every system, even of a container's.
    base = {"tar", "util-linux"}
    tools = (*runner.TOOLS, *machines.Uml.tools, *uml_kernel.TOOLS, *uml_kernel.UNPACKER.values())
    assert {package for _, packages in tools for package in packages.split()} - base <= installed


@pytest.mark.root
@pytest.mark.parametrize("path", [OURS, EXAMPLE], ids=lambda path: path.name)
def test_the_vm_has_its_memory_in_a_tmpfs_of_the_container(path: Path) -> None:
    """A VM cannot run in a file system without execution, and Docker's own /dev/shm is one."""
    job = job_of(path)
    memory = [re.findall(r"--memory (\d+)G", step.get("run", "")) for step in job["steps"]]
    asked_gib = max((int(found[0]) for found in memory if found), default=2)
    ask = f"from sennit.testbed.vm import machines; print(machines.memory_folder({asked_gib} << 30))"
    mounts = container_mounts.script(job["container"]["options"])
    enter = ["unshare", "--mount", "sh", "-e", "-c", f'mount --make-rprivate /\n{mounts}\nexec "$@"', "sh"]
    done = subprocess.run([*enter, sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{container_mounts.SHM}\n"
