# SPDX-License-Identifier: Apache-2.0
"""What sennit takes of torch that torch does not promise to keep: private names, and attributes of its groups.

A new minor release of torch is tried here first, and in csrc/torch_versions.hpp. All other files use public names
alone, which tests/test_private_names.py holds. Torch 2.11 to 2.14 have all of these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

# What torch calls the backend of every group whose backend is no part of torch.
EXTERNAL = "custom"


def name_groups(backend_name: str) -> None:
    """Makes groups of this backend report `backend_name`, because torch calls every external backend "custom".

    TorchRec takes "custom" for a stand-in without peers and replaces AlltoAll by a local copy: silently wrong data
    (docs/reference/torch.md). Groups of other backends report what they did before.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def named(original: Callable[[dist.ProcessGroup], str]) -> Callable[[dist.ProcessGroup], str]:
        @functools.wraps(original)
        def name(self: dist.ProcessGroup) -> str:
            text = original(self)
            if text != EXTERNAL:
                return text
            backends = {self._get_backend(device).name() for device in self._device_types}
            return backend_name if backend_name in backends else text

        return name

    for method in ("_get_backend_name", "name"):
        setattr(dist.ProcessGroup, method, named(getattr(dist.ProcessGroup, method)))

    logged: Callable[[DistributedDataParallel], dict[str, Any]] = DistributedDataParallel._get_ddp_logging_data

    @functools.wraps(logged)
    def logging_data(self: DistributedDataParallel) -> dict[str, Any]:
        # c10d's logger is C++ and reads the group's type, which is the same for all external backends.
        data = logged(self)
        if data.get("backend_name") == EXTERNAL:
            data["backend_name"] = self.process_group._get_backend_name()
        return data

    DistributedDataParallel._get_ddp_logging_data = logging_data  # type: ignore[method-assign]


