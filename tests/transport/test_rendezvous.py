# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: ranks as threads over an in-memory store, with endpoints that only record calls."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import resource
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import sennit
from sennit.transport import _core, errors
from sennit.transport.config import Config, Congestion, PathPolicy, TransportKind, VerbsService
from sennit.transport.errors import ConfigError, DeviceError, MismatchError, PeerError, Unsupported
from sennit.transport.meeting import rendezvous
from sennit.transport.meeting.devices import DevicePort
from sennit.transport.meeting.rails import Rail
from sennit.transport.meeting.rdma_rails import RdmaRail
from sennit.transport.meeting.store import FileStore
from sennit.transport.meeting.version import PROTOCOL_VERSION, WIRE_REVISION, Versions
from tests.transport.meeting import MemoryStore, Recorder, meet

# Endpoints in different rooms are on one host here. Another test covers the warning about that.
pytestmark = pytest.mark.filterwarnings("ignore:SENNIT_TRANSPORT=auto takes udp")


def test_neighbours_use_shared_memory_and_open_no_sockets() -> None:
    endpoints = [Recorder(rank, "a") for rank in range(3)]
    assert meet(endpoints) == [("self", "shm", "shm"), ("shm", "self", "shm"), ("shm", "shm", "self")]
    assert all(endpoint.udp is None for endpoint in endpoints)
    assert [endpoint.ranks_here for endpoint in endpoints] == [3, 3, 3]
    assert endpoints[0].routes == [("self", b""), ("shm", b""), ("shm", b"")]


def test_containers_with_their_own_memory_fall_back_to_udp() -> None:
    endpoints = [Recorder(0, "a"), Recorder(1, "a"), Recorder(2, "b")]
    assert meet(endpoints) == [("self", "shm", "udp"), ("shm", "self", "udp"), ("udp", "udp", "self")]
    assert endpoints[0].routes[2] == ("udp", b"udp2\x00\xfffor0")
    assert endpoints[2].udp == (
        [("10.0.0.2", "")],
        {
            "path_count": 8,
            "path_policy": "round_robin",
            "congestion": "dctcp",
            "window_bytes": 2 << 20,
            "ports": (0, 0),
        },
    )


def test_only_ranks_that_need_udp_open_it() -> None:
    # Ranks 0 and 1 share memory with all ranks. Ranks 2 and 3 cannot open each other's memory.
    class Picky(Recorder):
        def shm_accept(self, rank: int, offer: bytes, /) -> str:
            return "no" if {self.rank, rank} == {2, 3} else ""

    endpoints = [Picky(rank, "a") for rank in range(4)]
    routes = meet(endpoints)
    assert routes[2] == ("shm", "shm", "self", "udp")
    assert routes[0] == ("self", "shm", "shm", "shm")
    assert [endpoint.udp is not None for endpoint in endpoints] == [False, False, True, True]


def test_one_sided_reach_is_not_enough() -> None:
    class Blind(Recorder):
        def shm_accept(self, rank: int, offer: bytes, /) -> str:
            return "no"

    assert meet([Recorder(0, "a"), Blind(1, "a")]) == [("self", "udp"), ("udp", "self")]


def test_host_ids_keep_neighbours_apart_but_count_cores_together() -> None:
    endpoints = [Recorder(0, "a"), Recorder(1, "a")]
    assert meet(endpoints, [Config(host_id="left"), Config(host_id="right")]) == [("self", "udp"), ("udp", "self")]
    assert [endpoint.ranks_here for endpoint in endpoints] == [2, 2]


def test_ranks_share_the_cores_that_they_may_run_on() -> None:
    """Launchers bind ranks to cores of their own. Such a rank may spin while it waits."""
    endpoints = [Recorder(rank, "a") for rank in range(4)]
    meet(endpoints, cores=[{0}, {70}, {1, 70}, {2, 3}])
    assert [endpoint.ranks_here for endpoint in endpoints] == [1, 2, 2, 1]


