# SPDX-License-Identifier: Apache-2.0
"""The embedding kernels for tensors of `device_double`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.implementations import implementation
from sennit.runtime.kernels.layout import ShardMemory
from tests.runtime import device_double
from tests.runtime.device_double import OnDevice


class Kernels:
    """An implementation for `device_double`: the native one on the memory of its tensors."""

    device_type = device_double.DEVICE.type

    def __init__(self) -> None:
        self._native = implementation("native")

    def __getattr__(self, name: str) -> Any:
        def call(tables: Sequence[ShardMemory], batch: Batch, *given: Any, **options: Any) -> Any:
            found = getattr(self._native, name)(
                [_parts(table, device_double.host_of) for table in tables],
                _parts(batch, device_double.host_of),
                *map(device_double.host_of, given),
                **options,
            )
            if isinstance(found, list):
                return [_parts(one, OnDevice) for one in found]
            return OnDevice(found)

        return call


def _parts(whole: Any, change: Callable[[Any], Any]) -> Any:
    """A dataclass with its tensors changed."""
    fields = {one.name: getattr(whole, one.name) for one in dataclasses.fields(whole)}
    return dataclasses.replace(whole, **tree_map_only(Tensor, change, fields))
