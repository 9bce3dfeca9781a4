# SPDX-License-Identifier: Apache-2.0
"""Probes everything that a machine may lack: tests skip on it, and `sennit doctor` prints it.

A probe tries the thing itself if that is cheap (it sends two datagrams, it makes a BPF map) instead of guessing from
versions. Each runs at most once per process.
"""

import functools
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sennit import extras, host_name, surroundings

if TYPE_CHECKING:
    from sennit.transport.meeting.devices import DevicePort

# uapi/linux/udp.h, socket options at level IPPROTO_UDP
UDP_SEGMENT = 103
UDP_GRO = 104

SHM_FOLDER = Path("/dev/shm")
# Shared memory of 8 ranks on one host, rounded up: 8 segments of at most 5 MiB.
SHM_NEEDED_BYTES = 40 << 20
SHM_COMFORTABLE_BYTES = 256 << 20
# A Python that loads a program takes most of a second of processor, of which a busy machine gives little.
PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The result of one probe."""

    name: str
    """Its key in `PROBES`, which tests use too."""

    available: bool
    """Whether everything that needs it can run."""

    detail: str
    """What was found, or why it is missing, in one line."""

    remedy: str = ""
    """What to do about it; empty if it is available, or if nothing can be done."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Something a user wants to do, and the capabilities that it needs."""

    title: str
    """The user's words for it."""

    needs: tuple[str, ...]
    """Names of capabilities, in the order of the report."""

    required: bool = False
    """Without it, sennit is useless on this machine."""

    of_tests: bool = False
    """Only the project's own tests need it. A wheel has none."""


def present(name: str, detail: str) -> Capability:
    return Capability(name=name, available=True, detail=detail)


def absent(name: str, detail: str, remedy: str = "") -> Capability:
    return Capability(name=name, available=False, detail=detail, remedy=remedy)


def _cores() -> Capability:
    count = len(os.sched_getaffinity(0))
    return present("cores", f"{count} usable ({platform.machine()})")


def _shm() -> Capability:
    name = "shm"
    remedy = "give the container more shared memory (docker run --shm-size=1g), or set SENNIT_TRANSPORT=udp"
    if not SHM_FOLDER.is_dir():
        return absent(name, f"{SHM_FOLDER} does not exist", remedy)
    status = os.statvfs(SHM_FOLDER)
    free_bytes = status.f_bavail * status.f_frsize
    path = SHM_FOLDER / f"sennit-probe-{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return absent(name, f"cannot write {SHM_FOLDER}: {error.strerror}", remedy)
    try:
        os.unlink(path)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[0] = 1
    except OSError as error:
        return absent(name, f"cannot map {SHM_FOLDER}: {error.strerror}", remedy)
    finally:
        os.close(descriptor)
    detail = f"{free_bytes >> 20:,} MiB free in {SHM_FOLDER}"
    if free_bytes < SHM_NEEDED_BYTES:
        return absent(name, f"{detail}, 8 ranks need {SHM_NEEDED_BYTES >> 20}", remedy)
    if free_bytes < SHM_COMFORTABLE_BYTES:
        detail += "; data loaders with workers may need more (docker run --shm-size=1g)"
    return present(name, detail)


def _around(name: str, ask: Callable[[], surroundings.Answer]) -> Capability:
    answer = ask()
    return present(name, answer.what) if answer.fine else absent(name, answer.what, answer.remedy)


def _loopback(name: str, family: socket.AddressFamily, address: str, remedy: str) -> Capability:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            probe.settimeout(1.0)
            probe.sendto(b"sennit", probe.getsockname())  # an address can be bound without the interface
            probe.recv(16)
    except OSError as error:
        return absent(name, f"cannot send to {address}: {error.strerror or error}", remedy)
    return present(name, address)


def _loopback_ipv4() -> Capability:
    return _loopback("loopback-ipv4", socket.AF_INET, "127.0.0.1", "ip link set lo up")


