# SPDX-License-Identifier: Apache-2.0
"""What the order of samples depends on, as ranks and feeders tell each other.

Ranks have the settings, and feeders have the data. Feeders make the order of both (`StreamOrder`). Ranks need only the
numbers of batches and how many samples each has, which follow from a few counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from sennit.offload.ingest.protocol import ProtocolError, integer, text
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.stream.order import STREAM_ORDER_VERSION, Evaluation, StreamOrder
from sennit.runtime.stream.settings import StreamSettings
from sennit.runtime.stream.split import Last

ROWS_MAX = 1 << 40


def terms_of(run: OrderSettings, stream: StreamSettings) -> dict[str, Any]:
    """The settings as JSON, for the terms of a run."""
    return {"version": STREAM_ORDER_VERSION, "run": asdict(run), "stream": asdict(stream)}


def settings_of(order: Mapping[str, Any]) -> tuple[OrderSettings, StreamSettings]:
    """What `terms_of` made JSON of. Raises ProtocolError for anything else, and for another version."""
    try:
        _check_version(order["version"])
        return OrderSettings(**order["run"]), StreamSettings(**order["stream"])
    except ProtocolError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the trainer names an order that this feeder does not know: {error}") from error


def numbering_of(order: StreamOrder) -> dict[str, Any]:
    """What the numbers of batches depend on, as JSON, for the facts of a feeder."""
    return {
        "version": STREAM_ORDER_VERSION,
        "train": order.train_count,
        "validation": order.validation_count,
        "evaluation": order.eval_count,
        "windows": [[one.steps, *one.numbers, one.name] for one in order.rolling],
    }


def numbered(name: str, told: Mapping[str, Any], run: OrderSettings, stream: StreamSettings) -> StreamOrder:
    """An order with the numbers and sizes of the feeders' batches. It does not know which samples they have.

    `told`: what `numbering_of` made. Raises ProtocolError for anything else, and DataError for a run without batches.
    """
    try:
        _check_version(told["version"])
        train, validation, evaluation = (
            integer(f"facts: {what} rows", told[what], 0, ROWS_MAX) for what in ("train", "validation", "evaluation")
        )
        windows = tuple(
            Evaluation(
                integer("facts: steps of a window", steps, 1, ROWS_MAX),
                (integer("facts: row", begin, 0, ROWS_MAX), integer("facts: row", end, 1, ROWS_MAX)),
                text("facts: name of a window", window),
            )
            for steps, begin, end, window in told["windows"]
        )
    except ProtocolError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"facts: not the numbering of a run: {error!r}") from None
    rest = train + validation
    return StreamOrder(
        name=name,
        block_ends=np.array([rest + evaluation], np.int64),
        order=stream.order,
        seed=run.seed,
        held=Last(rest=rest, picked=evaluation),
        validation=Last(rest=train, picked=validation) if validation else None,
        batch_size=run.batch_size,
        epochs=run.epochs,
        max_steps=run.max_steps,
        eval_every=run.eval_every,
        slices=run.slices,
        shuffle_rows=stream.shuffle_rows,
        rolling=windows,
    )


def _check_version(version: Any) -> None:
    if version != STREAM_ORDER_VERSION:
        raise ProtocolError(f"version {version} of the order of streams; allowed: {STREAM_ORDER_VERSION}")
