# SPDX-License-Identifier: Apache-2.0
"""Means and deviations that follow the stream: of each step, and the same in any world.

docs/decisions/0075-running-means-follow-blocks.md says why they are as they are.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Scale
from sennit.runtime.data.schema import DenseField
from sennit.runtime.stream.fitting import Moments
from sennit.runtime.stream.order import CHUNK_ROWS

KEPT: Final = 64
"""States that are kept. Batches on their way, and chunks that are read ahead, are of the last few."""

BLOCKS: Final = 16
"""The rows of a block are at most this part of `DenseField.running`, unless a batch has more."""


class RunningScales:
    """The scales after each block of training batches. A block, and what is behind it, has those after the last one."""

    def __init__(self, scales: tuple[Scale, ...]) -> None:
        """`scales`: those that the stream begins with."""
        self._steps = [0]
        self._scales = [scales]

    def restore(self, steps: int, told: Sequence[Sequence[float]] | None) -> None:
        """Goes on with what `told` had made of the scales after so many steps. Raises DataError for anything else."""
        begun = self._scales[-1]
        try:
            made = [replace(scale, mean=float(mean), deviation=float(deviation)) for scale, (mean, deviation) in
                    zip(begun, told or (), strict=True)]  # fmt: skip
        except (TypeError, ValueError) as error:
            raise DataError(f"not the means and deviations of these {len(begun)} columns: {error}") from None
        self._steps, self._scales = [steps], [tuple(made)]

    def after(self, steps: int) -> tuple[Scale, ...]:
        """The scales of what comes after so many training steps."""
        # A run that goes on inside of a block has the scales that the block began with.
        return self._scales[max(0, bisect.bisect_right(self._steps, steps) - 1)]

    def follow(self, begin: int, end: int, numbers: npt.NDArray[np.float32]) -> None:
        """Takes in a block: the running columns [N, running] of all samples of the training steps [begin, end).

        A block that was taken in before changes nothing.
        """
        if end <= self._steps[-1]:
            return
        before, found = self.after(begin), Moments.of(numbers)
        # NaN is ignored. One number alone is equal to itself.
        is_constant = (np.fmin.reduce(numbers, 0) == np.fmax.reduce(numbers, 0)) & (found.count > 1)
        places = [place for place, scale in enumerate(before) if scale.field.running is not None]
        scales = list(before)
        for number, place in enumerate(places):
            scale = _followed(before[place], found, number)
            # Numbers that are all equal, as of a feature that is off, would bring the deviation to 0 in the end.
            scales[place] = replace(scale, deviation=before[place].deviation) if is_constant[number] else scale
        self._steps.append(end)
        self._scales.append(tuple(scales))
        del self._steps[:-KEPT], self._scales[:-KEPT]


def told(scales: Sequence[Scale]) -> list[list[float]]:
    """Means and deviations, for `RunningScales.restore`."""
    return [[scale.mean, scale.deviation] for scale in scales]


def _followed(scale: Scale, found: Moments, number: int) -> Scale:
    """The scale after a block of numbers. What came before counts as `DenseField.running` numbers.

    With one number x in a block, this is mean += a (x - mean), with a = 1 / (running + 1): `com` of pandas' `ewm`.
    """
    weight = float(scale.field.running or 0)
    before = Moments(np.array(weight), np.array(scale.mean), np.array(scale.deviation**2 * weight))
    after = before.merged(Moments(found.count[number], found.mean[number], found.squares[number]))
    return replace(scale, mean=float(after.mean), deviation=float(np.sqrt(after.squares / after.count)))


def block_rows(field: DenseField) -> int:
    """The most rows of a block, unless a batch has more."""
    return CHUNK_ROWS if field.running is None else max(1, field.running // BLOCKS)


def check_order(name: str, order: str, columns: Sequence[DenseField]) -> None:
    """Raises DataError for running columns in an order of samples that a rank does not read in turn."""
    if columns and order == "shuffled":
        raise DataError(
            f"{name}: column {columns[0].name} has running = {columns[0].running}, with --order shuffled; "
            "allowed: --order time or files"
        )
