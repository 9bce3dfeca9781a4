# SPDX-License-Identifier: Apache-2.0
"""The transport's configuration. This is the one file that reads `SENNIT_*` environment variables."""

from __future__ import annotations

import difflib
import functools
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

from sennit.transport.errors import ConfigError
from sennit.transport.light_names import LightNames
from sennit.transport.light_tuple import LightTuple

PATHS_MAX: Final = 256
# Binding a port below this number needs a privilege.
PORT_MIN: Final = 1024
PORT_MAX: Final = 65535
WINDOW_MIN_BYTES: Final = 64 << 10
WINDOW_MAX_BYTES: Final = 64 << 20
# Longer than any identity we generate, and short enough for an error message.
HOST_ID_MAX_CHARACTERS: Final = 128
THREADS_MAX: Final = 64
# Linux: IFNAMSIZ is 16 with the final zero (uapi/linux/if.h).
INTERFACE_MAX_CHARACTERS: Final = 15
# A busy machine may not run a thread for some tenths of a second. The upper limit of a day is for debuggers.
PEER_TIMEOUT_MIN_S: Final = 0.5
PEER_TIMEOUT_MAX_S: Final = 86_400.0
VARIABLES: Final = (
    "SENNIT_TRANSPORT",
    "SENNIT_INTERFACES",
    "SENNIT_PATHS",
    "SENNIT_PORTS",
    "SENNIT_VERBS_SERVICE",
    "SENNIT_PATH_POLICY",
    "SENNIT_CONGESTION",
    "SENNIT_WINDOW_BYTES",
    "SENNIT_ALGORITHM",
    "SENNIT_CALIBRATION",
    "SENNIT_AGGREGATOR",
    "SENNIT_THREADS",
    "SENNIT_HOST_ID",
    "SENNIT_TIMEOUT_S",
    "SENNIT_PEER_TIMEOUT_S",
)
# No fields of Config: the first holds for the process, the second is read by offload/ingest/target.py.
OTHER_VARIABLES: Final = ("SENNIT_SHARED_ALLOCATOR", "SENNIT_BPF_STATISTICS")
# How like a variable's name, without SENNIT_, another name must be (difflib's ratio) to count as a slip.
SLIP_RATIO: Final = 0.7


AnyName = TypeVar("AnyName", bound=LightNames)


class TransportKind(LightNames):
    """What carries the bytes between two ranks."""

    AUTO = "auto"
    SHM = "shm"
    UDP = "udp"
    VERBS = "verbs"


class PathPolicy(LightNames):
    """How the next path is chosen. The names are those of csrc/flow/path_policy.cpp."""

    ROUND_ROBIN = "round_robin"
    REPS = "reps"


class Congestion(LightNames):
    """What decides how much may be in flight. The names are those of csrc/flow/congestion.cpp."""

    DCTCP = "dctcp"
    FIXED = "fixed"
    SWIFT = "swift"


class Algorithm(LightNames):
    """How the ranks run a collective. Where one does not run, direct does (selection.py)."""

    ONE_SHOT = "one_shot"
    """Every rank sends its vector to all, and folds all vectors."""
    DIRECT = "direct"
    """Every rank folds its share of all vectors, and sends the result to all."""
    ROUND_TRIP = "round_trip"
    """As direct, but results come back in what was sent: in place, for ranks that all share memory."""
    DISSEMINATION = "dissemination"
    """As one shot, but ranks pass on what they have: log2(world) messages."""
    HALVING = "halving"
    """Recursive halving and doubling: log2(world) peers."""
    HIERARCHICAL = "hierarchical"
    """Hosts make partial sums in shared memory, and send only these to other hosts."""
    TREE = "tree"
    """A binomial tree to the root: log2(world) messages reach it."""
    RING = "ring"
    """Every rank sends only to the next one: world - 1 messages that wait for one another."""
    BRUCK = "bruck"
    """Parts travel by way of other ranks: log2(world) messages."""
    AGGREGATE = "aggregate"
    """An aggregator in the network folds (SENNIT_AGGREGATOR): each rank sends its vector once and gets the sum once."""


