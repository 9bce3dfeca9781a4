# SPDX-License-Identifier: Apache-2.0
"""Probes everything that a machine may lack: tests skip on it, and `sennit doctor` prints it.

A probe tries the thing itself if that is cheap (it sends two datagrams, it makes a BPF map) instead of guessing from
versions. Each runs at most once per process.
"""

import functools
import importlib.metadata
import importlib.util
import json
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

from sennit import host_name

if TYPE_CHECKING:
    from sennit.transport.devices import DevicePort

# uapi/linux/udp.h, socket options at level IPPROTO_UDP
UDP_SEGMENT = 103
UDP_GRO = 104

SHM_FOLDER = Path("/dev/shm")
# Shared memory of 8 ranks on one host, rounded up: 8 segments of at most 5 MiB.
SHM_NEEDED_BYTES = 40 << 20
PROBE_TIMEOUT_S = 10.0


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


def _available(name: str, detail: str) -> Capability:
    return Capability(name=name, available=True, detail=detail)


def _missing(name: str, detail: str, remedy: str = "") -> Capability:
    return Capability(name=name, available=False, detail=detail, remedy=remedy)


def _cores() -> Capability:
    count = len(os.sched_getaffinity(0))
    return _available("cores", f"{count} usable ({platform.machine()})")


def _shm() -> Capability:
    name = "shm"
    remedy = "give the container more shared memory (docker run --shm-size=1g), or set SENNIT_TRANSPORT=udp"
    if not SHM_FOLDER.is_dir():
        return _missing(name, f"{SHM_FOLDER} does not exist", remedy)
    status = os.statvfs(SHM_FOLDER)
    free_bytes = status.f_bavail * status.f_frsize
    path = SHM_FOLDER / f"sennit-probe-{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return _missing(name, f"cannot write {SHM_FOLDER}: {error.strerror}", remedy)
    try:
        os.unlink(path)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[0] = 1
    except OSError as error:
        return _missing(name, f"cannot map {SHM_FOLDER}: {error.strerror}", remedy)
    finally:
        os.close(descriptor)
    detail = f"{free_bytes >> 20:,} MiB free in {SHM_FOLDER}"
    if free_bytes < SHM_NEEDED_BYTES:
        return _missing(name, f"{detail}, 8 ranks need {SHM_NEEDED_BYTES >> 20}", remedy)
    return _available(name, detail)


def _loopback(name: str, family: socket.AddressFamily, address: str) -> Capability:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return _missing(name, f"cannot bind {address}: {error.strerror}", "bring the interface lo up with this address")
    return _available(name, address)


def _loopback_ipv4() -> Capability:
    return _loopback("loopback-ipv4", socket.AF_INET, "127.0.0.1")


def _loopback_ipv6() -> Capability:
    return _loopback("loopback-ipv6", socket.AF_INET6, "::1")


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
        return _missing(name, f"UDP_SEGMENT: {error.strerror or error}", "Linux 4.18 or later; udp works, but slower")
    if sizes != [segment_bytes, segment_bytes]:
        return _missing(name, f"two segments of {segment_bytes} bytes arrived as {sizes}")
    return _available(name, "UDP segmentation offload (one call sends many packets)")


def _udp_gro() -> Capability:
    name = "udp-gro"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    except OSError as error:
        return _missing(name, f"UDP_GRO: {error.strerror}", "Linux 5.0 or later; udp works, but slower")
    return _available(name, "UDP receive offload (one call takes many packets)")


def _settings() -> Capability:
    """Whether the SENNIT_* variables are valid, and what they ask for."""
    from sennit.transport import config
    from sennit.transport.errors import ConfigError

    try:
        found = config.from_environment()
    except ConfigError as error:
        return _missing("settings", str(error), "correct or unset the variable")
    detail = (
        f"transport {found.transport}, {found.paths} paths a peer and rail ({found.path_policy}), window "
        f"{found.window_bytes} bytes ({found.congestion})"
    )
    return _available("settings", detail)


