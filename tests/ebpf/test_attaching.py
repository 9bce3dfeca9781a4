# SPDX-License-Identifier: Apache-2.0
"""Links of every kind, ring buffers, maps with types, read-only data and arenas, with programs of a few lines."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sennit.ebpf import kernel_features, library, links
from sennit.ebpf.compiler import compile_source
from sennit.ebpf.library import BpfError
from sennit.ebpf.loader import BpfObject
from sennit.ebpf.ringbuffer import RingBuffer
from sennit.testbed.topology import namespace

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf", "arena")]
TIMEOUT_S = 10.0
XDP_DROP, XDP_PASS = 1, 2
# uapi/asm-generic/mman-common.h
MAP_NORESERVE = 0x4000

HEAD = """
#include "feed.h"
char licence[] SEC("license") = "GPL";
"""
PACKETS = """
struct seen { __u32 bytes; __u16 port; __u8 kind; };
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 3); __uint(map_flags, BPF_F_MMAPABLE);
         __type(key, __u32); __type(value, struct seen); } last SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 9); __type(key, __u64); __type(value, __u64); } by_size
    SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_RINGBUF); __uint(max_entries, 4096); } events SEC(".maps");
const volatile struct seen wanted = {};
static __always_inline void note(__u32 bytes) {
  struct seen *slot, now = {.bytes = bytes, .port = wanted.port, .kind = 7};
  __u32 second = 1;
  __u64 key = bytes, one = 1, *count = bpf_map_lookup_elem(&by_size, &key);
  if (count) __sync_fetch_and_add(count, 1); else bpf_map_update_elem(&by_size, &key, &one, 0);
  slot = bpf_map_lookup_elem(&last, &second);
  if (slot) *slot = now;
  bpf_ringbuf_output(&events, &now, sizeof now, 0);
}
SEC("xdp") int by_xdp(struct xdp_md *c) { note(c->data_end - c->data); return XDP_PASS; }
SEC("tc") int by_tcx(struct __sk_buff *skb) { note(skb->len); return -1; }
"""
PROCESS = """
struct { __uint(type, BPF_MAP_TYPE_RINGBUF); __uint(max_entries, 4096); } events SEC(".maps");
const volatile __u32 process = 0;
static __always_inline int note(__u64 what) {
  if (bpf_get_current_pid_tgid() >> 32 == process) bpf_ringbuf_output(&events, &what, sizeof what, 0);
  return 0;
}
"""


@pytest.fixture
def packets() -> Iterator[BpfObject]:
    with BpfObject(compile_source("packets", HEAD + PACKETS), read_only={"wanted": (0, 4711, 0)}) as made:
        yield made


@pytest.fixture
def host() -> Iterator[str]:
    made = f"{namespace.unique_prefix(78)}-links"
    namespace.create(made)
    yield made
    namespace.remove(made)


def refused_with(name: str, packets: BpfObject, by_link: bool) -> str:
    """Attaches a program of this name to lo, and returns the error of the second one. Follows the error's advice."""
    image = compile_source("other", HEAD + f'SEC("xdp") int {name}(struct xdp_md *context) {{ return XDP_PASS; }}\n')
    index = socket.if_nametoindex("lo")
    with BpfObject(image) as other, contextlib.ExitStack() as held:
        if by_link:
            held.enter_context(links.attach_xdp(other.program(name), index))
        else:
            folder = held.enter_context(tempfile.TemporaryDirectory())
            file = Path(folder, "other.o")
            file.write_bytes(image)
            run(f"ip link set dev lo xdpgeneric obj {file} sec xdp")
        with pytest.raises(BpfError) as refused:
            links.attach_xdp(packets.program("by_xdp"), index)
        text = str(refused.value)
        if "xdp-loader" not in text:
            run(text.split("`")[1])
            links.attach_xdp(packets.program("by_xdp"), index).close()
    return text


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=TIMEOUT_S)


@pytest.mark.needs("netns", "ip", "bpftool")
@pytest.mark.parametrize(
    ("name", "by_link", "remedy"),
    [
        ("somebodys", True, "`bpftool link detach id "),
        ("somebodys", False, "`ip link set dev lo xdp"),
        ("xdp_dispatcher", False, "`xdp-loader unload lo --all`"),
    ],
)
def test_the_xdp_program_in_the_way_is_named_with_what_detaches_it(
    packets: BpfObject, host: str, name: str, by_link: bool, remedy: str
) -> None:
    text = namespace.within(host, lambda: refused_with(name, packets, by_link))
    assert text.startswith("program by_xdp: cannot be attached to interface 1 as XDP (any): Device or resource busy; ")
    assert f"lo has the XDP program '{name}' (id " in text
    assert remedy in text
    assert "\n" not in text


