# SPDX-License-Identifier: Apache-2.0
"""Runs one command in one VM, and leaves no process of the VM behind."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sennit import cache, debian
from sennit.testbed.vm import initramfs, job, kernels
from sennit.testbed.vm.links import Links
from sennit.testbed.vm.machines import MACHINES, MEMORY_MIN_BYTES, MIB, Descriptors, Machine, temporary_folder

# The same values as timeout(1).
EXIT_TIME_LIMIT: Final = 124
EXIT_VM_FAILED: Final = 125

BOOT_TIMEOUT_S: Final = 120.0
"""The longest time until the command starts. Emulation on a busy machine takes most of it."""
SILENCE_S: Final = 10.0
"""A guest whose kernel still schedules says so every second (ALIVE_EVERY_MS in guest/init.c)."""
HUNG_S: Final = 90.0
"""A guest that is silent for so long is ended. By then its console has the stack of a processor that spins, or of a
task that waits (uml.config)."""
END_TIMEOUT_S: Final = 20.0
"""The longest time from the command's end to the machine's end."""
KILL_TIMEOUT_S: Final = 10.0
TIMEOUT_DEFAULT_S: Final = 600.0
# A panic with the registers and stacks of all processors is some 100 lines.
CONSOLE_TAIL_BYTES: Final = 16_384
READ_BYTES: Final = 1 << 16
SCRATCH_PREFIX: Final = "sennit-vm-"
SCRATCH_STALE_S: Final = 60.0
"""A younger folder may be about to be locked by its process."""
OUTPUT_VARIABLE: Final = "SENNIT_VM_OUT"
PATCHES_VARIABLE: Final = "SENNIT_VM_PATCHES"
"""Names of the kernel's patches, separated by colons."""
TOOLS: Final = (("ip", "iproute2"), ("rdma", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux"))

Sink = Callable[[bytes], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run, and in which machine."""

    command: tuple[str, ...]
    kind: kernels.Kind = kernels.Kind.UML
    kernel: Path | None = None
    """Its folder; None for the newest fitting one in the cache."""
    folder: Path = field(default_factory=Path.cwd)
    """The command's working directory, at the same path in the guest as on the host."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    links: Links = field(default_factory=Links)
    memory_bytes: int | None = None
    """Taken from the host as the guest uses it. None: as much as there is room for, up to 4 GiB."""
    timeout_s: float = TIMEOUT_DEFAULT_S
    """Counted from the start of the machine. Then the machine is killed."""
    patches: tuple[Path, ...] = ()
    """Patches of the kernel. The cache must have a kernel with exactly these."""
    keep: tuple[Path, ...] = ()
    """Folders that keep what the command writes. Missing ones are made. The first one is `$SENNIT_VM_OUT`."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no command to run in the VM")
        if self.memory_bytes is not None and self.memory_bytes < MEMORY_MIN_BYTES:
            raise ValueError(f"memory of {self.memory_bytes // MIB} MiB, must be at least {MEMORY_MIN_BYTES // MIB}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout of {self.timeout_s:g} s, must be above 0")
        kernels.check_patches(self.kind, self.patches)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the command ended."""

    code: int
    """The command's exit code, 128 + the signal that ended it, EXIT_TIME_LIMIT or EXIT_VM_FAILED."""
    reason: str = ""
    """Why the code is not the command's own; empty if it is."""
    console: str = ""
    """The end of the kernel's messages, if the code is not the command's own."""


def run(request: Request, *, output: Sink, errors: Sink, console: Sink = lambda data: None) -> Outcome:
    """Runs the command, and passes both of its streams to the sinks while it runs. Always leaves no process behind.

    Raises `KernelMissing` if `make kernel` was not run, and `Unavailable` if something has to be installed, if there is
    no room, or if no VM can run on this processor.
    """
    kernels.check_processor()
    debian.require((*TOOLS, *MACHINES[request.kind].tools), f"a VM of the kind {request.kind}")
    machine = MACHINES[request.kind](request.kernel or kernels.find(request.kind, request.patches))
    memory_bytes = request.memory_bytes or machine.default_memory_bytes()
    with _scratch_folder() as folder:
        initrd = folder / "initrd"
        content = _initramfs(request, machine)
        try:
            initrd.write_bytes(content)
        except OSError as error:
            reason = f"{folder.parent} does not take the VM's {len(content) // 1024} KiB ({error.strerror})"
            raise debian.Unavailable(f"{reason}: set TMPDIR to a folder with room") from error
        return _Run(request, machine, memory_bytes, output, errors, console).play(initrd, folder)


def _initramfs(request: Request, machine: Machine) -> bytes:
    keep = _folders(request.keep)
    environment = {**request.environment, PATCHES_VARIABLE: ":".join(file.name for file in request.patches)}
    if keep:
        environment[OUTPUT_VARIABLE] = str(keep[0])
    modules = machine.modules()
    steps = job.records(
        root=machine.root,
        kept=machine.kept_mounts(keep),
        channels=machine.channels,
        modules=[f"/{module.path}" for module in modules],
        setup=[*machine.setup, *request.links.records()],
        environment=environment,
        folder=request.folder.resolve(),
        command=request.command,
    )
    return initramfs.archive(
        [
            initramfs.folder("dev"),
            initramfs.console(),
            initramfs.file("init", kernels.guest_program().read_bytes(), 0o755),
            initramfs.file("job", job.encode(steps)),
            *([initramfs.folder("modules"), *modules] if modules else []),
        ]
    )


def _folders(keep: tuple[Path, ...]) -> list[Path]:
    for path in keep:
        path.mkdir(parents=True, exist_ok=True)
    return [path.resolve() for path in keep]


class _Run:
    """The life of one machine, as its host sees it."""

    def __init__(
        self, request: Request, machine: Machine, memory_bytes: int, output: Sink, errors: Sink, console: Sink
    ) -> None:
        self._request = request
        self._machine = machine
        self._memory_bytes = memory_bytes
        self._sinks: dict[str, Sink] = {
            "output": output,
            "errors": errors,
            "control": self._hear,
            "console": self._remember,
        }
        self._show_console = console
        self._console = b""
        self._heard = b""
        self._code: int | None = None
        self._failure = ""
        self._started = False
        self._alive_s = time.monotonic()
        self._end_s = self._alive_s + request.timeout_s

    def play(self, initrd: Path, folder: Path) -> Outcome:
        with _pipes(tuple(self._sinks)) as (readers, writers), selectors.DefaultSelector() as selector:
            for name, descriptor in readers.items():
                selector.register(descriptor, selectors.EVENT_READ, name)
            process = self._start(initrd, folder, Descriptors(**writers))
            try:
                for descriptor in writers.values():
                    os.close(descriptor)
                writers.clear()
                expired = self._listen(selector)
            finally:
                _end(process, selector)
        return self._outcome(process.returncode, expired)

    def _start(self, initrd: Path, folder: Path, descriptors: Descriptors) -> subprocess.Popen[bytes]:
        command = self._machine.command(
            initrd=initrd,
            folder=folder,
            memory_bytes=self._memory_bytes,
            descriptors=descriptors,
            kept=_folders(self._request.keep),
        )
        process = subprocess.Popen(
            # The kernel ends the VM when this process ends, even if it is killed and cannot clean up.
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            env=self._machine.environment(self._memory_bytes),
            stdin=subprocess.DEVNULL,
            stdout=descriptors.console,
            stderr=descriptors.console,
            pass_fds=(descriptors.output, descriptors.errors, descriptors.control, descriptors.console),
            # A terminal's interrupt must reach only this process. A group of its own can also be killed as a whole.
            start_new_session=True,
        )
        processors = self._machine.processors()
        if processors is not None:
            os.sched_setaffinity(process.pid, processors)
        return process

    def _listen(self, selector: selectors.BaseSelector) -> bool:
        """Passes on output until the machine is off. Returns True if that took too long."""
        boot_end_s = self._alive_s + BOOT_TIMEOUT_S
        while selector.get_map():
            now_s = time.monotonic()
            limit_s = self._end_s if self._started else min(self._end_s, boot_end_s)
            if now_s >= limit_s:
                return True
            # What came while a sink was slow is read before the guest counts as silent.
            hung_s = self._alive_s + HUNG_S if self._started else limit_s
            ready = selector.select(max(0.0, min(limit_s, hung_s) - now_s))
            if not ready:
                return True
            for key, _ in ready:
                data = os.read(key.fd, READ_BYTES)
                if data:
                    self._sinks[key.data](data)
                else:
                    selector.unregister(key.fd)
        return False

    def _hear(self, data: bytes) -> None:
        """Reads lines of the guest's first process (`report` in guest/init.c)."""
        self._alive_s = time.monotonic()
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            verb, _, rest = line.decode(errors="replace").partition(" ")
            if verb == "started":
                self._started = True
            elif verb == "exit":
                self._code = int(rest)
                self._end_s = self._alive_s + END_TIMEOUT_S
            elif verb == "error":
                self._failure = rest

    def _remember(self, data: bytes) -> None:
        self._console = (self._console + data)[-CONSOLE_TAIL_BYTES:]
        self._show_console(data)

    def _outcome(self, status: int, expired: bool) -> Outcome:
        if self._code is not None and not expired:
            return Outcome(code=self._code)
        code, reason = self._verdict(status, expired)
        return Outcome(code=code, reason=reason, console=self._console.decode(errors="replace").replace("\r\n", "\n"))

    def _verdict(self, status: int, expired: bool) -> tuple[int, str]:
        """Returns the exit code, and the reason if the command or its machine did not end properly."""
        silent_s = time.monotonic() - self._alive_s
        if self._failure:
            return EXIT_VM_FAILED, f"setting up the VM failed: {self._failure}"
        if not expired:
            panic = re.search(rb"Kernel panic[^\r\n]*", self._console)
            how = f"its process by signal {-status}" if status < 0 else f"its process with status {status}"
            how = panic[0].decode(errors="replace") if panic else how
            return EXIT_VM_FAILED, f"the VM ended before its command did: {how}"
        if self._code is not None:
            return EXIT_VM_FAILED, f"the VM was still there {END_TIMEOUT_S:.0f} s after its command's end"
        if not self._started:
            return EXIT_VM_FAILED, f"the VM was not up within {min(BOOT_TIMEOUT_S, self._request.timeout_s):g} s"
        if silent_s > SILENCE_S:
            return EXIT_VM_FAILED, f"the VM hung: silent for {silent_s:.0f} s"
        return EXIT_TIME_LIMIT, f"the time limit of {self._request.timeout_s:g} s is over"


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder for one run, locked while the run lives. Removes the unlocked folders of killed runs."""
    base = temporary_folder()
    for remains in base.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError), cache.locked(remains, 0):
            if time.time() - remains.stat().st_mtime > SCRATCH_STALE_S:
                shutil.rmtree(remains)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=base) as folder, cache.locked(Path(folder), 0):
        yield Path(folder)


@contextlib.contextmanager
def _pipes(names: tuple[str, ...]) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """A pipe for each name. Closes at the end what is still in the two dictionaries."""
    readers: dict[str, int] = {}
    writers: dict[str, int] = {}
    try:
        for name in names:
            readers[name], writers[name] = os.pipe()
        yield readers, writers
    finally:
        for descriptor in (*readers.values(), *writers.values()):
            os.close(descriptor)


def _end(process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> None:
    """Kills the machine and all its processes. Only waits for one that has switched itself off.

    Processes of the guest are not this process's children, so it cannot wait for them. They hold the pipes' writing
    ends: each pipe ends when the last of them is gone.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_TIMEOUT_S)
    end_s = time.monotonic() + KILL_TIMEOUT_S
    while selector.get_map() and (ready := selector.select(max(0.0, end_s - time.monotonic()))):
        for key, _ in ready:
            if not os.read(key.fd, READ_BYTES):
                selector.unregister(key.fd)