def _loopback_ipv6() -> Capability:
    remedy = "IPv4 is used; for IPv6: ip link set lo up, and sysctl net.ipv6.conf.all.disable_ipv6=0"
    return _loopback("loopback-ipv6", socket.AF_INET6, "::1", remedy)


def _udp_gso() -> Capability:
    """Sends two segments with one call over loopback and counts the datagrams that arrive."""
    name = "udp-gso"
    segment_bytes = 512
    try:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            receiver.bind(("127.0.0.1", 0))
            receiver.settimeout(1.0)
            sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, segment_bytes)
            sender.sendto(bytes(2 * segment_bytes), receiver.getsockname())
            sizes = [len(receiver.recv(65_536)), len(receiver.recv(65_536))]
    except OSError as error:
        return absent(name, f"UDP_SEGMENT: {error.strerror or error}", "Linux 4.18 or later; udp works, but slower")
    if sizes != [segment_bytes, segment_bytes]:
        return absent(name, f"two segments of {segment_bytes} bytes arrived as {sizes}")
    return present(name, "UDP segmentation offload (one call sends many packets)")


def _udp_gro() -> Capability:
    name = "udp-gro"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    except OSError as error:
        return absent(name, f"UDP_GRO: {error.strerror}", "Linux 5.0 or later; udp works, but slower")
    return present(name, "UDP receive offload (one call takes many packets)")


def _settings() -> Capability:
    """Whether the SENNIT_* variables are valid, and what they ask for."""
    from sennit.transport import config
    from sennit.transport.errors import ConfigError

    try:
        found = config.from_environment()
    except ConfigError as error:
        return absent("settings", str(error), "correct or unset the variable")
    detail = (
        f"transport {found.transport}, {found.paths} paths a peer and rail ({found.path_policy}), window "
        f"{found.window_bytes} bytes ({found.congestion})"
    )
    return present("settings", detail)


def _rails() -> Capability:
    """The local addresses that udp would use with the present settings."""
    from sennit.transport import config
    from sennit.transport.errors import ConfigError
    from sennit.transport.meeting import numa, rails

    try:
        found = rails.find_rails(config.from_environment().interfaces)
    except ConfigError as error:
        return absent("rails", str(error), "set SENNIT_INTERFACES to an interface that is up and has an address")
    except ImportError as error:
        return absent("rails", f"{error}", extras.in_checkout("build", "pip install --force-reinstall sennit"))
    addresses = ", ".join(f"{rail.interface} {rail.address}" for rail in found)
    far = numa.describe_distance("this process", [rail.interface for rail in found])
    return present("rails", f"{addresses}; {far}" if far else addresses)


def _core() -> Capability:
    name = "core"
    from sennit.errors import Unsupported
    from sennit.transport import native, tracepoints

    try:
        native.require_core()
        from sennit.transport import _core

        detail = str(tracepoints.library())
        if _core.CRC_BY != "ISA-L":
            detail += f"; built without ISA-L, so CRCs are by {_core.CRC_BY} and udp is slower"
        return present(name, detail)
    except Unsupported as error:
        what, _, remedy = str(error).rpartition("; ")
        return absent(name, what, remedy)


def _amx() -> Capability:
    """Whether attention of bfloat16 takes tiles of the processor."""
    name = "amx"
    try:
        from sennit.runtime.kernels import _kernels
    except ImportError as error:
        return absent(name, str(error), extras.in_checkout("build", "a wheel of sennit for this processor"))
    if name in _kernels.attention_sets():
        return present(name, "tiles of bfloat16")
    return absent(
        name,
        "no tiles of bfloat16 for this process: attention takes wide vectors, slower and with the same bits",
        "a processor with AMX (Intel Sapphire Rapids or later), and Linux 5.16",
    )


def _torch() -> Capability:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return absent("torch", "not installed", extras.install_command("torch") or "")
    return present("torch", version)


