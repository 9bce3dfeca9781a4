# SPDX-License-Identifier: Apache-2.0
"""The unit for systemd: the rights that the agent needs and no others, and the folders that it uses."""

from __future__ import annotations

import configparser
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sennit.ebpf.kernel_features import CAPABILITIES
from sennit.offload.agent.command import agent
from sennit.offload.agent.permissions import FILE
from sennit.offload.agent.receiver import SOCKET

UNIT = Path(__file__).resolve().parents[2] / "examples/cluster/systemd/sennit-agent.service"
TOOL = shutil.which("systemd-analyze")


def service() -> dict[str, str]:
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def test_it_has_three_capabilities_and_the_usual_socket() -> None:
    found = service()
    for key in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert set(found[key].split()) == set(CAPABILITIES)
    assert Path("/run") / found["RuntimeDirectory"] == SOCKET.parent
    assert found["RuntimeDirectoryMode"] == "0755", "trainers go through"
    assert found["ExecStart"].split()[1:] == ["agent"]
    assert f"/var/cache/{found['CacheDirectory']}" == "/var/cache/sennit"
    assert found["Environment"] == "XDG_CACHE_HOME=/var/cache"


def test_the_command_takes_the_usual_places() -> None:
    """It names them itself, so that `--help` imports nothing."""
    options = inspect.signature(agent).parameters
    assert options["config"].default == FILE
    assert options["socket"].default == SOCKET


@pytest.mark.skipif(TOOL is None, reason="systemd-analyze is not installed")
def test_systemd_knows_every_line(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/sennit/bin/sennit", sys.executable))
    assert TOOL is not None
    command = [TOOL, "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "NoNewPrivilege" in done.stderr
