# SPDX-License-Identifier: Apache-2.0
# Torch types its tensors thinly:
# mypy: disable-error-code="no-untyped-call"
"""Gradients of a module's parameters, slice by slice, summed over all slices in the canonical tree.

Every slice runs on parameters of its own that share the memory of the module's. So autograd adds up nothing over
slices. A rank adds up its slices' gradients as far as the tree allows, and AllReduce does the rest, bucket by bucket.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sennit.runtime.backend.torch_versions import at_end_of_backward, backward_pass, tree_leaves
from sennit.runtime.replicas.cutting import CUT_NODE
from sennit.runtime.replicas.gradient_rows import Layout
from sennit.runtime.replicas.reduction import Reduction
from sennit.runtime.sharded.accumulation import begin_holder, end_holder, hold, sum_over_slices
from sennit.runtime.sharded.sent import Running
from sennit.transport.errors import ArgumentError, MismatchError, Unsupported
from sennit.transport.plans.tree import Span

# The types whose sums are made in float32 and rounded once.
_NARROW = (torch.float16, torch.bfloat16)


class Held:
    """Gradients kept slice by slice until a later backward pass sums them (`no_sync`)."""

    def __init__(self) -> None:
        self._gradients: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._gradients)

    def add(self, number: int, index: int, gradient: Tensor) -> None:
        held = self._gradients.setdefault((number, index), gradient)
        if held is not gradient:
            held.add_(gradient)

    def take(self, number: int, index: int) -> Tensor | None:
        return self._gradients.pop((number, index), None)

    def rest(self) -> list[tuple[int, int, Tensor]]:
        """Returns what is left, and forgets it."""
        rest = [(number, index, gradient) for (number, index), gradient in self._gradients.items()]
        self._gradients.clear()
        return rest


class SliceSums:
    """The gradients of one forward pass. Each backward pass through it fills the sums and empties them again."""

    def __init__(
        self, layout: Layout, sizes: Sequence[int], held: Held, reduction: Reduction, *, synchronised: bool
    ) -> None:
        """`sizes`: samples in each slice of this rank, maybe 0. `synchronised`: the backward pass sums over ranks."""
        self._layout, self._sizes, self._held, self._reduction = layout, sizes, held, reduction
        self._synchronised = synchronised
        self._nodes = layout.slices.nodes_of(layout.slices.rank)
        self._row_of = {(node.low, node.high - node.low): row for row, node in enumerate(self._nodes)}
        # The parameters of each slice. The module may run in two parts, which share them.
        self._aliases: dict[int, list[nn.Parameter]] = {}
        self._buckets = reduction.buckets(layout)
        self._bucket_of = {index: place for place, bucket in enumerate(self._buckets) for index in bucket.parameters}
        self._is_first = False
        if not synchronised:
            begin_holder(self)
        self._begin()

    def _begin(self, backward_pass: int | None = None) -> None:
        self._backward_pass = backward_pass
        self._rows: dict[torch.dtype, Tensor] = {}
        self._seen: set[tuple[int, int]] = set()
        # The number of gradients that each bucket waits for.
        filled = sum(1 for size in self._sizes if size)
        self._missing = [filled * len(bucket.parameters) for bucket in self._buckets]
        # Sums that are on their way, in the order of buckets.
        self._sent: list[Running] = []
        # Nodes of the tree that wait for the other half: (parameter, first slice, slices).
        self._waiting: dict[tuple[int, int, int], Tensor] = {}

    @contextlib.contextmanager
    def own_parameters(self, number: int) -> Iterator[list[nn.Parameter]]:
        """Inside, the module's parameters are those of a slice. They share the memory of the real ones."""
        layout = self._layout
        if number not in self._aliases:
            self._aliases[number] = [nn.Parameter(parameter.detach()) for parameter in layout.parameters]
            for index, alias in enumerate(self._aliases[number]):
                alias.register_post_accumulate_grad_hook(functools.partial(self._take, number, index))
        aliases = self._aliases[number]
        try:
            for place, index in layout.places:
                place.put(aliases[index])
            yield aliases
        finally:
            for place, index in layout.places:
                place.put(layout.parameters[index])

    def has_all_slices(self) -> None:
        """The module has run on all slices, and all were checked. Now only the graph keeps the slices' parameters."""
        self._layout.is_checked = True
        self._aliases.clear()

    def check_leaves(self, output: object, own: Sequence[nn.Parameter]) -> None:
        """Raises `ArgumentError` if a slice's gradients would go elsewhere than to its own parameters and arguments.

        Passes are checked until one was good on all slices.
        """
        if self._layout.is_checked:
            return
        known = {id(parameter) for parameter in own}
        nodes = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or node.name() == CUT_NODE:
                continue
            seen.add(node)
            if node.name() == "CheckpointFunctionBackward":
                raise ArgumentError("checkpoint() runs the module again without slices; give it use_reentrant=False")
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                names = {id(real): name for real, name in zip(self._layout.parameters, self._layout.names, strict=True)}
                what = names.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)}")
                raise ArgumentError(
                    f"the module uses {what}, which requires gradients, by a reference that slices cannot replace. Let "
                    "it be an attribute of a module, or an argument"
                )
            nodes.extend(next_node for next_node, _ in node.next_functions)

    def expect(self) -> None:
        """A backward pass has reached the slices' results: sums gradients at its end, whatever else it reaches."""
        current = backward_pass()
        # A backward pass that failed has left its sums here.
        if self._backward_pass != current:
            self._begin(current)
            sum_over_slices(current)
            self._is_first = self._reduction.is_first(current)
            if self._synchronised:
                self._add_empty()
            else:
                hold(current)
            at_end_of_backward(self._finish)

    def _take(self, number: int, index: int, alias: Tensor) -> None:
        """Autograd's hook: one slice's gradient of one parameter is complete."""
        self.expect()
        gradient, alias.grad = alias.grad, None
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise Unsupported(
                "sparse gradients", f"parameter {self._layout.names[index]} has one; make it dense (sparse=False)"
            )
        gradient = gradient.detach()
        if not self._synchronised:
            self._held.add(number, index, gradient)
            return
        before = self._held.take(number, index)
        self._add(number, index, gradient if before is None else before.add_(gradient))

    def _add_empty(self) -> None:
        """Slices without samples give zeros, or what earlier passes have kept of them."""
        for number, size in zip(range(*self._layout.slices.own), self._sizes, strict=True):
            for index, parameter in enumerate(() if size else self._layout.parameters):
                held = self._held.take(number, index)
                if held is not None:
                    self._seen.add((number, index))
                self._sum(number, index, torch.zeros_like(parameter) if held is None else held)

    def _add(self, number: int, index: int, gradient: Tensor) -> None:
        self._seen.add((number, index))
        self._sum(number, index, gradient)
        self._missing[self._bucket_of[index]] -= 1
        if self._is_first:
            self._send()

    def _send(self) -> None:
        """Sends the sums of buckets that are complete, but not before those ahead of them, nor the last one.

        So all ranks send them in one order, whichever parameters their slices reach.
        """
        while len(self._sent) < len(self._buckets) - 1 and not self._missing[len(self._sent)]:
            bucket = self._buckets[len(self._sent)]
            self._sent.append(self._reduction.begin(self._layout, bucket, self._rows_of(bucket.dtype)))

    def _sum(self, number: int, index: int, gradient: Tensor) -> None:
        low, size = number, 1
        value = gradient.float() if gradient.dtype in _NARROW else gradient
        while (low, size) not in self._row_of:
            half = self._waiting.pop((index, low ^ size, size), None)
            if half is None:
                self._waiting[index, low, size] = value
                return
            # a + b has the bits of b + a, so it does not matter which slice came first.
            low, size = low & ~size, 2 * size
            if (low, size) in self._row_of:
                torch.add(half, value, out=self._piece(low, size, index))
                return
            value = half.add_(value)
        self._piece(low, size, index).copy_(value)

    def _piece(self, low: int, size: int, index: int) -> Tensor:
        rows = self._rows_of(self._layout.parameters[index].dtype)
        return self._layout.piece(rows[self._row_of[low, size]], index)

    def _rows_of(self, dtype: torch.dtype) -> Tensor:
        """[nodes of this rank, elements]: the partial sums of the parameters of one type."""
        if dtype not in self._rows:
            rows = self._layout.free_rows.pop(dtype, None)
            if rows is None:
                summed = torch.float32 if dtype in _NARROW else dtype
                shape = (len(self._nodes), self._layout.lengths[dtype])
                rows = torch.zeros(shape, dtype=summed, device=self._layout.device)
            self._rows[dtype] = rows
        return self._rows[dtype]

    @torch.no_grad()
    def _finish(self) -> None:
        """The backward pass has ended: leaves the sum over all slices in the parameters' `grad`."""
        try:
            if self._synchronised:
                self._reduce()
        finally:
            end_holder(self)
            self._begin()

    def _reduce(self) -> None:
        layout = self._layout
        for number, index, gradient in self._held.rest():
            self._add(number, index, gradient)
        counts = torch.zeros(len(layout.parameters) + layout.slices.count)
        for _, index in self._seen:
            counts[index] += 1
        own = layout.slices.own
        counts[len(layout.parameters) :][own.low : own.high] = torch.tensor(self._sizes, dtype=torch.float32)
        for index, parameter in enumerate(layout.parameters):
            for number, size in zip(range(*own), self._sizes, strict=True):
                if size and (number, index) not in self._seen:
                    self._add(number, index, torch.zeros_like(parameter))
        rows = self._rows_of(torch.float32)
        rows[:, : layout.counts_length] = 0
        rows[0, : len(counts)].copy_(counts)
        self._send()
        last = self._buckets[-1]
        total = self._reduction.total(layout, last, self._rows_of(last.dtype))
        totals = [*self._reduction.results(self._sent), total]
        layout.free_rows = self._rows
        counted = total[: len(counts)].tolist()
        self._check_sizes([int(size) for size in counted[len(layout.parameters) :]])
        there = [total.to(layout.device) for total in totals]
        for index, parameter in enumerate(layout.parameters):
            if counted[index]:
                place = self._bucket_of[index]
                gradient = layout.piece(there[place], index, self._buckets[place].start)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)

    def _check_sizes(self, sizes: list[int]) -> None:
        """All ranks see the same sizes, so all raise or none does."""
        slices = self._layout.slices
        of_rank = [sum(sizes[slice(*slices.of(rank))]) for rank in range(slices.world_size)]
        by_slice = slices.sizes(Span(0, slices.count), sum(sizes))
        if sizes != by_slice and len(set(of_rank)) > 1:
            ranks = ", ".join(f"rank {rank} {sizes[slice(*slices.of(rank))]}" for rank in range(slices.world_size))
            raise MismatchError(
                f"ranks disagree on the global batch: samples in the slices of {ranks}; allowed: sizes that differ by "
                f"one at most, as {by_slice}, or equally many samples on all ranks"
            )
