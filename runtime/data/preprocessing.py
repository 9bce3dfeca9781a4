# SPDX-License-Identifier: Apache-2.0
"""What a model has learnt about its inputs before training: vocabularies, means and deviations.

It is fitted to training rows alone and is part of every checkpoint. A server needs it to feed the model
(docs/reference/checkpoints.md). In a table with a vocabulary, row 0 is for null, for values that no training row has,
and for values that training rows have less often than `Feature.min_frequency` says.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sennit.runtime.data.column_types import check_spelling
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.raw_samples import NO_DENSE, Feature, RawSamples, Values
from sennit.runtime.data.schema import DenseField, Schema

FORMAT: Final = 1
NAME: Final = "preprocessing.json"
UNKNOWN_ROW: Final = 0
_ID_WORDS: Final = ("integers", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """One dense feature: (x - mean) / deviation after the field's operators; 0 for null."""

    field: DenseField
    mean: float
    deviation: float

    @classmethod
    def of(cls, field: DenseField, mean: float, deviation: float) -> Self:
        """The scale of a column. A constant one, and one without any number, is left as it is."""
        return (
            cls(field=field, mean=0.0, deviation=1.0)
            if deviation <= 1e-12
            else cls(field=field, mean=mean, deviation=deviation)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoding:
    """The encoding of one table's ids."""

    name: str
    row_count: int
    vocabulary: Values | None = None
    """Values in rising order. Value i has row i + 1. None: ids are rows, or are hashed if there is a salt."""

    salt: int | None = None
    first: int | None = None
    is_dynamic: bool = False
    """Ids of 64 bits stay as they are, for a dynamic table. `row_count`: the most rows that it may have."""

    is_value: bool = False
    """Integers stay as they are, and there is no table."""

    id_type: str | None = "int64"
    """As in `Feature`. None: nobody knows, as of checkpoints that do not say it."""

    def places_in(self, other: Encoding) -> npt.NDArray[np.int64]:
        """[row_count]: the row of `other`'s table for each row of this one. `other` has all values of this one."""
        if self.vocabulary is None or other.vocabulary is None:
            return np.arange(self.row_count)
        own, known = _comparable(self.vocabulary, other.vocabulary)
        return np.concatenate([[UNKNOWN_ROW], 1 + np.searchsorted(known, own)])

    def check_ids(self, name: str, id_type: str | None) -> None:
        """Raises DataError if ids of the data set `name` are text and the model's integers, or the other way round.

        The same user would have a row as text and another as an integer. `id_type`: as in `Feature`.
        """
        if self.kind not in ("hash", "dynamic") or None in (id_type, self.id_type):
            return
        if (id_type == "text") != (self.id_type == "text"):
            kind = "string" if self.id_type == "text" else self.id_type
            raise DataError(
                f"{name}: column {self.name} is of {_ID_WORDS[id_type == 'text']}, where the model has "
                f"{_ID_WORDS[self.id_type == 'text']}, whose rows are others; allowed: the type of the model, in text "
                f'files by types = {{ {self.name} = "{kind}" }} below [text] of the schema'
            )

    @property
    def kind(self) -> str:
        """The encoding's name in a schema file."""
        if self.vocabulary is not None:
            return "dictionary"
        if self.is_value:
            return "value"
        return "dynamic" if self.is_dynamic else "id" if self.salt is None else "hash"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preprocessing:
    """The preprocessing of all features of a data set, in their order."""

    scales: tuple[Scale, ...]
    encodings: tuple[Encoding, ...]

    @classmethod
    def fit(cls, raw: RawSamples, is_training: Tensor, known: Preprocessing | None = None) -> Self:
        """Fits to the rows where `is_training`, bool [N], is True. No other row has any influence.

        `known`: the preprocessing of a model that is to be trained on with these rows. Its scales stay as they are,
        since the model's weights go with them, and vocabularies keep their values and get those that are new. Raises
        DataError for features that are not those of the model.
        """
        if known is not None:
            known.check_features(raw)
        return cls(
            scales=tuple(
                _scale(field, raw.dense[:, number], is_training) for number, field in enumerate(raw.dense_fields)
            )
            if known is None
            else known.scales_for(raw.dense_fields),
            encodings=tuple(
                _encoding(feature, is_training.numpy(), None if known is None else known.encodings[number])
                for number, feature in enumerate(raw.features)
            ),
        )

    def scaled(self, scales: tuple[Scale, ...]) -> Preprocessing:
        """The same with other means and deviations."""
        return replace(self, scales=scales)

    def scales_for(self, fields: Iterable[DenseField]) -> tuple[Scale, ...]:
        """The scales, for a model that is trained on. Which of them follow the stream from now on is up to `fields`."""
        return tuple(replace(scale, field=field) for scale, field in zip(self.scales, fields, strict=True))

    @property
    def begun(self) -> Preprocessing:
        """Without the means and deviations that follow the stream, so that it is the same all along."""
        if not any(scale.field.running for scale in self.scales):
            return self
        return self.scaled(tuple(Scale.of(one.field, 0, 0) if one.field.running else one for one in self.scales))

    def is_of(self, schema: Schema) -> bool:
        """Whether data of this schema have the features of the model, in their order."""
        dense = [(part.name, part.running) for part in schema.dense or NO_DENSE]
        sparse = [(part.name, part.encode) for part in schema.sparse]
        return dense == [(scale.field.name, scale.field.running) for scale in self.scales] and sparse == [
            (part.name, part.kind) for part in self.encodings
        ]

    def check_features(self, raw: RawSamples) -> None:
        """Raises DataError unless the samples have the features of this preprocessing, with the same operators.

        Whether means follow a stream is not asked.
        """
        for what, found, wanted in (
            ("dense features", _fixed(raw.dense_fields), _fixed(scale.field for scale in self.scales)),
            ("features", _described(raw.features), _described(self.encodings)),
        ):
            if found != wanted:
                pairs = itertools.zip_longest(found, wanted, fillvalue="none")
                here, there = next((one, other) for one, other in pairs if one != other)
                raise DataError(f"{raw.name}: {what}: {here}, where the model has {there}")
        for feature, encoding in zip(raw.features, self.encodings, strict=True):
            encoding.check_ids(raw.name, feature.id_type)

    def check_schema(self, name: str, schema: Schema, types: Mapping[str, str | None]) -> None:
        """Raises DataError unless the columns of a schema, which `is_of`, have the operators of this preprocessing.

        `types`: by column what its ids are in the data, as in `Feature`. Whether means follow a stream is not asked.
        """
        dense = zip(_fixed(schema.dense or NO_DENSE), _fixed(scale.field for scale in self.scales), strict=True)
        for here, there in dense:
            if here != there:
                raise DataError(
                    f"{name}: column {here.name} with clamp {here.clamp} and log1p {here.log1p}, where the model has "
                    f"clamp {there.clamp} and log1p {there.log1p}"
                )
        for part, encoding, known in zip(schema.sparse, self.encodings, _described(self.encodings), strict=True):
            salt = part.salt if part.encode == "hash" else None
            if (found := _words(part.name, part.encode, salt, part.rows, part.first)) != known:
                raise DataError(f"{name}: column {found}, where the model has {known}")
            encoding.check_ids(name, types.get(part.name))

    def apply(self, raw: RawSamples) -> RawSamples:
        """The samples with dense features scaled and ids as rows, some of which are still to be hashed.

        Features must be equal.
        """
        names = [[part.name for part in parts] for parts in (raw.features, self.encodings)]
        if names[0] != names[1] or raw.dense.shape[1] != len(self.scales):
            raise DataError(f"{raw.name}: features {names[0]}, but the model has {names[1]}")
        dense = torch.empty(len(raw), len(self.scales), dtype=torch.float32)
        for number, scale in enumerate(self.scales):
            column = (raw.dense[:, number].to(torch.float64) - scale.mean) / scale.deviation
            dense[:, number] = torch.nan_to_num_(column, nan=0.0)
        return replace(
            raw,
            dense=dense,
            features=tuple(
                _encoded(feature, encoding) for feature, encoding in zip(raw.features, self.encodings, strict=True)
            ),
        )

    def text(self) -> str:
        """JSON, for checkpoints and for servers of the model."""
        return json.dumps(self.as_json(), allow_nan=False) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "dense": [
                {
                    "name": scale.field.name,
                    "clamp": scale.field.clamp,
                    "log1p": scale.field.log1p,
                    "mean": scale.mean,
                    "deviation": scale.deviation,
                }
                | ({} if scale.field.running is None else {"running": scale.field.running})
                for scale in self.scales
            ],
            "sparse": [
                {
                    "name": part.name,
                    "encode": part.kind,
                    "rows": part.row_count,
                    "salt": part.salt,
                    "first": part.first,
                    "values": None if part.vocabulary is None else part.vocabulary.tolist(),
                }
                | ({} if part.id_type is None or part.kind not in ("hash", "dynamic") else {"ids": part.id_type})
                for part in self.encodings
            ],
        }

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `text` wrote. Raises ValueError for anything else."""
        try:
            return cls.from_json(json.loads(text))
        except RecursionError:
            raise ValueError("nested too deeply") from None

    @classmethod
    def read(cls, checkpoint: Path) -> Self | None:
        """That of a checkpoint; None if only feeders had it. Raises DataError for a file that is not one."""
        path = checkpoint / NAME
        try:
            return cls.parse(path.read_text(encoding="utf-8")) if path.exists() else None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """Reads what `as_json` made. Raises ValueError for anything else."""
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}; allowed: {FORMAT}")
            return cls(
                scales=tuple(
                    Scale(
                        field=DenseField(
                            name=str(part["name"]),
                            clamp=None if part["clamp"] is None else (float(part["clamp"][0]), float(part["clamp"][1])),
                            log1p=bool(part["log1p"]),
                            running=None if part.get("running") is None else int(part["running"]),
                        ),
                        mean=float(part["mean"]),
                        deviation=float(part["deviation"]),
                    )
                    for part in content["dense"]
                ),
                encodings=tuple(
                    Encoding(
                        name=str(part["name"]),
                        row_count=int(part["rows"]),
                        vocabulary=None if part["values"] is None else _values(part["values"]),
                        salt=part["salt"],
                        first=part["first"],
                        is_dynamic=part["encode"] == "dynamic",
                        is_value=part["encode"] == "value",
                        id_type=_id_type(part),
                    )
                    for part in content["sparse"]
                ),
            )
        except (KeyError, TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"not the preprocessing of a model: {error!r}") from None


def _id_type(part: dict[str, Any]) -> str | None:
    if part["encode"] not in ("hash", "dynamic"):
        return "int64"
    return None if part.get("ids") is None else str(part["ids"])


def _fixed(fields: Iterable[DenseField]) -> tuple[DenseField, ...]:
    return tuple(replace(field, running=None) for field in fields)


def _scale(field: DenseField, column: Tensor, is_training: Tensor) -> Scale:
    """Fits the scale of one column. Nulls are ignored."""
    values = column[is_training].to(torch.float64)
    values = values[~torch.isnan(values)]
    if not len(values):
        return Scale.of(field, 0.0, 0.0)
    return Scale.of(field, float(values.mean()), float(values.std(unbiased=False)))


def _described(parts: Iterable[Feature | Encoding]) -> tuple[str, ...]:
    """What a model that is trained on must have as it was, in words."""
    return tuple(_words(part.name, part.kind, part.salt, part.row_count, part.first) for part in parts)


def _words(name: str, kind: str, salt: int | None, rows: int | None, first: int | None) -> str:
    return (
        f"{name} with encode = {kind!r}"
        + (f", salt {salt} and {rows} rows" if salt is not None else "")
        + (f", the first {first}" if first is not None else "")
    )


def _encoding(
    feature: Feature, is_training: np.ndarray[Any, np.dtype[np.bool_]], known: Encoding | None = None
) -> Encoding:
    if feature.dictionary is None:
        return encoding_of(feature, np.empty(0, np.int64), np.empty(0, np.int64), known)
    return encoding_of(feature, feature.dictionary, frequency_of(feature, is_training), known)


def frequency_of(feature: Feature, is_training: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How often the samples where `is_training`, bool [N], is True have each value of the feature's dictionary."""
    assert feature.dictionary is not None
    cut = feature.cut()
    codes = cut.values[is_training if cut.offsets is None else np.repeat(is_training, cut.lengths)]
    return np.bincount(codes[codes >= 0], minlength=len(feature.dictionary))


