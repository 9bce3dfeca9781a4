# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster of its own: a controller and the daemons of some nodes, all of them on this machine."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from sennit.closing import Closing
from tests.free_ports import free_ports

DEADLINE_S: Final = 60.0
LOOK_S: Final = 0.1
# No control groups, no binding to cores, no MPI: they need what a container may lack. Nodes are scheduled at once.
CONFIGURATION: Final = """\
ClusterName=sennit
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE: Final = "NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs=1\n"


class SlurmNodes(Closing):
    """Nodes `n1`, `n2` and so on of one processor each. Raises RuntimeError if a daemon ends or nobody answers."""

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sennit-slurm-"))  # short, as Unix sockets want it
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        names = [f"n{number}" for number in range(1, count + 1)]
        for name in ("state", *names):
            (self.folder / name).mkdir()
        machine, ports = socket.gethostname().partition(".")[0], free_ports(1 + count)
        nodes = [
            NODE.format(name=name, machine=machine, port=port) for name, port in zip(names, ports[1:], strict=True)
        ]
        settings = self.folder / "slurm.conf"
        settings.write_text(CONFIGURATION.format(machine=machine, ports=ports, folder=self.folder) + "".join(nodes))
        key = self.folder / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(128))
        self.environment = {**os.environ, "SLURM_CONF": str(settings)}
        try:
            # --force: /tmp is writable by all.
            self._start(
                "munged", "--foreground", "--force", "--num-threads=1",
                *(f"--{option}={self.folder / file}" for option, file in MUNGE_FILES.items()),
            )  # fmt: skip
            self._until("munged", lambda: (self.folder / "munge.socket").exists())
            self._start("slurmctld", "-D", "-f", str(settings))
            for name in names:
                self._start("slurmd", "-D", "-f", str(settings), "-N", name, called=f"slurmd-{name}")
            self._until(
                "sinfo", lambda: self._said("sinfo", "--noheader", "--format=%t %D").split() == ["idle", f"{count}"]
            )
        except BaseException:
            self.close()
            raise

    def submit(self, *arguments: str, environment: Mapping[str, str]) -> tuple[int, str]:
        """Submits a job, waits for its end, and returns its exit status and what it and sbatch printed.

        Raises RuntimeError with the logs of all daemons if the job is refused, or does not end in time.
        """
        output = self.folder / f"{secrets.token_hex(4)}.out"
        told = self._said("sbatch", "--parsable", f"--output={output}", *arguments, **environment)
        if not told.isdecimal():
            raise RuntimeError(told)
        # `sbatch --wait` looks every ten seconds.
        self._until(f"job {told}", lambda: self._said("squeue", "--noheader", f"--jobs={told}") == "")
        found = re.search(r" ExitCode=(\d+):", self._said("scontrol", "show", "job", told, "--oneliner"))
        if found is None:
            raise RuntimeError(f"job {told} is not known")
        return int(found[1]), output.read_text()

    def close(self) -> None:
        """Ends all jobs, then the daemons."""
        if "slurmctld" in self._daemons:
            self._said("scancel", "--full", "--signal=KILL", "--user=root")
            self._until("squeue", lambda: self._said("squeue", "--noheader") == "")
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            daemon.wait(DEADLINE_S)
        self._daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *command: str, called: str = "") -> None:
        name = called or command[0]
        with (self.folder / f"{name}.log").open("wb") as log:
            # A session that is killed leaves none behind.
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _said(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else f"{command[0]}: {done.stderr}"

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not holds():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"{what}: {f'ended: {ended}' if ended else 'not in time'}\n{logs}")
            time.sleep(LOOK_S)


MUNGE_FILES: Final = {
    "key-file": "munge.key",
    "socket": "munge.socket",
    "pid-file": "munged.pid",
    "log-file": "munged.own.log",
    "seed-file": "munged.seed",
}
