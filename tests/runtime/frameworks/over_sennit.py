# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call"
"""A group over sennit for the code of others, and a proof that the code used this group and no other backend."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch.distributed as dist

from sennit.runtime.backend import communicator

DEADLINE_S: Final = 30.0


def as_under_torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives to a rank; it has to serve `port` if its number is 0."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "frameworks",
    }


@contextmanager
def only_sennit() -> Iterator[list[int]]:
    """Runs code that makes and destroys the default group itself. No group may be one of gloo.

    Yields a list: what this rank has sent to the other, for each default group that was destroyed.
    """
    sent_bytes: list[int] = []
    destroy = dist.destroy_process_group

    def note_and_destroy(group: dist.ProcessGroup | None = None) -> None:
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            assert dist.get_backend() == "sennit"
            sent_bytes.append(communicator().counters()["shm_bytes_sent"])
        destroy(group)

    gloo = dist.distributed_c10d.ProcessGroupGloo

    def refuse(*arguments: Any, **options: Any) -> Any:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares calls over a group of gloo, beside any backend.
        if sys._getframe(1).f_code.co_name == "_create_process_group_wrapper":
            return gloo(*arguments, **options)
        raise AssertionError("a group of backend gloo was made")

    # What others warn of is theirs.
    with (
        warnings.catch_warnings(),
        mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", refuse),
        mock.patch.object(dist.distributed_c10d, "destroy_process_group", note_and_destroy),
        mock.patch.object(dist, "destroy_process_group", note_and_destroy),
    ):
        warnings.simplefilter("ignore")
        try:
            yield sent_bytes
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def group_over_sennit(rank: int, world: int, folder: str, name: str) -> Iterator[None]:
    """A default group for code that uses the one that is there. Its ranks must have run collectives in the end."""
    with only_sennit() as sent_bytes:
        store = dist.FileStore(str(Path(folder) / name), world)
        limit = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("sennit", store=store, rank=rank, world_size=world, timeout=limit)
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
    assert sum(sent_bytes) > 0, f"{name} sent nothing over sennit"
