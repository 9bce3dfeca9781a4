# SPDX-License-Identifier: Apache-2.0
"""Samples as they come from their source, their fingerprint, and the operators that turn ids into rows of tables.

For data in a trainer's memory, the operators run when the data set is loaded. For ids from a feeder they run at the
trainer, in XDP or on its CPU. Both run the same plan and produce the same rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sennit.offload.columns import DenseType, DenseValues, IdsType, Ragged, ids_of
from sennit.offload.native import NativeTransform
from sennit.offload.operators import Clamp, ClampList, FirstX, Log1p, Operator, SigridHash
from sennit.offload.plan import Graph
from sennit.runtime.data.column_types import cast, is_text, plain
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import require
from sennit.runtime.data.samples import Column, Samples, check_tensors
from sennit.runtime.data.schema import DenseField, History

NULL: Final = -1
"""The code of a null."""

Values = npt.NDArray[np.object_] | npt.NDArray[np.int64] | npt.NDArray[np.uint64]


def encode(column: Any) -> tuple[npt.NDArray[np.int64], Values]:
    """Returns (codes, distinct values in rising order) of strings or integers: an Arrow array or chunked array, or what
    pyarrow makes one of, such as a list, an array, a tensor or a series.

    Text is sorted by code points. The distinct values are those of the whole column. Which of them a model knows is
    decided later, by its training rows (`preprocessing`). Raises DataError for other values.
    """
    arrow = require("pyarrow", package="pyarrow", purpose="a column of categories")
    if not isinstance(column, arrow.Array | arrow.ChunkedArray):
        column = _as_arrow(arrow, column)
    kind = plain(column.type)
    if arrow.types.is_null(kind):
        kind = arrow.int64()
    if not (is_text(kind) or arrow.types.is_integer(kind)):
        raise DataError(f"categories are {column.type}; allowed: integers, strings, and nulls among them")
    if isinstance(column, arrow.ChunkedArray):
        column = arrow.chunked_array([cast(part, kind) for part in column.chunks], kind)
    else:
        column = cast(column, kind)
    encoded = column.dictionary_encode()
    if isinstance(encoded, arrow.ChunkedArray):
        # Each chunk may have a dictionary.
        encoded = encoded.unify_dictionaries().combine_chunks()
        if isinstance(encoded, arrow.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else column.combine_chunks().dictionary_encode()
    values = np.asarray(encoded.dictionary.to_numpy(zero_copy_only=False))
    if values.dtype.kind in "iu" and values.dtype != np.uint64:
        values = values.astype(np.int64)
    elif values.dtype.kind not in "iu":
        values = values.astype(object)
    order = np.argsort(values, kind="stable")
    # One more for nulls.
    code_of = np.empty(len(values) + 1, np.int64)
    code_of[order] = np.arange(len(values))
    code_of[-1] = NULL
    indices = np.asarray(encoded.indices.fill_null(len(values)).to_numpy(zero_copy_only=False))
    return code_of[indices], values[order]


def _as_arrow(arrow: Any, values: Any) -> Any:
    try:
        if hasattr(values, "__arrow_c_stream__"):  # as series of polars
            return arrow.chunked_array(values)
        return arrow.array(values.numpy() if isinstance(values, Tensor) else values)
    except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"categories: {error}; allowed: integers or strings, and nulls among them") from error


IdArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """The ids of one table for N samples, before preprocessing."""

    name: str
    row_count: int
    """Number of rows of the table."""

    values: IdArray
    """Ids, sample after sample. They are rows of the table, unless there is a salt or a dictionary, or `is_dynamic`."""

    offsets: npt.NDArray[np.int64] | None = None
    """[N + 1]: the index of each sample's first id; None: exactly one id per sample."""

    salt: int | None = None
    """The row of an id is SigridHash(salt, row_count) of it."""

    first: int | None = None
    """Only this many ids of a list are used."""

    min_frequency: int | None = None
    """With a dictionary: values that training rows have less often share row 0. None: no value does."""

    dictionary: Values | None = None
    """The values that the codes in `values` stand for (`encode`), until `Preprocessing` turns codes into
    rows.
    """

    is_dynamic: bool = False
    """Ids are any 64-bit integers, for a dynamic table. `row_count` is the most rows that it may have."""

    is_value: bool = False
    """No ids, but integers that a model reads as they are. There is no table."""

    id_type: str | None = "int64"
    """What the ids of a hashed column or a dynamic table are in the data: "int64", "uint64", or "text" (also bytes),
    whose ids are its hash. None: there are nulls alone."""

    @classmethod
    def categories(cls, name: str, column: Any, offsets: npt.NDArray[np.int64] | None = None, **rest: Any) -> Feature:
        """The feature for strings or integers, as `encode` takes them. With `offsets`, those of all lists together.

        Raises DataError for other values.
        """
        try:
            codes, known = encode(column)
        except DataError as error:
            raise DataError(f"column {name}: {error}") from error
        return cls(name=name, row_count=len(known) + 1, values=codes, offsets=offsets, dictionary=known, **rest)

    @classmethod
    def of(cls, column: Column) -> Feature:
        """The feature for ids that are rows already."""
        offsets = None if column.offsets is None else column.offsets.numpy()
        return cls(name=column.name, row_count=column.row_count, values=column.values.numpy(), offsets=offsets)

    @property
    def kind(self) -> str:
        """The encoding's name in a schema file."""
        if self.dictionary is not None:
            return "dictionary"
        if self.is_value:
            return "value"
        return "dynamic" if self.is_dynamic else "id" if self.salt is None else "hash"

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of ids of each sample."""
        return np.ones(len(self.values), np.int64) if self.offsets is None else np.diff(self.offsets)

    @property
    def mean_length(self) -> float:
        """The mean number of used ids per sample, as in the column."""
        lengths = self.lengths
        used = lengths if self.first is None else np.minimum(lengths, self.first)
        return int(used.sum()) / max(1, len(used))

    def at_least(self, min_frequency: int) -> Feature:
        """The feature with this least frequency of a value, if it has a dictionary and none of its own."""
        if self.dictionary is None or self.min_frequency is not None:
            return self
        return replace(self, min_frequency=min_frequency)

    def cut(self) -> Feature:
        """The feature with only the ids that are used."""
        if self.first is None or self.offsets is None:
            return self
        lengths = self.lengths
        position = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], lengths)
        offsets: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(np.minimum(lengths, self.first))])
        return replace(self, values=self.values[position < self.first], offsets=offsets)

    def operators(self, source: str, kind: IdsType) -> dict[str, Operator]:
        """Operators that compute the table's rows from the column `source`; the last one gives the rows.

        Empty if the column holds the rows already. If ids of this kind could be outside the table they are clamped, so
        that no record can name a missing row.
        """
        made: dict[str, Operator] = {}
        used = source
        if self.first is not None:
            used = f"{source}_first"
            made[used] = FirstX(column=source, count=self.first)
        if self.salt is not None:
            made[f"{source}_rows"] = SigridHash(column=used, salt=self.salt, max_value=self.row_count)
        elif self.is_dynamic or self.is_value:
            pass
        elif kind.low < 0 or kind.high >= self.row_count:
            made[f"{source}_rows"] = ClampList(column=used, low=0, high=self.row_count - 1)
        return made

    def unhashed(self) -> Column:
        """The ids that are used, as they are: of 64 bits."""
        used = self.cut()
        offsets = None if used.offsets is None else torch.from_numpy(used.offsets)
        values = torch.from_numpy(used.values.astype(np.int64, copy=False))
        return Column(name=self.name, row_count=self.row_count, values=values, offsets=offsets)

    def column(self) -> Column:
        """All rows of the table at once."""
        if self.dictionary is not None:
            raise DataError(f"column {self.name}: categories without a vocabulary")
        if self.is_dynamic or self.is_value:
            return self.unhashed()
        if self.salt is None and self.first is None:
            if self.offsets is None:
                return Column.single(self.name, self.row_count, self.values)
            return Column.bags(self.name, self.row_count, self.values, self.lengths)
        lengths = self.lengths
        # Use the range of the table: a clamp would hide a wrong id, which Column reports.
        kind = IdsType(length=max(1, int(lengths.max(initial=1))), is_list=True, low=0, high=self.row_count - 1)
        operators = self.operators("ids", kind)
        output = tuple(operators)[-1]
        run = NativeTransform(Graph(sources={"ids": kind}, columns=operators), (output,))
        ids = Ragged(lengths.astype(np.int32), self.values.astype(np.int64, copy=False))
        found = ids_of(run({"ids": ids}), output)
        if self.offsets is None:
            return Column.single(self.name, self.row_count, found.values)
        return Column.bags(self.name, self.row_count, found.values, found.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSamples:
    """N labelled samples. `Samples` describes the fields."""

    name: str
    dense: Tensor
    """Float32 or float64 [N, D]; the operators of `dense_fields` have been applied. NaN stands for null."""

    labels: Tensor
    features: tuple[Feature, ...]
    dense_fields: tuple[DenseField, ...]
    label_names: tuple[str, ...] = ("label",)
    sample_weights: Tensor | None = None
    eval_rows: int | None = None
    """The last samples that are for evaluation, and all others are not. None: the run chooses some."""

    times: npt.NDArray[np.int64] | None = None
    """[N]: seconds since 1970, if samples are in order of time."""

    history: History | None = None
    """Features of which a sample has those of earlier samples, too, if the run asks for histories."""

    def __post_init__(self) -> None:
        check_tensors(self.name, dense=self.dense, labels=self.labels, sample_weights=self.sample_weights)

    @classmethod
    def of(cls, samples: Samples) -> RawSamples:
        """Samples that need no preprocessing."""
        return cls(
            name=samples.name,
            dense=samples.dense,
            labels=samples.labels,
            label_names=samples.label_names,
            sample_weights=samples.sample_weights,
            features=tuple(Feature.of(column) for column in samples.columns),
            dense_fields=dense_fields(samples.dense_names or map(str, range(samples.dense.shape[1]))),
        )

    def without_history(self) -> RawSamples:
        """The samples alone (`Schema.without_history`)."""
        if self.history is None:
            return self
        past = self.history.past
        kept = tuple(part for part in self.features if part.name not in past and part.kind != "value")
        return replace(self, features=kept, history=None)

    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.dense_fields)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def samples(self, column: Callable[[Feature], Column] = Feature.column) -> Samples:
        """The samples with every operator applied. Raises DataError if they cannot be trained on.

        `column`: makes the ids of a table.
        """
        return Samples(
            name=self.name,
            dense=self.dense,
            labels=self.labels,
            label_names=self.label_names,
            sample_weights=self.sample_weights,
            columns=tuple(map(column, self.features)),
            dense_names=self.dense_names,
        )


def dense_fields(names: Iterable[str]) -> tuple[DenseField, ...]:
    """Dense fields without operators."""
    return tuple(DenseField(name=name) for name in names)


NO_DENSE: Final = dense_fields(["constant"])
"""The dense feature of data without any: a constant, with which the bottom MLP learns a vector of all samples."""


def dense_column(part: DenseField, values: DenseValues) -> DenseValues:
    """The column after the field's operators."""
    operators: dict[str, Operator] = {}
    last = "x"
    if part.clamp is not None:
        operators["clamped"] = Clamp(column=last, low=part.clamp[0], high=part.clamp[1])
        last = "clamped"
    if part.log1p:
        operators["log"] = Log1p(column=last)
        last = "log"
    if not operators:
        return values
    run = NativeTransform(Graph(sources={"x": DenseType()}, columns=operators), (last,))
    found = run({"x": values})[last]
    assert isinstance(found, np.ndarray)
    return found


