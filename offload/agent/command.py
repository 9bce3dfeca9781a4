# SPDX-License-Identifier: Apache-2.0
"""The command line of `sennit agent`. Its modules are imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sennit.command_line import EXIT_UNAVAILABLE, fail

if TYPE_CHECKING:
    from types import FrameType

# linux/prctl.h
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4


def agent(
    config: Annotated[Path, typer.Option(metavar="FILE", help="who may have which programs, in TOML")] = Path(
        "/etc/sennit/agent.toml"
    ),
    socket: Annotated[Path, typer.Option(metavar="PATH", help="where trainers ask; SENNIT_AGENT names it")] = Path(
        "/run/sennit/agent.sock"
    ),
) -> None:
    """Load XDP programs for `sennit train --ingest xdp://...` of users that may not.

    It needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON. SIGTERM or Ctrl-C ends it, and nothing stays attached.
    """
    from sennit.ebpf.kernel_features import missing_privileges
    from sennit.errors import ConfigError
    from sennit.offload.agent.permissions import read_permissions
    from sennit.offload.agent.server import Agent

    def say(text: str) -> None:
        typer.echo(text)

    if lacking := missing_privileges():
        fail(f"the agent lacks {', '.join(lacking)}: run it as root, or give it these capabilities", EXIT_UNAVAILABLE)
    try:
        permissions = read_permissions(config)
        _limit()
        serving = Agent(permissions, socket, say)
    except ConfigError as error:
        fail(error)
    with serving:

        def end(number: int, frame: FrameType | None) -> None:
            serving.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        say(f"ready: {socket}, {len(permissions.grants)} grants of {config}")
        serving.run()


def _limit() -> None:
    """What the compiler gets of this process: no capability, unless it is root. And descriptors for many leases."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, argument in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)):
        if libc.prctl(option, argument, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            fail(f"prctl {option}: {os.strerror(code)}")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