def test_maps_have_the_types_of_the_source(packets: BpfObject) -> None:
    assert set(packets.maps()) >= {"last", "by_size", "events"}
    assert set(packets.programs()) == {"by_xdp", "by_tcx"}
    trial = packets.program("by_xdp").test_run(bytes(100), repeat=5)
    assert (trial.verdict, trial.packet) == (XDP_PASS, bytes(100))
    assert packets.map("last").values(1)[["bytes", "port", "kind"]].tolist() == [(100, 4711, 7)]
    assert [int.from_bytes(key, "little") for key in packets.map("by_size").each_key()] == [100]
    assert packets.map("by_size").values((100).to_bytes(8, "little")).tolist() == [5]
    packets.map("by_size").delete((100).to_bytes(8, "little"))
    assert list(packets.map("by_size").each_key()) == []
    with pytest.raises(BpfError, match="a key of 4 bytes; allowed: 8"):
        packets.map("by_size").read(1)
    with pytest.raises(BpfError, match="packet of 13 bytes; allowed: 14 or more"):
        packets.program("by_xdp").test_run(bytes(13))


def test_a_mapped_array_is_live_in_both_directions(packets: BpfObject) -> None:
    view = packets.map("last").view()
    packets.program("by_xdp").test_run(bytes(64))
    assert view["bytes"].tolist() == [0, 64, 0]
    view["bytes"][2] = 9
    assert packets.map("last").values(2)["bytes"].tolist() == [9]
    with pytest.raises(BpfError, match="by_size cannot be mapped"):
        packets.map("by_size").view()


def test_a_ring_buffer_gives_structs(packets: BpfObject) -> None:
    with RingBuffer(packets.map("events")) as ring:
        assert ring.read(0.0) == []
        for size in (20, 30, 40):
            packets.program("by_xdp").test_run(bytes(size))
        assert ring.records(packets.btf.dtype("seen"), TIMEOUT_S)["bytes"].tolist() == [20, 30, 40]
    with pytest.raises(BpfError, match="is closed"):
        ring.read(0.0)


@pytest.mark.needs("netns")
def test_xdp_and_tcx_take_packets_until_they_are_closed(packets: BpfObject) -> None:
    name = f"{namespace.unique_prefix(77)}-links"
    namespace.create(name)
    try:
        namespace.within(name, loopback_traffic, packets)
    finally:
        namespace.remove(name)


def loopback_traffic(packets: BpfObject) -> None:
    """Sends packets over the loopback of a new namespace, where XDP is generic."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        (index,) = route.link_lookup(ifname="lo")
        route.link("set", index=index, state="up")
    with (
        RingBuffer(packets.map("events")) as ring,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(TIMEOUT_S)

        def seen(size: int) -> list[int]:
            sender.sendto(bytes(size), receiver.getsockname())
            assert len(receiver.recv(2048)) == size
            return [int(found) for found in ring.records(packets.btf.dtype("seen"), 0.0)["bytes"]]

        with links.attach_xdp(packets.program("by_xdp"), index):
            assert seen(100) == [142]
            busy = rf"cannot be attached to interface {index} as XDP .* lo has the XDP program 'by_xdp' \(id [0-9]+\)"
            with pytest.raises(BpfError, match=busy):
                links.attach_xdp(packets.program("by_xdp"), index)
            with links.attach_tcx(packets.program("by_tcx"), index):
                assert seen(50) == [92, 92]
        assert seen(60) == []
        with pytest.raises(BpfError, match=r"as XDP \(native\)"):
            links.attach_xdp(packets.program("by_xdp"), index, links.XdpMode.NATIVE)


@pytest.mark.needs("uprobe")
def test_an_instruction_of_a_process() -> None:
    getppid = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value or 0
    libc, offset = Path(), 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, place, *_, path = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= getppid < end:
            libc, offset = Path(path), getppid - begin + int(place, 16)
    source = HEAD + PROCESS + 'SEC("uprobe") int entered(void *c) { return note(1); }\n'
    image = compile_source("process", source)
    with BpfObject(image, read_only={"process": os.getpid()}) as made, RingBuffer(made.map("events")) as ring:
        with links.attach_uprobe_at(made.program("entered"), libc, offset):
            os.getppid()
            assert ring.read(TIMEOUT_S) == [(1).to_bytes(8, "little")]
        os.getppid()
        assert ring.read(0.0) == []
        with pytest.raises(BpfError, match="program entered: cannot be attached to /no/such at 0x10"):
            links.attach_uprobe_at(made.program("entered"), Path("/no/such"), 16)


# 33 is BPF_MAP_TYPE_ARENA: the headers of a distribution may be older than its kernel.
ARENA = """
    #define __arena __attribute__((address_space(1)))
    struct { __uint(type, 33); __uint(map_flags, BPF_F_MMAPABLE); __uint(max_entries, 1); } shared
        SEC(".maps");
    SEC("xdp") int add(struct xdp_md *c) {
      asm volatile("" :: "r"(&shared));
      __u64 __arena *numbers = (__u64 __arena *)0;
      numbers[1000] += numbers[999];
      return XDP_DROP;
    }
