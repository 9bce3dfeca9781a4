# SPDX-License-Identifier: Apache-2.0
"""`sennit metrics --bpffs`: as long as the ranks live, bpftool dumps the values that they count."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sennit.transport._core", reason="the native core is not built")

from sennit.ebpf import kernel_features
from sennit.runtime.telemetry import bpf_maps
from sennit.runtime.telemetry.samples import STANDARD_NAMES, UNUSED
from sennit.transport import counters
from tests.testbed.answering_ranks import DEADLINE_S, Ranks, start_over

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "bpftool")]
COMMAND = (sys.executable, "-m", "sennit", "metrics", "--bpffs", "--interval", "0.1")
EX_UNAVAILABLE = 69
# linux/prctl.h
PR_CAPBSET_DROP = 24


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    pytest.importorskip("sennit.transport.meeting.rails")
    with Ranks(start_over("udp"), tmp_path, seed=1) as made:
        yield made


@pytest.fixture
def publisher() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def dumped(path: Path) -> dict[tuple[int, ...], dict[str, int]]:
    command = ["bpftool", "-j", "map", "dump", "pinned", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    entries = json.loads(done.stdout) if done.returncode == 0 else []
    return {tuple(entry["formatted"]["key"].values()): entry["formatted"]["value"] for entry in entries}


def counted(pages: list[counters.Page], group: str) -> dict[tuple[int, ...], dict[str, int]]:
    """Returns the expected dump of a group's map."""
    return {
        (
            int(page.number, 16), page.process, page.rank,
            -1 if block.peer is None else block.peer, -1 if block.path is None else block.path,
            page.owner,
        ): {STANDARD_NAMES.get(name, name): value for name, value in block.values.items() if name != UNUSED}
        for page in pages if page.is_alive
        for block in page.blocks if block.group == group
    }  # fmt: skip


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0)


def test_bpftool_dumps_what_live_ranks_count(ranks: Ranks, publisher: subprocess.Popen[str]) -> None:
    assert publisher.stderr is not None
    folder = Path(publisher.stderr.readline().split()[2])
    mine = {process.pid for process in ranks.processes}

    def published(group: str) -> dict[tuple[int, ...], dict[str, int]]:
        return {key: value for key, value in dumped(folder / group).items() if key[1] in mine}

    groups = {block.group for page in ranks.pages() for block in page.blocks}
    assert groups > {"engine", "flow", "path", "udp_receive"}
    for group in groups:
        until(lambda group=group: published(group) == counted(ranks.pages(), group) != {})  # type: ignore[misc]
    assert sum(value["rdma_tx_bytes"] for value in published("flow").values()) > 10_000_000
    ranks.processes[0].kill()
    ranks.processes[0].wait(DEADLINE_S)
    until(lambda: {key[2] for key in published("flow")} == {1})
    publisher.send_signal(signal.SIGTERM)
    assert publisher.wait(DEADLINE_S) == 0
    assert not folder.exists()


def test_a_second_publisher_is_told_so(publisher: subprocess.Popen[str]) -> None:
    assert publisher.stderr is not None
    publisher.stderr.readline()
    second = subprocess.run(COMMAND, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (second.returncode, second.stderr.count("another process")) == (EX_UNAVAILABLE, 1)


def test_without_privilege_it_says_which(tmp_path: Path) -> None:
    def drop() -> None:
        for number in (*kernel_features.CAPABILITIES.values(), kernel_features.CAP_SYS_ADMIN):
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, number, 0, 0, 0)

    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=DEADLINE_S, check=False, preexec_fn=drop)
    assert done.returncode == EX_UNAVAILABLE
    assert "no CAP_BPF" in done.stderr


def page(file: Path, **changed: Any) -> counters.Page:
    fields: dict[str, Any] = {
        "file": file, "rank": 0, "world": 2, "process": 7, "began_ns": 0, "is_alive": True, "owner": 0,
        "account": changed.get("owner", 0),
        "blocks": (counters.Block(group="some", peer=None, path=None, values={"a": 1, "none": 0}),),
    }  # fmt: skip
    return counters.Page(**(fields | changed))


