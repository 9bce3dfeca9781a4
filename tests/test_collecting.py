# SPDX-License-Identifier: Apache-2.0
"""Blocks in which Python does not look for garbage."""

from __future__ import annotations

import gc

import pytest

from sennit.collecting import no_collections


def test_collections_pause_and_go_on_also_after_an_error() -> None:
    assert gc.isenabled()
    seen = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError):
        no_collections()(fail)()
    assert seen == [False]
    assert gc.isenabled()


def test_a_block_within_a_block_does_not_end_the_pause() -> None:
    with no_collections():
        no_collections()(list)()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_turned_collections_off_finds_them_off() -> None:
    gc.disable()
    try:
        no_collections()(list)()
        assert not gc.isenabled()
    finally:
        gc.enable()
