# SPDX-License-Identifier: Apache-2.0
"""What `sennit aggregate` does where there is no XDP, and with options that are not allowed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sennit.commands.cli import app
from sennit.ebpf import kernel_features
from sennit.ebpf.kernel_features import Feature
from sennit.runtime.aggregate.serving import Serving
from sennit.transport.aggregator import MEMORY_MIN_BYTES


def test_a_kernel_without_arenas_sums_behind_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Feature(name="arena", absent_because="Invalid argument", remedy="Linux 6.9 or later")
    monkeypatch.setattr(kernel_features, "probe", lambda name: absent)
    with Serving("lo", addresses=["127.0.0.1"], port=0, memory_bytes=MEMORY_MIN_BYTES) as serving:
        assert serving.why_native == "no XDP, arena: Invalid argument (Linux 6.9 or later)"
        serving.run(0.01)
        report = serving.report()
    assert (serving.mode, report["in_kernel"], report["jobs"]) == ("native", {}, [])
    assert set(report["counters"].values()) == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1XB"], "--memory: size '1XB': expected a number with one of B, KiB"),
        (["--memory", "1MiB"], "memory of 1048576 bytes; allowed: 4194304 to 4294967296"),
        (["lo", "--port", "0"], "--port 0 with XDP; allowed: 1 to 65535"),
        (["eth-none"], "there is no interface 'eth-none'"),
        (["--bind", "localhost"], '"localhost" is not an IPv4 or IPv6 address'),
    ],
)
def test_what_is_not_allowed_is_said(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["aggregate", *options])
    assert result.exit_code == 1
    assert message in result.output