def test_pages_of_two_versions_and_of_nobody(tmp_path: Path) -> None:
    """A hostile page spoils at most its own map."""
    file = Path("/dev/shm/sennit.counters-00000000000000ff")
    newer = (counters.Block(group="some", peer=1, path=2, values={"a": 1, "b": 2}),)
    wrong = [
        counters.Block(group="../up", peer=None, path=None, values={"a": 1}),
        counters.Block(group="spaced", peer=None, path=None, values={"a b": 1}),
        counters.Block(group="empty", peer=None, path=None, values={}),
        counters.Block(group="huge", peer=1 << 31, path=None, values={"a": 1}),
        *(counters.Block(group=f"g{n}", peer=None, path=None, values={"a": 1}) for n in range(100)),
    ]
    with bpf_maps.Publisher() as made:
        assert made.publish([page(file), page(file, process=8, blocks=newer)]) == 2
        assert dumped(made.path / "some") == {(255, 7, 0, -1, -1, 0): {"a": 1}}
        assert dumped(made.path / "some-2") == {(255, 8, 0, 1, 2, 0): {"a": 1, "b": 2}}
        assert made.refused == {}
        found = made.publish([page(file, blocks=wrong), page(file.with_name("sennit.counters-x"))])
        # "some" twice, and the map of "huge", stay without entries.
        assert found == bpf_maps.OWN_MAPS_MAX - 3
        assert {"../up", "spaced", "empty", "huge", "some", "g99"} <= made.refused.keys()
        assert len(made.refused) < 60
        assert dumped(made.path / "some") == dumped(made.path / "some-2") == {}
        assert made.publish([]) == 0


def blocks(groups: Iterable[str], names: Iterable[str] = ("a",), peers: int = 1) -> tuple[counters.Block, ...]:
    return tuple(
        counters.Block(group=group, peer=peer, path=None, values=dict.fromkeys(names, 1))
        for group in groups
        for peer in range(peers)
    )


def test_other_users_leave_room_for_this_one_and_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpf_maps, "ENTRIES_MAX", 12)
    monkeypatch.setattr(bpf_maps, "FOREIGN_ENTRIES_MAX", 6)
    monkeypatch.setattr(bpf_maps, "FOREIGN_MAPS_MAX", 4)
    file = Path("/dev/shm/sennit.counters-00000000000000ff")
    many = [f"g{n}" for n in range(10)]
    with bpf_maps.Publisher() as made:
        assert made.publish([page(file, owner=7, blocks=blocks(many))]) == 4
        assert made.refused.keys() == {"user 7"}
        assert sorted(pin.name for pin in made.path.iterdir()) == ["g0", "g1", "g2", "g3"]
        assert made.publish([page(file, owner=7, blocks=blocks(["g0"], peers=10))]) == 6
        # Another one with many, and one with few.
        greedy = [page(file, owner=user, blocks=blocks(many[user:] + many[:user])) for user in (7, 8)]
        modest = page(file, owner=9, blocks=blocks(["g9"], peers=2))
        assert made.publish([*greedy, modest]) == 6
        assert Counter(key[-1] for key in dumped(made.path / "g9"))[9] == 2
        # Twelve fit: six are of others, who change all of theirs, and six of this user.
        own = page(file, blocks=blocks(["g0"], peers=6))
        for user in (7, 8):
            assert made.publish([own, page(file, owner=user, blocks=blocks(["g0"], peers=10))]) == 12
            assert Counter(key[-1] for key in dumped(made.path / "g0")) == {0: 6, user: 6}
        assert made.publish([]) == 0
        assert [pin.name for pin in made.path.iterdir()] == ["g0"]


def test_a_map_of_several_users_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpf_maps, "FOREIGN_MAPS_MAX", 8)
    file = Path("/dev/shm/sennit.counters-00000000000000ff")
    with bpf_maps.Publisher() as made:
        users = [page(file, owner=user, blocks=blocks([f"g{n}" for n in range(7)])) for user in (7, 8, 9, 10, 11)]
        assert made.publish(users) == 35
        assert not made.refused


def test_another_users_map_gives_way_to_one_of_this_user() -> None:
    file = Path("/dev/shm/sennit.counters-00000000000000ff")
    theirs = page(file, owner=7, blocks=blocks(["flow"], ["odd"]))
    with bpf_maps.Publisher() as made:
        made.publish([theirs])
        assert dumped(made.path / "flow") == {(255, 7, 0, 0, -1, 7): {"odd": 1}}
        made.publish([page(file, blocks=blocks(["flow"])), theirs])
        assert dumped(made.path / "flow") == {(255, 7, 0, 0, -1, 0): {"a": 1}}
        assert dumped(made.path / "flow-2") == {(255, 7, 0, 0, -1, 7): {"odd": 1}}
        made.publish([page(file, blocks=blocks(["flow"]))])
        assert [pin.name for pin in made.path.iterdir()] == ["flow"]