def _rails() -> Capability:
    """The local addresses that udp would use with the present settings."""
    from sennit.transport import config, rails
    from sennit.transport.errors import ConfigError

    try:
        found = rails.find_rails(config.from_environment().interfaces)
    except ConfigError as error:
        return _missing("rails", str(error), "set SENNIT_INTERFACES to an interface that is up and has an address")
    return _available("rails", ", ".join(f"{rail.interface} {rail.address}" for rail in found))


def _core() -> Capability:
    name = "core"
    try:
        module = importlib.import_module("sennit.transport._core")
    except ImportError as error:
        return _missing(name, f"{error}", "make build")
    return _available(name, str(module.__file__))


def _torch() -> Capability:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return _missing("torch", "not installed", "pip install torch==2.13.0, then build sennit again")
    return _available("torch", version)


def _backend() -> Capability:
    """The torch extension fits one torch version only. The build records which."""
    name = "backend"
    torch = probe("torch")
    if not torch.available:
        return _missing(name, "needs torch", torch.remedy)
    package = importlib.util.find_spec("sennit.runtime.backend")
    folders = list(package.submodule_search_locations or ()) if package else []
    records = [path for folder in folders if (path := Path(folder) / "build_info.json").exists()]
    if not records:
        return _missing(name, "the extension sennit.runtime.backend._c10d was not built", "make build")
    built_for = json.loads(records[0].read_text())["torch"]
    if built_for != torch.detail:
        return _missing(name, f"built for torch {built_for}, but torch {torch.detail} is installed", "make build")
    try:
        importlib.import_module("torch")
        importlib.import_module("sennit.runtime.backend._c10d")
    except ImportError as error:
        return _missing(name, f"{error}", "make build")
    return _available(name, f"built for torch {built_for}")


def _gpu() -> Capability:
    name = "gpu"
    if not Path("/dev/nvidiactl").exists():
        return _missing(name, "no NVIDIA device on this machine")
    if not probe("torch").available:
        return _missing(name, "needs torch", probe("torch").remedy)
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return _missing(name, "this torch cannot use the device", "install a torch built for CUDA, then make build")
    return _available(name, f"{cuda.device_count()} × {cuda.get_device_name(0)}")


def _rdma() -> Capability:
    from sennit.transport import devices
    from sennit.transport.errors import DeviceError, Unsupported

    name = "rdma"
    try:
        found = devices.read_devices()
    except Unsupported as error:
        return _missing(name, str(error), "install pyverbs (Debian: python3-pyverbs)")
    except DeviceError as error:
        return _missing(name, str(error), "give this user access to /dev/infiniband/uverbs*")
    if not found:
        problems = devices.absence_problems()
        return _missing(name, devices.whats(problems), devices.remedies(problems))
    return _available(name, ", ".join(device.name for device in found))


def _roce() -> Capability:
    """Whether a port of some device can be used, and memory can be registered for it."""
    from sennit.transport import devices

    name = "roce"
    if not probe("rdma").available:
        return _missing(name, "needs an RDMA device", probe("rdma").remedy)
    found = devices.read_devices()
    usable = devices.usable_ports(found)
    problems = devices.machine_problems()
    if not usable:
        problems += [problem for device in found for port in device.ports for problem in devices.port_problems(port)]
    if problems:
        return _missing(name, devices.whats(problems), devices.remedies(problems))
    return _available(name, ", ".join(f"{port.device}/{port.number} {_gids(port)}" for port in usable))


def _gids(port: "DevicePort") -> str:
    addresses = " ".join(f"{gid.address} (GID {gid.index})" for gid in port.gids if not gid.is_link_local)
    return f"{port.mtu_bytes} bytes a packet, {addresses or 'link-local addresses only'}"


def _tracepoints() -> Capability:
    """Whether the native core was built with tracepoints."""
    name = "tracepoints"
    if importlib.util.find_spec("elftools") is None:
        return _missing(name, "pyelftools is not installed", "pip install 'sennit[testbed]', or make build")
    if not probe("core").available:
        return _missing(name, "needs the native core", probe("core").remedy)
    from sennit.ebpf import usdt
    from sennit.transport import tracepoints

    count = len(usdt.read(tracepoints.library()))
    if count == 0:
        return _missing(name, "built without sys/sdt.h", "install systemtap-sdt-dev, then make build")
    return _available(name, f"{count} in {tracepoints.LIBRARY} (sennit trace list)")