def test_a_full_shared_memory_is_no_reason_to_stop() -> None:
    endpoints = [Recorder(0, "a"), Recorder(1, "a", shm_errno=errno.ENOSPC), Recorder(2, "a")]
    assert meet(endpoints) == [("self", "udp", "shm"), ("udp", "self", "udp"), ("shm", "udp", "self")]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (
            Recorder(1, "a", shm_errno=errno.ENOSPC),
            "rank 1: it has no shared memory: shm_open: No space left on device. Give containers a larger /dev/shm",
        ),
        (
            Recorder(1, "a", shm_errno=errno.EMFILE),
            "rank 1: it has no shared memory: shm_open: Too many open files. This process may have {limit} files open: "
            "raise that by `ulimit -n`",
        ),
        (
            Recorder(1, "b"),
            "rank {rank} cannot open the shared memory of rank {peer}: another room. Open the door; rank {peer} cannot",
        ),
    ],
)
def test_auto_says_when_it_does_not_take_shared_memory_and_why(second: Recorder, why: str) -> None:
    with pytest.warns(RuntimeWarning, match="auto") as named:
        assert meet([Recorder(0, "a"), second]) == [("self", "udp"), ("udp", "self")]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for rank, said in enumerate(sorted(str(warning.message) for warning in named)):
        assert said.startswith(
            f"SENNIT_TRANSPORT=auto takes udp, not shared memory, between rank {rank} and rank {1 - rank} of the same "
            f"host: {why.format(rank=rank, peer=1 - rank, limit=limit)}"
        )
        assert said.endswith(". Or set SENNIT_TRANSPORT=udp")


@pytest.mark.filterwarnings("error")
def test_udp_that_was_asked_for_is_no_reason_to_warn() -> None:
    udp = Config(transport=TransportKind.UDP)
    assert meet([Recorder(0, "a"), Recorder(1, "a")], [udp, Config()]) == [("self", "udp"), ("udp", "self")]
    apart = [Config(host_id="left"), Config(host_id="right")]
    assert meet([Recorder(0, "a"), Recorder(1, "a")], apart) == [("self", "udp"), ("udp", "self")]


def test_an_interface_without_counterpart_is_noted() -> None:
    rails = [
        [Rail(interface="eth0", address="10.0.0.0"), Rail(interface="eth1", address="10.1.0.0")],
        [Rail(interface="eth0", address="10.0.0.1")],
    ]
    configs = [Config(transport=TransportKind.UDP)] * 2
    notes: dict[int, tuple[str, ...]] = {}
    assert meet([Recorder(0, "a"), Recorder(1, "b")], configs, rails=rails, notes=notes) == [
        ("self", "udp"),
        ("udp", "self"),
    ]
    assert notes[0] == (
        "eth1 (10.1.0.0) of rank 0 stays out of use with rank 1: fewer interfaces with an address of its family there",
        "rank 0 uses IPv4, because there is no IPv6 address on eth0 (10.0.0.0), eth1 (10.1.0.0)",
    )
    assert notes[1] == ("rank 1 uses IPv4, because there is no IPv6 address on eth0 (10.0.0.1)",)


def test_udp_alone_makes_no_segment() -> None:
    endpoints = [Recorder(rank, "a", shm_errno=errno.EACCES) for rank in range(2)]
    config = Config(
        transport=TransportKind.UDP,
        paths=3,
        path_policy=PathPolicy.REPS,
        congestion=Congestion.SWIFT,
        window_bytes=1 << 20,
    )
    # Settings of a rank's own sending may differ from those of its peer.
    assert meet(endpoints, [config, Config()]) == [("self", "udp"), ("udp", "self")]
    assert endpoints[0].udp == (
        [("10.0.0.0", "")],
        {"path_count": 3, "path_policy": "reps", "congestion": "swift", "window_bytes": 1 << 20, "ports": (0, 0)},
    )


