# SPDX-License-Identifier: Apache-2.0
"""Files of constants: what is refused and how, and that a group has one set of constants."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sennit.transport.choice.calibration import Calibration, read_calibration
from sennit.transport.choice.coded_cost import SPEEDS, CodecSpeed
from sennit.transport.choice.costs import NETWORK, SHARED_MEMORY, Costs
from sennit.transport.communicator import Communicator
from sennit.transport.config import Config
from sennit.transport.errors import ConfigError, PeerError
from sennit.transport.plans.coding import CodecKind
from tests.transport.meeting import Recorder, meet

WAY = {"round_s": 1e-5, "message_s": 2e-6, "byte_s": 3e-10, "peer_share": 0.25, "fold_byte_s": 0}
SPEED = {"encode_element_s": 1e-10, "encode_stochastic_element_s": 2e-10, "decode_element_s": 3e-10}
GOOD: dict[str, Any] = {"schema": 1, "ways": {"shared_memory": WAY, "network": {**WAY, "round_s": 7e-5}}}


def write(path: Path, found: object) -> str:
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return str(path)


def changed(way: str, field: str, value: object) -> dict[str, Any]:
    found = copy.deepcopy(GOOD)
    found["ways"][way][field] = value
    return found


def test_a_file_has_the_constants_of_both_ways(tmp_path: Path) -> None:
    path = write(tmp_path / "here.json", GOOD)
    found = read_calibration(path)
    assert found.shared_memory == Costs(round_s=1e-5, message_s=2e-6, byte_s=3e-10, peer_share=0.25, fold_byte_s=0)
    assert found.network.round_s == 7e-5
    assert found.source == path
    assert read_calibration(None) == Calibration(shared_memory=SHARED_MEMORY, network=NETWORK, source="defaults")


def test_a_file_has_the_speed_of_codecs_which_choose_nothing(tmp_path: Path) -> None:
    plain = read_calibration(write(tmp_path / "plain.json", GOOD))
    found = read_calibration(write(tmp_path / "coded.json", {**GOOD, "codecs": {"int8": SPEED}}))
    assert plain.codecs == SPEEDS
    assert found.codecs == {**SPEEDS, CodecKind.INT8: CodecSpeed(**SPEED)}
    assert found.digest() == plain.digest()


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[" * 50_000, "not JSON: maximum recursion depth exceeded"),
        (" " * 70_000, "over 65536 bytes; allowed: 65536"),
        ([], "field schema is missing"),
        ({**GOOD, "schema": 2}, "schema 2; allowed: 1. Run sennit calibrate again"),
        ({"schema": 1}, "field ways is missing"),
        ({"schema": 1, "ways": {"shared_memory": WAY}}, "field ways.network is missing"),
        ({"schema": 1, "ways": {"shared_memory": {}}}, "field ways.shared_memory.round_s is missing"),
        (changed("network", "byte_s", -1e-9), "field ways.network.byte_s is -1e-09; allowed: a number, 0..1000"),
        (changed("network", "byte_s", float("nan")), "field ways.network.byte_s is nan; allowed"),
        (changed("network", "peer_share", float("inf")), "field ways.network.peer_share is inf; allowed"),
        ({**GOOD, "codecs": []}, "field codecs is []; allowed: an object"),
        ({**GOOD, "codecs": {"int9": {}}}, "field codecs.int9 is unknown; allowed: fp16, bf16, fp8_e4m3"),
        ({**GOOD, "codecs": {"int8": 1}}, "field codecs.int8.encode_element_s is missing"),
        (
            {**GOOD, "codecs": {"int8": {**SPEED, "decode_element_s": "fast"}}},
            "field codecs.int8.decode_element_s is 'fast'; allowed: a number",
        ),
        (changed("shared_memory", "round_s", True), "field ways.shared_memory.round_s is True; allowed"),
        (changed("shared_memory", "message_s", "1"), "field ways.shared_memory.message_s is '1'; allowed"),
        (changed("shared_memory", "fold_byte_s", 10**400), "field ways.shared_memory.fold_byte_s is 1000"),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_field(tmp_path: Path, found: object, why: str) -> None:
    path = write(tmp_path / "wrong.json", found)
    with pytest.raises(ConfigError) as raised:
        read_calibration(path)
    assert str(raised.value).startswith(f"calibration file {path}: {why}")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(path) + 200


def test_a_file_that_is_none_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a file; make one with: sennit calibrate --output"):
        read_calibration(str(tmp_path / "missing.json"))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="not a file"):
        read_calibration(str(fifo))
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        read_calibration("n" * 300)


def test_ranks_with_different_constants_make_no_group(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "a.json", GOOD), write(tmp_path / "b.json", changed("network", "byte_s", 1e-9))
    digests = [read_calibration(path).digest() for path in (ours, theirs)]
    assert digests[0] != digests[1]
    for error in meet(
        [Recorder(rank, "a") for rank in range(2)], [Config(calibration=ours), Config(calibration=theirs)]
    ):
        assert isinstance(error, ConfigError)
        assert str(error) == (
            f"rank 0 has SENNIT_CALIBRATION {digests[0]} a.json, rank 1 has {digests[1]} b.json (digest and file); "
            "allowed: the same constants on all ranks"
        )


def test_equal_constants_may_lie_in_files_of_other_names(tmp_path: Path) -> None:
    paths = write(tmp_path / "a.json", GOOD), write(tmp_path / "b.json", json.dumps(GOOD, indent=4))
    configs = [Config(calibration=path) for path in paths]
    assert meet([Recorder(rank, "a") for rank in range(2)], configs) == [("self", "shm"), ("shm", "self")]


def test_all_ranks_learn_that_one_has_a_wrong_file(tmp_path: Path) -> None:
    wrong = write(tmp_path / "wrong.json", {"schema": 1})
    first, second = meet([Recorder(rank, "a") for rank in range(2)], [Config(), Config(calibration=wrong)])
    assert isinstance(second, ConfigError)
    assert isinstance(first, PeerError)
    assert "rank 1" in str(first)
    assert "wrong.json: field ways is missing" in str(first)


def test_a_file_of_another_host_and_processor_is_told_of_both(tmp_path: Path) -> None:
    date = "2026-01-01T00:00:00Z"
    (told,) = read_calibration(write(tmp_path / "a.json", GOOD | {"date": date, "host": "elsewhere"})).notes
    assert "elsewhere" in told
    assert "days ago" in told
    foreign = GOOD | {"date": date, "host": "elsewhere", "processor": "Another 9000"}
    (told,) = read_calibration(write(tmp_path / "b.json", foreign)).notes
    assert "host elsewhere, processor Another 9000; this is host " in told
    (told,) = read_calibration(write(tmp_path / "c.json", GOOD | {"date": date})).notes
    assert "on this host" in told
    assert read_calibration(write(tmp_path / "d.json", GOOD)).notes == ()


def test_rank_0_alone_tells_of_a_file_of_another_host(tmp_path: Path) -> None:
    path = write(tmp_path / "there.json", GOOD | {"host": "elsewhere"})
    configs = [Config(calibration=path)] * 2
    with pytest.warns(RuntimeWarning, match="on host elsewhere; this is host") as told:
        meet([Recorder(rank, "a") for rank in range(2)], configs)
    assert len(told) == 1


def test_a_group_chooses_by_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "here.json", GOOD)
    with Communicator(rank=0, world=1, config=Config(calibration=path)) as group:
        assert group.selection.near == read_calibration(path).shared_memory
        assert group.allreduce(np.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match="not a file"):
        Communicator(rank=0, world=1, config=Config(calibration=str(tmp_path / "missing.json")))
