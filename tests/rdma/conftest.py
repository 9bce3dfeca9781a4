# SPDX-License-Identifier: Apache-2.0
"""The tests here run inside `sennit testbed vm` (`make test-rdma`), with the devices rxe0 and rxe1 on one link."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sennit.testbed.vm import links
from sennit.testbed.vm.guest_command import execute


def load(path: Path, *parts: str) -> ModuleType:
    """Loads a module of this folder, or a package with these parts. Most import pyverbs, so only tests that run may."""
    is_package = path.name == "__init__.py"
    name = f"rdma_{path.parent.name if is_package else path.stem}"
    folders = [str(path.parent)] if is_package else None
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look for their own module there
        spec.loader.exec_module(module)
    for part in parts:
        importlib.import_module(f"{name}.{part}")
    return sys.modules[name]


@pytest.fixture(scope="session")
def endpoint() -> ModuleType:
    """The module endpoint.py."""
    return load(Path(__file__).with_name("endpoint.py"))


@pytest.fixture(scope="session")
def groups() -> ModuleType:
    """The module groups.py."""
    return load(Path(__file__).with_name("groups.py"))


@pytest.fixture(scope="session")
def captures() -> ModuleType:
    """The module captures.py."""
    return load(Path(__file__).with_name("captures.py"))


@pytest.fixture(scope="session")
def conformance() -> ModuleType:
    """The package conformance, without the udp port."""
    return load(Path(__file__).with_name("conformance") / "__init__.py", "packets", "sockets", "rxe_target")


@pytest.fixture(scope="session")
def halves() -> ModuleType:
    """The package peer, a rank in Python, without the parts that need a device."""
    return load(Path(__file__).with_name("peer") / "__init__.py", "controls", "messages", "receiving", "sending")


@pytest.fixture(scope="session")
def peer(halves: ModuleType) -> ModuleType:
    """The whole package peer."""
    importlib.import_module(f"{halves.__name__}.rank")
    return halves


@pytest.fixture
def mixed() -> Iterator[ModuleType]:
    """The module mixed_link.py, while its link exists."""
    module = load(Path(__file__).with_name("mixed_link.py"))
    with module.link():
        yield module


@pytest.fixture
def pair(endpoint: ModuleType) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Makes two connected queue pairs, on rxe0 and on rxe1: `pair("RC", ip_version=6, size_bytes=4096)`."""
    with contextlib.ExitStack() as stack:

        def make(qp_type: str, *, ip_version: int = 4, size_bytes: int = 4096, first_psn: int = 0) -> tuple[Any, Any]:
            near, far = (
                stack.enter_context(
                    endpoint.Endpoint(device, qp_type=qp_type, ip_version=ip_version, size_bytes=size_bytes)
                )
                for device in (0, 1)
            )
            near.connect(far, first_psn)
            far.connect(near, first_psn)
            return near, far

        yield make


@pytest.fixture
def unconnected() -> Iterator[str]:
    """A device whose interface, cold0, is down."""
    for command in ("ip link add cold0 type dummy", "rdma link add cold type rxe netdev cold0"):
        execute(command)
    yield "cold"
    # If the interface went first, the device would stay for some time.
    for command in ("rdma link delete cold", "ip link del cold0"):
        execute(command)


@pytest.fixture
def netem() -> Iterator[Callable[[int, str], None]]:
    """Sets the impairment of packets that a device sends, in the words of tc-netem(8). Removes it after the test."""
    changed: set[int] = set()

    def tc(action: str, device: int, settings: str = "") -> None:
        execute(f"tc qdisc {action} dev {links.netdev(device)} root {settings}")

    def change(device: int, settings: str) -> None:
        tc("replace", device, f"netem {settings}")
        changed.add(device)

    yield change
    for device in changed:
        tc("del", device)
