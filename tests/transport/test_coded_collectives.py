# SPDX-License-Identifier: Apache-2.0
"""Collectives with codecs between processes, bit for bit, and what they refuse."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.communicator import Communicator
from sennit.transport.errors import ArgumentError
from sennit.transport.plans.elements import ReduceOp
from tests.extent import briefly
from tests.transport import coded_scenarios as coded
from tests.transport.processes import run_ranks


@pytest.fixture(scope="module", autouse=True)
def definitions_are_computed_once() -> Iterator[None]:
    """All ranks of all worlds compare with the same codes, and NumPy takes long for them."""
    with tempfile.TemporaryDirectory(prefix="sennit-test-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESULTS", folder)
        yield


@pytest.mark.parametrize(("transport", "world"), briefly(product(("shm", "udp"), (2, 3)), [("udp", 2)]))
def test_allreduce_has_the_bits_of_the_definition(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([coded.allreduces, coded.survive], world, transport, tmp_path, seed=world)


@pytest.mark.parametrize(
    ("transport", "world"), briefly([("shm", 1), ("shm", 4), ("udp", 3)], [("shm", 1), ("udp", 3)])
)
def test_exchanges_have_the_bits_of_their_definitions(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([coded.exchanges], world, transport, tmp_path, seed=world)


@pytest.mark.parametrize("hosts", briefly(["aabb", "abbb", "ab", "aa", "abc"], ["abbb", "aa"]))
def test_collectives_between_hosts_have_the_bits_of_their_definitions(hosts: str, tmp_path: Path) -> None:
    run_ranks([coded.between], len(hosts), "auto", tmp_path, seed=1, hosts=hosts)


@pytest.mark.parametrize(
    ("hosts", "call"), [("ab", "allreduce"), ("abb", "allreduce"), ("abb", "alltoall"), ("ab", "allgather")]
)
def test_a_rank_that_codes_everywhere_is_refused(hosts: str, call: str, tmp_path: Path) -> None:
    mismatch = partial(coded.mismatch, differs="where", call=call)
    run_ranks([mismatch], len(hosts), "auto", tmp_path, seed=0, hosts=hosts)


@pytest.mark.parametrize(
    ("transport", "world"), briefly([("shm", 1), ("shm", 4), ("udp", 2), ("udp", 3)], [("shm", 1), ("udp", 2)])
)
def test_lossless_exchanges_give_every_bit(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([coded.lossless], world, transport, tmp_path, seed=world)


@pytest.mark.parametrize(
    ("transport", "world", "codec", "gives"),
    briefly(
        [
            (*group, codec, gives)
            for group in (("shm", 3), ("udp", 2))
            for codec in ("INT8", "LOSSLESS")
            for gives in (0, 99, 101, 200_000)
        ],
        [
            ("shm", 3, "INT8", 0),
            ("udp", 2, "LOSSLESS", 99),
            ("shm", 3, "LOSSLESS", 101),
            ("udp", 2, "INT8", 200_000),
        ],
    ),
)
def test_counts_that_differ_are_refused(transport: str, world: int, codec: str, gives: int, tmp_path: Path) -> None:
    run_ranks([partial(coded.other_counts, kind=CodecKind[codec], gives=gives)], world, transport, tmp_path, seed=0)


@pytest.mark.parametrize(("transport", "world"), [("shm", 3), ("udp", 2)])
def test_new_counts_compile_no_plan(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([coded.new_counts], world, transport, tmp_path, seed=world)


@pytest.mark.parametrize(
    ("transport", "world"),
    briefly(product(("shm", "udp"), (1, 2, 4, 8)), [("shm", 1), ("shm", 4)]),
)
def test_eight_leaves_have_the_same_bits_in_every_world(transport: str, world: int, tmp_path: Path) -> None:
    run_ranks([coded.leaves], world, transport, tmp_path, seed=8)


def test_threads_share_the_work_and_change_no_bit(tmp_path: Path) -> None:
    run_ranks([coded.allreduces], 2, "shm", tmp_path, seed=2, variables=[{"SENNIT_THREADS": "3"}])


@pytest.mark.parametrize(
    ("differs", "transport", "world", "call"),
    briefly(
        [
            (differs, *call)
            for differs in ("kind", "block", "rounding", "seed", "long seed")
            for call in (
                ("shm", 2, "allreduce"),
                ("udp", 3, "allreduce"),
                ("shm", 2, "alltoall"),
                ("udp", 2, "allgather"),
            )
        ],
        [
            ("kind", "shm", 2, "allreduce"),
            ("block", "udp", 3, "allreduce"),
            ("rounding", "shm", 2, "alltoall"),
            ("seed", "udp", 2, "allgather"),
            ("long seed", "udp", 3, "allreduce"),
        ],
    ),
)
def test_ranks_that_differ_are_refused(differs: str, transport: str, world: int, call: str, tmp_path: Path) -> None:
    run_ranks([partial(coded.mismatch, differs=differs, call=call)], world, transport, tmp_path, seed=0)


def test_a_rank_without_codec_is_refused(tmp_path: Path) -> None:
    run_ranks([coded.without], 2, "shm", tmp_path, seed=0)


def test_a_rank_is_refused_whose_messages_nobody_waits_for(tmp_path: Path) -> None:
    run_ranks([coded.no_common_slot], 3, "auto", tmp_path, seed=0, hosts="abb")


@pytest.mark.parametrize(("transport", "hosts"), [("shm", "aaa"), ("udp", "aa"), ("auto", "aab"), ("auto", "abb")])
def test_a_rank_that_dies_is_named(transport: str, hosts: str, tmp_path: Path) -> None:
    run_ranks([coded.killed], len(hosts), transport, tmp_path, seed=0, hosts=hosts)


def test_wrong_use_raises_before_anything_is_sent() -> None:
    with Communicator(rank=0, world=1) as group:
        codec = Codec(kind=CodecKind.INT8)
        for dtype in (np.int32, np.bool_, np.float64, np.complex64):
            for call in (group.allreduce, group.alltoall, group.allgather, group.reduce_scatter):
                with pytest.raises(ArgumentError, match=r"INT8: element type \d+; allowed: F32, F16, BF16"):
                    call(np.zeros(10, dtype), codec=codec)
        for call in (group.alltoall, group.allgather):
            with pytest.raises(ArgumentError, match=r"LOSSLESS: element type \d+; allowed: F32, F16, BF16, I32, I64"):
                call(np.zeros(10, np.uint8), codec=Codec(kind=CodecKind.LOSSLESS))
        given = np.zeros((4, 10), np.float32)
        for call in (group.allreduce, group.reduce_scatter):
            with pytest.raises(ArgumentError, match="LOSSLESS in a collective that sums; allowed: the other codecs"):
                call(given, codec=Codec(kind=CodecKind.LOSSLESS))
        with pytest.raises(ArgumentError, match="partial sums with a codec"):
            group.allreduce(given, leaves=4, partial=True, codec=codec)
        with pytest.raises(ArgumentError, match=r"shape \(4, 10\); allowed: 5 rows"):
            group.allreduce(given, leaves=5, codec=codec)
        with pytest.raises(ArgumentError, match="PREMUL_SUM of F16"):
            group.reduce_scatter(given.astype(np.float16), ReduceOp.PREMUL_SUM, codec=codec)
        with pytest.raises(ArgumentError, match="BXOR"):
            group.allreduce(given, ReduceOp.BXOR, codec=codec)
        assert group.sequence == 0


def test_numbers_at_odd_addresses_are_copied_first() -> None:
    odd = np.zeros(4 * 100 + 1, np.uint8)[1:].view(np.float32)
    odd[:] = np.arange(100)
    with Communicator(rank=0, world=1) as group:
        codec = Codec(kind=CodecKind.BF16)
        np.testing.assert_array_equal(group.allreduce(odd, codec=codec), np.arange(100))
