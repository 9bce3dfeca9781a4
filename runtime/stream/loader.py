# SPDX-License-Identifier: Apache-2.0
"""A stream for a training loop of one's own: this rank's batches, with a position that can be saved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.utils.data

from sennit.closing import Closing
from sennit.offload.ingest.facts import TableFacts
from sennit.runtime.backend.first_rank import on_first, place_in
from sennit.runtime.data import sources
from sennit.runtime.data.batch import Batch
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import RawSamples
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import Schema, read_schema
from sennit.runtime.data.source import Source
from sennit.runtime.stream.running import told
from sennit.runtime.stream.settings import OpenedStream, StreamSettings, open_stream, short_stream
from sennit.runtime.stream.source import StreamSource
from sennit.transport.errors import ConfigError


class StreamLoader(Closing):
    """The training batches of this rank, in the order that `sennit train` has. Iterating goes on where it was.

        loader = StreamLoader("clicks/*.parquet", schema="clicks.toml", order="shuffled", batch_size=4096)
        embeddings = ShardedEmbeddingBags([Table(name=t.name, rows=t.rows, dim=16) for t in loader.tables])
        for batch in loader:
            ...

    Ranks together have each sample once. Batches are the same in any world, and after `load_state_dict` in another one.
    One loop has all epochs, and all windows of time. Where one ends, `evaluates` is true.
    """

    def __init__(
        self,
        data: str | Path | Sequence[str | Path] | RawSamples | Samples,
        *,
        schema: str | Path | Schema | None = None,
        order: str | StreamSettings = "shuffled",
        batch_size: int,
        max_steps: int | None = None,
        epochs: int = 1,
        slices: int = 8,
        seed: int = 1,
        split: str = "random",
        eval_fraction: float = 0.1,
        evaluation: str | Path | Sequence[str | Path] = (),
        preprocessing: Preprocessing | None = None,
        histories: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Collective over `group`, if there is a process group.

        `data`, `evaluation`: paths, patterns or folders of files, with a `schema`. `data` may also be a data set by
        name, or samples, the same on every rank. Without `evaluation`, `eval_fraction` of the rows is held back by
        `split`. `order`: "shuffled", "time", "files", or all settings. `batch_size`: samples of all ranks.
        `preprocessing`: of a model that is trained on with the same values; None: one pass over the training rows fits
        it. `histories`: columns that the schema's `history` names have lists, of earlier rows and of the row itself.
        Raises DataError for data that are no stream, and ConfigError for settings.
        """
        settings = StreamSettings(order=order) if isinstance(order, str) else order
        if settings.follow is not None:
            raise ConfigError("follow with StreamLoader; allowed: with sennit train")
        run = OrderSettings(
            seed=seed,
            split=split,
            eval_fraction=eval_fraction,
            batch_size=batch_size,
            epochs=epochs,
            max_steps=max_steps,
            slices=slices,
        )
        if isinstance(data, RawSamples | Samples):
            found = short_stream(data, settings, run, histories=histories)
        else:
            paths = _paths(data)
            if not paths:
                raise ConfigError(
                    f"data is a {type(data).__name__}; allowed: paths of files, the name of a data set, samples; "
                    "sennit.runtime.stream.spool writes files of an iterator"
                )
            held = _paths(evaluation)
            if not held and evaluation != ():
                raise ConfigError(f"evaluation is a {type(evaluation).__name__}; allowed: paths of files")
            source = Source(data=paths[0], further=paths[1:], evaluation=held)
            found = _opened(source, schema, settings, run, group, histories)
        if preprocessing is None:
            preprocessing = found.fit(group=group)
        rank, world_size = place_in(group)
        self.order = found.order
        self.step = 0
        """Training batches taken."""

        self._has_ended = False
        """Whether a loop has come to the end."""

        self._settings = {"fingerprint": found.stream.fingerprint, "seed": seed, "batch_size": batch_size}
        self._settings |= {"slices": slices, "stream": settings.fixed}
        self._preprocessing = preprocessing
        self._source = StreamSource(found.stream, found.order, preprocessing, rank=rank, world_size=world_size)

    @property
    def preprocessing(self) -> Preprocessing:
        """How data become what the model reads, as it is after the batches so far. A server needs it, too."""
        scales = self._source.scales(self.step)
        return self._preprocessing if scales is None else self._preprocessing.scaled(scales)

    @property
    def tables(self) -> tuple[TableFacts, ...]:
        """Name and rows of each table, in the order of `Batch.lengths`."""
        return self._source.tables

    @property
    def dense_count(self) -> int:
        """The columns of `Batch.dense`."""
        return self._source.dense_count

    def __len__(self) -> int:
        """The training batches that are left."""
        return self.order.step_count - self.step

    def __getitem__(self, number: object) -> NoReturn:
        # torch's DataLoader takes what has a length for a list of samples.
        raise TypeError(
            "a StreamLoader has no sample by number: it makes whole batches of this rank, and reads ahead itself; "
            "allowed: to iterate over it, without a DataLoader"
        )

    def __reduce__(self) -> NoReturn:
        # A DataLoader with workers that are spawned sends them its data set.
        raise TypeError(
            "a StreamLoader reads ahead in a thread of its process, so it is neither copied nor pickled; allowed: "
            "state_dict(), and load_state_dict of another loader"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Raises DataError if a loop over all batches has ended before, and in a worker of a DataLoader.

        A worker is a fork, which has no thread that reads.
        """
        if torch.utils.data.get_worker_info() is not None:
            raise DataError("a StreamLoader in a worker of a DataLoader; allowed: to loop over it in the rank itself")
        if self._has_ended:
            raise DataError(
                f"{self.step} batches, which are all, were taken; allowed: StreamLoader(epochs=) with more epochs, all "
                "in one loop, or to go back with load_state_dict"
            )
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        while self.step < self.order.step_count:
            batch = self._source.take(self.order.training_batch(self.step))
            # A state that is saved in the body of the loop has this batch behind it.
            self.step += 1
            yield batch
        self._has_ended = True

    @property
    def evaluates(self) -> bool:
        """Whether an epoch, or a window of time, ends with the last batch: `evaluation` then comes before the next."""
        return self.step > 0 and self.order.evaluates(self.step)

    @property
    def window(self) -> str:
        """The name of the window of time that `evaluation` has; empty without windows."""
        return self.order.evaluated(self.step)

    def evaluation(self) -> Iterator[Batch]:
        """The batches of the evaluation that follows the steps so far, or else of the next one."""
        for number in self.order.evaluation_batches(self.step):
            yield self._source.take(number)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """The position, and what tells this stream from another.

        `step`: behind so many training batches of the stream; None: behind all that were taken. Whoever takes batches
        ahead of their use, as a pipeline, gives the number of those that were used. Raises DataError for a number that
        is no position of this loader so far.
        """
        step = self.step if step is None else step
        if not 0 <= step <= self.step:
            raise DataError(f"step {step}; allowed: 0 to {self.step}, the batches that were taken")
        scales = self._source.scales(step)
        return {"step": step, **self._settings, **({} if scales is None else {"scales": told(scales)})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind the batches that had been taken. Raises DataError for the state of another stream."""
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise DataError(f"{name} {state.get(name)} in the state; allowed: {value}, as in this loader")
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step <= self.order.step_count:
            raise DataError(f"step {step!r} in the state; allowed: 0 to {self.order.step_count}")
        self._source.restore_scales(step, state.get("scales"))
        self.step, self._has_ended = step, False

    def close(self) -> None:
        """Ends its thread, and closes files."""
        self._source.close()


def _paths(given: object) -> tuple[str, ...]:
    """One path or several, as texts; none for anything else."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    paths = tuple(os.fspath(path) for path in several if isinstance(path, str | os.PathLike))
    return paths if len(paths) == len(several) else ()


def _opened(
    source: Source,
    schema: str | Path | Schema | None,
    settings: StreamSettings,
    run: OrderSettings,
    group: dist.ProcessGroup | None,
    histories: bool,
) -> OpenedStream:
    if sources.is_named(source.data):
        if schema is not None:
            raise DataError(f"a schema with the data set {source.data!r}; allowed: with files")
        # Each rank has its own in memory.
        return short_stream(
            sources.load(source, seed=run.seed, histories=histories), settings, run, histories=histories
        )
    if schema is None:
        raise DataError(f"data set {source.data!r} without schema=; allowed: without it are {', '.join(sources.NAMES)}")
    known = schema if isinstance(schema, Schema) else read_schema(Path(schema))
    # Rank 0 makes the index: for text, that is a pass over all of it. A rank that opens a file compares it.
    return on_first(lambda: open_stream(source, known, settings, run, histories=histories), group)