def _bcc() -> Capability:
    from sennit.runtime.trace import session

    what, _, remedy = session.problem().partition(": ")
    return _missing("bcc", what, remedy) if what else _available("bcc", "sennit trace ops, sennit trace loss")


def _io_uring() -> Capability:
    """Creates a ring: a kernel, a container's filter or a missing library may refuse."""
    name = "io-uring"
    if not probe("core").available:
        return _missing(name, "needs the native parts", probe("core").remedy)
    from sennit.runtime.memory import _memory

    problem: str = _memory.uring_problem()
    if problem:
        return _missing(
            name, problem, "install liburing (Debian: liburing2) and permit io_uring; threads are used without"
        )
    return _available(name, "files of embedding rows are read and written in batches")


def _vm() -> Capability:
    """Whether a VM with soft-RoCE can be started: a kernel is in the cache, and boots on this machine."""
    from sennit.testbed.vm import boot, kernels

    try:
        choice = boot.choose(boot.wanted(boot.AUTO))
    except kernels.KernelMissing as error:
        return _missing("vm", str(error), "make kernel")
    return _available("vm", choice.kernel.name + (f" ({choice.instead_because})" if choice.instead_because else ""))


def _root() -> Capability:
    from sennit.ebpf import features

    if os.geteuid() == 0 and features.effective_capabilities() >> features.CAPABILITIES["CAP_NET_ADMIN"] & 1:
        return _available("root", "CAP_NET_ADMIN")
    return _missing("root", "no CAP_NET_ADMIN", "run as root, or add the capability to the container")