def encoding_of(
    feature: Feature, values: Values, frequency: npt.NDArray[np.int64], known: Encoding | None = None
) -> Encoding:
    """The encoding of a feature whose training rows have each of `values`, in rising order, `frequency` times.

    `known`: of a model that is trained on. Raises DataError for what cannot go on with it.
    """
    if feature.dictionary is None:
        if known is not None and not feature.is_dynamic and feature.row_count < known.row_count:
            raise DataError(
                f"column {feature.name}: {feature.row_count} rows; allowed: at least the {known.row_count} of the model"
            )
        return Encoding(
            name=feature.name,
            row_count=feature.row_count,
            salt=feature.salt,
            first=feature.first,
            is_dynamic=feature.is_dynamic,
            is_value=feature.is_value,
            id_type=known.id_type if feature.id_type is None and known is not None else feature.id_type,
        )
    known_values = () if known is None or known.vocabulary is None else (known.vocabulary,)
    check_spelling(feature.name, values, *known_values)
    vocabulary = values[frequency >= max(1, feature.min_frequency or 1)]
    if known is not None and known.vocabulary is not None:
        try:
            vocabulary = _values(sorted({*known.vocabulary.tolist(), *vocabulary.tolist()}))
        except (TypeError, OverflowError):
            raise _mixed(feature.name) from None
    return Encoding(name=feature.name, row_count=1 + len(vocabulary), vocabulary=vocabulary, first=feature.first)


