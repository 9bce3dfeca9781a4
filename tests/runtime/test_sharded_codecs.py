# SPDX-License-Identifier: Apache-2.0
"""Sharded tables whose sums, rows and gradients travel coded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

CASES = "sharded_codec_cases.py"


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_coded_bags_have_the_same_bits_wherever_tables_lie(kept_world: Callable[..., Any], codec: str) -> None:
    """Whole bags are coded, of each column shard: so neither owner nor world changes them."""
    found = {
        digest
        for world, transport, placement in (
            (1, "shm", "table_wise"),
            (2, "shm", "table_wise"),
            (2, "shm", "column_wise"),
            (3, "udp", "table_wise"),
        )
        for digest, _ in kept_world(world, transport).run(CASES, "coded", codec=codec, placement=placement)
    }
    assert len(found) == 1
    assert found != {kept_world(1).run(CASES, "coded", codec=None)[0][0]}


@pytest.mark.parametrize("kind", ["bags", "sequences"])
@pytest.mark.parametrize("codec", ["mx4", "int8", "lossless"])
@pytest.mark.parametrize("world", [1, 2])
def test_codecs_send_fewer_bytes(kept_world: Callable[..., Any], world: int, codec: str, kind: str) -> None:
    plain = kept_world(world).run(CASES, "coded", codec=None, kind=kind)
    coded = kept_world(world).run(CASES, "coded", codec=codec, kind=kind)
    assert (coded[0][0] == plain[0][0]) == (codec == "lossless")
    if world == 1:
        assert not any(coded[0][1].values())
        return
    for (_, before), (_, after) in zip(plain, coded, strict=True):
        # Ids are not coded but by LOSSLESS, whose bytes are known to the transport alone.
        assert after["all"] < before["all"] * 0.95
        for what in ("sums", "gradients") if kind == "bags" else ("rows", "gradients"):
            ratio = {"mx4": 0.14, "int8": 0.32, "lossless": 1.0}[codec]
            assert after[what] <= before[what] * ratio


def test_a_row_is_a_block(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "coded_as_defined")


def test_ranks_with_different_codecs_are_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "refuses_codecs")


def test_a_dead_rank_is_named(new_world: Callable[..., Any]) -> None:
    survivor, dead = new_world(2).run(CASES, "dies")
    assert dead is None
    assert "rank 1" in survivor[0]
    assert len(survivor) == 2
