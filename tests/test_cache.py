# SPDX-License-Identifier: Apache-2.0
"""A cache that cannot be read is an empty one to all who can do without it. Who needs it is told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 90.0
STRANGER = 54_321

# Everyone who looks into the cache, or keeps something there, only to save time.
USERS = """
from sennit.ebpf import object_cache
from sennit.runtime.trace import kernel_headers
from sennit.runtime.backend import extension
from sennit.testbed.vm import kernels
object_cache.write("key", b"image")
assert object_cache.read("key") in (None, b"image")
assert kernel_headers.find() is None
try:
    kernels.find(kernels.Kind.UML)
except kernels.KernelMissing as error:
    assert "no such uml kernel in the cache: run" in str(error)
list(extension.builds("2.99.0"))
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("sennit", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""
NEEDED = """
from sennit import cache
from sennit.errors import DeviceError
try:
    cache.provide("entry", lambda folder: (folder / "file").write_bytes(bytes(100_000)))
except DeviceError as error:
    assert str(error).endswith(cache.REMEDY), error
else:
    raise AssertionError("it was written")
"""


# These keep all else as it is: the tests' own folder may be closed to other users.
WITHOUT_OVERRIDE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Root, to whom folders of other users are closed."""
NOBODY = [
    *("setpriv", "--reuid", str(STRANGER), "--clear-groups"),
    *("--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"),
]
"""A user without an entry in /etc/passwd, who may read every file."""


def run(program: str, *before: str, **changed: str | None) -> None:
    """Runs a program of Python by a command, with these variables changed; None removes one."""
    variables = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    done = subprocess.run(
        [*before, sys.executable, "-c", program],
        env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.root
@pytest.mark.parametrize("program", [USERS, NEEDED, GROUP], ids=["optional", "needed", "group"])
def test_the_home_of_another_user(tmp_path: Path, program: str) -> None:
    """As in a container that keeps HOME=/root for every user."""
    (tmp_path / ".cache" / "sennit").mkdir(parents=True)
    tmp_path.chmod(0o700)
    os.chown(tmp_path, STRANGER, STRANGER)
    run(program, *WITHOUT_OVERRIDE, HOME=str(tmp_path), XDG_CACHE_HOME=None)


@pytest.mark.root
@pytest.mark.parametrize("program", [USERS, NEEDED], ids=["optional", "needed"])
def test_a_user_without_a_home(program: str) -> None:
    run(program, *NOBODY, HOME=None, XDG_CACHE_HOME=None)


@pytest.mark.root
@pytest.mark.parametrize("program", [USERS, NEEDED], ids=["optional", "needed"])
@pytest.mark.parametrize("option", ["size=4k", "nr_inodes=2", "ro"])
def test_a_full_disk_and_one_that_cannot_be_written(tmp_path: Path, option: str, program: str) -> None:
    """`nr_inodes=2`: room for the cache's folder, and for nothing in it."""
    mount = f'mount -t tmpfs -o {option} tmpfs {tmp_path} && exec "$@"'
    run(program, "unshare", "--mount", "sh", "-c", mount, "sh", XDG_CACHE_HOME=str(tmp_path))


@pytest.mark.parametrize("program", [USERS, NEEDED], ids=["optional", "needed"])
@pytest.mark.parametrize("place", ["file", "n" * 300, "loop"])
def test_a_place_that_is_no_folder(tmp_path: Path, place: str, program: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    run(program, XDG_CACHE_HOME=str(tmp_path / place))
