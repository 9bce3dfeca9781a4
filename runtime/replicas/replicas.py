# SPDX-License-Identifier: Apache-2.0
"""A module replicated on every rank, as with DDP, but with gradients that have the same bits in every world.

replicas = SlicedReplicas(module)           # module(features, labels) returns the mean loss of its samples
losses = replicas(features, labels)         # of this rank's samples: the loss of each of its slices
replicas.loss(losses).backward()            # parameter.grad: the gradient of the mean loss of all samples
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from sennit.runtime.backend.gathering import all_gather_parts
from sennit.runtime.backend.torch_versions import NormBase, times_changed, tree_leaves, tree_map
from sennit.runtime.data.seeds import derive
from sennit.runtime.replicas.cutting import Along, CutArguments, join
from sennit.runtime.replicas.gradient_rows import Layout, places_of
from sennit.runtime.replicas.gradients import Held, SliceSums
from sennit.runtime.replicas.reduction import Reduction, Residuals
from sennit.runtime.sharded.agreement import check_agreement, check_codec
from sennit.runtime.sharded.module import uncompiled
from sennit.runtime.sharded.phases import PhaseClock
from sennit.runtime.sharded.sent import Pending, RunBeside
from sennit.runtime.sharded.slices import DEFAULT_SLICES, GlobalBatch, Slices
from sennit.transport.choice.calibration import processor_maker
from sennit.transport.codecs import Codec
from sennit.transport.errors import ArgumentError, ConfigError, SennitError


class SlicedReplicas(nn.Module):
    """Runs `module` on one slice of the global batch after the other (docs/reference/sharded.md).

    The backward pass leaves in `parameter.grad` the sum over all V slices, summed in the canonical tree. Parameters,
    buffers and the order of random numbers are those of rank 0 and of (seed, pass, slice). So runs of 1 to V ranks end
    with the same bits, if the loss is computed slice by slice.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        slices: int = DEFAULT_SLICES,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        codec: Codec | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        """Collective. Parameters and buffers become those of rank 0.

        `slices`: V, a power of two. `seed`: decides the random numbers that `module` draws from torch's default
        generator. `codec`: codes the AllReduce of gradients, with error feedback; bits then depend on the ranks.
        `clock`: measures the phase "AllReduce".

        Raises on all ranks `ConfigError` if they disagree on V, the seed, the codec, or the names, shapes or types of
        parameters and buffers, and `ArgumentError` if these are on several devices.
        """
        super().__init__()
        described = _description(module, slices, seed) | {"codec": str(codec)}
        check_agreement(described, group, warned=("threads", "processor"))
        check_codec(codec, group)
        own = Slices(count=slices, rank=dist.get_rank(group), world_size=dist.get_world_size(group))
        self._begin(module, own, seed, group, Reduction(own, group, codec, clock))
        _broadcast(module, group)

    def _begin(
        self, module: nn.Module, slices: Slices, seed: int, group: dist.ProcessGroup | None, reduction: Reduction
    ) -> None:
        """The part of the constructor that is not collective."""
        self.module, self.slices = module, slices
        self.passes = 0
        """The forward passes in training mode so far. They decide random numbers, and are part of `state_dict`."""
        self._seed, self._group, self._reduction = seed, group, reduction
        self._synchronised = True
        self._last: Samples | None = None
        self._samples_of = WeakTensorKeyDictionary()
        """The samples of the last call, and of results of earlier ones."""
        self._held = Held()
        self._device = _device_of(module)
        self._layout = Layout(places_of(module), self.slices)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, `torch.save` and deepcopy: without what is known of results, which no copy has."""
        return {key: value for key, value in self.__dict__.items() if key != "_samples_of"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._samples_of = WeakTensorKeyDictionary()

    def get_extra_state(self) -> Tensor:
        """`passes` as int64 []: a part of `state_dict`, by which torch's `nn.Module` calls this."""
        return torch.tensor(self.passes)

    def set_extra_state(self, state: Tensor) -> None:
        self.passes = int(state)

    @property
    def residuals(self) -> Residuals | None:
        """What coding has lost of this rank's last gradients; None without a codec. Save its `state_dict`."""
        return self._reduction.residuals

    @uncompiled
    def forward(self, *args: Any, global_batch: int | None = None, **kwargs: Any) -> Any:
        """Returns what `module` returns for this rank's samples: tensors by dimension 0, 0-dim tensors [own slices].

        Tensors are cut along dimension 0, in tuples, lists and dicts too; `Along` names another dimension.
        `global_batch`: the samples of all ranks; needed where slices differ in size, unless all ranks have equally many
        samples. Raises `ArgumentError` if the samples are not those of this rank's slices, and if the module changes a
        buffer.

        If an argument is `Pending` and the module has a method `early`, that method does what needs no vectors while
        the vectors travel. It is called for all slices first, with None in place of the argument. The module then gets
        what `early` returned as its argument `early`.
        """
        self._refuse_running_statistics()
        # The buffers themselves, so that no other can have the identity of one that is gone.
        buffers = {name: (buffer, times_changed(buffer)) for name, buffer in self.module.named_buffers()}
        sums, begun = None, {}
        early: Any = getattr(self.module, "early", None)
        if early is not None and _is_pending((args, kwargs)) and not _is_compiled(self.module):
            cut = CutArguments(tree_map(_without, (args, kwargs)), self.slices, global_batch)
            sums = self._sums(cut)
            for number, (arguments, options) in cut:
                with self._random_numbers("module", number), _parameters_of(sums, number):
                    begun[number] = early(*arguments, **options), torch.get_rng_state()
        cut = CutArguments(tree_map(_arrived, (args, kwargs)), self.slices, global_batch)
        sums = sums or self._sums(cut)
        outputs = []
        for number, (arguments, options) in cut:
            with self._random_numbers("module", number), _parameters_of(sums, number) as own:
                if number in begun:
                    options["early"], random_numbers = begun.pop(number)
                    torch.set_rng_state(random_numbers)
                outputs.append(self.module(*arguments, **options))
            if sums is not None:
                sums.check_leaves(outputs[-1], own)
        if sums is not None:
            sums.has_all_slices()
        now = dict(self.module.named_buffers())
        for name in buffers | now:
            buffer, version = buffers.get(name, (None, 0))
            if buffer is None or now.get(name) is not buffer or times_changed(buffer) != version:
                raise ArgumentError(f"the module changed its buffer {name}: slices would see each other's changes")
        self.passes += self.training
        return self._joined(outputs, cut, None if sums is None else sums.expect)

    @uncompiled
    def each_slice(
        self, function: Callable[..., Any], *args: Any, global_batch: int | None = None, **kwargs: Any
    ) -> Any:
        """Calls `function`, which has no parameters, slice by slice: for a loss that the module does not compute.

        Arguments and results are those of `forward`.
        """
        outputs = []
        cut = CutArguments((args, kwargs), self.slices, global_batch)
        for number, (arguments, options) in cut:
            with self._random_numbers("function", number):
                outputs.append(function(*arguments, **options))
        return self._joined(outputs, cut, None)

    def loss(self, losses: Tensor, divisor: float | None = None) -> Tensor:
        """What to call `backward` on, from `losses`, [own slices that have samples]: a result, or made of the last one.

        Without `divisor` they are means over the samples of a slice, and count by these: the loss is the mean over the
        samples of all ranks. Where ranks have not equally many slices, ranks then tell each other how many samples they
        have. `divisor`: for sums over samples, a number that no world changes, such as the global batch. The value is
        this rank's part of the loss; `global_loss` returns the whole.
        """
        total = self._parts(losses, divisor).sum()
        return total if divisor is None else total / divisor

    def global_loss(self, losses: Tensor, divisor: float | None = None) -> Tensor:
        """Collective: the loss of all slices, a 0-dim tensor with the same bits on every rank and in every world."""
        parts, samples = self._parts(losses, divisor).detach(), self._samples(losses)
        if not all(samples.sizes):
            places = torch.tensor([place for place, size in enumerate(samples.sizes) if size], dtype=torch.int64)
            parts = parts.new_zeros(len(samples.sizes)).index_copy_(0, places.to(parts.device), parts)
        total = self._reduction.leaves(parts).to(losses.device)
        return total if divisor is None else total / divisor

    def gathered(self, own: Tensor, global_batch: int | None = None) -> Tensor:
        """Collective: the results of all samples, [global batch, …], rank by rank and without gradients.

        `own`: the results of this rank's samples, [B, …]. `global_batch`: as in a call.
        """
        self.slices.own_sizes(len(own), global_batch)
        batch, of_sample = self._batch(len(own), global_batch), own.shape[1:]
        sizes = [count * math.prod(of_sample) for count in batch.of_rank]
        return all_gather_parts(own.detach().reshape(-1), sizes, self._group).view(batch.size, *of_sample)

    def _batch(self, local_batch: int, global_batch: int | None) -> GlobalBatch:
        """The samples of all ranks. Collective where ranks have not equally many slices: one rank cannot know then."""
        slices = self.slices
        if slices.count % slices.world_size:
            told = all_gather_parts(torch.tensor([local_batch]), [1] * slices.world_size, self._group)
            return slices.batch_of(told.tolist(), global_batch)
        if global_batch is None:
            return slices.batch_of([local_batch] * slices.world_size)
        spans = (slices.samples(rank, global_batch) for rank in range(slices.world_size))
        return slices.batch_of([span.high - span.low for span in spans], global_batch)

    def _parts(self, losses: Tensor, divisor: float | None) -> Tensor:
        """`losses`; without `divisor` the part of each slice in the mean over all samples."""
        samples = self._samples(losses)
        sizes = [size for size in samples.sizes if size]
        if losses.shape != (len(sizes),):
            raise ArgumentError(
                f"losses of shape {tuple(losses.shape)}; allowed: ({len(sizes)},), one 0-dim loss for each slice of "
                "this rank that has samples. Compute it in the module or by each_slice"
            )
        if divisor is not None:
            return losses
        total = max(self._batch(sum(sizes), samples.global_batch).size, 1)
        if len(set(sizes)) == 1:  # Without a tensor, which would have to be copied to a device.
            return losses * (sizes[0] / total)
        return losses * torch.tensor([size / total for size in sizes], dtype=losses.dtype, device=losses.device)

    def _samples(self, losses: Tensor) -> Samples:
        """The samples of the call that `losses` come from. Without any call, one in each slice."""
        one_each = Samples([1] * len(range(*self.slices.own)), self.slices.count)
        found: Samples = self._samples_of.get(losses, self._last or one_each)  # type: ignore[no-untyped-call]
        return found

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The backward pass of a forward pass made inside keeps its gradients on this rank, added up slice by slice.

        The next backward pass whose forward pass is made outside adds the kept gradients to its own, slice by slice,
        and sums over all slices. So gradients are accumulated with one AllReduce, and the same bits in every world.
        """
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also forgets the gradients that `no_sync` has kept."""
        super().zero_grad(set_to_none)
        self._held.rest()

    def overlap(self, run: RunBeside | None, group: dist.ProcessGroup | None = None) -> None:
        """From now on `run` sends each bucket of gradients in another thread, over `group`, as soon as it is complete.

        `group` has the same ranks, and nothing else may use it. The last bucket travels when the backward pass ends,
        which waits for all buckets. With a codec, on a GPU and after `overlap(None)`, the thread of the backward pass
        sends everything.
        """
        self._reduction.overlap(run if self._device.type == "cpu" else None, group)

    def digest(self) -> str:
        """SHA-256 of all parameters and buffers with their names. Collective; raises `SennitError` if ranks differ."""
        found = hashlib.sha256()
        for name, tensor in _state(self.module):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            found.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        everyone: list[Any] = [None] * self.slices.world_size
        dist.all_gather_object(everyone, found.hexdigest(), group=self._group)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise SennitError(
                    f"parameters or buffers of rank {rank} differ from those of rank 0; or not all ranks call "
                    "`digest`, which is collective"
                )
        return found.hexdigest()

    def _joined(self, outputs: list[object], cut: CutArguments, on_backward: Callable[[], None] | None) -> Any:
        """The result of a call, whose samples are remembered."""
        self._last = Samples(cut.own_sizes, cut.global_batch)
        found = join(outputs, on_backward, is_empty=cut.is_empty)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.ndim == 1:
                self._samples_of[leaf] = self._last
        return found

    def _sums(self, cut: CutArguments) -> SliceSums | None:
        if not torch.is_grad_enabled() or not (layout := self._current_layout()).parameters:
            return None
        return SliceSums(layout, cut.own_sizes, self._held, self._reduction, synchronised=self._synchronised)

    def _current_layout(self) -> Layout:
        """The layout of the parameters as they are now: the module may have got others, or frozen some."""
        places = places_of(self.module)
        if not self._layout.fits(places):
            if self._held:
                raise ArgumentError("parameters changed while no_sync held gradients of them")
            self._layout = Layout(places, self.slices)
        return self._layout

    @contextlib.contextmanager
    def _random_numbers(self, what: str, number: int) -> Iterator[None]:
        """Inside, torch's default generators begin where (seed, pass, slice) say. Afterwards they go on as before.

        This holds for the generators of the host and of the module's device.
        """
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(torch.cuda.default_generators[self._device.index])
        states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(derive(self._seed, what, self.passes, number))
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _refuse_running_statistics(self) -> None:
        for name, norm in self.module.named_modules():
            if isinstance(norm, NormBase) and norm.training and norm.track_running_stats:
                raise ConfigError(
                    f"{name} ({type(norm).__name__}) updates running statistics, which depend on the order of slices. "
                    "Give it track_running_stats=False (statistics of a slice), call eval() on it, or take LayerNorm"
                )


