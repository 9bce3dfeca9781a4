# SPDX-License-Identifier: Apache-2.0
# Torch types its dispatch thinly:
# mypy: disable-error-code="override,no-untyped-call,untyped-decorator,no-any-return"
"""Tensors that say they are on a device and compute on the CPU: they find operations that mix devices, or wait.

An operation on such a tensor and a host tensor fails, as on a GPU. `waits` counts reads of values by the host. The
device is torch's `lazy`, since torch for CPUs refuses to name `cuda`. Collectives take the way of device tensors
(device_stand_in.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.runtime.device_stand_in import on_device

DEVICE = torch.device("lazy:0")
aten = torch.ops.aten
# These may take tensors of both kinds of memory. Indices may be on the host, too.
_MIXED = (aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default)
# These need values before they can go on.
_READS = (aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default, aten.equal.default)


class OnDevice(Tensor):
    """A tensor of the device. Its memory is `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
            requires_grad=host.requires_grad,
        )
        made.host = host
        return made

    def tolist(self) -> Any:
        # torch refuses it for subclasses, and does not dispatch it.
        for mode in Device.active:
            mode.waits["tolist"] += 1
        return self.host.tolist()

    def __repr__(self) -> str:
        return f"OnDevice({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_nested(args, kwargs):
            return NotImplemented
        return _run(func, args, kwargs or {}, Device.active[-1] if Device.active else None)


def host_of(given: Any) -> Any:
    """The memory of a tensor of the device; anything else as it is."""
    return given.host if isinstance(given, OnDevice) else given


class Device(TorchDispatchMode):
    """Inside, `device=DEVICE` makes such tensors."""

    active: ClassVar[list[Device]] = []

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self.active.append(self)
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self.active.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _has_nested(args, kwargs):
            return NotImplemented
        return _run(func, args, kwargs or {}, self)


def _has_nested(args: Any, kwargs: Any) -> bool:
    """Whether it is torch's nested tensors that take an operation apart, and come back with their parts."""
    return any(isinstance(leaf, NestedTensor) for leaf in tree_leaves((args, kwargs)))


def _run(func: Any, args: Any, kwargs: dict[str, Any], device: Device | None) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    wanted = kwargs.get("device")
    stays = bool(ours) and (wanted is None or torch.device(wanted).type == DEVICE.type)
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    hosts = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    if ours and hosts and func not in _MIXED:
        raise RuntimeError(f"{func} with tensors on {DEVICE} and in host memory: {[tuple(one.shape) for one in hosts]}")
    is_read = bool(ours) and (func in _READS or (func is aten._to_copy.default and not stays))
    is_read = is_read or (func is aten.copy_.default and bool(ours) and not isinstance(args[0], OnDevice))
    if is_read and device is not None:
        device.waits[str(func)] += 1
    args, kwargs = tree_map_only(OnDevice, lambda one: one.host, (args, kwargs))
    with on_device(bool(ours) and func.namespace == "c10d"):
        found = func(*args, **kwargs)
    if func is aten.copy_.default:
        return tensors[0]
    is_new = not ours and wanted is not None and torch.device(wanted).type == DEVICE.type
    if not (stays or is_new):
        return found
    known = {id(one.host): one for one in ours}  # An operation may return what it was given.
    return tree_map_only(Tensor, lambda host: known[id(host)] if id(host) in known else OnDevice(host), found)


def moved(module: nn.Module, device: torch.device, names: Collection[str] | None = None) -> nn.Module:
    """The module with its parameters on `device`; those of `names` alone, if given. Torch's `to` keeps its own type."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if names is None or name in names:
                part._parameters[name] = nn.Parameter(parameter.detach().to(device))
    return module
