# SPDX-License-Identifier: Apache-2.0
"""The native data plane: plans run over shared memory and RoCEv2 on UDP (csrc/bindings/module.cpp)."""

from collections.abc import Sequence
from typing import Any, Final, final

WIRE_REVISION: Final[int]
"""The version of the control payload and of packets (docs/reference/wire.md)."""

HAS_WIDE_VECTORS: Final[bool]
"""Whether sums, codecs and lookups need not take portable kernels. `sennit.surroundings` says what is missing."""

PATH_POLICIES: Final[tuple[str, ...]]
"""How a flow may choose among its paths (csrc/flow/path_policy.hpp)."""

CONGESTION_CONTROLS: Final[tuple[str, ...]]
"""What may decide how much is in flight (csrc/flow/congestion.hpp)."""

CRC_BY: Final[str]
"""What computes CRCs in this build: "ISA-L", or "tables", which are slower."""

HAS_VERBS: Final[bool]
"""Whether this build has the verbs port. Without it `verbs_open` and `rdma_ports` raise, and say why."""

DEFAULTS: Final[dict[str, int | float | str]]
"""The values that C++ uses for missing fields of `Config`. They equal the defaults of config.py."""

def rdma_ports() -> list[tuple[str, int, int, bool, int, list[int], list[tuple[int, str, int]], str]]:
    """Returns the ports of all RDMA devices: (device, number, state, Ethernet or not, largest payload, partition keys,
    RoCE v2 GIDs as (index, address, interface index), problem). With number 0, only `problem` is valid: why the device
    cannot be read."""

def interfaces(if_inet6: str) -> list[tuple[str, bool, bool, list[str]]]:
    """Returns the interfaces of this network namespace, by index: (name, up, loopback, addresses that a peer could send
    to). `if_inet6`: the kernel's table of IPv6 addresses."""

def symmetric_alloc(size_bytes: int) -> int:
    """Returns the address of memory that the ranks of this host map, aligned to a page; 0 if there is none left."""

def symmetric_free(address: int) -> bool:
    """Frees what `symmetric_alloc` returned. False: the memory is not from there."""

def lent_time_count(is_on: bool) -> None:
    """Counts the processor time of posts and waits from now on. Each call with True takes one with False."""

def lent_time_ns() -> int:
    """Processor time that threads of the caller spent in posts and waits, while it was counted. Nanoseconds."""

def operation_log_begin(file: int, offset: int, room: int) -> None:
    """Writes the last `room` operations of all groups to this file descriptor from now on, at this offset.

    The offset is a multiple of the page size. executor/operation_log.hpp has the format.
    """

def operation_log_end() -> None:
    """Stops."""

def operation_log_name(group: int, name: str) -> None:
    """Names the group with this handle in the log."""

def available_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Memory that this process can still use: `MemAvailable`, or less if its control group has less left.

    2**62 without information.
    """

def describe_signature(signature: int) -> str:
    """Returns a signature in words, as errors name it: "allreduce of float32 (sum), 1024 elements"."""

def codec_refusal(codec: tuple[int, int, bool, int], dtype: int) -> str:
    """Returns why elements of this type cannot be coded so; empty if they can.

    `codec`: number of its kind, elements a block, stochastic or not, seed (csrc/codec/codec.hpp).
    """

def coded_bytes(codec: tuple[int, int, bool, int], dtype: int, count: int) -> int:
    """Returns the bytes of `count` coded elements."""

def encode(
    codec: tuple[int, int, bool, int],
    dtype: int,
    source: Any,
    first_index: int,
    destination: Any,
    residual: Any = None,
) -> int:
    """Codes the elements of a buffer into another one and returns the bytes written. Raises ArgumentError."""

def decode(
    codec: tuple[int, int, bool, int], dtype: int, coded: Any, count: int, result: int, destination: Any
) -> bool:
    """Gives back elements as type `result`. Returns False if `coded` is no coded form of so many elements."""

@final
class Aggregator:
    """A store of leaves behind UDP sockets (csrc/aggregation/server.hpp)."""

    def __init__(self, addresses: list[str], port: int, *, memory_bytes: int, arena: int = 0) -> None: ...
    def run(self, seconds: float) -> None: ...
    @property
    def port(self) -> int: ...
    def counters(self) -> dict[str, int]: ...
    def jobs(self) -> list[tuple[int, int, int, int, int]]: ...

@final
class Plan:
    """A compiled plan (docs/reference/plans.md). Raises ArgumentError for malformed bytes."""

    def __init__(self, data: bytes) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def buffer_bytes(self) -> list[int]:
        """Bytes of each of the caller's buffers that the plan touches; empty if it takes counts."""

    @property
    def step_count(self) -> int: ...

@final
class Op:
    """One run of a plan."""

    def wait(self, timeout_s: float = 0.0) -> None:
        """Blocks until the operation is done. Raises the error it ended with. 0: until the operation's own deadline."""

    def done(self) -> bool: ...
    @property
    def source(self) -> int:
        """The rank that a receive from any rank matched."""

@final
class Registration:
    """Memory that devices keep registered."""

    def close(self) -> None: ...