class Samples(NamedTuple):
    """The samples of a call."""

    sizes: list[int]
    """In each slice of this rank."""

    global_batch: int | None
    """Those of all ranks, if they were given."""


def _parameters_of(sums: SliceSums | None, number: int) -> contextlib.AbstractContextManager[list[nn.Parameter]]:
    return contextlib.nullcontext([]) if sums is None else sums.own_parameters(number)


def _is_pending(arguments: object) -> bool:
    return any(isinstance(getattr(leaf, "value", leaf), Pending) for leaf in tree_leaves(arguments))


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch has compiled the module. Its `early` is then plain code, which may round differently."""
    return hasattr(module, "_orig_mod")


def _without(leaf: object) -> object:
    return None if _is_pending(leaf) else leaf


def _arrived(leaf: object) -> object:
    if isinstance(leaf, Along) and isinstance(leaf.value, Pending):
        return Along(leaf.value.wait(), leaf.dim)
    return leaf.wait() if isinstance(leaf, Pending) else leaf


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"parameter {name}", tensor) for name, tensor in module.named_parameters())
    yield from ((f"buffer {name}", tensor) for name, tensor in module.named_buffers())


def _description(module: nn.Module, slices: int, seed: int) -> dict[str, str]:
    """What all ranks must agree on. Nothing raises here: peers would wait for a rank that left."""
    found = {"slices": str(slices), "seed": str(seed)}
    for name, tensor in _state(module):
        if is_lazy(tensor):
            found[name] = "not initialised"
        else:
            frozen = "" if tensor.requires_grad or name.startswith("buffer") else ", frozen"
            found[name] = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}{frozen}"
    found["threads"] = f"{torch.get_num_threads()} (torch.set_num_threads)"
    # Libraries of matrix products choose their code by both.
    found["processor"] = f"{processor_maker()} {torch.backends.cpu.get_cpu_capability()}".strip()
    devices = {tensor.device for _, tensor in _state(module)}
    found["devices"] = str(len(devices))
    for device in devices:
        if device.type == "cuda":
            found["processor"] = torch.cuda.get_device_name(device)
    return found


def _device_of(module: nn.Module) -> torch.device:
    """The device of all parameters and buffers; the host if there are none. Raises `ArgumentError` if they differ."""
    device = next((tensor.device for _, tensor in _state(module)), torch.device("cpu"))
    for name, tensor in _state(module):
        if is_lazy(tensor):
            raise ArgumentError(f"{name} is not initialised; run the module once before")
        if tensor.device.type == "meta":
            raise ArgumentError(f"{name} on {tensor.device}; allowed: memory of the host or of a GPU")
        if tensor.device != device:
            raise ArgumentError(f"{name} on {tensor.device}, others on {device}; allowed: one device")
    return device


def _broadcast(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    with torch.no_grad():
        for _, tensor in _state(module):
            values = tensor.detach().contiguous()
            dist.broadcast(values, group=group, group_src=0)
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)
