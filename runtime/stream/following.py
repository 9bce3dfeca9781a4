# SPDX-License-Identifier: Apache-2.0
"""Files that come while a run trains: which of them are whole, whether more will come, and a source that goes on.

Batches are those of a run over all files at once. So a file is taken when it is whole and all files before it, by name,
were taken. What others do: Spark's file source takes files by the time of their change; Flink's FileSource looks again
at an interval. Both forget which files were before which, and so their order is no function of the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from sennit.runtime.backend.first_rank import on_first
from sennit.runtime.data.arrow_columns import check_types
from sennit.runtime.data.errors import DataError, Incomplete
from sennit.runtime.data.files import DataFile, GrowingFolder, check_once, find_files
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.schema import Schema
from sennit.runtime.data.source import Source
from sennit.runtime.data.text_format import TextFormat
from sennit.runtime.stream.files import StreamFile
from sennit.runtime.stream.formats import check_skipped, is_text, open_files, typed
from sennit.runtime.stream.index import index_of
from sennit.runtime.stream.refused_rows import without_refused
from sennit.runtime.stream.settings import OpenedStream, StreamSettings, ordered
from sennit.runtime.stream.source import StreamSource
from sennit.transport.errors import ConfigError

SEEN: Final = "files.json"
"""Lies beside a checkpoint: the files whose rows the run knew, in order."""

_LOOK_S: Final = 1.0
"""Seconds between two looks into the folder while a run waits."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A file that a run has taken, as its checkpoint tells of it."""

    name: str
    rows: int
    digest: str

    @staticmethod
    def of(file: StreamFile) -> Seen:
        return Seen(file.name, sum(file.block_rows), file.digest)


def seen_text(seen: Sequence[Seen]) -> str:
    return json.dumps([[one.name, one.rows, one.digest] for one in seen], indent=1) + "\n"


def read_seen(text: str) -> list[Seen]:
    """Raises ValueError for what `seen_text` has not written."""
    try:
        return [Seen(str(name), int(rows), str(digest)) for name, rows, digest in json.loads(text)]
    except TypeError as error:
        raise ValueError(f"not a list of files: {error}") from None


@dataclass(frozen=True, slots=True)
class Look:
    """What rank 0 has found in the folder."""

    opened: OpenedStream | None
    """The stream with all files so far; None: it is as before, or too short to begin."""

    seen: tuple[Seen, ...]
    """The files to train on."""

    reason: str
    """What the run waits for, if it has to."""


