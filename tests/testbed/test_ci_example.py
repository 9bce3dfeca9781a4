# SPDX-License-Identifier: Apache-2.0
"""examples/ci/soft-roce.yaml without running it: a workflow that GitHub would take, and commands and packages that fit.

test_empty_roots.py runs its steps.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from sennit.testbed.vm import machines, runner, uml_kernel
from tests import pages
from tests.test_code_blocks import check_sennit

WORKFLOW = pages.ROOT / "examples/ci/soft-roce.yaml"
# docs.github.com: Workflow syntax for GitHub Actions, the keys in use here and those beside them.
JOB_KEYS = {"name", "needs", "runs-on", "container", "env", "steps", "timeout-minutes", "strategy", "if"}
STEP_KEYS = {"id", "if", "name", "uses", "run", "shell", "with", "env", "working-directory", "timeout-minutes"}


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    # YAML 1.1 reads the key `on` as a truth value.
    assert set(workflow) == {"name", True, "jobs"}
    (found,) = workflow["jobs"].values()
    assert isinstance(found, dict)
    return found


def test_jobs_and_steps_have_the_keys_that_github_knows(job: dict[str, Any]) -> None:
    assert set(job) <= JOB_KEYS
    assert set(job["container"]) <= {"image", "options", "env", "volumes", "ports", "credentials"}
    for step in job["steps"]:
        assert set(step) <= STEP_KEYS
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


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
        subprocess.run(["sh", "-n"], input=step["run"], text=True, check=True, timeout=10)
        for command in re.findall(r"/bin/sennit ([^\n)]+)", step["run"]):
            check_sennit(shlex.split(command))
            count += 1
    assert count == 2


def test_what_it_installs_is_all_that_the_vm_and_its_kernel_ask_for(job: dict[str, Any]) -> None:
    (install,) = (step["run"] for step in job["steps"] if "apt-get install" in step.get("run", ""))
    installed = {word for word in shlex.split(install.replace("\\\n", "")) if not word.startswith("-")}
    # Part of every system, even of a container's.
    base = {"tar", "util-linux"}
    tools = (*runner.TOOLS, *machines.Uml.tools, *uml_kernel.TOOLS, *uml_kernel.UNPACKER.values(), ("cc", "libc6-dev"))
    assert {package for _, package in tools} - base <= installed