def _backend() -> Capability:
    name = "backend"
    torch = probe("torch")
    if not torch.available:
        return absent(name, "needs torch", torch.remedy)
    from sennit.errors import Unsupported
    from sennit.runtime.backend import extension

    try:
        if "torch" in sys.modules:
            extension.load()
        else:  # an import of torch would take most of the doctor's time
            extension.try_link(torch.detail)
    except (ImportError, Unsupported) as error:
        return absent(name, f"{error}", extension.remedy(torch.detail))
    return present(name, f"the extension fits torch {torch.detail}")


def _gpu() -> Capability:
    name = "gpu"
    if not Path("/dev/nvidiactl").exists():
        return absent(name, "no NVIDIA device on this machine")
    if not probe("torch").available:
        return absent(name, "needs torch", probe("torch").remedy)
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return absent(name, "this torch cannot use the device", "install a torch built for CUDA, then make build")
    return present(name, f"{cuda.device_count()} × {cuda.get_device_name(0)}")


def _rdma() -> Capability:
    from sennit.transport.errors import DeviceError, Unsupported
    from sennit.transport.meeting import devices

    name = "rdma"
    try:
        found = devices.read_devices()
    except Unsupported as error:
        return absent(name, str(error), "install pyverbs (Debian: python3-pyverbs)")
    except DeviceError as error:
        return absent(name, str(error), "give this user access to /dev/infiniband/uverbs*")
    if not found:
        problems = devices.absence_problems()
        return absent(name, devices.whats(problems), devices.remedies(problems))
    return present(name, ", ".join(device.name for device in found))


def _roce() -> Capability:
    """Whether a port of some device can be used, and memory can be registered for it."""
    from sennit.transport.meeting import devices

    name = "roce"
    if not probe("core").available:
        return absent(name, "needs the native core", probe("core").remedy)
    from sennit.transport import _core

    if not _core.HAS_VERBS:
        again = extras.in_checkout("build", "pip install --no-binary sennit sennit")
        return absent(name, "built without libibverbs", f"install its headers (Debian: libibverbs-dev), then {again}")
    if not probe("rdma").available:
        return absent(name, "needs an RDMA device", probe("rdma").remedy)
    found = devices.read_devices()
    usable = devices.usable_ports(found)
    problems = devices.machine_problems()
    if not usable:
        problems += [problem for device in found for port in device.ports for problem in devices.port_problems(port)]
    if problems:
        return absent(name, devices.whats(problems), devices.remedies(problems))
    return present(name, ", ".join(f"{port.device}/{port.number} {_gids(port)}" for port in usable))


def _gids(port: "DevicePort") -> str:
    addresses = " ".join(f"{gid.address} (GID {gid.index})" for gid in port.gids if not gid.is_link_local)
    return f"{port.mtu_bytes} bytes a packet, {addresses or 'link-local addresses only'}"


def _tracepoints() -> Capability:
    """Whether the native core was built with tracepoints."""
    name = "tracepoints"
    if importlib.util.find_spec("elftools") is None:
        return absent(name, "pyelftools is not installed", extras.in_checkout("build", "pip install 'sennit[testbed]'"))
    if not probe("core").available:
        return absent(name, "needs the native core", probe("core").remedy)
    from sennit.ebpf import usdt
    from sennit.transport import tracepoints

    count = len(usdt.read(tracepoints.library()))
    if count == 0:
        return absent(name, "built without sys/sdt.h", "install systemtap-sdt-dev, then make build")
    return present(name, f"{count} in {tracepoints.LIBRARY} (sennit trace list)")


def _bcc() -> Capability:
    from sennit.runtime.trace import session

    what, _, remedy = session.problem().partition(": ")
    return absent("bcc", what, remedy) if what else present("bcc", "sennit trace ops, sennit trace loss")