"""


def test_an_arena_is_shared() -> None:
    with BpfObject(compile_source("arena", HEAD + ARENA), arenas={"shared": 3 * 4096}) as made:
        view = made.arena("shared").view(999 * 8, (2,), np.dtype("<u8"))
        view[:] = 5, 2
        assert made.program("add").test_run(bytes(64), repeat=3).verdict == XDP_DROP
        assert view.tolist() == [5, 17]
        with pytest.raises(BpfError, match="bytes 12280 to 12296; allowed: 0 to 12288"):
            made.arena("shared").view(12280, (2,), np.dtype("<u8"))
        with pytest.raises(BpfError, match="no arena 'other'"):
            made.arena("other")


def test_what_other_threads_map_while_an_object_is_loaded_is_not_where_its_arena_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image, loaded = compile_source("arena", HEAD + ARENA), library.library()
    load = loaded.bpf_object__load
    others: list[mmap.mmap] = []

    def late(pointer: int) -> int:
        # As large as an arena can be, so that nothing but its place has room for the first of them.
        others.extend(mmap.mmap(-1, 1 << 32, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=0) for _ in range(3))
        return int(load(pointer))

    monkeypatch.setattr(loaded, "bpf_object__load", late)
    with BpfObject(image, arenas={"shared": 4096}) as made:
        assert made.program("add").test_run(bytes(64)).verdict == XDP_DROP
    for other in others:
        other.close()


@pytest.mark.parametrize("code", [errno.ERANGE, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_driver_that_refuses_a_large_mtu_is_named_whatever_its_error(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.library(), "bpf_link_create", lambda *arguments: -code)
    program: Any = SimpleNamespace(descriptor=0, name="feed")
    for mtu, told in ((9001, "the MTU of lo is 9001, which may be more than its driver"), (1500, "cannot be attached")):
        monkeypatch.setattr(links, "interface_mtu", lambda name, mtu=mtu: mtu)
        with pytest.raises(BpfError) as refused:
            links.attach_xdp(program, socket.if_nametoindex("lo"))
        assert refused.value.errno == code
        assert told in str(refused.value)
        assert ("MTU" in str(refused.value)) == (mtu > 1500)


def test_wrong_read_only_data_is_named() -> None:
    image = compile_source("packets", HEAD + PACKETS)
    with pytest.raises(BpfError, match="no read-only variable 'unknown'"):
        BpfObject(image, read_only={"unknown": 1})
    with pytest.raises(BpfError, match="map last is no arena"):
        BpfObject(image, arenas={"last": 4096})


def test_what_is_absent_is_named() -> None:
    assert kernel_features.missing_privileges(effective=0) == ["CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON"]
    assert kernel_features.missing_privileges(effective=1 << 21 | 1 << 12) == []
    for name in kernel_features.PROBES:
        found = kernel_features.probe(name)
        assert found.name == name
        assert found.available or found.remedy
    assert kernel_features.absent() == [
        found for name in kernel_features.PROBES if not (found := kernel_features.probe(name)).available
    ]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise BpfError(2, "libbpf.so.1: cannot open shared object file")

    monkeypatch.setattr(kernel_features, "library", no_library)
    kernel_features.probe.cache_clear()
    try:
        for name in ("libbpf", "arena", "xdp"):
            assert "libbpf.so.1" in kernel_features.probe(name).absent_because
    finally:
        kernel_features.probe.cache_clear()
