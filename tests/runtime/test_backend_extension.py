# SPDX-License-Identifier: Apache-2.0
"""Which extension is loaded, and what is said where none fits this torch and this Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sennit import extras
from sennit.errors import Unsupported
from sennit.runtime.backend import extension

pytestmark = pytest.mark.needs("backend")


def load_anew() -> None:
    extension.load.__wrapped__()


def test_another_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    there = r"no extension for torch 2\.99\.0\+cpu and Python 3\.\d+\.\d+\S*, but for torch 2\.\d+\.\d+\S*; make build"
    with pytest.raises(Unsupported, match=there):
        load_anew()


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "build_info.json").write_text(json.dumps({"torch": torch.__version__}))
    (tmp_path / "_c10d.cpython-399-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(extension, "_portions", lambda package: [tmp_path] if package == "sennit_torch" else [])
    monkeypatch.setattr(extras, "from_checkout", lambda: False)
    there = r"but for torch \S+ and cpython-399; pip install 'sennit-torch==0\.1\.0\+torch2\.\d+', or .*build-extension"
    with pytest.raises(Unsupported, match=there):
        load_anew()


def test_a_patch_release_keeps_the_interface_and_a_minor_one_does_not(tmp_path: Path) -> None:
    build = extension.Build(path=tmp_path / f"_c10d{extension.SUFFIX}", torch="2.13.0+cpu")
    fits = {version: build.fits(version) for version in ("2.13.0", "2.13.1+cu126", "2.12.0", "2.14.0+cpu", "2.1.0")}
    assert fits == {"2.13.0": True, "2.13.1+cu126": True, "2.12.0": False, "2.14.0+cpu": False, "2.1.0": False}


def test_the_doctor_links_the_extension_without_an_import_of_torch() -> None:
    program = (
        "import sys\nfrom sennit.doctor.capabilities import probe\nprint(probe('backend'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert "available=True" in done.stdout
    assert done.stdout.endswith(" False\n")


@pytest.mark.parametrize(("size_bytes", "why"), [(5_000, "damaged: .* signal 7"), (10, "file too short")])
def test_what_cannot_be_linked_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size_bytes: int, why: str
) -> None:
    torn = tmp_path / f"_c10d{extension.SUFFIX}"
    torn.write_bytes(Path(extension.load().__file__ or "").read_bytes()[:size_bytes])
    (tmp_path / "build_info.json").write_text(json.dumps({"torch": torch.__version__}))
    monkeypatch.setattr(extension, "builds", lambda _: [extension.record_of(tmp_path)])
    with pytest.raises(Unsupported, match=rf"_c10d\S+ cannot be loaded with torch 2\.\S+ \(.*{why}\); make build"):
        extension.try_link(torch.__version__)


# Two ranks of a host, which know nothing yet but torch. Rank 0 says what it loads, and in which of these modules Python
# looked for garbage.
STARTS = """
import gc
import os
import sys

import torch
import torch.distributed as dist

collected = set()


def note(phase, info):
    frame = sys._getframe(1)
    while phase == "start" and frame is not None:
        if frame.f_code.co_name == "<module>":
            collected.add(frame.f_globals["__name__"])
        frame = frame.f_back


before = set(sys.modules)
other = os.fork()
rank = 0 if other else 1
gc.callbacks.append(note)
dist.init_process_group("sennit", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
made = set(sys.modules)
dist.all_reduce(torch.ones(1024))
after = set(sys.modules)
gc.callbacks.clear()
dist.destroy_process_group()
if rank:
    os._exit(0)
assert os.waitpid(other, 0)[1] == 0
print(*sorted(made - before))
print(*sorted(after - made))
kinds = [kind for name in after - before for kind in vars(sys.modules[name]).values() if isinstance(kind, type)]
print(*sorted({kind.__qualname__ for kind in kinds if {"__dataclass_fields__", "_member_map_"} & vars(kind).keys()}))
print(*sorted(collected & (after - before)))
"""
# What a group needs for a network, a codec, a device, a failure, or where no extension was built.
FOR_OTHERS = {
    *("rails", "rdma_rails", "devices", "reachability", "network_trial", "numa", "endpoint"),
    *("codecs", "coding", "coded_cost", "device_plan", "halving", "membership", "cache", "extras"),
}


def test_a_group_of_one_host_loads_what_it_needs_and_no_compiler(tmp_path: Path) -> None:
    """All ranks of a host load it at the same time, so that each module counts as often as there are ranks a core."""
    command = [sys.executable, "-c", STARTS, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    at_init, at_first_call, dear, collected = (line.split() for line in done.stdout.splitlines())
    ours = [name for name in at_init if name.startswith("sennit.")]
    assert "sennit.transport.meeting.rendezvous" in ours
    assert not [name for name in ours if name.endswith((".plan_codec", ".selection"))]
    assert not {name.rpartition(".")[2] for name in [*at_init, *at_first_call]} & {*FOR_OTHERS, "secrets"}
    first = [name for name in at_first_call if name.startswith("sennit.")]
    assert first == ["sennit.transport.choice", "sennit.transport.choice.ready_plans"]
    assert "sennit.transport.communicator" not in ours
    # torch's own are in `import torch`.
    assert not [name for name in [*at_init, *at_first_call] if name.startswith(("torch.", "sympy", "numpy."))]
    # Python compiles the methods of a dataclass in each process. A NamedTuple takes a sixth of that time. An Enum makes
    # a descriptor of each member.
    assert not dear
    # One look for garbage takes as long as ten modules, and finds none.
    assert not collected
