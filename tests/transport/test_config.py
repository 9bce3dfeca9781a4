# SPDX-License-Identifier: Apache-2.0
"""Configuration: every variable, its default, its range, and errors that contain value and range."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from sennit.transport import errors
from sennit.transport.config import (
    Algorithm,
    Config,
    Congestion,
    PathPolicy,
    TransportKind,
    VerbsService,
    from_environment,
)
from sennit.transport.errors import ConfigError, DeviceError, SennitError, Unsupported, from_status
from sennit.transport.meeting.host import host_identity, machine_identity


def test_defaults_without_any_variable() -> None:
    assert from_environment({}) == Config()
    assert from_environment({"SENNIT_TRANSPORT": "", "SENNIT_PATHS": " ", "HOME": "/root"}) == Config()


def test_every_variable() -> None:
    assert from_environment(
        {
            "SENNIT_TRANSPORT": "UDP",
            "SENNIT_INTERFACES": "eth0, eth1,",
            "SENNIT_PATHS": "256",
            "SENNIT_VERBS_SERVICE": "RC",
            "SENNIT_PATH_POLICY": "REPS",
            "SENNIT_CONGESTION": "swift",
            "SENNIT_WINDOW_BYTES": "65536",
            "SENNIT_ALGORITHM": "Halving",
            "SENNIT_CALIBRATION": "/etc/sennit/Rack-4.json",
            "SENNIT_HOST_ID": "left",
            "SENNIT_TIMEOUT_S": "2.5",
            "SENNIT_PEER_TIMEOUT_S": "0.5",
            "SENNIT_THREADS": "3",
        }
    ) == Config(
        transport=TransportKind.UDP,
        interfaces=("eth0", "eth1"),
        paths=256,
        verbs_service=VerbsService.RC,
        path_policy=PathPolicy.REPS,
        congestion=Congestion.SWIFT,
        window_bytes=65_536,
        algorithm=Algorithm.HALVING,
        calibration="/etc/sennit/Rack-4.json",
        host_id="left",
        timeout_s=2.5,
        peer_timeout_s=0.5,
        threads=3,
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SENNIT_TRANSPORT", "tcp", "SENNIT_TRANSPORT=tcp; allowed: auto, shm, udp, verbs"),
        ("SENNIT_PATHS", "0", r"paths 0; allowed: 1\.\.256"),
        ("SENNIT_PATHS", "257", r"paths 257; allowed: 1\.\.256"),
        ("SENNIT_PATHS", "many", "SENNIT_PATHS=many; allowed: a whole number"),
        ("SENNIT_VERBS_SERVICE", "ud", "SENNIT_VERBS_SERVICE=ud; allowed: uc, rc"),
        ("SENNIT_PATH_POLICY", "random", "SENNIT_PATH_POLICY=random; allowed: round_robin, reps"),
        ("SENNIT_CONGESTION", "cubic", "SENNIT_CONGESTION=cubic; allowed: dctcp, fixed, swift"),
        ("SENNIT_WINDOW_BYTES", "65535", r"window_bytes 65535; allowed: 65536\.\.67108864"),
        ("SENNIT_WINDOW_BYTES", "67108865", "window_bytes 67108865"),
        ("SENNIT_WINDOW_BYTES", "2MiB", "SENNIT_WINDOW_BYTES=2MiB; allowed: a whole number"),
        ("SENNIT_INTERFACES", "eth0,eth0", "each name once"),
        ("SENNIT_INTERFACES", "a-name-of-sixteen", "interface 'a-name-of-sixteen'; allowed: 1..15"),
        ("SENNIT_INTERFACES", "../eth0", "without space or slash"),
        (
            "SENNIT_ALGORITHM",
            "fold",
            "SENNIT_ALGORITHM=fold; allowed: auto, one_shot, direct, round_trip, dissemination",
        ),
        ("SENNIT_HOST_ID", "x" * 129, "129 characters"),
        ("SENNIT_TIMEOUT_S", "0", "timeout_s 0.0; allowed: finite and above 0"),
        ("SENNIT_TIMEOUT_S", "nan", "timeout_s nan"),
        ("SENNIT_THREADS", "0", r"threads 0; allowed: 1\.\.64"),
        ("SENNIT_THREADS", "65", r"threads 65; allowed: 1\.\.64"),
        ("SENNIT_THREADS", "two", "SENNIT_THREADS=two"),
        ("SENNIT_PEER_TIMEOUT_S", "0.4", r"peer_timeout_s 0\.4; allowed: 0\.5\.\.86400"),
        ("SENNIT_PEER_TIMEOUT_S", "86401", r"peer_timeout_s 86401\.0; allowed: 0\.5\.\.86400"),
        ("SENNIT_PEER_TIMEOUT_S", "nan", "peer_timeout_s nan"),
        ("SENNIT_TIMEOUT_S", "soon", "SENNIT_TIMEOUT_S=soon; allowed: a number of seconds"),
    ],
)
def test_wrong_values_name_value_and_range(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_environment({variable: value})


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("SENNIT_CONGESTON", "SENNIT_CONGESTION"),
        ("SENNIT_TRANSPORTS", "SENNIT_TRANSPORT"),
        ("SENNIT_TIMEOUT", "SENNIT_TIMEOUT_S"),
        ("SENNIT_WINDOW_BYTE", "SENNIT_WINDOW_BYTES"),
        ("SENNIT_SHARED_ALLOCATER", "SENNIT_SHARED_ALLOCATOR"),
    ],
)
def test_a_slip_in_a_name_is_a_warning_once(slip: str, meant: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"{slip} is no variable of sennit.*perhaps {meant} is meant"):
        assert from_environment({slip: "1"}) == Config()
    assert from_environment({slip: "1"}) == Config()  # a second warning would be an error


def test_names_that_resemble_no_variable_are_let_be() -> None:
    others = ("SENNIT_SERVICE_HOST", "SENNIT_VM_OUT", "SENNIT_VM_PATCHES", "SENNIT_SANITIZE", "SENNIT_BPF_STATISTICS")
    assert from_environment(dict.fromkeys((*others, "PATHS", "SENNIT_TESTS"), "1")) == Config()


def test_a_configuration_cannot_change_and_takes_names_only() -> None:
    config = Config(transport="shm")  # type: ignore[arg-type]
    assert config.transport is TransportKind.SHM
    with pytest.raises(AttributeError):
        config.paths = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(TransportKind.SHM)
    with pytest.raises(ConfigError, match="transport 'tcp'"):
        Config(transport="tcp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="path_policy 'random'; allowed: round_robin, reps"):
        Config(path_policy="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="congestion 'cubic'; allowed: dctcp, fixed, swift"):
        Config(congestion="cubic")  # type: ignore[arg-type]


def test_identities(tmp_path: Path) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("0f3c\n")
    assert host_identity(boot_id=boot_id) == machine_identity(boot_id=boot_id) == "boot:0f3c"
    assert host_identity("left", boot_id=boot_id) == "named:left"
    with pytest.raises(DeviceError, match="No such file") as caught:
        machine_identity(boot_id=tmp_path / "none")
    assert caught.value.errno == errno.ENOENT
    assert host_identity() == host_identity()


@pytest.mark.parametrize(
    ("status", "kind", "builtin"),
    [
        (2, errors.TimeoutError, TimeoutError),
        (3, errors.AbortedError, RuntimeError),
        (4, errors.PeerError, RuntimeError),
        (5, errors.MismatchError, RuntimeError),
        (6, errors.ArgumentError, ValueError),
        (7, errors.DeviceError, OSError),
        (99, SennitError, RuntimeError),
    ],
)
def test_each_status_of_the_core_is_an_error_class(status: int, kind: type[SennitError], builtin: Any) -> None:
    error = from_status(status, "rank 3 left")
    assert type(error) is kind
    assert isinstance(error, SennitError)
    assert isinstance(error, builtin)
    assert str(error) == "rank 3 left"


def test_errors_keep_who_and_what() -> None:
    assert errors.PeerError("gone", rank=2).rank == 2
    assert Unsupported("verbs", "no device").capability == "verbs"
    assert str(Unsupported("verbs", "no device")) == "verbs: no device"
    refused = DeviceError("bind 10.0.0.1", errno.EADDRINUSE)
    assert refused.errno == errno.EADDRINUSE
    assert "Address already in use" in str(refused)


@pytest.mark.parametrize("text", ["5000-5100", " 5000-5100 "])
def test_ports_of_firewalls(text: str) -> None:
    assert from_environment({"SENNIT_PORTS": text}).ports == (5000, 5100)
    assert from_environment({}).ports is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("5000", "ports 5000-5000: 1 ports; allowed: at least 9 for each rank of a host"),
        ("5000-5007", "5000-5007: 8 ports; allowed: at least 9 for each rank of a host and each process group, 1 to"),
        ("5100-5000", "ports 5100-5000; allowed: FIRST-LAST within 1024..65535"),
        ("80-500", "ports 80-500; allowed"),
        ("65000-65536", "ports 65000-65536; allowed"),
        ("http-5000", "SENNIT_PORTS=http-5000; allowed: FIRST-LAST, as in 5000-5100"),
        ("5000-", "SENNIT_PORTS=5000-; allowed"),
        ("-5000", "SENNIT_PORTS=-5000; allowed"),
    ],
)
def test_a_range_of_ports_that_cannot_work_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        from_environment({"SENNIT_PORTS": text})