def _in_new_namespace(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--net", *command], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )


def _netns() -> Capability:
    name = "netns"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return _missing(name, "no unshare or ip command", "install util-linux and iproute2")
    made = _in_new_namespace("ip", "link", "add", "sennit0", "type", "veth", "peer", "name", "sennit1")
    if made.returncode != 0:
        return _missing(name, made.stderr.strip().splitlines()[-1] if made.stderr.strip() else "refused", "run as root")
    return _available(name, "network namespaces and veth links")


def _bpf_feature(feature: str, name: str, detail: str) -> Capability:
    """The result of sennit.ebpf.features."""
    from sennit.ebpf import features

    found = features.probe(feature)
    return _available(name, detail) if found.available else _missing(name, found.absent_because, found.remedy)


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
            return _missing(name, f"needs {need}: {probe(need).detail}", probe(need).remedy)
    program = "from sennit.ebpf.features import try_native_xdp; try_native_xdp('sennit0', 'sennit1')"
    tried = _in_new_namespace(sys.executable, "-c", program)
    if tried.returncode != 0:
        return _missing(name, tried.stderr.strip().splitlines()[-1])
    return _available(name, "virtual interfaces run XDP programs in their driver")


def _tc_bpf() -> Capability:
    """Whether the programs of sennit.ebpf can be compiled, and pyroute2 is there."""
    name = "tc-bpf"
    if importlib.util.find_spec("pyroute2") is None:
        return _missing(name, "pyroute2 is not installed", "pip install 'sennit[testbed]', or make build")
    for need in ("bpf", "clang"):
        found = probe(need)
        if not found.available:
            return _missing(name, f"{need}: {found.detail}", found.remedy)
    from sennit.ebpf import compiler, library, loader

    try:
        with loader.BpfObject(compiler.compile_program("fabric")):
            return _available(name, "BPF programs can be compiled and loaded")
    except (compiler.CompileError, library.BpfError) as error:  # our program is wrong: tests/ebpf finds it
        return _missing(name, str(error).splitlines()[0], "install clang, libbpf1 and libbpf-dev; Linux 5.12 or later")


def _netem() -> Capability:
    name = "netem"
    found = probe("netns")
    if not found.available or not probe("tc").available:
        return _missing(name, "needs root, network namespaces and tc", "run as root")
    made = _in_new_namespace("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    if made.returncode != 0:
        return _missing(name, "this kernel has no sch_netem", "modprobe sch_netem")
    return _available(name, "the kernel's own losses and delays")


def _netem_seed() -> Capability:
    """Whether this tc can seed the kernel's dice (Linux 6.6)."""
    name = "netem-seed"
    found = probe("netem")
    if not found.available:
        return _missing(name, found.detail, found.remedy)
    made = _in_new_namespace("tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "1%", "seed", "1")
    if made.returncode != 0:
        return _missing(name, "tc knows no seed of netem", "install iproute2 6.6 or later")
    return _available(name, "the same seed loses the same packets")


def _bridge() -> Capability:
    name = "bridge"
    found = probe("netns")
    if not found.available or not probe("ip").available:
        return _missing(name, "needs root, network namespaces and ip", "run as root")
    made = _in_new_namespace("ip", "link", "add", "bridge0", "type", "bridge")
    if made.returncode != 0:
        return _missing(name, "this kernel has no bridges", "modprobe bridge")
    return _available(name, "bridges between interfaces")


def _command(name: str, package: str) -> Capability:
    path = shutil.which(name)
    if path is None:
        return _missing(name, "command not found", f"install {package}")
    return _available(name, path)


def _openmpi() -> Capability:
    name = "openmpi"
    if importlib.util.find_spec("mpi4py") is None:
        return _missing(name, "mpi4py is not installed", "pip install 'sennit[mpi]', or make bench")
    # The wheel `openmpi` installs its commands beside python.
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        return _missing(name, "no mpirun", "pip install 'sennit[mpi]', or make bench")
    return _available(name, launcher)


def _host_name() -> Capability:
    own = socket.gethostname()
    if not (here := host_name.leads_here_only(own)):
        return _available("host-name", own)
    return _missing("host-name", f"{own} is {here}, where nobody else meets it", host_name.what_to_do(own, here))


PROBES: dict[str, Callable[[], Capability]] = {
    "cores": _cores,
    "settings": _settings,
    "shm": _shm,
    "loopback-ipv4": _loopback_ipv4,
    "loopback-ipv6": _loopback_ipv6,
    "rails": _rails,
    "host-name": _host_name,
    "udp-gso": _udp_gso,
    "udp-gro": _udp_gro,
    "core": _core,
    "torch": _torch,
    "backend": _backend,
    "rdma": _rdma,
    "roce": _roce,
    "vm": _vm,
    "tracepoints": _tracepoints,
    "bcc": _bcc,
    "gpu": _gpu,
    "io-uring": _io_uring,
    "root": _root,
    "netns": _netns,
    "bpf": functools.partial(_bpf_feature, "map", "bpf", "maps can be made"),
    "arena": _arena,
    "native-xdp": _native_xdp,
    "fentry": functools.partial(_bpf_feature, "fentry", "fentry", "programs at the entry of kernel functions"),
    "tp-btf": functools.partial(_bpf_feature, "tp_btf", "tp-btf", "programs at tracepoints, with types"),
    "uprobe": functools.partial(_bpf_feature, "uprobe", "uprobe", "programs at functions of a process"),
    "tc": functools.partial(_command, "tc", "iproute2"),
    "ip": functools.partial(_command, "ip", "iproute2"),
    "nsenter": functools.partial(_command, "nsenter", "util-linux"),
    "clang": functools.partial(_command, "clang", "clang"),
    "tc-bpf": _tc_bpf,
    "bpftool": functools.partial(_command, "bpftool", "bpftool"),
    "bpftrace": functools.partial(_command, "bpftrace", "bpftrace"),
    "netem": _netem,
    "netem-seed": _netem_seed,
    "bridge": _bridge,
    "dumpcap": functools.partial(_command, "dumpcap", "tshark"),
    "tshark": functools.partial(_command, "tshark", "tshark"),
    "openmpi": _openmpi,
}


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