@pytest.mark.parametrize(
    ("endpoints", "configs", "reason"),
    [
        ([Recorder(0, "a"), Recorder(1, "b")], [Config(), Config()], "another room"),
        ([Recorder(0, "a"), Recorder(1, "a")], [Config(), Config(host_id="far")], "on another host .named:far"),
        (
            [Recorder(0, "a"), Recorder(1, "a")],
            [Config(), Config(transport=TransportKind.UDP)],
            "its SENNIT_TRANSPORT is udp",
        ),
        ([Recorder(0, "a"), Recorder(1, "a", shm_errno=errno.ENOSPC)], [Config(), Config()], "No space left"),
    ],
)
def test_shm_demanded_but_out_of_reach_names_rank_and_reason(
    endpoints: list[Recorder], configs: list[Config], reason: str
) -> None:
    demanding = Config(transport=TransportKind.SHM)
    first, second = meet(endpoints, [demanding, configs[1]])
    assert isinstance(first, Unsupported)
    with pytest.raises(Unsupported, match=f"SENNIT_TRANSPORT=shm, but rank 1 is out of reach: .*{reason}"):
        raise first
    # The other rank gets the error at once instead of at its deadline.
    assert isinstance(second, PeerError)
    assert second.rank == 0
    assert "rank 0 could not join" in str(second)


def test_shm_demanded_but_impossible_here() -> None:
    config = Config(transport=TransportKind.SHM)
    results = meet([Recorder(0, "a", shm_errno=errno.ENOSPC), Recorder(1, "a")], [config, config])
    assert isinstance(results[0], DeviceError)
    assert isinstance(results[1], PeerError)
    assert "No space left" in str(results[1])


def test_verbs_and_udp_are_one_wire_and_each_rank_chooses_its_own() -> None:
    endpoints = [Recorder(rank, "a") for rank in range(3)]
    verbs = Config(transport=TransportKind.VERBS, paths=3, verbs_service=VerbsService.RC)
    assert meet(endpoints, [verbs, Config(), Config()]) == [
        ("self", "verbs", "verbs"),
        ("udp", "self", "shm"),
        ("udp", "shm", "self"),
    ]
    assert [endpoint.verbs is not None for endpoint in endpoints] == [True, False, False]
    assert [endpoint.udp is not None for endpoint in endpoints] == [False, True, True]
    assert endpoints[0].verbs is not None
    addresses, settings = endpoints[0].verbs
    assert addresses == ["10.0.0.0"]
    assert settings == {
        "path_count": 3,
        "path_policy": "round_robin",
        "congestion": "dctcp",
        "window_bytes": 2 << 20,
        "service": "rc",
    }
    assert endpoints[1].routes[0] == ("udp", b"verbs0for1")
    assert endpoints[0].routes[1] == ("verbs", b"udp1\x00\xfffor0")


def test_packets_that_two_devices_make_smaller_than_need_be_are_named() -> None:
    verbs = [Config(transport=TransportKind.VERBS)] * 2
    rails = [
        [rdma_rail("rxe0", "10.0.0.0", mtu_bytes=4096)],
        [rdma_rail("mlx5_0", "10.0.0.1", mtu_bytes=1024)],
    ]
    with pytest.warns(RuntimeWarning, match="packets of") as named:
        assert meet([Recorder(0, "a"), Recorder(1, "b")], verbs, rails=rails) == [("self", "verbs"), ("verbs", "self")]
    assert sorted(str(warning.message).partition(" (")[0] for warning in named) == [
        "verbs: rank 0: packets of 1024 bytes on mlx5_0 10.0.0.1 and of 4096 on rxe0 10.0.0.0",
        "verbs: rank 1: packets of 4096 bytes on rxe0 10.0.0.0 and of 1024 on mlx5_0 10.0.0.1",
    ]