def dense_matrix(columns: Sequence[DenseValues]) -> Tensor:
    """[N, D]"""
    return torch.from_numpy(np.stack(columns, 1))


def fingerprint(raw: RawSamples) -> str:
    """SHA-256 in hexadecimal over labels, dense features, ids, and the preprocessing of the ids.

    Two data sets with one fingerprint train the same model. Names of data sets and of files, and the cut into files, do
    not change it.
    """
    digest = hashlib.sha256()

    def add(about: list[Any], array: npt.NDArray[Any]) -> None:
        if array.dtype == object:
            # The lengths separate adjacent texts.
            parts = [text.encode() for text in array]
            add([*about, "lengths"], np.array([len(part) for part in parts], np.int64))
            digest.update(b"".join(parts))
            return
        content = np.ascontiguousarray(array)
        content = content.astype(content.dtype.newbyteorder("<"), copy=False)
        digest.update(json.dumps([about, str(content.dtype), content.shape]).encode())
        if content.size:
            digest.update(content.view(np.uint8).data)

    add(["labels"], raw.labels.numpy())
    add(["dense", [[part.name, part.clamp, part.log1p] for part in raw.dense_fields]], raw.dense.numpy())
    for part in raw.features:
        # Ids have 32 or 64 bits.
        values = part.values.astype(np.int64, copy=False)
        about = ["ids", part.name, part.row_count, part.salt, part.first]
        add([*about, part.kind] if part.is_dynamic or part.is_value else about, values)
        for name, array in (("offsets", part.offsets), ("dictionary", part.dictionary)):
            if array is not None:
                add([name], array)
        if part.min_frequency not in (None, 1):
            add(["min_frequency", part.min_frequency], np.empty(0))
    if raw.sample_weights is not None:
        add(["sample weights"], raw.sample_weights.numpy())
    if raw.times is not None:
        add(["times"], raw.times)
    if raw.eval_rows is not None:
        add(["evaluation rows", raw.eval_rows], np.empty(0))
    return digest.hexdigest()