class Follower:
    """Looks for files of a run, on rank 0. All ranks make it; `look` is collective."""

    def __init__(
        self,
        source: Source,
        schema: Schema,
        settings: StreamSettings,
        run: OrderSettings,
        *,
        seen: Sequence[Seen] = (),
        histories: bool = False,
        group: dist.ProcessGroup | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`seen`: the files that the run had when it was stopped: it needs them to go on. `histories`: whether the run
        wants those of the schema.

        Raises ConfigError for settings with which no folder can be followed, and DataError if there is no folder.
        """
        assert settings.follow is not None
        self._follow = settings.follow
        if histories and schema.history is not None:
            raise ConfigError("--follow with histories, which are sorted by user before the run begins")
        schema = schema.without_history()
        if source.further:
            raise ConfigError("--follow with several --data; allowed: one folder, or one pattern")
        if settings.window_s is None and not source.evaluation:
            raise ConfigError(
                "--follow alone: its last rows are not known; allowed: with --window, or with --eval-data"
            )
        if settings.window_s is not None and source.evaluation:
            raise ConfigError("--eval-data with --window; allowed: one of them")
        if settings.window_s is None and settings.fit_rows is None:
            raise ConfigError("--follow without --window; allowed: with --fit-rows ROWS, which means are fitted to")
        if run.validation_fraction:
            raise ConfigError("--validation-fraction with --follow, whose rows are not known")
        self._source, self._schema, self._settings, self._run = source, schema, settings, run
        self._seen, self._group, self._pause = list(seen), group, pause
        self._time = None if schema.time is None else schema.time.column
        self._columns = tuple(dict.fromkeys((*schema.read_columns, *([] if self._time is None else [self._time]))))
        self._form: TextFormat | None = None
        self._folder = GrowingFolder.of(source.data)
        self._held = find_files(source.evaluation)
        self._evaluation: tuple[StreamFile, ...] | None = None
        self._files: tuple[StreamFile, ...] = ()
        self._opened: OpenedStream | None = None
        self._waits_since_s: float | None = None
        self._behind: list[tuple[str, int | None]] = []
        """Names and sizes of the files that were there at the last look, and not taken."""

    def first(self, tell: Callable[[str], None] = lambda reason: None) -> Look:
        """Waits until there are rows enough to begin with. `tell` is called with what is waited for, as it changes.

        Collective; raises as `look` does.
        """
        found, told = self.look(), ""
        while found.opened is None:
            if found.reason != told:
                told = found.reason
                tell(told)
            found = self.look(pauses=True)
        return found

    def look(self, *, pauses: bool = False) -> Look:
        """Looks once into the folder; `pauses`: after a second. Collective.

        Raises the errors of rank 0 on every rank: DataError for a file that cannot be one of the run, for one that is
        not behind those that were taken, and if the folder is complete and too small.
        """

        def find() -> Look:
            if pauses:
                self._pause(_LOOK_S)
            else:
                self._waits_since_s = None
            return self._look()

        return on_first(find, self._group)

    def _look(self) -> Look:
        # In this order: what is there once the folder was complete is all.
        is_complete = self._has_done_file()
        found = self._folder.files()
        self._note_change(found)
        is_done = is_complete or self._has_waited()
        known = len(self._files)
        reason = self._take(found, is_done=is_done)
        if self._files and (skipped := sum(file.skipped_rows for file in self._all_files)):
            reason += f"; {skipped:,} broken rows are left out so far"
        del self._behind[: len(self._files) - known]
        if self._waits_since_s is None:
            self._waits_since_s = time.monotonic()
        before, seen = self._opened, tuple(Seen.of(file) for file in self._files)
        if before is not None and not is_done and len(before.stream.index.files) == len(self._all_files):
            return Look(None, seen, reason)
        try:
            self._opened = self._ordered(grows=not is_done)
        except Incomplete as error:
            if is_done:
                raise
            return Look(None, seen, f"{error}; {reason}")
        return Look(self._opened, seen, reason)

    def _has_done_file(self) -> bool:
        done_file = self._follow.done_file
        return done_file is not None and self._folder.has(done_file)

    def _note_change(self, found: Sequence[DataFile]) -> None:
        """The wait begins anew where a file has come, or grows."""
        behind = [(file.name, file.size_bytes) for file in found[len(self._files) :]]
        if behind != self._behind:
            self._behind, self._waits_since_s = behind, None

    def _has_waited(self) -> bool:
        done_after_s, since_s = self._follow.done_after_s, self._waits_since_s
        return done_after_s is not None and since_s is not None and time.monotonic() - since_s >= done_after_s

    def _take(self, found: Sequence[DataFile], *, is_done: bool) -> str:
        """Takes the files that are whole. Returns why there are no more of them."""
        check_once((*found, *self._held))
        self._check_names([file.name for file in found])
        for number, file in enumerate(found[len(self._files) :], len(self._files)):
            is_known = is_done or number < len(self._seen)
            try:
                if not is_known and number + 1 == len(found) and is_text(file, self._schema.text_format):
                    return f"{file} is whole when there is a file behind it"
                (opened,) = self._open([file])
            except Incomplete as error:
                if is_known:
                    raise
                return str(error)
            self._check_seen(number, opened)
            self._files += (opened,)
            self._waits_since_s = None
        if len(self._files) < len(self._seen):
            raise DataError(
                f"{self._source.data}: {len(self._files)} files; the run had {len(self._seen)} when it was stopped, "
                f"the next one {self._seen[len(self._files)].name}"
            )
        return f"no file behind {self._files[-1].name}" if self._files else f"no file in {self._source.data}"

    def _open(self, files: Sequence[DataFile]) -> tuple[StreamFile, ...]:
        if self._form is None:
            # The types of the first text are those of all.
            self._form = typed(files, self._columns, self._schema.text_format)
        opened = open_files(
            files, self._columns, self._form, self._time, before=self._files[-1] if self._files else None
        )
        for file in opened:
            check_types(file.name, self._schema, file.schema)
        return without_refused(opened, self._schema)

    def _check_names(self, found: Sequence[str]) -> None:
        """Raises DataError unless those that were taken are the first ones by name."""
        if [file.name for file in self._files] == found[: len(self._files)]:
            return
        for number, file in enumerate(self._files):
            if file.name not in found:
                raise DataError(f"{file.name}: is no longer there; allowed: files that stay while a run follows them")
            if found[number] != file.name:
                raise DataError(
                    f"{found[number]}: came when {self._files[-1].name} was there already; allowed: files whose names "
                    "are behind those of earlier ones"
                )

    def _check_seen(self, number: int, file: StreamFile) -> None:
        if number < len(self._seen) and Seen.of(file).digest != self._seen[number].digest:
            raise DataError(
                f"{file.name}: is not the file {number + 1} that the run had when it was stopped "
                f"({self._seen[number].name}); allowed: the same files, and others behind them"
            )

    @property
    def _all_files(self) -> tuple[StreamFile, ...]:
        if self._evaluation is None:
            self._evaluation = self._open(self._held) if self._held else ()
        return self._files + self._evaluation

    def _ordered(self, *, grows: bool) -> OpenedStream:
        train_rows = sum(sum(file.block_rows) for file in self._files)
        if not train_rows:
            raise Incomplete(f"{self._source.name}: no rows; allowed: at least one")
        check_skipped(self._all_files, self._schema.text_format)
        index = index_of(
            self._all_files,
            self._columns,
            time_column=self._time,
            encodings=self._schema.encodings,
            beside=self._schema.beside,
        )
        before = self._opened
        if before is not None:
            for field in before.stream.index.schema:
                # What a null stands for decides what a table is: one id, or a list of them.
                if str(field.type) == "null" != str(kind := index.schema.field(field.name).type):
                    raise DataError(
                        f"{self._files[-1].name}: column {field.name} is {kind}, and had no value in the files before; "
                        "allowed: a column that has values, or a type, from the beginning"
                    )
        return ordered(
            self._source.name, index, self._schema, train_rows, self._settings, self._run, grows=grows, before=before
        )


class FollowingSource(StreamSource):
    """The batches of one rank from files that become more. All ranks make it with the same stream."""

    def __init__(self, found: Look, preprocessing: Preprocessing, follower: Follower, **options: Any) -> None:
        """`found`: what `follower` has found at first. `options`: those of `StreamSource`."""
        assert found.opened is not None
        super().__init__(found.opened.stream, found.opened.order, preprocessing, **options)
        self._follower = follower
        self.seen = found.seen
        """The files to train on so far, in order. The first one tells this stream from others."""

    def grow(self, *, pauses: bool = False) -> str:
        """Looks for files once, while no batch is on its way. Returns what the run waits for, if `order` says that it
        has to. Collective; raises as `Follower.look` does.
        """
        found = self._follower.look(pauses=pauses)
        if found.opened is not None:
            self.take_over(found.opened.stream, found.opened.order)
            self.seen = found.seen
        return found.reason
