# SPDX-License-Identifier: Apache-2.0
"""How a run reads its data, and the order that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import numpy as np
import torch.distributed as dist

from sennit.options import Option, check
from sennit.runtime.backend.first_rank import place_in
from sennit.runtime.data import sources
from sennit.runtime.data.arrow_columns import Piece, check_types, labels_of
from sennit.runtime.data.errors import DataError, Incomplete
from sennit.runtime.data.files import find_files
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import Schema
from sennit.runtime.data.source import Source
from sennit.runtime.stream.balance import BALANCE_VERSION
from sennit.runtime.stream.fitting import fit
from sennit.runtime.stream.follow_settings import FollowSettings
from sennit.runtime.stream.index import StreamIndex, index_of, open_index
from sennit.runtime.stream.memory_file import in_memory
from sennit.runtime.stream.order import CHUNK_ROWS, ORDERS, STREAM_ORDER_VERSION, Interval, StreamOrder
from sennit.runtime.stream.refused_rows import without_refused
from sennit.runtime.stream.running import block_rows, check_order
from sennit.runtime.stream.source import Stream
from sennit.runtime.stream.split import Last, Split, split
from sennit.runtime.stream.synthetic_data import index_of_synthetic, is_synthetic
from sennit.runtime.stream.times import (
    Times,
    duration_text,
    moment_text,
    parse_duration,
    parse_moment,
    rolling,
)
from sennit.transport.errors import ConfigError

CHUNK_BYTES: Final = 16 << 20
"""A chunk of wide rows has fewer of them: several chunks are in memory, and each is put together from pieces."""

EVALUATE_ON = ("rest", "next")


def _duration(text: str) -> float:
    return parse_duration(text)


def _moment(text: str) -> float:
    return parse_moment(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """In which order a run reads its data, piece by piece. All options but the last belong to the model."""

    order: Annotated[str, Option(choices=ORDERS)] = "shuffled"
    """The order of samples. Files are read piece by piece, so they may be larger than memory."""

    shuffle_rows: Annotated[int, Option(metavar="ROWS", low=1, high=2**40)] = 1 << 18
    """With --order shuffled: rows of all ranks that are mixed at once, at most. Two such windows are in memory."""

    window_s: Annotated[
        float | None,
        Option(flag="--window", metavar="DURATION", parse=_duration, text=duration_text, above=0, high=1e11),
    ] = None
    """With --order time: train a window of time, such as 1d, evaluate the next one, and go on with it."""

    train_until_s: Annotated[
        float | None, Option(flag="--train-until", metavar="TIME", parse=_moment, text=moment_text)
    ] = None
    """Train on rows before this time (2026-11-28, or seconds since 1970), and evaluate those behind it."""

    evaluate_on: Annotated[str, Option(choices=EVALUATE_ON)] = "rest"
    """With --train-until: evaluate all rows behind it, or those of the next --window."""

    balance: Annotated[bool, Option()] = False
    """Deal the samples of each batch to its slices so that their histories cost alike, for models that read histories.
    Ranks then wait less for one another."""

    time_tolerance_s: Annotated[
        float, Option(flag="--time-tolerance", metavar="DURATION", parse=_duration, text=duration_text, low=0)
    ] = 0.0
    """With a column of time: by how much a row may be earlier than one before it."""

    fit_rows: Annotated[int | None, Option(metavar="ROWS", low=1, high=2**62)] = None
    """Fit means and dictionaries to the first ROWS rows of training. None: to all, and with --window to the first
    window."""

    follow: FollowSettings | None = None
    """How files that come later are found; None: the files are those that are there at the beginning."""

    def __post_init__(self) -> None:
        check(self)
        if self.evaluate_on == "next" and (self.train_until_s is None or self.window_s is None):
            raise ConfigError("--evaluate-on next alone; allowed: with --train-until TIME and --window DURATION")
        if self.follow is not None and self.order == "shuffled":
            raise ConfigError("--follow with --order shuffled, which needs all rows; allowed: time, files")
        if self.follow is not None and self.train_until_s is not None:
            raise ConfigError("--follow with --train-until; allowed: with --window, or with --eval-data")
        if self.window_s is None:
            return
        if self.order != "time":
            raise ConfigError(f"--window with --order {self.order}; allowed: time")
        if self.train_until_s is not None and self.evaluate_on != "next":
            raise ConfigError("--window with --train-until; allowed: with --evaluate-on next, or one of the two")

    @property
    def needs_time(self) -> bool:
        """Whether there has to be a column of time."""
        return self.order == "time" or self.train_until_s is not None

    @property
    def fixed(self) -> dict[str, Any]:
        """What decides the order, as JSON."""
        found: dict[str, Any] = {"version": STREAM_ORDER_VERSION, "order": self.order}
        if self.follow is not None:
            found["follow"] = True
        if self.order == "shuffled":
            found["shuffle_rows"] = self.shuffle_rows
        for name in ("window_s", "train_until_s", "fit_rows"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.balance:
            found["balance"] = BALANCE_VERSION
        return found | ({"evaluate_on": self.evaluate_on} if self.evaluate_on != "rest" else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedStream:
    """The stream of a run, its order, and the training numbers that means and vocabularies are fitted to."""

    stream: Stream
    order: StreamOrder
    fitted: Interval
    times: Times | None

    def fit(
        self, *, min_frequency: int = 1, known: Preprocessing | None = None, group: dist.ProcessGroup | None = None
    ) -> Preprocessing:
        """One pass over the training rows (`fitting.fit`). Collective over `group`, if there is a process group."""
        rank, world_size = place_in(group)

        def gather(mine: Any) -> list[Any]:
            every: list[Any] = [mine] * world_size
            if world_size > 1:
                dist.all_gather_object(every, mine, group)
            return every

        return fit(
            self.stream.name,
            self.stream.index,
            self.stream.schema,
            self.order.training_part(),
            self.fitted,
            min_frequency=min_frequency,
            known=known,
            rank=rank,
            world_size=world_size,
            gather=gather,
        )

    def only_label(self) -> float | None:
        """The label that all rows have by which an evaluation is judged, of several labels the first; None: there are
        two. Reads labels of blocks until another one comes.
        """
        index, part = self.stream.index, self.order.judged_part()
        schema = replace(self.stream.schema, labels=self.stream.schema.labels[:1])
        first: float | None = None
        begin, end = part.rows((0, part.count))
        for block in range(index.block_of(begin), index.block_of(end - 1) + 1):
            block_begin = index.begin_of(block)
            if not part.has(np.arange(block_begin, int(index.ends[block]))).any():
                continue
            for place, rows in index.read(block_begin, int(index.ends[block]), schema.labels):
                row = block_begin + place.row
                labels = labels_of([Piece(rows, place)], schema).numpy()[part.has(np.arange(row, row + len(rows)))]
                for label in np.unique(labels):
                    if first is not None and label != first:
                        return None
                    first = float(label)
        return first


def open_stream(
    source: Source, schema: Schema, settings: StreamSettings, run: OrderSettings, *, histories: bool = False
) -> OpenedStream:
    """Reads the index of the files. Raises DataError for files or settings that give no stream.

    `histories`: with those of the schema, if it has any.
    """
    schema = schema if histories else schema.without_history()
    # Listed once: a file that comes now is not there for the one and new to the other.
    paths = (source.data, *source.further)
    files, held = find_files(paths), find_files(source.evaluation)
    index = open_index(
        (*files, *held),
        schema.read_columns,
        time_column=None if schema.time is None else schema.time.column,
        text=schema.text_format,
        encodings=schema.encodings,
        beside=schema.beside,
    )
    for file in index.files:
        check_types(file.name, schema, file.schema)
    if (kept := without_refused(index.files, schema)) != index.files:
        index = index_of(
            kept, index.columns, time_column=index.time_column, encodings=schema.encodings, beside=schema.beside
        )
    if settings.order == "shuffled" and index.is_sequential:
        file = next(file for file in index.files if file.is_sequential)
        raise DataError(
            f"{file.name}: it has to be read from its beginning; allowed: --order time or files, or to unpack it"
        )
    train_rows = index.sample_count
    if held:
        train_rows = int(index.ends[index.file_ends[len(files) - 1] - 1])
        if not 0 < train_rows < index.sample_count:
            empty, use = (source.evaluation, "evaluate") if train_rows else (paths, "train on")
            raise DataError(f"{', '.join(empty)}: no row to {use}; allowed: files with rows")
    return ordered(source.name, index, schema, train_rows, settings, run)


def open_source(
    source: Source,
    settings: StreamSettings,
    run: OrderSettings,
    *,
    seed: int,
    adapted: Callable[[Schema], Schema] = lambda schema: schema,
    histories: bool = False,
) -> OpenedStream:
    """The stream of files, one that is made, or the short one of a named data set.

    `seed`: for data sets that are made. `adapted`: changes what the columns mean. `histories`: with those of the data
    set, if it has any. Raises DataError if there is no stream.
    """
    if is_synthetic(source):
        index, schema = index_of_synthetic(source, adapted, histories=histories)
        return ordered(source.data.partition("?")[0], index, schema, index.sample_count, settings, run)
    if sources.is_named(source.data):
        return short_stream(
            sources.load(source, seed=seed, histories=histories), settings, run, adapted, histories=histories
        )
    return open_stream(source, adapted(sources.schema_of(source)), settings, run, histories=histories)


def short_stream(
    data: RawSamples | Samples,
    settings: StreamSettings,
    run: OrderSettings,
    adapted: Callable[[Schema], Schema] = lambda schema: schema,
    *,
    histories: bool = False,
) -> OpenedStream:
    """The stream of a data set that is in memory. Raises DataError for samples or settings that give none.

    `histories`: with those of the samples, if they have any.
    """
    raw = RawSamples.of(data) if isinstance(data, Samples) else data
    raw = raw if histories else raw.without_history()
    # In another order, times tell no stream from another.
    file, schema = in_memory(raw if settings.needs_time else replace(raw, times=None))
    schema = adapted(schema)
    time = None if schema.time is None else schema.time.column
    if schema.history is not None or schema.group is not None:
        check_types(raw.name, schema, file.schema)
    columns = (*schema.read_columns, *([] if time is None else [time]))
    index = index_of((file,), columns, time_column=time, beside=schema.beside)
    return ordered(raw.name, index, schema, len(raw) - (raw.eval_rows or 0), settings, run)


def _row_bytes(schema: Schema) -> int:
    """Of a row's samples, with one id for each table, and histories of full length."""
    ids, history = len(schema.sparse), schema.history
    if history is not None:
        ids += history.last * (len(history.columns) + len(history.past))
    return 4 * (len(schema.dense) + len(schema.labels)) + 8 * ids