@final
class Communicator:
    """This rank's channels to all ranks of a group."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        seed: int,
        ranks_here: int = 1,
        peer_timeout_s: float = 10.0,
        threads: int = 1,
    ) -> None: ...
    def shm_offer(self, ranks_here: Sequence[int] = ()) -> bytes:
        """Makes this rank's shared-memory segment, with room for the ranks of its host (empty: all). Returns what they
        need to open it. They ascend, include this rank, and are the same on all of them.
        """

    def shm_why_unnamed(self) -> str:
        """Why this rank's segment has no name in /dev/shm. Empty if it has one, or if there is none."""

    def shm_accept(self, rank: int, offer: bytes) -> str:
        """Opens a peer's segment. Returns why it cannot be reached, or nothing. Raises DeviceError if this process
        lacks descriptors or memory.
        """

    def udp_open(
        self,
        rails: Sequence[tuple[str, str]],
        *,
        path_count: int,
        path_policy: str,
        congestion: str,
        window_bytes: int,
        ports: tuple[int, int] = (0, 0),
        seed: int = 0,
    ) -> bytes:
        """Opens the sockets on the rails. Returns what all peers need to connect.

        A rail is an interface's address, and its address of the other family, or "". All ports are within `ports`
        (first, last), unless that begins with 0. Raises ArgumentError for an unknown name or a number out of range.
        """

    def verbs_open(
        self,
        addresses: Sequence[str],
        *,
        path_count: int,
        path_policy: str,
        congestion: str,
        window_bytes: int,
        service: str,
        seed: int = 0,
    ) -> bytes:
        """Opens the RDMA device that serves these local addresses. Returns what all peers need to connect."""

    def aggregator_open(self, address: str, port: int, /, *, key: int, limit_s: float) -> str:
        """Asks an aggregator to take the group, for at most `limit_s`. Returns why it does not; empty: it has."""

    def aggregator_drop(self) -> None:
        """Before connect: this group has no aggregator, because another rank has none."""

    def offer_for(self, rank: int) -> bytes:
        """After `udp_open` or `verbs_open`: returns what that rank alone needs besides.

        A route to this rank is both parts, one after the other.
        """

    def begin_trial(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        """Begins to send packets over every path to the peers with udp and verbs routes.

        Call it before connect, with the same routes.
        """

    def try_network(self, limit_s: float, /) -> bool:
        """Continues the trial for at most `limit_s`. Returns True when there is nothing more to find out."""

    def is_tried(self, rank: int, /) -> bool:
        """Returns whether the trial with this rank is over. True without a trial."""

    def is_perfect(self, rank: int, /) -> bool:
        """Returns whether every path takes the largest packet both ways. True without a trial."""

    def trial_message(self, rank: int, /) -> bytes:
        """Returns what this end knows, for that rank's learn_trial."""

    def learn_trial(self, rank: int, message: bytes, /) -> None:
        """Takes a trial_message of that rank that came another way. Empty: that rank found every path perfect."""

    def tried_paths(self, rank: int, /) -> list[tuple[str, int, str, int, int, int, int, int, int, bool, str]]:
        """Returns for each path: own address and source port, the peer's address and port, the peer's source port and
        our port, the largest payload that arrived at the peer and here, errno of the last failed send, whether the
        group uses the path, and our RDMA device.
        """

    def trial_payload_bytes(self, rank: int, /) -> int:
        """Returns the payload that the trial found, in bytes; 0 before it and without one."""

    def trial_payload_max_bytes(self, rank: int, /) -> int:
        """Returns the largest payload that the interfaces at both ends take."""

    def give_up(self, reason: str, /) -> None:
        """Tells the reachable peers why there will be no group. Replaces connect."""

    def connect(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        """Connects to every rank. `routes` has per rank ('self'|'shm'|'udp'|'verbs', the peer's blob)."""

    def register_memory(self, buffer: Any) -> Registration:
        """Keeps a buffer in place until closed. RDMA devices register it on first use."""

    def post(
        self,
        plan: Plan,
        buffers: Sequence[Any],
        *,
        timeout_s: float = 0.0,
        background: bool = False,
        tag: int | None = None,
        scalar: float = 1.0,
        counts: Sequence[int] = (),
        seed: int = 0,
    ) -> Op: ...
    def time_plan(self, plan: Plan, buffers: Sequence[Any], iterations: int, counts: Sequence[int] = ()) -> list[float]:
        """Runs a plan many times without Python in between. Returns the seconds of each run."""

    @property
    def handle(self) -> int:
        """Returns the sennit_comm* of the C interface, as an integer."""

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the default deadline of later operations."""

    @property
    def failure(self) -> str:
        """Returns why the group ended. Empty while it works."""

    @property
    def lost_ranks(self) -> list[int]:
        """Returns the ranks that the failure blames."""

    def find_gone_ranks(self) -> list[int]:
        """Looks up the peers whose process, or whose end of this group, is gone now."""

    @property
    def sequence(self) -> int: ...
    def counters(self) -> dict[str, int]: ...
    def counter_page(self) -> str: ...
    def describe(self) -> str: ...
    def abort(self, reason: str) -> None: ...
    def shutdown(self, timeout_s: float = 5.0) -> None: ...
