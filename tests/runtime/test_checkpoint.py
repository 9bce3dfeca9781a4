# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder: kills at every point of a save, power cuts, full disks, and which checkpoints are kept."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint import writing
from sennit.runtime.checkpoint.manifest import CheckpointError, Manifest
from tests.forked_commands import forked

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"
OLD, NEW = 1.0, 2.0


def about(step: int, run_id: str = RUN) -> Manifest:
    return Manifest(run_id=run_id, step=step, fixed={}, free={}, code={})


def save(folder: Path, step: int, value: float = 0.0, run_id: str = RUN, keep: int | None = None) -> None:
    writing.save(folder, about(step, run_id), {"weights": torch.full((9000,), value)}, keep=keep)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Makes a process group of this process alone."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("step", "keep"),
    [
        pytest.param(7, 0, id="the same step again", marks=pytest.mark.long),
        pytest.param(8, 1, id="a newer step, one kept"),
    ],
)
def test_killed_at_any_point_of_a_save_a_whole_checkpoint_is_left(tmp_path: Path, step: int, keep: int) -> None:
    done = forked("tests.runtime.checkpoint_crashes", str(tmp_path), str(step), str(keep), timeout_s=170)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    names = [f"step-{step:09d}"] if keep else ["step-000000006", "step-000000007"]
    for answer in answers:
        # A later complete save removes all half-written files.
        assert answer["after"] == names, answer
        assert answer["value"] in (OLD, NEW)
    *killed, undisturbed = answers
    assert undisturbed["value"] == NEW
    # Up to one moment the old checkpoint is the newest, from then on the new one.
    values = [answer["value"] for answer in answers]
    assert values == sorted(values)
    assert OLD in values
    points = [answer["died_at"].partition(" ")[0] for answer in killed]
    assert {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "fsync"} <= set(points)
    newest = {answer["newest"] for answer in killed}
    assert newest == ({"step-000000007", "step-000000008"} if keep else {"step-000000007", "step-000000007.replaced"})


class Journal:
    """Records a save's operations on a folder, in order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        root = folder.parent
        fsync, rename, rmdir = os.fsync, os.rename, os.rmdir

        def name(path: Any) -> str:
            return str(Path(path).relative_to(root))

        def on_fsync(descriptor: int) -> None:
            self.events.append(("fsync", name(os.readlink(f"/proc/self/fd/{descriptor}"))))
            fsync(descriptor)

        def on_rename(source: Any, target: Any, **rest: Any) -> None:
            self.events.append(("rename", name(target)))
            rename(source, target, **rest)

        def on_rmdir(path: Any, **rest: Any) -> None:
            self.events.append(("rmdir", Path(path).name))
            rmdir(path, **rest)

        monkeypatch.setattr(os, "fsync", on_fsync)
        monkeypatch.setattr(os, "rename", on_rename)
        monkeypatch.setattr(os, "rmdir", on_rmdir)

    def place(self, what: str, path: str, after: int = -1) -> int:
        return self.events.index((what, path), after + 1)


@pytest.mark.usefixtures("group")
def test_a_checkpoint_is_durable_before_it_counts_and_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses what was not synced. Contents need the files' own fsync, names the folder's."""
    folder = tmp_path / "saved"
    save(folder, 1)
    journal = Journal(folder, monkeypatch)
    save(folder, 2, keep=1)
    partial = "saved/step-000000002.partial"
    renamed = journal.place("rename", "saved/step-000000002")
    files = [entry.name for entry in (folder / "step-000000002").iterdir()]
    assert {".metadata", "manifest.json"} < set(files)
    synced = {path for what, path in journal.events[:renamed] if what == "fsync"}
    # DCP writes its index under another name and renames it.
    assert {f"{partial}/{name}{'.tmp' if name == '.metadata' else ''}" for name in files} <= synced
    last = max(place for place, event in enumerate(journal.events[:renamed]) if event[1].startswith(f"{partial}/"))
    assert journal.place("fsync", partial, after=last) < renamed
    named = journal.place("fsync", "saved", after=renamed)
    away = journal.place("rename", "saved/step-000000001.deleted")
    assert named < away
    # The name goes before the parts, so that a half-deleted checkpoint never looks whole.
    assert journal.place("fsync", "saved", after=away) < journal.place("rmdir", "step-000000001.deleted")


@pytest.mark.usefixtures("group")
def test_the_rename_of_a_first_checkpoint_is_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "saved", monkeypatch)
    save(tmp_path / "saved", 1)
    journal.place("fsync", "saved", after=journal.place("rename", "saved/step-000000001"))


@pytest.mark.usefixtures("group")
def test_the_newest_of_the_own_run_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for step in (1, 2, 3):
        save(folder, step)
    save(folder, 9, run_id=OTHER)
    (folder / "step-000000000").mkdir()
    (folder / "notes.txt").touch()
    save(folder, 4, keep=2)
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "notes.txt",
        "step-000000000",
        "step-000000003",
        "step-000000004",
        "step-000000009",
    ]
    assert checkpoint.latest(folder) == folder / "step-000000009"
    assert checkpoint.latest_of(folder, RUN) == folder / "step-000000004"


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("limit_bytes", [0, 100, 20_000, 40_000])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, limit_bytes: int) -> None:
    """The step may already exist, and the disk may have room for the weights but not for the manifest."""
    folder = tmp_path / "saved"
    save(folder, 1, OLD)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    large = Manifest(run_id=RUN, step=1, fixed={"x": "x" * 50_000}, free={}, code={})
    action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-000000001 was not written: rank 0: .*(too large|write|unexpected pos)"
        ):
            writing.save(folder, large, {"weights": torch.full((9000,), NEW)}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, action)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [entry.name for entry in folder.iterdir()] == ["step-000000001"]


def test_unfinished_checkpoints_are_not_taken(tmp_path: Path) -> None:
    for name in ("step-000000007.partial", "step-000000008.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "step-000000003").mkdir()
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    for name in ("step-000000002.replaced", "step-000000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["step-000000002.replaced", "step-000000001"]