def _io_uring() -> Capability:
    """Creates a ring: a kernel, a container's filter or a missing library may refuse."""
    name = "io-uring"
    if not probe("core").available:
        return absent(name, "needs the native parts", probe("core").remedy)
    from sennit.runtime.memory import _memory

    problem: str = _memory.uring_problem()
    if problem:
        return absent(
            name, problem, "install liburing (Debian: liburing2) and permit io_uring; threads are used without"
        )
    return present(name, "files of embedding rows are read and written in batches")


def _root() -> Capability:
    from sennit.ebpf import kernel_features

    if (
        os.geteuid() == 0
        and kernel_features.effective_capabilities() >> kernel_features.CAPABILITIES["CAP_NET_ADMIN"] & 1
    ):
        return present("root", "CAP_NET_ADMIN")
    return absent("root", "no CAP_NET_ADMIN", "run as root, or add the capability to the container")


def in_new_namespace(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a network namespace of its own. One that does not end has the status of timeout(1), 124."""
    arguments = ["unshare", "--net", *command]
    try:
        return subprocess.run(arguments, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        said = f"{command[0]} did not end within {PROBE_TIMEOUT_S:g} s: a very busy machine"
        return subprocess.CompletedProcess(arguments, 124, "", said)


def _netns() -> Capability:
    name = "netns"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return absent(name, "no unshare or ip command", "install util-linux and iproute2")
    made = in_new_namespace("ip", "link", "add", "sennit0", "type", "veth", "peer", "name", "sennit1")
    if made.returncode != 0:
        return absent(name, made.stderr.strip().splitlines()[-1] if made.stderr.strip() else "refused", "run as root")
    return present(name, "network namespaces and veth links")


def _bpf_feature(feature: str, name: str, detail: str) -> Capability:
    """The result of sennit.ebpf.kernel_features."""
    from sennit.ebpf import kernel_features

    found = kernel_features.probe(feature)
    return present(name, detail) if found.available else absent(name, found.absent_because, found.remedy)


def _arena() -> Capability:
    """Everything that the target xdp needs: an arena, XDP programs, and a clang that knows arenas."""
    for feature in ("xdp", "arena", "clang-arena"):
        found = _bpf_feature(feature, "arena", "XDP programs can share an arena with this process")
        if not found.available:
            return found
    return found


def _native_xdp() -> Capability:
    """Whether a driver runs XDP programs: the driver of virtual interfaces, which the tests use."""
    name = "native-xdp"
    for need in ("netns", "bpf"):
        if not probe(need).available:
            return absent(name, f"needs {need}: {probe(need).detail}", probe(need).remedy)
    program = "from sennit.ebpf.kernel_features import try_native_xdp; try_native_xdp('sennit0', 'sennit1')"
    tried = in_new_namespace(sys.executable, "-c", program)
    if tried.returncode != 0:
        return absent(name, tried.stderr.strip().splitlines()[-1])
    return present(name, "virtual interfaces run XDP programs in their driver")


def _xdp_agent() -> Capability:
    """Whether an agent loads XDP programs for this user, and where."""
    from sennit.offload.agent import receiver
    from sennit.offload.errors import TargetUnavailable

    path = receiver.agent_socket() or receiver.SOCKET
    try:
        grants = receiver.terms(path)
    except TargetUnavailable as error:
        reason, _, remedy = str(error).removeprefix("xdp: ").partition("; ")
        return absent("xdp-agent", reason, remedy)
    what = (f"{', '.join(one['interfaces'])} ports {one['ports'][0]} to {one['ports'][1]}" for one in grants)
    return present("xdp-agent", f"{path}: {'; '.join(what)}")


def command(name: str, package: str) -> Capability:
    path = shutil.which(name)
    if path is None:
        return absent(name, "command not found", f"install {package}")
    return present(name, path)


def _host_name() -> Capability:
    own = socket.gethostname()
    if not (here := host_name.leads_here_only(own)):
        return present("host-name", own)
    return absent("host-name", f"{own} is {here}, where nobody else meets it", host_name.what_to_do(own, here))


PROBES: dict[str, Callable[[], Capability]] = {
    "cores": _cores,
    "settings": _settings,
    "shm": _shm,
    "avx2": functools.partial(_around, "avx2", surroundings.vector_units),
    "libc": functools.partial(_around, "libc", surroundings.libraries),
    "cache": functools.partial(_around, "cache", surroundings.cache_folder),
    "proxy": functools.partial(_around, "proxy", surroundings.proxy),
    "loopback-ipv4": _loopback_ipv4,
    "loopback-ipv6": _loopback_ipv6,
    "rails": _rails,
    "host-name": _host_name,
    "udp-gso": _udp_gso,
    "udp-gro": _udp_gro,
    "core": _core,
    "amx": _amx,
    "torch": _torch,
    "backend": _backend,
    "rdma": _rdma,
    "roce": _roce,
    "tracepoints": _tracepoints,
    "bcc": _bcc,
    "gpu": _gpu,
    "io-uring": _io_uring,
    "root": _root,
    "netns": _netns,
    "bpf": functools.partial(_bpf_feature, "map", "bpf", "maps can be made"),
    "arena": _arena,
    "native-xdp": _native_xdp,
    "xdp-agent": _xdp_agent,
    "uprobe": functools.partial(_bpf_feature, "uprobe", "uprobe", "programs at functions of a process"),
    "tc": functools.partial(command, "tc", "iproute2"),
    "ip": functools.partial(command, "ip", "iproute2"),
    "nsenter": functools.partial(command, "nsenter", "util-linux"),
    "clang": functools.partial(command, "clang", "clang"),
    "bpftool": functools.partial(command, "bpftool", "bpftool"),
    "bpftrace": functools.partial(command, "bpftrace", "bpftrace"),
}


# What `sennit doctor` asks. The testbed adds its own (testbed/probes.py).
QUESTIONS = [
    Question(title="the native core runs", needs=("cores", "libc", "core", "settings"), required=True),
    Question(title="torch.distributed backend", needs=("torch", "backend"), required=True),
    Question(title="ranks of one host share memory (shm)", needs=("shm",)),
    Question(title="RoCEv2 over UDP sockets (udp)", needs=("loopback-ipv4", "rails", "udp-gso", "udp-gro")),
    Question(title="the same over IPv6 (IPv4 otherwise)", needs=("loopback-ipv6",)),
    Question(title="other machines find this one by its name", needs=("host-name",)),
    Question(title="kernels with wide vectors (portable ones otherwise)", needs=("avx2",)),
    Question(title="attention of bfloat16 by tiles (wide vectors otherwise)", needs=("amx",)),
    Question(title="BPF objects, extensions and kernels are kept for the next time", needs=("cache",)),
    Question(title="services of this machine are reached without a proxy", needs=("proxy",)),
    Question(title="RDMA devices (verbs)", needs=("rdma", "roce")),
    Question(title="embedding rows on files by io_uring (threads otherwise)", needs=("io-uring",)),
    Question(title="CUDA tensors", needs=("gpu",)),
    Question(title="preprocessing in XDP, batches in an arena (offload)", needs=("root", "bpf", "arena", "native-xdp")),
    Question(title="the same without rights, through sennit agent", needs=("xdp-agent",)),
    Question(title="sums in XDP (aggregate; sockets otherwise)", needs=("root", "bpf", "arena", "native-xdp")),
]


@functools.cache
def probe(name: str) -> Capability:
    """The capability `name`. Raises KeyError that lists the known names for any other."""
    if name not in PROBES:
        raise KeyError(f"unknown capability {name!r}; known are {', '.join(PROBES)}")
    return PROBES[name]()


def missing(*names: str) -> str | None:
    """Why a test that needs all of `names` cannot run here, naming the first one missing; None if it can run."""
    for name in names:
        capability = probe(name)
        if not capability.available:
            return f"missing capability {name}: {capability.detail}"
    return None