class VerbsService(LightNames):
    """The service of RDMA queue pairs that carries the packets."""

    UC = "uc"
    RC = "rc"


# The fields of Config that are names.
NAMED: Final[Mapping[str, type[LightNames]]] = {
    "transport": TransportKind,
    "verbs_service": VerbsService,
    "path_policy": PathPolicy,
    "congestion": Congestion,
    "algorithm": Algorithm,
}


class Config(LightTuple):
    """The transport's settings, checked on creation. Ranks of one group may have different settings if they find a
    common transport. Path policy, congestion control and window concern only the sender and change nothing on the wire.
    If path counts differ, a pair of ranks uses the smaller one."""

    transport: TransportKind = TransportKind.AUTO
    """`SENNIT_TRANSPORT`. auto: shared memory inside a host, else udp. shm, udp, verbs: that one, or an error. The
    ports udp and verbs share a wire format, so some ranks of a group may use udp and others verbs (over IPv6)."""

    interfaces: tuple[str, ...] = ()
    """`SENNIT_INTERFACES`, names separated by commas: the network interfaces (rails) that udp uses. Empty: those of
    default routes, else any that are up and have an address, else loopback (`rails.py`). With verbs: the interfaces of
    the RDMA devices to use; empty: those of the first device that has any (`rdma_rails.py`)."""

    paths: int = 8
    """`SENNIT_PATHS`, 1 to 256: UDP source ports (ECMP entropies) for each peer and rail. Eight load four equal-cost
    planes almost evenly. More paths only cost memory. Sockets of one address use one."""

    ports: tuple[int, int] | None = None
    """`SENNIT_PORTS`, "5000-5100": the first and the last UDP port that udp may use, for firewalls. On each rail a
    process needs one for each path, and one for each of its process groups to receive. Ranks of a host share the range.
    None: 4791 or any free port to receive, 49152 to 65535 to send. verbs always uses 4791."""

    verbs_service: VerbsService = VerbsService.UC
    """`SENNIT_VERBS_SERVICE`, equal on all ranks with verbs. uc: unreliable connected; only this transport retransmits.
    rc: reliable connected, for devices without uc; the device retransmits too, from the first loss on."""

    path_policy: PathPolicy = PathPolicy.ROUND_ROBIN
    """`SENNIT_PATH_POLICY`. round_robin: all working paths in turn, best where paths are equal. reps: reuses paths
    whose packets just arrived unmarked, faster ones first, for fabrics whose paths have unequal load."""

    congestion: Congestion = Congestion.DCTCP
    """`SENNIT_CONGESTION`. dctcp: a window that ECN marks and overflowing queues make smaller, beside the receivers'
    grants, which follow delay. fixed: always the whole window, for hosts that share no link with others. swift: a
    window that follows delay, too, for the shortest queues (docs/lab/congestion.md compares them)."""

    window_bytes: int = 2 << 20
    """`SENNIT_WINDOW_BYTES`, 64 KiB to 64 MiB: how much this rank may have in flight to one peer. The peer's socket
    buffer may allow less. It should be rate times round-trip time: the default suits 100 Gbit/s over 160 µs. If it is
    far below the peer's window, acknowledgements wait for a timer and come 400 µs late."""

    algorithm: Algorithm | None = None
    """`SENNIT_ALGORITHM`, equal on all ranks: the algorithm of collectives on host memory, wherever it can run.
    None (auto): the one that a cost model prefers (selection.py). Results are the same to the bit."""

    calibration: str | None = None
    """`SENNIT_CALIBRATION`: a file of `sennit calibrate`, with the same constants on all ranks, for the cost model.
    None: the built-in constants (calibration.py)."""

    aggregator: str = ""
    """`SENNIT_AGGREGATOR`, ADDRESS or ADDRESS:PORT ([ADDRESS]:PORT of IPv6): an aggregator (`sennit aggregate`) that
    all ranks reach. The cost model then may let it do an allreduce. If it fails, the ranks do it themselves."""

    threads: int = 1
    """`SENNIT_THREADS`, 1 to 64: threads of this process that share the folds and copies of a large operation. Results
    do not depend on it. 1: the thread that waits does all the work. More help where a rank has cores to spare."""

    host_id: str | None = None
    """`SENNIT_HOST_ID`: names this host when ranks look for neighbours. None: the kernel's boot id. Give two containers
    different values to keep them from trying shared memory. Equal values do not force it."""

    timeout_s: float = 1800.0
    """`SENNIT_TIMEOUT_S`, seconds: the deadline of rendezvous and of every operation without its own. The default
    equals torch's default for process groups, which replaces it under torch."""

    peer_timeout_s: float = 10.0
    """`SENNIT_PEER_TIMEOUT_S`, 0.5 to 86,400 seconds: a rank that others wait for is dead to them after this time
    without a sign of life, and the group ends. Library threads send these signs, so a rank that computes or holds the
    GIL is not dead. A stopped process (SIGSTOP, a debugger) sends none."""

    def __new__(cls, **given: Any) -> Self:
        """Takes names only. Raises ConfigError, with what is allowed, for a value that is not."""
        for field, kind in NAMED.items():
            value = given.get(field, cls._field_defaults[field])
            if value is None and field == "algorithm":
                continue
            try:
                given[field] = kind(value)
            except ValueError:
                or_none = ", or None" if field == "algorithm" else ""
                raise ConfigError(f"{field} {value!r}; allowed: {', '.join(kind)}{or_none}") from None
        self = super().__new__(cls, **given)
        self._check()
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

    def _check(self) -> None:
        if not 1 <= self.paths <= PATHS_MAX:
            raise ConfigError(f"paths {self.paths}; allowed: 1..{PATHS_MAX}")
        if self.ports is not None:
            self._check_ports(*self.ports)
        if not WINDOW_MIN_BYTES <= self.window_bytes <= WINDOW_MAX_BYTES:
            raise ConfigError(f"window_bytes {self.window_bytes}; allowed: {WINDOW_MIN_BYTES}..{WINDOW_MAX_BYTES}")
        for name in self.interfaces:
            if not 1 <= len(name) <= INTERFACE_MAX_CHARACTERS or "/" in name or any(map(str.isspace, name)):
                raise ConfigError(
                    f"interface {name!r}; allowed: 1..{INTERFACE_MAX_CHARACTERS} characters without space or slash"
                )
        if len(set(self.interfaces)) != len(self.interfaces):
            raise ConfigError(f"interfaces {','.join(self.interfaces)}; allowed: each name once")
        if not 1 <= self.threads <= THREADS_MAX:
            raise ConfigError(f"threads {self.threads}; allowed: 1..{THREADS_MAX}")
        if self.host_id is not None and not 1 <= len(self.host_id) <= HOST_ID_MAX_CHARACTERS:
            raise ConfigError(f"host_id of {len(self.host_id)} characters; allowed: 1..{HOST_ID_MAX_CHARACTERS}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s {self.timeout_s}; allowed: finite and above 0")
        if not PEER_TIMEOUT_MIN_S <= self.peer_timeout_s <= PEER_TIMEOUT_MAX_S:
            raise ConfigError(
                f"peer_timeout_s {self.peer_timeout_s}; allowed: {PEER_TIMEOUT_MIN_S:g}..{PEER_TIMEOUT_MAX_S:g}"
            )

    def _check_ports(self, first: int, last: int) -> None:
        if not PORT_MIN <= first <= last <= PORT_MAX:
            raise ConfigError(f"ports {first}-{last}; allowed: FIRST-LAST within {PORT_MIN}..{PORT_MAX}")
        count, needed = last - first + 1, 1 + self.paths
        if count < needed:
            raise ConfigError(
                f"ports {first}-{last}: {count} ports; allowed: at least {needed} for each rank of a host and each "
                f"process group, 1 to receive and {self.paths} for paths (SENNIT_PATHS)"
            )


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """Returns the configuration that the `SENNIT_*` variables ask for. Unset or empty ones keep the default."""
    source = os.environ if environment is None else environment
    wants_shared_allocator(source)  # raises where the import only warned
    _tell_of_slips(source)
    given = {name: text for name in VARIABLES if (text := source.get(name, "").strip())}
    default = Config()
    return Config(
        transport=_name("SENNIT_TRANSPORT", given.get("SENNIT_TRANSPORT"), default.transport),
        interfaces=_names(given.get("SENNIT_INTERFACES")),
        paths=_integer("SENNIT_PATHS", given.get("SENNIT_PATHS"), default.paths),
        ports=_ports("SENNIT_PORTS", given.get("SENNIT_PORTS")),
        verbs_service=_name("SENNIT_VERBS_SERVICE", given.get("SENNIT_VERBS_SERVICE"), default.verbs_service),
        path_policy=_name("SENNIT_PATH_POLICY", given.get("SENNIT_PATH_POLICY"), default.path_policy),
        congestion=_name("SENNIT_CONGESTION", given.get("SENNIT_CONGESTION"), default.congestion),
        window_bytes=_integer("SENNIT_WINDOW_BYTES", given.get("SENNIT_WINDOW_BYTES"), default.window_bytes),
        algorithm=_algorithm("SENNIT_ALGORITHM", given.get("SENNIT_ALGORITHM")),
        calibration=given.get("SENNIT_CALIBRATION"),
        aggregator=given.get("SENNIT_AGGREGATOR", ""),
        threads=_integer("SENNIT_THREADS", given.get("SENNIT_THREADS"), default.threads),
        host_id=given.get("SENNIT_HOST_ID"),
        timeout_s=_seconds("SENNIT_TIMEOUT_S", given.get("SENNIT_TIMEOUT_S"), default.timeout_s),
        peer_timeout_s=_seconds("SENNIT_PEER_TIMEOUT_S", given.get("SENNIT_PEER_TIMEOUT_S"), default.peer_timeout_s),
    )