def serve_callers(backend_name: str, make: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Lets functions of torch serve groups of this backend that look for gloo or NCCL by name or by class.

    These are `monitored_barrier`, which refuses others, `_set_pg_timeout`, which leaves their deadline and warns, and
    `new_group` of `_dist2`, for which `make` gets torch's `_DistributedBackendOptions` and the call's own options.
    Groups of other backends get what they got before.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import _DistributedBackendOptions
    from torch.distributed import _dist2

    functions = dist.distributed_c10d
    barrier, set_timeout = functions.monitored_barrier, functions._set_pg_timeout

    def backends(group: dist.ProcessGroup | None) -> list[Any]:
        """Those of this backend in a group that this process is in."""
        chosen: Any = group or dist.group.WORLD
        if chosen is None or functions._rank_not_in_group(chosen):
            return []
        found = [backend_of(chosen, device) for device in chosen._device_types]
        return [one for one in found if one.name() == backend_name]

    @functools.wraps(barrier)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        found = backends(group)
        if not found:
            barrier(group, timeout, wait_all_ranks)
            return
        if timeout is None:
            timeout = timeout_of(found[0])
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        chosen: Any = group or dist.group.WORLD
        chosen.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    @functools.wraps(set_timeout)
    def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        found = backends(group)
        for one in found:
            one.set_timeout(timeout)
        if not found or len(found) < len((group or dist.group.WORLD)._device_types):  # type: ignore[union-attr]
            set_timeout(timeout, group)

    for module in (functions, dist):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
    functions._set_pg_timeout = set_pg_timeout

    def independent_group(
        store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device, **options: Any
    ) -> dist.ProcessGroup:
        given = _DistributedBackendOptions()
        given.store, given.group_rank, given.group_size, given.timeout = store, rank, world_size, timeout
        given.group_id, given.global_ranks_in_group = "independent", []
        backend = make(given, options)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for served in {torch.device("cpu"), torch.device(device.type)}:
            group._register_backend(served, dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group

    _dist2.register_backend(backend_name, independent_group)


# The end of `import torch` registers our backend, which needs the functions above: where nobody has imported torch
# before, that is while this file is read.
import torch
import torch.distributed as dist
from torch import nn

# `torch.distributed` has these, too, but does not export them to type checkers.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.nn.modules.batchnorm import _NormBase

# These modules are not public yet.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

# The base of all BatchNorm and InstanceNorm modules, which have no public one.
NormBase = _NormBase


def coalescing(group: dist.ProcessGroup, *, async_ops: bool) -> AbstractContextManager[Any]:
    """A block whose calls become one. It yields what is waited for, where `async_ops` is set."""
    block: AbstractContextManager[Any] = dist.distributed_c10d._coalescing_manager(group, async_ops=async_ops)
    return block


def premul_sum(factor: float) -> Any:
    """The reduction that multiplies by a factor and sums."""
    return torch._C._distributed_c10d._make_nccl_premul_sum(factor)


def default_group() -> dist.ProcessGroup:
    """The default process group. Raises ValueError if there is none."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Store:
    """The store of the default process group, whose keys are those of this group alone."""
    return backend_and_store(default_group())[1]


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups that this process is in."""
    return list(dist.distributed_c10d._world.pg_map)


def backend_and_store(group: dist.ProcessGroup) -> tuple[str, Store]:
    """What `init_process_group` or `new_group` was given: the backend's name or names, and the store that it uses."""
    name, store = dist.distributed_c10d._world.pg_map[group]
    return name, store


def backend_of(group: dist.ProcessGroup, device: torch.device | None = None) -> Any:
    """The backend of a group for a device (None: the group's first). None if it has none for it."""
    if device is None:
        device = group._device_types[0]
    elif device not in group._device_types:
        return None
    backend: Any = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps the backend.
    return getattr(backend, "wrapped_pg", backend)


def timeout_of(backend: Any) -> timedelta:
    """The deadline of a backend's operations."""
    timeout: timedelta = backend.options._timeout
    return timeout


def abort(group: dist.ProcessGroup) -> None:
    """Ends what is in flight in a group, on every device."""
    for device in group._device_types:
        group._get_backend(device).abort()


def backward_pass() -> int:
    """The number of the backward pass that this thread runs. -1: none."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls `call` once, when the present backward pass has done all else. Only for a thread that runs one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def optimizer_in_backward(parameter: torch.Tensor) -> tuple[type, dict[str, Any]] | None:
    """The class and the arguments of the optimizer that `apply_optimizer_in_backward` has given a parameter last."""
    classes = getattr(parameter, "_optimizer_classes", None)
    return (classes[-1], parameter._optimizer_kwargs[-1]) if classes else None  # type: ignore[attr-defined]


def has_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Lets schedulers know of a step that was no call of `optimizer.step`: they warn where they come before it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def accumulates() -> bool:
    """Whether a DDP runs its `forward` now, and only accumulates gradients (`no_sync`)."""
    ddp = nn.parallel.DistributedDataParallel._active_ddp_module
    return ddp is not None and not ddp.require_backward_grad_sync


def runs_ddp() -> bool:
    """Whether a DDP runs its `forward` now."""
    return nn.parallel.DistributedDataParallel._active_ddp_module is not None


def finds_unused() -> bool:
    """Whether a DDP runs its `forward` now that looks for tensors in its results (`find_unused_parameters`)."""
    ddp = nn.parallel.DistributedDataParallel._active_ddp_module
    return ddp is not None and ddp.find_unused_parameters


# As the `__torch_function__` of a subclass of Tensor: results of functions are plain tensors, as those of a Parameter.
plain_results: Any = torch._C._disabled_torch_function_impl


def jagged(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A nested tensor of layout torch.jagged, as `torch.nested.nested_tensor_from_jagged` makes it.

    That function logs a warning about torch.fx in each process (2.13).
    """
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets

    found: torch.Tensor = nested_view_from_values_offsets(rows, offsets)  # type: ignore[no-untyped-call]
    return found


def times_changed(tensor: torch.Tensor) -> int:
    """How often operations have written to the memory of a tensor: torch's version counter."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return tensor._base


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by attribute, its submodules' left out. Changes of it are changes of the module."""
    return module._parameters
