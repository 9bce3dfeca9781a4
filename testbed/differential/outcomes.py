# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,type-arg,func-returns-value"
"""Runs rounds of calls over both backends, and compares the outcome of each call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

import sennit  # noqa: F401  the backend, in a checkout without entry points too
from sennit.errors import SennitError
from sennit.testbed.differential.calls import DIFFERENCES, KINDS, Call, Draw, is_refused
from sennit.testbed.differential.tensors import Given, same, unusual

DEADLINE: Final = timedelta(seconds=60)


class Differs(SennitError):
    """The outcomes of a call differ. The message says how to repeat it."""


def run(calls: Sequence[Call], group: Any, given: Sequence[Given], order: Sequence[int], together: bool) -> list[str]:
    """Runs calls, all in flight at once where `together`. Returns the error of each; empty: none."""
    errors = [""] * len(calls)
    works: list[list[Any]] = [[] for _ in calls]

    def wait(index: int) -> None:
        try:
            for work in works[index]:
                work.wait()
        except (RuntimeError, ValueError, TypeError) as error:
            errors[index] = f"{type(error).__name__}: {error}"

    for index, call in enumerate(calls):
        try:
            works[index] = call.start(group, given[index].inputs, given[index].outputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            errors[index] = f"{type(error).__name__}: {error}"
        if not together:
            wait(index)
    for index in order if together else ():
        wait(index)
    return errors


def compare(rank: int, world: int, *, calls: int, seed: int, first: int = 0) -> dict[str, int]:
    """Runs rounds from number `first` until `calls` calls were drawn. Every rank of the default group has to call this.

    Returns how often this rank saw each outcome. Raises Differs at the first call whose outcomes differ.
    """
    members = [list(range(world))] + ([[0, world - 1], list(range(1, world))] if world > 2 else [])
    groups = [
        (ranks, *(dist.new_group(ranks, backend=name, timeout=DEADLINE) for name in ("gloo", "sennit")))
        for ranks in members
    ]
    outcomes: Counter[str] = Counter()
    number, drawn = first, 0
    while drawn < calls:
        rng = random.Random(f"{seed}/{number}")
        ranks, gloo, ours = rng.choice(groups)
        length, together = rng.choice((1, 1, 2, 4)), rng.random() < 0.5
        kinds, order = [rng.choice(KINDS) for _ in range(length)], rng.sample(range(length), length)
        if rank in ranks:
            draws = [Draw(f"{seed}/{number}/{place}", ranks.index(rank), len(ranks)) for place in range(length)]
            made = [kind(draw) for kind, draw in zip(kinds, draws, strict=True)]
            plain = [
                Given(
                    inputs=draw.multiplied(call.inputs), outputs=draw.multiplied([one.clone() for one in call.outputs])
                )
                for call, draw in zip(made, draws, strict=True)
            ]
            given = [unusual(draw.own, call) for draw, call in zip(draws, made, strict=True)]
            # gloo's round has ended before the other begins.
            theirs = run(made, gloo, plain, order, together)
            mine = run(made, ours, given, order, together)
            for place, (call, draw) in enumerate(zip(made, draws, strict=True)):
                try:
                    outcomes[outcome(call, plain[place], theirs[place], given[place], mine[place])] += 1
                except Differs as error:
                    shapes = " to ".join(
                        str([tuple(one.shape) for one in tensors]) for tensors in (call.inputs, call.outputs)
                    )
                    raise Differs(
                        f"{call.kind}, {draw.dtype}, {draw.op_name}, {shapes}: {error} (call {place} of {length} of "
                        f"--seed {seed} --first {number} --ranks {world})"
                    ) from None
        drawn += length
        number += 1
    for _, gloo, ours in groups:
        dist.destroy_process_group(gloo)
        dist.destroy_process_group(ours)
    return dict(outcomes)


def outcome(call: Call, plain: Given, theirs: str, given: Given, mine: str) -> str:
    """Returns the common outcome of a call. Raises Differs. `theirs`, `mine`: the errors over gloo and sennit."""
    if theirs:
        return "refused by both" if mine else "refused by gloo alone"
    if is_refused(call) != bool(mine):
        raise Differs(
            f"sennit takes it, but {DIFFERENCES[call.difference]}" if not mine else f"sennit refuses it: {mine}"
        )
    if mine:
        return f"refused by sennit alone, {call.difference}"
    expected = plain.outputs if call.is_written else call.outputs
    for index, (one, other) in enumerate(zip(given.outputs, expected, strict=True)):
        if not same(one, other, is_exact=call.is_exact or not call.is_written):
            raise Differs(f"output {index} is {one.flatten()[:8]}, over gloo {other.flatten()[:8]}")
    if not given.is_untouched():
        raise Differs("something between the elements of an output was written")
    return "same"


def run_rank(rank: int, world: int, store: str, what: Callable[..., dict[str, int]], options: dict[str, int]) -> None:
    """One process of the program: makes the default group, runs `what`, and prints what it has seen."""
    torch.set_num_threads(1)
    limit, records = DEADLINE, dist.FileStore(store, world)
    dist.init_process_group("sennit", store=records, rank=rank, world_size=world, timeout=limit)
    found = what(rank, world, **options)
    dist.destroy_process_group()
    counts = ", ".join(f"{found[name]} {name}" for name in sorted(found))
    print(f"rank {rank}: {sum(found.values())} calls: {counts}", flush=True)