def _tell_of_slips(source: Mapping[str, str]) -> None:
    """Warns of names that are almost those of variables, such as SENNIT_CONGESTON. They change nothing."""
    known = {name.removeprefix("SENNIT_"): name for name in (*VARIABLES, *OTHER_VARIABLES)}
    for name in source:
        short = name.removeprefix("SENNIT_")
        if short == name or short in known:
            continue
        if near := difflib.get_close_matches(short, known, n=1, cutoff=SLIP_RATIO):
            _tell_of_slip(name, known[near[0]])


@functools.cache
def _tell_of_slip(name: str, meant: str) -> None:
    """Once in a process: programs make many groups."""
    warnings.warn(f"{name} is no variable of sennit, and changes nothing; perhaps {meant} is meant", RuntimeWarning, 4)


def wants_shared_allocator(environment: Mapping[str, str] | None = None) -> bool:
    """`SENNIT_SHARED_ALLOCATOR`, 0 (default) or 1: whether every new CPU tensor of the process is in symmetric memory.

    It holds for the process, not for a group, so it is no field of `Config`. Raises ConfigError for other values.
    """
    text = (os.environ if environment is None else environment).get("SENNIT_SHARED_ALLOCATOR") or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"SENNIT_SHARED_ALLOCATOR={text}; allowed: 0 or 1")
    return text == "1"


def _name(variable: str, text: str | None, default: AnyName) -> AnyName:
    kind = type(default)
    if text is None:
        return default
    try:
        return kind(text.lower())
    except ValueError:
        raise ConfigError(f"{variable}={text}; allowed: {', '.join(kind)}") from None


def _algorithm(variable: str, text: str | None) -> Algorithm | None:
    if text is None or text.lower() == "auto":
        return None
    try:
        return Algorithm(text.lower())
    except ValueError:
        raise ConfigError(f"{variable}={text}; allowed: auto, {', '.join(Algorithm)}") from None


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _ports(variable: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    try:
        return int(first), int(last if dash else first)
    except ValueError:
        raise ConfigError(f"{variable}={text}; allowed: FIRST-LAST, as in 5000-5100") from None


def _integer(variable: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}={text}; allowed: a whole number") from None


def _seconds(variable: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text}; allowed: a number of seconds") from None