def ordered(
    name: str,
    index: StreamIndex,
    schema: Schema,
    train_rows: int,
    settings: StreamSettings,
    run: OrderSettings,
    *,
    grows: bool = False,
    before: OpenedStream | None = None,
) -> OpenedStream:
    """The stream of an index, in the order of these settings. Raises DataError for rows or settings that give none, and
    Incomplete where there are too few rows.

    `train_rows`: the first rows; those behind are for evaluation. `grows`: more files may come. `before`: the stream
    when it had fewer files.
    """
    check_order(name, settings.order, schema.running)
    if settings.balance and schema.history is None:
        raise ConfigError(f"--balance for {name} without histories; allowed: with a model that reads them")
    if settings.needs_time and schema.time is None:
        raise DataError(
            f'{name}: no column of time; allowed: time = "name" in the schema of files, or another --order without it'
        )
    times = None
    if schema.time is not None and settings.needs_time:
        times = Times(
            index,
            unit=schema.time.unit,
            tolerance_s=settings.time_tolerance_s,
            row_count=train_rows,
            before=None if before is None else before.times,
        )
    held, windows = _held(name, settings, run, index.sample_count, train_rows, times, grows=grows)
    validation = None
    if run.validation_fraction:
        if windows:
            raise ConfigError("--validation-fraction with --window, which evaluates rows that were never trained on")
        validation = split(
            _how(settings, run), "validation", held.rest, run.validation_fraction, f"{run.seed}/validation"
        )
    if windows and run.eval_every is not None:
        raise ConfigError("--eval-every with --window, which says when evaluations are; allowed: one of the two")
    order = StreamOrder(
        name=name,
        block_ends=index.ends,
        order=settings.order,
        seed=run.seed,
        held=held,
        validation=validation,
        batch_size=run.batch_size,
        epochs=run.epochs,
        max_steps=run.max_steps,
        eval_every=run.eval_every,
        slices=run.slices,
        chunk_rows=min(CHUNK_ROWS, CHUNK_BYTES // _row_bytes(schema), *(block_rows(part) for part in schema.running)),
        shuffle_rows=settings.shuffle_rows,
        balances=settings.balance,
        rolling=windows,
        grows=grows,
    )
    check_time = times.check if times is not None and settings.order == "time" else None
    fitted = settings.fit_rows or (windows[0].steps * run.batch_size if windows else order.train_count)
    if fitted > order.train_count:
        raise Incomplete(f"{name}: {order.train_count} rows to train on; allowed: {fitted} or more (--fit-rows)")
    return OpenedStream(stream=Stream(name, index, schema, check_time), order=order, fitted=(0, fitted), times=times)


def _how(settings: StreamSettings, run: OrderSettings) -> str:
    """How rows are held back. In order, what is evaluated comes after what is trained on."""
    return run.split if settings.order == "shuffled" else "last"


def _held(
    name: str,
    settings: StreamSettings,
    run: OrderSettings,
    count: int,
    train_rows: int,
    times: Times | None,
    *,
    grows: bool,
) -> tuple[Split, tuple[Any, ...]]:
    """What is held back, and the evaluations of a rolling run."""
    if train_rows < count:
        if settings.window_s is not None or settings.train_until_s is not None:
            raise ConfigError("--eval-data with --window or --train-until; allowed: one of them")
        return Last(rest=train_rows, picked=count - train_rows), ()
    if settings.train_until_s is not None:
        assert times is not None
        rest, end = times.row_at(settings.train_until_s), count
        if settings.window_s is not None:
            end = times.row_at(settings.train_until_s + settings.window_s)
        if not 0 < rest < end:
            raise DataError(
                f"{name}: {rest} rows before {moment_text(settings.train_until_s)} and {end - rest} to evaluate; "
                f"times are {moment_text(times.first_s)} to {moment_text(times.last_s)}"
            )
        return Last(rest=rest, picked=end - rest), ()
    if settings.window_s is not None:
        assert times is not None
        # The last window may get more rows, and nobody trains on rows of a window that is not evaluated yet.
        known = times.windows(settings.window_s)[-1][1] if grows else count
        return Last(rest=known, picked=count - known), rolling(times, settings.window_s, known, run.batch_size)
    return split(_how(settings, run), "evaluation", count, run.eval_fraction, f"{run.seed}/evaluation"), ()