def _mixed(name: str) -> DataError:
    return DataError(f"column {name}: text where the model knows numbers, or numbers for text")


def _encoded(feature: Feature, encoding: Encoding) -> Feature:
    vocabulary = encoding.vocabulary
    if vocabulary is None or feature.dictionary is None:
        if (vocabulary is None) != (feature.dictionary is None):
            raise DataError(f"column {feature.name}: encode = {encoding.kind!r} in the model, but not in these data")
        return replace(feature, row_count=encoding.row_count)
    # The last entry is for nulls, whose code is -1.
    row_of = np.full(len(feature.dictionary) + 1, UNKNOWN_ROW, np.int64)
    if len(vocabulary) and len(feature.dictionary):
        vocabulary, values = _comparable(vocabulary, feature.dictionary)
        try:
            place = np.minimum(np.searchsorted(vocabulary, values), len(vocabulary) - 1)
        except TypeError:
            raise _mixed(feature.name) from None
        is_known = vocabulary[place] == values
        row_of[:-1][is_known] = place[is_known] + 1
    return replace(feature, values=row_of[feature.values], row_count=encoding.row_count, dictionary=None)


def _comparable(one: Values, other: Values) -> tuple[Values, Values]:
    """The same values. NumPy would compare int64 and uint64 as floats."""
    if {one.dtype.kind, other.dtype.kind} == {"i", "u"}:
        return one.astype(object), other.astype(object)
    return one, other


def _values(values: list[Any]) -> Values:
    if all(isinstance(value, str) for value in values):
        return np.array(values, dtype=object)
    if max(values) > 2**63 - 1:
        return np.array(values, dtype=np.uint64)
    return np.array(values, dtype=np.int64)
