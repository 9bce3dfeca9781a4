# SPDX-License-Identifier: Apache-2.0
"""The VM in the CI of others: the steps of examples/ci/soft-roce.yaml, in roots that have nothing but the base system.

Packages come from the archives that apt knows here, so Ubuntu's root needs a machine with Ubuntu. pip gets a folder of
wheels, and sennit as an sdist. A kernel that this machine has under the workflow's key is put into the root's cache, as
GitHub would do. Else it is built there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sennit import cache
from tests import pages

WORKFLOW = pages.ROOT / "examples/ci/soft-roce.yaml"
COMPONENTS = {"Debian": "main", "Ubuntu": "main universe"}
COMMAND_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 3000.0
# A container's root: its own processes, shared memory and mounts, and the network of the host.
ENTER = """
mount --make-rprivate /
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=1777,size=3g tmpfs "$1/dev/shm"
exec chroot "$1" /usr/bin/env -i - HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive \
  PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels GITHUB_OUTPUT=/outputs SENNIT="$2" sh -e -c "$3"
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(4 * STEP_TIMEOUT_S),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="debootstrap is not installed"),
]


def steps() -> list[dict[str, Any]]:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    found: list[dict[str, Any]] = job["steps"]
    return found


def sources(origin: str, release: str) -> list[str]:
    """Lines of sources.list for a release, the base system first, from this machine's. Skips where it has none."""
    fields = ["--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages", f"Origin: {origin}"]
    command = ["apt-get", "indextargets", *fields]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S).stdout
    archives = dict.fromkeys(tuple(line.split()) for line in listed.splitlines())
    own = next((name for _, name in archives if "-" not in name), None)
    if own is None:
        pytest.skip(f"apt knows no archive of {origin} here")
    lines = [f"deb {uri} {name.replace(own, release, 1)} {COMPONENTS[origin]}" for uri, name in archives]
    return sorted(lines, key=lambda line: f" {release} " not in line)


@dataclass(frozen=True)
class Root:
    """An empty root, which a test enters as a container does."""

    folder: Path

    def run(self, script: str, sennit: str = "") -> str:
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-e", "-c", ENTER, "sh"]
        done = subprocess.run(
            [*enter, str(self.folder), sennit, script],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=STEP_TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    origin, release = request.param
    lines = sources(origin, release)
    folder = tmp_path / "root"
    command = ["debootstrap", "--variant=minbase", release, str(folder), lines[0].split()[1]]
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    (folder / "etc/apt/sources.list").write_text("".join(f"{line}\n" for line in lines))
    return Root(folder)


def wheelhouse(folder: Path, python: str) -> None:
    """Collects what sennit without its native parts is built with, and what it needs."""
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version", python]
    names = [requirement.partition(";")[0] for requirement in wanted]
    subprocess.run([*pip, "--dest", str(folder), *names], check=True, timeout=COMMAND_TIMEOUT_S)


@pytest.mark.parametrize(
    ("root", "python"),
    [(("Debian", "bookworm"), "3.11"), (("Debian", "trixie"), "3.13"), (("Ubuntu", "noble"), "3.12")],
    indirect=["root"],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_the_workflow_boots_soft_roce_and_runs_a_program(root: Root, python: str, tmp_path: Path) -> None:
    wheelhouse(root.folder / "wheels", python)
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(tmp_path), str(pages.ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    (sdist,) = tmp_path.glob("sennit-*.tar.gz")
    shutil.copy(sdist, root.folder)
    printed = ""
    for step in steps():
        if "run" in step:
            printed = root.run(step["run"], f"/{sdist.name}")
        elif step["uses"].startswith("actions/cache@"):
            name, _, key = (root.folder / "outputs").read_text().strip().partition("=")
            assert name == "key"
            assert key.startswith("kernel-uml-")
            own = cache.folder() / key
            if own.is_dir():
                shutil.copytree(own, root.folder / "root/.cache/sennit" / key, ignore=shutil.ignore_patterns("boots"))
    assert [line.split()[:4] for line in printed.splitlines() if line.startswith("link ")] == [
        ["link", f"rxe{number}/1", "state", "ACTIVE"] for number in (0, 1)
    ]
    # The same from a wheel, which asks for no build tool, with a program of two processes over verbs.
    root.run("SENNIT_PYTHON_ONLY=1 /opt/sennit/bin/pip wheel --no-deps --wheel-dir /made $SENNIT", f"/{sdist.name}")
    (wheel,) = (root.folder / "made").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    root.run("python3 -m venv /opt/other && /opt/other/bin/pip install $SENNIT", f"/made/{wheel.name}")
    program = "/opt/other/bin/sennit testbed vm --memory 512M --netem 'loss 1%' -- sh -c 'tc qdisc show dev roce1'"
    assert "loss 1%" in root.run(program)
