# SPDX-License-Identifier: Apache-2.0
"""Blocks that load modules, in which Python does not look for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from sennit.collecting import loading

ABSENT = "sennit.no_such_module"


@pytest.fixture(autouse=True)
def collections_on() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.enable()
    yield
    gc.enable()
    gc.freeze() if was_frozen else gc.unfreeze()


def test_collections_pause_and_go_on_also_after_an_error() -> None:
    seen = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError):
        loading(ABSENT)(fail)()
    assert seen == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_was_made_is_not_looked_at_until_a_full_collection() -> None:
    gc.collect()
    with loading(ABSENT):
        made = [[number] for number in range(5_000)]
        young = gc.get_objects(generation=0)
        assert any(found is made[0] for found in young)
    assert not any(found is made[0] for generation in (0, 1) for found in gc.get_objects(generation=generation))
    assert any(found is made[0] for found in gc.get_objects(generation=2))


def test_nothing_changes_for_a_loaded_module_or_where_collections_are_off_or_objects_frozen() -> None:
    with loading(__name__):
        assert gc.isenabled()
    gc.disable()
    with loading(ABSENT):
        assert not gc.isenabled()
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with loading(ABSENT):
        pass
    assert gc.get_freeze_count() >= frozen > 0