def rdma_rail(device: str, address: str, *, mtu_bytes: int) -> RdmaRail:
    port = DevicePort(
        device=device, number=1, state="active", is_ethernet=True, mtu_bytes=mtu_bytes, gids=(), partitions=(0x7FFF,)
    )
    return RdmaRail(interface="eth0", address=address, port=port)


def test_ranks_that_never_arrive_are_named() -> None:
    results = meet([Recorder(rank, "a") for rank in range(5)], timeout_s=0.3, absent=[1, 3, 4])
    for result in results:
        assert isinstance(result, errors.TimeoutError)
        assert "round hello: no word from ranks 1, 3, 4 of 5 after 0.3 s" in str(result)


@pytest.mark.parametrize(
    ("record", "theirs"),
    [
        ({"version": 99}, "protocol version 99, wire revision unknown (sennit unknown)"),
        ({"version": 99, "wire": 1, "package": "9.9"}, "protocol version 99, wire revision 1 (sennit 9.9)"),
        (
            {"version": PROTOCOL_VERSION, "wire": 77, "package": "0.7"},
            f"protocol version {PROTOCOL_VERSION}, wire revision 77 (sennit 0.7)",
        ),
    ],
)
def test_another_version_or_wire_revision_is_refused_with_both_named(record: dict[str, Any], theirs: str) -> None:
    store = MemoryStore()
    store.set("sennit/world/hello/1", json.dumps(record))
    (result,) = meet([Recorder(rank, "a") for rank in range(2)], store=store, absent=[1])
    assert isinstance(result, MismatchError)
    assert f"rank 1 speaks {theirs}, this process protocol version {PROTOCOL_VERSION}" in str(result)
    assert f"wire revision {WIRE_REVISION} (sennit {sennit.__version__})" in str(result)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "{}",
        "[1]",
        "\x00\x01",
        "null",
        f'{{"version": {PROTOCOL_VERSION}}}',
        f'{{"version": {PROTOCOL_VERSION}, "wire": {WIRE_REVISION}}}',
        f'{{"version": {PROTOCOL_VERSION}, "wire": {WIRE_REVISION}, "world": "2", "host": "a"}}',
    ],
)
def test_foreign_records_are_refused(value: str) -> None:
    store = MemoryStore()
    store.set("sennit/world/hello/1", value)
    (result,) = meet([Recorder(rank, "a") for rank in range(2)], store=store, absent=[1])
    assert isinstance(result, MismatchError)
    assert "rank 1 published a record that sennit did not write" in str(result)


def test_worlds_of_other_sizes_are_told_apart() -> None:
    store = MemoryStore()
    store.set(
        "sennit/world/hello/1",
        json.dumps(
            {
                **Versions.ours().as_record(),
                "nonce": "n",
                "world": 3,
                "process": {},
                "host": "boot:x",
                "machine": "boot:x",
                "cores": "3",
                "algorithm": "auto",
                "calibration": "0 defaults",
                "aggregation_key": "",
            }
        ),
    )
    (result,) = meet([Recorder(rank, "a") for rank in range(2)], store=store, absent=[1], timeout_s=0.5)
    assert isinstance(result, MismatchError)
    assert "rank 1 is in a world of 3 ranks, rank 0 in one of 2" in str(result)


@pytest.mark.parametrize("old_world", [2, 3])
def test_records_of_an_earlier_run_in_the_same_store_do_not_count(old_world: int) -> None:
    """As after a restart by torchrun: each rank finds records of the old ranks, and some ranks come late."""
    store = MemoryStore()
    old = meet([Recorder(rank, "old") for rank in range(old_world)], store=store)
    assert all(isinstance(routes, tuple) for routes in old)
    for late in range(2):
        come = threading.Event()

        endpoints = [Recorder(rank, "new") for rank in range(2)]

        def join(rank: int, late: int = late, come: threading.Event = come, endpoints: Any = endpoints) -> Any:
            if rank == late:
                # By then the other rank has read the old records.
                assert come.wait(60)
            watch = None if rank == late else come.set
            # Another host than in every earlier run, so an old record looks like a stranger's.
            config = Config(host_id=f"run-{late}")
            return rendezvous.connect(
                lambda _: endpoints[rank], config=config, store=store, rank=rank, world=2, rails=list, watch=watch
            ).routes

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(join, range(2))) == [("self", "shm"), ("shm", "self")]


