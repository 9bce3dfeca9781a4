# SPDX-License-Identifier: Apache-2.0
"""What a model has learnt about its inputs before training: vocabularies, means and deviations.

It is fitted to training rows alone and is part of every checkpoint. A server needs it to feed the model
(docs/reference/checkpoints.md). In a table with a vocabulary, row 0 is for null and for values that no training row
has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.order import Order
from sennit.runtime.data.raw_samples import Feature, RawSamples, Values, fingerprint
from sennit.runtime.data.samples import Samples
from sennit.runtime.data.schema import DenseField

FORMAT: Final = 1
NAME: Final = "preprocessing.json"
UNKNOWN_ROW: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """One dense feature: (x - mean) / deviation after the field's operators; 0 for null."""

    field: DenseField
    mean: float
    deviation: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoding:
    """The encoding of one table's ids."""

    name: str
    row_count: int
    vocabulary: Values | None = None
    """Values in rising order. Value i has row i + 1. None: ids are rows, or are hashed if there is a salt."""

    salt: int | None = None
    first: int | None = None

    @property
    def kind(self) -> str:
        """The encoding's name in a schema file."""
        return "dictionary" if self.vocabulary is not None else "id" if self.salt is None else "hash"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preprocessing:
    """The preprocessing of all features of a data set, in their order."""

    scales: tuple[Scale, ...]
    encodings: tuple[Encoding, ...]

    @classmethod
    def fit(cls, raw: RawSamples, is_training: Tensor) -> Self:
        """Fits to the rows where `is_training`, bool [N], is True. No other row has any influence."""
        return cls(
            scales=tuple(
                _scale(field, raw.dense[:, number], is_training) for number, field in enumerate(raw.dense_fields)
            ),
            encodings=tuple(_encoding(feature, is_training.numpy()) for feature in raw.features),
        )

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
                    )
                    for part in content["sparse"]
                ),
            )
        except (KeyError, TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"not the preprocessing of a model: {error!r}") from None


def _scale(field: DenseField, column: Tensor, is_training: Tensor) -> Scale:
    """Fits the scale of one column. Constant columns are left as they are. Nulls are ignored."""
    values = column[is_training].to(torch.float64)
    values = values[~torch.isnan(values)]
    if not len(values):
        return Scale(field=field, mean=0.0, deviation=1.0)
    mean, deviation = float(values.mean()), float(values.std(unbiased=False))
    if deviation <= 1e-12:
        mean, deviation = 0.0, 1.0
    return Scale(field=field, mean=mean, deviation=deviation)


def _encoding(feature: Feature, is_training: np.ndarray[Any, np.dtype[np.bool_]]) -> Encoding:
    if feature.dictionary is None:
        return Encoding(name=feature.name, row_count=feature.row_count, salt=feature.salt, first=feature.first)
    cut = feature.cut()
    counts = is_training if cut.offsets is None else np.repeat(is_training, cut.lengths)
    codes = cut.values[counts]
    is_known = np.zeros(len(feature.dictionary), np.bool_)
    is_known[codes[codes >= 0]] = True
    vocabulary = feature.dictionary[is_known]
    return Encoding(name=feature.name, row_count=1 + len(vocabulary), vocabulary=vocabulary, first=feature.first)


def _encoded(feature: Feature, encoding: Encoding) -> Feature:
    vocabulary = encoding.vocabulary
    if vocabulary is None or feature.dictionary is None:
        if (vocabulary is None) != (feature.dictionary is None):
            raise DataError(f"column {feature.name}: encode = {encoding.kind!r} in the model, but not in these data")
        return replace(feature, row_count=encoding.row_count)
    # The last entry is for nulls, whose code is -1.
    row_of = np.full(len(feature.dictionary) + 1, UNKNOWN_ROW, np.int64)
    if len(vocabulary) and len(feature.dictionary):
        try:
            place = np.minimum(np.searchsorted(vocabulary, feature.dictionary), len(vocabulary) - 1)
        except TypeError:
            raise DataError(f"column {feature.name}: text where the model knows numbers, or numbers for text") from None
        is_known = vocabulary[place] == feature.dictionary
        row_of[:-1][is_known] = place[is_known] + 1
    return replace(feature, values=row_of[feature.values], row_count=encoding.row_count, dictionary=None)


def _values(values: list[Any]) -> Values:
    if all(isinstance(value, str) for value in values):
        return np.array(values, dtype=object)
    if max(values) > 2**63 - 1:
        return np.array(values, dtype=np.uint64)
    return np.array(values, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """A data set as one run trains on it: split, preprocessed by its training rows. All ranks have the same."""

    samples: Samples
    order: Order
    preprocessing: Preprocessing
    fingerprint: str
    """The fingerprint of the data before preprocessing."""

    @classmethod
    def of(cls, data: RawSamples | Samples, order: Order) -> Self:
        """Splits and preprocesses the data. Raises DataError if they cannot be trained on."""
        raw = RawSamples.of(data) if isinstance(data, Samples) else data
        preprocessing = Preprocessing.fit(raw, order.is_training())
        return cls(
            samples=preprocessing.apply(raw).samples(),
            order=order,
            preprocessing=preprocessing,
            fingerprint=fingerprint(raw),
        )
