# SPDX-License-Identifier: Apache-2.0
"""Impairments as data: refused values, and the statistics of the dice."""

from __future__ import annotations

import itertools
import re

import pytest

from sennit.ebpf import compiler
from sennit.testbed.topology import Draw, Impairment, dice, fabric, impairment, planes, rate_limit
from sennit.testbed.topology.impairment import mix
from sennit.testbed.topology.planes import Planes

THROWS = 100_000


def throws(impairment: Impairment, draw: Draw, host: int = 0, plane: int = 0) -> list[bool]:
    return list(itertools.islice(dice(impairment, host, plane, draw), THROWS))


def test_mix_is_that_of_splitmix64() -> None:
    """The first outputs for the seed 1234567, as published with the reference implementation's tests."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix((1_234_567 + n * gamma) % 2**64) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.5])
def test_a_fraction_is_hit_as_often_as_it_says(fraction: float, seed: int) -> None:
    hits = sum(throws(Impairment(loss_fraction=fraction, seed=seed), Draw.DROP))
    deviation = (THROWS * fraction * (1 - fraction)) ** 0.5
    assert abs(hits - THROWS * fraction) < 5 * deviation


def test_the_switch_and_its_python_have_the_same_numbers() -> None:
    source = (compiler.PROGRAMS / "fabric.bpf.c").read_text()
    in_c = {
        name: int(value, 0) for name, value in re.findall(r"#define (\w+) (\w+?)u?\b", source) if value[0].isdigit()
    }
    for module, names in (
        (fabric, ("HOSTS_MAX", "FIRST_PORT_IFINDEX", "FLAG_BLACKHOLE", "FLAG_ORPHAN")),
        (impairment, ("HELD_MAX",)),
    ):
        for name in names:
            assert getattr(module, name) == in_c[name], name
    assert in_c["PORTS_MAX"] == fabric.HOSTS_MAX * fabric.PLANES_MAX
    assert in_c["FRAME_MAX_BYTES"] >= planes.MTU_MAX_BYTES + rate_limit.ETHERNET_HEADER_BYTES
    kinds = re.search(r"enum draw \{ (.*), DRAWS = (\d+) \}", source)
    assert kinds is not None
    assert kinds[1].split(", ") == [f"DRAW_{draw.name}" for draw in Draw]
    assert int(kinds[2]) == impairment.DRAWS
    mac = fabric.mac_address(0, 0).split(":")
    assert [int(part, 16) for part in mac[:2]] == [in_c["MAC_PREFIX_0"], in_c["MAC_PREFIX_1"]]


def test_always_and_never() -> None:
    assert all(throws(Impairment(loss_fraction=1), Draw.DROP))
    assert not any(throws(Impairment(), Draw.DROP))


def test_hosts_planes_kinds_and_seeds_have_dice_of_their_own(seed: int) -> None:
    both = Impairment(loss_fraction=0.1, duplicate_fraction=0.1, seed=seed)
    other_seed = Impairment(loss_fraction=0.1, duplicate_fraction=0.1, seed=seed ^ 1)
    lists = [
        throws(both, Draw.DROP),
        throws(both, Draw.DUPLICATE),
        throws(both, Draw.DROP, host=1),
        throws(both, Draw.DROP, plane=1),
        throws(other_seed, Draw.DROP),
    ]
    assert lists[0] == throws(both, Draw.DROP)
    for first, second in itertools.combinations(lists, 2):
        # Independent dice agree if both hit or both miss: 0.1² + 0.9².
        agreeing = sum(a == b for a, b in zip(first, second, strict=True))
        assert abs(agreeing - 0.82 * THROWS) < 5 * (THROWS * 0.82 * 0.18) ** 0.5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"loss_fraction": 1.5}, r"loss_fraction 1.5; allowed: 0..1"),
        ({"corrupt_fraction": -0.1}, r"corrupt_fraction -0.1"),
        ({"ecn_fraction": float("nan")}, r"ecn_fraction nan"),
        ({"reorder_fraction": 0.1}, r"reorder_depth 0; allowed: 1..127"),
        ({"reorder_depth": 128}, r"reorder_depth 128; allowed: 0..127"),
        ({"corrupt_skip_bytes": -1}, r"corrupt_skip_bytes -1"),
        ({"seed": 1 << 64}, r"seed 18446744073709551616"),
    ],
)
def test_an_impossible_impairment_is_refused(arguments: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Impairment(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [({"hosts": 1}, "hosts 1; allowed: 2..64"), ({"planes": 17}, "planes 17"), ({"mtu": 9_001}, "mtu 9001")],
)
def test_impossible_planes_are_refused(arguments: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Planes(**arguments)  # type: ignore[arg-type]


def test_planes_that_were_not_entered_say_so() -> None:
    with pytest.raises(RuntimeError, match="with Planes"):
        Planes().impair(Impairment())
