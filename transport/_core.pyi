# SPDX-License-Identifier: Apache-2.0
"""The native data plane: plans run over shared memory and RoCEv2 on UDP (csrc/bindings/module.cpp)."""

from collections.abc import Sequence
from typing import Any, Final, final

WIRE_REVISION: Final[int]
"""Of the control payload and of packets (docs/reference/wire.md)."""

PATH_POLICIES: Final[tuple[str, ...]]
"""How a flow may choose among its paths (csrc/flow/path_policy.hpp)."""

CONGESTION_CONTROLS: Final[tuple[str, ...]]
"""What may decide how much is in flight (csrc/flow/congestion.hpp)."""

DEFAULTS: Final[dict[str, int | float | str]]
"""What C++ takes for fields of `Config` that it is not given: the defaults of config.py."""

def rdma_ports() -> list[tuple[str, int, int, bool, int, list[int], list[tuple[int, str, int]], str]]:
    """The ports of all RDMA devices: (device, number, state, Ethernet or not, largest payload, partition keys, RoCE v2
    GIDs as (index, address, interface index), problem). Number 0: only `problem` counts, why it cannot be read."""

def describe_signature(signature: int) -> str:
    """A plan's signature in words, as errors name it: "allreduce of float32 (sum), 1024 elements"."""

@final
class Plan:
    """A compiled plan (docs/reference/plans.md). Raises ArgumentError for malformed bytes."""

    def __init__(self, data: bytes) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def step_count(self) -> int: ...

@final
class Op:
    """One run of a plan."""

    def wait(self, timeout_s: float = 0.0) -> None:
        """Blocks until done (0: until the operation's own deadline); raises the error it ended with."""

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
    ) -> None: ...
    def shm_offer(self) -> bytes:
        """Makes this rank's shared-memory segment; what peers need to open it."""

    def shm_accept(self, rank: int, offer: bytes) -> bool:
        """Opens a peer's segment; False when it cannot be reached."""

    def udp_open(
        self,
        rails: Sequence[tuple[str, int]],
        *,
        path_count: int,
        path_policy: str,
        congestion: str,
        window_bytes: int,
        ports: tuple[int, int] = (0, 0),
        seed: int = 0,
    ) -> bytes:
        """Opens the sockets on (address, port) rails, all within `ports` (first, last) unless that begins with 0; what
        peers need to connect.

        ArgumentError for a name that is unknown or a number out of range.
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
        """Opens the RDMA device that serves these local addresses; what peers need to connect."""

    def begin_trial(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        """Before connect, with its routes: begins to send packets over every path to the peers of udp routes."""

    def try_network(self, limit_s: float, /) -> bool:
        """Goes on with the trial for so long at most; True when there is nothing more to find out."""

    def is_tried(self, rank: int, /) -> bool:
        """The trial with this rank is over, or there is none."""

    def is_perfect(self, rank: int, /) -> bool:
        """Every path takes the largest packet both ways, or there is no trial."""

    def trial_message(self, rank: int, /) -> bytes:
        """What this end knows, for that rank's learn_trial."""

    def learn_trial(self, rank: int, message: bytes, /) -> None:
        """A trial_message of that rank that came another way; empty: it found every path perfect."""

    def tried_paths(self, rank: int, /) -> list[tuple[str, int, str, int, int, int, int, int, int]]:
        """For each path: own address and source port, the peer's address and port, its source port and our port, the
        largest payload that arrived there and here, errno of the last send that failed."""

    def trial_payload_bytes(self, rank: int, /) -> int:
        """The size of packets that the trial found; 0 before and without one."""

    def trial_payload_max_bytes(self, rank: int, /) -> int:
        """The largest that the interfaces at both ends take."""

    def give_up(self, reason: str, /) -> None:
        """In place of connect: tells the peers that could be reached why there will be no group."""

    def connect(self, routes: Sequence[tuple[str, bytes]], /) -> None:
        """Per rank: ('self'|'shm'|'udp'|'verbs', the peer's blob)."""

    def register_memory(self, buffer: Any) -> Registration:
        """Keeps a buffer where it is, and registered with RDMA devices once it is used, until closed."""

    def post(
        self,
        plan: Plan,
        buffers: Sequence[Any],
        *,
        timeout_s: float = 0.0,
        background: bool = False,
        tag: int | None = None,
        scalar: float = 1.0,
    ) -> Op: ...
    def time_plan(self, plan: Plan, buffers: Sequence[Any], iterations: int) -> list[float]:
        """Runs a plan many times without Python in between; returns seconds a run."""

    @property
    def handle(self) -> int:
        """sennit_comm* of the C interface, as an integer."""

    def set_timeout(self, timeout_s: float) -> None:
        """The default deadline of operations from now on."""

    @property
    def failure(self) -> str:
        """Why the group ended; empty while it works."""

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that the failure blames."""

    def find_gone_ranks(self) -> list[int]:
        """Peers whose processes, or whose ends of this group, are gone, looked up now."""

    @property
    def sequence(self) -> int: ...
    def counters(self) -> dict[str, int]: ...
    def counter_page(self) -> str: ...
    def describe(self) -> str: ...
    def abort(self, reason: str) -> None: ...
    def shutdown(self, timeout_s: float = 5.0) -> None: ...