@pytest.mark.parametrize("operation", ["wait", "get", "compare_set", "check"])
def test_a_broken_store_is_not_a_timeout(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MemoryStore, *arguments: Any) -> Any:
        raise ConnectionResetError("server gone")

    monkeypatch.setattr(MemoryStore, operation, fail)
    for result in meet([Recorder(0, "a"), Recorder(1, "a")]):
        assert isinstance(result, PeerError)
        assert "rendezvous of world: the store failed: server gone" in str(result)


def test_one_rank_needs_nothing() -> None:
    endpoint = Recorder(0, "a")
    make: Callable[[int], Any] = lambda _: endpoint  # noqa: E731
    connection = rendezvous.connect(make, config=Config(), store=None, rank=0, world=1, rails=list)
    assert connection.routes == ("self",)
    assert endpoint.routes == [("self", b"")]
    with pytest.raises(ConfigError, match="world of 2 ranks without a store"):
        rendezvous.connect(make, config=Config(), store=None, rank=0, world=2, rails=list)


def test_over_a_folder(tmp_path: Path) -> None:
    assert meet([Recorder(0, "a"), Recorder(1, "a")], store=FileStore(tmp_path / "new" / "store")) == [
        ("self", "shm"),
        ("shm", "self"),
    ]


def test_file_store(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.set("a/../b", "one")
    store.set("a/../b", "two")
    assert store.get("a/../b") == b"two"
    assert store.check(["a/../b"])
    assert not store.check(["a/../b", "c"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a%2F..%2Fb"]
    assert store.compare_set("d", "", "first") == b"first"
    assert store.compare_set("d", "", "second") == b"first"
    assert store.compare_set("d", "first", "third") == b"third"
    assert [store.add("n", 1), store.add("n", 2), store.add("n", 0)] == [1, 3, 3]
    with pytest.raises(errors.TimeoutError, match="'c'"):
        store.wait(["c"], timedelta(milliseconds=20))
    with (tmp_path / ".lock").open() as lock:
        # As if a process was stopped while it held the lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
        impatient = FileStore(tmp_path, lock_timeout_s=0.02)
        with pytest.raises(errors.TimeoutError, match=r"\.lock locked for 0.02 s"):
            impatient.add("n", 1)
        with pytest.raises(errors.TimeoutError, match=r"\.lock locked for 0.02 s"):
            impatient.compare_set("d", "third", "fourth")
    assert impatient.add("n", 1) == 4
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot make the store's folder"):
        FileStore(tmp_path / "file" / "below")


def test_over_torch_stores() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.PrefixStore("group", distributed.HashStore())
    assert meet([Recorder(0, "a"), Recorder(1, "b")], store=store) == [("self", "udp"), ("udp", "self")]
    (result,) = meet([Recorder(0, "a"), Recorder(1, "a")], store=distributed.HashStore(), timeout_s=0.2, absent=[1])
    assert isinstance(result, errors.TimeoutError)
    assert "no word from rank 1 of 2" in str(result)


def test_python_and_the_core_speak_of_one_wire_revision() -> None:
    assert WIRE_REVISION == _core.WIRE_REVISION


@pytest.mark.parametrize("rooms", ["aaa", "abc", "a" * 40, "ab" * 20])
def test_records_go_when_all_have_read_them(rooms: str) -> None:
    store = MemoryStore()
    for number in range(2):
        endpoints = [Recorder(rank, room) for rank, room in enumerate(rooms)]
        results = meet(endpoints, store=store, name=f"group{number}")
        assert all(isinstance(result, tuple) for result in results)
        assert not store.values


def test_records_of_a_group_that_did_not_form_stay_for_those_who_come_late() -> None:
    store = MemoryStore()
    results = meet([Recorder(0, "a"), Recorder(1, "a", shm_errno=errno.ENOSPC)], store=store, timeout_s=0.3, absent=[1])
    assert isinstance(results[0], errors.TimeoutError)
    assert "sennit/world/hello/0" in store.values


class Counted:
    """Counts the requests of each thread to a store that reads several values in one."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.requests: Counter[int] = Counter()

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        self.requests[threading.get_ident()] += 1
        return [self._store.get(key) for key in keys]

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            self.requests[threading.get_ident()] += 1
            return getattr(self._store, name)(*arguments)

        return request


def test_a_rank_asks_the_store_a_few_times_however_many_ranks_there_are() -> None:
    """On a busy machine, each request waits until the store's process has had its turn, and then until the rank has."""
    store: Any = Counted()
    routes = meet([Recorder(rank, "a") for rank in range(16)], store=store)
    assert routes[0] == ("self", *["shm"] * 15)
    # Rank 0 has more, and the last rank that is connected, which deletes what is left: it may be rank 0.
    *others, last, _ = sorted(store.requests.values())
    assert set(others) == {15}
    assert last in (15, 18)


def test_no_rank_asks_the_store_to_wait_for_a_moment() -> None:
    """A TCPStore writes two warnings to the terminal for each wait that ends without the value."""
    waits = list[timedelta]()

    class Waited(MemoryStore):
        def wait(self, keys: Sequence[str], timeout: timedelta, /) -> None:
            waits.append(timeout)
            super().wait(keys, timeout)

    meet([Recorder(rank, "a") for rank in range(40)], store=Waited(), timeout_s=60.0)
    assert min(waits) > timedelta(seconds=30)


@pytest.mark.parametrize("refused", [(), (1,), (0, 2)])
def test_all_ranks_have_the_aggregator_or_none_has_it(refused: tuple[int, ...]) -> None:
    endpoints = [Recorder(rank, "a") for rank in range(3)]
    for rank in refused:
        endpoints[rank].without_aggregator = "no answer"
    notes: dict[int, tuple[str, ...]] = {}
    configs = [Config(aggregator=f"192.0.2.{rank}:70") for rank in range(3)]
    told = pytest.warns(RuntimeWarning, match="no aggregator") if refused else contextlib.nullcontext()
    with told:
        meet(endpoints, configs, notes=notes)
    if refused:
        why = "; ".join(f"rank {rank}: no answer" for rank in refused)
        assert all(f"the group has no aggregator, and does its sums itself: {why}" in each for each in notes.values())
        assert [endpoint.aggregator for endpoint in endpoints] == [None] * 3
        return
    assert [endpoint.aggregator and endpoint.aggregator[:2] for endpoint in endpoints] == [
        (f"192.0.2.{rank}", 70) for rank in range(3)
    ]
    assert len({endpoint.aggregator and endpoint.aggregator[2] for endpoint in endpoints}) == 1


def test_a_group_of_too_many_ranks_asks_no_aggregator() -> None:
    endpoints = [Recorder(rank, "a") for rank in range(65)]
    with pytest.warns(RuntimeWarning, match=r"65 ranks; allowed: 2\.\.64"):
        meet(endpoints, [Config(aggregator="192.0.2.1")] * 65)
    assert all(endpoint.aggregator is None for endpoint in endpoints)


def test_some_ranks_without_an_aggregator_are_refused() -> None:
    results = meet([Recorder(rank, "a") for rank in range(2)], [Config(aggregator="192.0.2.1"), Config()])
    for result in results:
        assert isinstance(result, ConfigError)
        assert "rank 1 has no SENNIT_AGGREGATOR; allowed: one on all ranks, or none" in str(result)
