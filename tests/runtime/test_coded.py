# SPDX-License-Identifier: Apache-2.0
"""AllReduce of tensors with codecs, and DDP's gradients through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

CASES = "coded_cases.py"


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (3, "udp")])
def test_a_tensor_is_reduced_in_place(kept_world: Callable[..., Any], size: int, transport: str) -> None:
    kept_world(size, transport).run(CASES, "in_place")


@pytest.mark.parametrize("feedback", [False, True])
def test_gradients_of_ddp_are_those_of_the_definition(kept_world: Callable[..., Any], feedback: bool) -> None:
    kept_world(2).run(CASES, "hooked", feedback=feedback)


def test_a_run_goes_on_with_what_its_hook_had_kept(kept_world: Callable[..., Any], tmp_path: Path) -> None:
    kept_world(2).run(CASES, "resumes", folder=str(tmp_path))


def test_feedback_survives_new_buckets(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "rebuilt")


def test_states_of_another_rank_or_model_are_refused(kept_world: Callable[..., Any]) -> None:
    kept_world(2).run(CASES, "other_states")


def test_hooks_that_differ_are_refused_in_the_backward_pass(new_world: Callable[..., Any]) -> None:
    new_world(2).run(CASES, "differs")


def test_feedback_and_a_codec_between_hosts_are_refused_together() -> None:
    from sennit.runtime.backend.coded import coded_hook
    from sennit.transport.codecs import Codec, CodecKind
    from sennit.transport.errors import ArgumentError

    codec = Codec(kind=CodecKind.INT8, between_hosts=True)
    with pytest.raises(ArgumentError, match="error feedback with a codec between hosts alone; allowed: feedback=False"):
        coded_hook(codec)
    assert callable(coded_hook(codec, feedback=False))


def test_a_model_learns_with_four_bits_a_gradient(kept_world: Callable[..., Any]) -> None:
    assert max(kept_world(2).run(CASES, "converges")) < 1e-3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_may_have_a_codec_for_all_its_sums(kept_world: Callable[..., Any], size: int) -> None:
    kept_world(size).run(CASES, "of_a_group")


def test_ranks_whose_groups_have_other_codecs_are_refused(new_world: Callable[..., Any]) -> None:
    new_world(2).run(CASES, "groups_differ")
