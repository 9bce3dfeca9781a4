# SPDX-License-Identifier: Apache-2.0
"""bpftool finds maps by name, with typed fields, as long as their process lives."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sennit.ebpf.library import BpfError
from sennit.ebpf.pins import BPFFS, PARENT_NAME, PinFolder
from sennit.ebpf.typed_maps import TypedHash

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "bpftool")]
DEADLINE_S = 60.0
KEY = np.dtype([("rank", "<u4"), ("peer", "<i4")])
VALUE = np.dtype([("bytes", "<u8"), ("balance", "<i8"), ("marks", "<u4"), ("state", "<i4")])
PARENT = BPFFS / PARENT_NAME


def dumped(path: Path) -> list[dict[str, Any]]:
    """Returns key and value of every entry, as bpftool types them."""
    command = ["bpftool", "-j", "map", "dump", "pinned", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return [entry["formatted"] for entry in json.loads(done.stdout)]


def test_bpftool_shows_the_fields_of_the_dtype() -> None:
    with TypedHash("some_counters", key=KEY, value=VALUE, entries=4) as made, PinFolder("test-fields") as folder:
        path = folder.pin(made.map)
        made[3, -1] = (1 << 63, -5, 7, -1)
        made[4, 0] = (1, 2, 3, 4)
        del made[4, 0]
        assert dumped(path) == [
            {
                "key": {"rank": 3, "peer": -1},
                "value": {"bytes": 1 << 63, "balance": -5, "marks": 7, "state": -1},
            }
        ]
        for rank in range(3):
            made[rank, 0] = (0, 0, 0, 0)
        with pytest.raises(BpfError, match="of 4: Argument list too long"):
            made[9, 0] = (0, 0, 0, 0)
        with pytest.raises(BpfError, match="No such file"):
            del made[9, 9]
    assert not path.exists()
    assert not folder.path.exists()


def test_a_name_that_is_none_in_c_is_refused() -> None:
    with pytest.raises(BpfError, match="BTF of bad_key, bad_value"):
        TypedHash("bad", key=KEY, value=np.dtype([("a b", "<u8")]), entries=1)


def test_a_folder_is_one_processs() -> None:
    with PinFolder("test-owner"):
        with pytest.raises(BpfError, match="another process") as refused:
            PinFolder("test-owner")
        assert refused.value.errno == errno.EBUSY
        with PinFolder("test-other"):  # Making a folder removes abandoned folders only.
            assert (PARENT / "test-owner").is_dir()
    with PinFolder("test-owner"):
        pass


def test_a_folder_that_somebody_removed_is_closed_without_an_error() -> None:
    folder = PinFolder("test-removed")
    (PARENT / "test-removed").rmdir()
    folder.close()
    with PinFolder("test-removed"):
        assert (PARENT / "test-removed").is_dir()


def test_what_a_killed_process_left_is_removed() -> None:
    program = (
        "import numpy as np, sys\n"
        "from sennit.ebpf.pins import PinFolder\n"
        "from sennit.ebpf.typed_maps import TypedHash\n"
        "kind = np.dtype([('a', '<u8')])\n"
        "print(PinFolder('test-killed').pin(TypedHash('left', key=kind, value=kind, entries=1).map), flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        assert dumped(left) == []
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    assert left.exists()
    with PinFolder("test-sweeps"):
        assert not left.parent.exists()


def test_another_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BpfError, match=r"is no BPF file system \(mount -t bpf bpf DIRECTORY\)"):
        PinFolder("test-elsewhere", tmp_path)
    assert list(tmp_path.iterdir()) == []
