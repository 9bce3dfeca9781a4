# SPDX-License-Identifier: Apache-2.0
"""The manifests for Kubernetes: known fields of the right types, options that commands have, ports and capabilities."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("yaml", reason="the package PyYAML is not installed")
pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")

import yaml
from jsonschema import Draft202012Validator

from sennit.commands.cli import app
from sennit.ebpf.kernel_features import CAPABILITIES
from sennit.offload.agent.permissions import FILE, permissions_of
from sennit.offload.agent.receiver import SOCKET
from sennit.offload.ingest import target

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples/cluster/kubernetes").glob("*.yaml"))
SCHEMAS = json.loads((ROOT / "tests/vectors/kubernetes.json").read_text())
# pkg/constants of kubeflow/trainer
TORCHRUN_PORT = 29500


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


EVERY = [found for path in FILES for found in documents(path)]
# Of two, the one of the last file.
BY_KIND = {found["kind"]: found for found in EVERY}


def problems(value: Any) -> list[str]:
    """What does not fit the schema of its kind."""
    validator = Draft202012Validator({"$ref": f"#/$defs/{value['kind']}", **SCHEMAS})
    return [f"{found.json_path}: {found.message}" for found in validator.iter_errors(value)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_fields_and_types_are_those_of_the_custom_resources(path: Path) -> None:
    for found in documents(path):
        assert problems(found) == []


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("TrainJob", {"runtimeRef": {}}, "$.spec.runtimeRef: 'name' is a required property"),
        (
            "TrainJob",
            {"trainer": {"numProcPerNode": "8"}},
            "$.spec.trainer.numProcPerNode: '8' is not of type",
        ),
        ("JobSet", {"replicated": []}, "$.spec: Additional properties are not allowed ('replicated' was unexpected)"),
        ("DaemonSet", {"updateStrategy": {"type": "Never"}}, "$.spec.updateStrategy.type: 'Never' is not one of"),
        ("Job", {"suspend": 1}, "$.spec.suspend: 1 is not of type 'boolean'"),
    ],
)
def test_other_fields_and_types_are_found(kind: str, change: dict[str, Any], told: str) -> None:
    changed = {**BY_KIND[kind], "spec": {**BY_KIND[kind]["spec"], **change}}
    (found,) = problems(changed)
    assert found.startswith(told)


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Every container below `value`."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name in ("containers", "initContainers"):
                yield from part
            else:
                yield from containers(part)
    elif isinstance(value, list):
        for part in value:
            yield from containers(part)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command of ours in the manifests: `train`, `feed`, `agent` or `metrics`, and its arguments."""
    every = [*containers(EVERY), BY_KIND["TrainJob"]["spec"]["trainer"]]
    for found in every:
        words = [*found["command"], *found.get("args", [])]
        if words[0] == "sennit":
            yield words[1], words[2:]
        else:
            assert words[:3] == ["torchrun", "-m", "sennit.runtime.training"]
            yield "train", words[3:]


def test_commands_have_the_options() -> None:
    found = list(commands())
    assert {name for name, _ in found} == {"train", "feed", "agent", "metrics"}
    for name, arguments in found:
        said = CliRunner().invoke(app, [name, "--help"])
        assert said.exit_code == 0
        known = set(re.findall(r"--[a-z][a-z-]*", said.output))
        assert {word for word in arguments if word.startswith("--")} <= known, name


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_only_ranks_at_xdp_and_their_agent_have_capabilities_and_only_those_that_they_need() -> None:
    for found in containers(EVERY):
        context = found["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        given = {f"CAP_{name}" for name in context["capabilities"].get("add", [])}
        is_agent = found.get("command") == ["sennit", "agent"]
        at_xdp = is_agent or any(word.startswith("xdp://") for word in found.get("args", []))
        assert given == (set(CAPABILITIES) if at_xdp else set())


def test_the_network_policy_opens_the_ports_in_use() -> None:
    opened = {}
    for rule in BY_KIND["NetworkPolicy"]["spec"]["ingress"]:
        labels = rule["from"][0].get("podSelector", {}).get("matchLabels", {})
        for port in rule["ports"]:
            ends = (port["port"], port.get("endPort", port["port"]))
            opened[labels.get("sennit/part", "metrics"), port["protocol"]] = ends
    runtime = list(containers(BY_KIND["ClusterTrainingRuntime"]))
    trainer = BY_KIND["TrainJob"]["spec"]["trainer"]
    (ports,) = {
        entry["value"] for found in runtime for entry in found.get("env", []) if entry["name"] == "SENNIT_PORTS"
    }
    (metrics,) = {port["containerPort"] for found in runtime for port in found.get("ports", [])}
    ingest = (target.PORT, target.PORT + trainer["numProcPerNode"] - 1)
    assert opened == {
        ("rank", "TCP"): (TORCHRUN_PORT, TORCHRUN_PORT),
        ("rank", "UDP"): tuple(map(int, ports.split("-"))),
        ("feeder", "TCP"): ingest,
        ("feeder", "UDP"): ingest,
        ("metrics", "TCP"): (metrics, metrics),
    }
    assert (
        target.IngestTarget.parse(option(trainer["args"], "--ingest").replace("$(POD_IP)", "10.0.0.1")).port
        == ingest[0]
    )


def test_names_that_manifests_share_are_the_same() -> None:
    run, trainer = BY_KIND["TrainJob"], BY_KIND["TrainJob"]["spec"]["trainer"]
    assert run["spec"]["runtimeRef"]["name"] == BY_KIND["ClusterTrainingRuntime"]["metadata"]["name"]
    name = run["metadata"]["name"]
    (feed,) = (arguments for command_name, arguments in commands() if command_name == "feed")
    assert option(feed, "--to") == f"{name}-node-0-0.{name}:{target.PORT}"
    ranks = trainer["numNodes"] * trainer["numProcPerNode"]
    assert ranks <= int(option(trainer["args"], "--slices"))
    service = BY_KIND["Service"]
    (first,) = containers(BY_KIND["Job"])
    (joins,) = containers(BY_KIND["DaemonSet"])
    port = option(first["args"], "--port")
    assert option(joins["args"], "--join") == f"{service['metadata']['name']}:{port}"
    assert service["spec"]["ports"][0]["port"] == int(port)
    labels = BY_KIND["Job"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_agent_can_read_its_permissions_and_shares_its_socket() -> None:
    permissions = permissions_of(tomllib.loads(BY_KIND["ConfigMap"]["data"]["agent.toml"]))
    (interface,) = permissions.grants[0].interfaces
    (joins,) = containers(BY_KIND["DaemonSet"])
    at = target.IngestTarget.parse(option(joins["args"], "--ingest"))
    assert at.places == (interface,)
    assert permissions.grants[0].covers(interface, at.port)
    (found,) = (one for one in containers(EVERY) if one.get("command") == ["sennit", "agent"])
    mounts = {mount["mountPath"] for mount in found["volumeMounts"]}
    assert {str(FILE.parent), str(SOCKET.parent)} <= mounts
