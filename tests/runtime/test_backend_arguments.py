# SPDX-License-Identifier: Apache-2.0
"""What gloo takes is taken; calls that would lose data are refused; a refusal leaves no trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

CASES = "argument_cases.py"
World = Callable[..., Any]


@pytest.mark.parametrize("transport", ["shm", "udp"])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("case", ["any_strides", "shared_memory"])
def test_tensors_are_taken(kept_world: World, transport: str, device: bool, case: str) -> None:
    kept_world(3, transport).run(CASES, case, device=device)


def test_outputs_that_share_memory_are_refused(kept_world: World) -> None:
    apart = r"share memory; allowed: outputs apart"
    expected = {
        "same": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "first and last": rf"ValueError: outputs\[0\] and outputs\[2\] {apart}",
        "slices": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "gather": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "all_to_all": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "columns": rf"ValueError: outputs\[0\] and outputs\[1\] {apart}",
        "coalesced": rf"ValueError: outputs\[0\] and outputs\[2\] {apart}",
        "expanded": r"ValueError: tensor has elements that share memory \(sizes \[6\], strides \[0\]\); pass",
        "windows": r"ValueError: tensor has elements that share memory",
    }
    for errors in kept_world(3).run(CASES, "shared_outputs"):
        assert errors.keys() == expected.keys()
        assert not {name: text for name, text in errors.items() if not re.search(expected[name], text)}


def test_a_refusal_leaves_no_block_open(kept_world: World) -> None:
    """torch's manager of blocks has no `finally`: with it open, `all_reduce` does nothing and says nothing."""
    expected = [
        r"ValueError: tag is -1",
        r"ValueError: peer is \d, this rank itself",
        r"ValueError: reduce op BAND is not defined",
        r"ValueError: outputs has 9 elements; needed: 6",
        r"ValueError: input has 9 elements; needed: 6",
        r"ValueError: tensor has elements that share memory",
        r"ValueError: reduce op BAND is not defined",
        r"ValueError: reduce op BAND is not defined",
        r"RuntimeError: of the program",
    ]
    for errors in kept_world(3).run(CASES, "refused_blocks"):
        for error, text in zip(errors, expected, strict=True):
            assert re.search(text, error), errors
