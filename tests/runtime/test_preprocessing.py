# SPDX-License-Identifier: Apache-2.0
"""Preprocessing fitted to training rows, the treatment of values that they do not have, and the file that keeps it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sennit.runtime.data.arrow_columns import PartOfFile, Piece, raw_samples
from sennit.runtime.data.errors import DataError
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.raw_samples import Feature, RawSamples, fingerprint
from sennit.runtime.data.schema import DenseField, parse_schema
from sennit.runtime.stream.encoder import Encoder

arrow = pytest.importorskip("pyarrow")


def raw(**changed: Any) -> RawSamples:
    """Five samples. The tests fit to the first three."""
    made = RawSamples(
        name="made",
        dense=torch.tensor([[1.0, 7.0], [3.0, 7.0], [torch.nan, 7.0], [50.0, 8.0], [torch.nan, 7.0]]),
        labels=torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]),
        dense_fields=(DenseField(name="price", clamp=(0.0, 99.0)), DenseField(name="constant", log1p=True)),
        features=(
            Feature.categories("city", arrow.array(["Ulm", None, "Kiel", "Bonn", "Ulm"])),
            Feature.categories("words", arrow.array([3, 1, 9, 9, 5, 3]), np.array([0, 2, 2, 4, 6, 6]), first=1),
            Feature(name="user", row_count=10, values=np.array([0, 9, 3, 4, 4])),
            Feature(name="seen", row_count=4, values=np.array([2**62, 5, 5, -1, 0]), salt=3),
        ),
    )
    return replace(made, **changed)


TRAINING = torch.tensor([True, True, True, False, False])


def test_only_training_rows_have_a_say() -> None:
    fitted = Preprocessing.fit(raw(), TRAINING)
    city, words, user, seen = fitted.encodings
    assert city.vocabulary is not None
    assert words.vocabulary is not None
    assert city.vocabulary.tolist() == ["Kiel", "Ulm"]
    # The first id of each list is used: 3 of the first sample, 9 of the third.
    assert words.vocabulary.tolist() == [3, 9]
    assert [part.row_count for part in fitted.encodings] == [3, 3, 10, 4]
    assert (user.kind, seen.kind, seen.salt) == ("id", "hash", 3)
    price, constant = fitted.scales
    assert (price.mean, price.deviation) == (2.0, 1.0)
    # A constant column is not scaled.
    assert (constant.mean, constant.deviation) == (0.0, 1.0)


def test_unseen_values_and_nulls_have_row_zero_and_null_numbers_the_mean() -> None:
    samples = Preprocessing.fit(raw(), TRAINING).apply(raw()).samples()
    city, words, user, _ = samples.columns
    assert city.values.tolist() == [2, 0, 1, 0, 2]
    assert words.values.tolist() == [1, 2, 0]
    assert words.offsets is not None
    assert words.offsets.tolist() == [0, 1, 1, 2, 3, 3]
    assert user.values.tolist() == [0, 9, 3, 4, 4]
    assert samples.dense.tolist() == [[-1.0, 7.0], [1.0, 7.0], [0.0, 7.0], [48.0, 8.0], [0.0, 7.0]]


def test_held_back_rows_change_nothing() -> None:
    """Held-back rows do not change the fit, to the last bit."""
    other = raw(
        dense=torch.where(TRAINING[:, None], raw().dense, torch.tensor(1e6)),
        features=(
            Feature.categories("city", arrow.array(["Ulm", None, "Kiel", "Aachen", "Zwickau"])),
            *raw().features[1:],
        ),
    )
    assert Preprocessing.fit(other, TRAINING).text() == Preprocessing.fit(raw(), TRAINING).text()


def test_fresh_samples_are_encoded_as_those_it_was_fitted_to() -> None:
    """The fresh samples have other distinct values, in another order."""
    fitted = Preprocessing.parse(Preprocessing.fit(raw(), TRAINING).text())
    fresh = raw(
        dense=torch.tensor([[2.0, 7.0]]),
        labels=torch.tensor([1.0]),
        features=(
            Feature.categories("city", arrow.array(["Ulm"])),
            Feature.categories("words", arrow.array([8, 9]), np.array([0, 2]), first=1),
            Feature(name="user", row_count=10, values=np.array([7])),
            Feature(name="seen", row_count=4, values=np.array([5]), salt=3),
        ),
    )
    samples = fitted.apply(fresh).samples()
    assert [column.values.tolist() for column in samples.columns[:3]] == [[2], [0], [7]]
    assert samples.dense.tolist() == [[0.0, 7.0]]


def test_rare_values_share_the_row_of_unknown_ones_which_they_train() -> None:
    city = Feature.categories("city", arrow.array(["Ulm", "Kiel", "Ulm", "Bonn", "Ulm", None]), min_frequency=2)
    many = raw(dense=torch.zeros(6, 2), labels=torch.zeros(6), features=(replace(city, min_frequency=None), city))
    is_training = torch.tensor([True, True, True, True, False, True])
    every, frequent = Preprocessing.fit(many, is_training).encodings
    assert every.vocabulary is not None
    assert frequent.vocabulary is not None
    assert (every.vocabulary.tolist(), frequent.vocabulary.tolist()) == (["Bonn", "Kiel", "Ulm"], ["Ulm"])
    _, found = Preprocessing.fit(many, is_training).apply(many).features
    # Training rows 1, 3 and 5 train row 0.
    assert found.values.tolist() == [1, 0, 1, 0, 1, 0]
    assert fingerprint(many) != fingerprint(replace(many, features=(city, city)))


def test_a_model_that_is_trained_on_keeps_its_values_and_scales_and_gets_new_values() -> None:
    before = Preprocessing.fit(raw(), TRAINING)
    tomorrow = raw(
        features=(
            Feature.categories("city", arrow.array(["Trier", "Ulm", "Aachen", "Bonn", "Ulm"])),
            Feature.categories("words", arrow.array([5, 5, 2**63, 9, 9], arrow.uint64()), np.arange(6), first=1),
            Feature(name="user", row_count=12, values=np.array([11, 9, 3, 4, 4])),
            raw().features[3],
        ),
        dense=raw().dense * 7,
    )
    now = Preprocessing.fit(tomorrow, TRAINING, before)
    assert now.scales == before.scales
    city, words = now.encodings[:2]
    assert city.vocabulary is not None
    assert words.vocabulary is not None
    # Bonn is in no training row.
    assert city.vocabulary.tolist() == ["Aachen", "Kiel", "Trier", "Ulm"]
    assert words.vocabulary.tolist() == [3, 5, 9, 2**63]
    assert [part.row_count for part in now.encodings] == [5, 5, 12, 4]
    assert [one.places_in(other).tolist() for one, other in zip(before.encodings, now.encodings, strict=True)] == [
        [0, 2, 4], [0, 1, 3], list(range(10)), [0, 1, 2, 3]
    ]  # fmt: skip
    assert now.apply(tomorrow).features[0].values.tolist() == [3, 4, 1, 0, 4]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dense_fields": (DenseField(name="price"), DenseField(name="constant", log1p=True))}, "dense features: "),
        ({"features": raw().features[:3]}, "features: none, where the model has seen with encode = 'hash', salt 3"),
        ({"features": (raw().features[1], *raw().features[1:])}, "words with encode = 'dictionary', the first 1"),
        ({"features": (*raw().features[:2], Feature(name="user", row_count=9, values=np.zeros(5, np.int64)),
                       raw().features[3])}, "column user: 9 rows; allowed: at least the 10 of the model"),
        ({"features": (Feature.categories("city", arrow.array([1, 2, 3, 4, 5])), *raw().features[1:])},
         "column city: text where the model knows numbers"),
    ],
)  # fmt: skip
def test_what_a_model_that_is_trained_on_cannot_take_is_named(changed: dict[str, Any], message: str) -> None:
    before = Preprocessing.fit(raw(), TRAINING)
    with pytest.raises(DataError, match=message):
        Preprocessing.fit(raw(**changed), TRAINING, before)


@pytest.mark.parametrize(
    ("cities", "is_refused"),
    [
        (["3", "3.0", None, "-4", "7.0"], True),
        (["3", None, "5", "8.0", "-4"], True),  # which is in no training row
        (["3.0", None, "5.0", "-4.0", "8.0"], False),
        (["3", "3.0", "3.1", "4", "4.0"], False),
        (["3", "3.0", "", "4", "4.0"], False),
    ],
)
def test_integers_with_and_without_a_point_are_not_two_values(cities: list[str | None], is_refused: bool) -> None:
    """As pandas writes a column with gaps, and one without."""

    def features(values: list[str | None]) -> tuple[Feature, ...]:
        return (Feature.categories("city", arrow.array(values, arrow.string())),)

    message = "column city: integers with and without a decimal point, as -?[34] and [0-9].0, .*: one way .*Int64"
    with pytest.raises(DataError, match=message) if is_refused else contextlib.nullcontext():
        Preprocessing.fit(raw(features=features(cities)), TRAINING)
    # And so of a model that goes on with other data.
    before = Preprocessing.fit(raw(features=features(["3", "4", "5", "6", "7"])), TRAINING)
    with pytest.raises(DataError, match=message):
        Preprocessing.fit(raw(features=features(["9.0"] * 5)), TRAINING, before)


@pytest.mark.parametrize("encode", ["hash", "dynamic"])
def test_ids_that_were_text_are_no_integers_when_a_model_is_trained_on(encode: str) -> None:
    """The same user would have two rows."""
    schema = parse_schema({"label": "y", "sparse": {"user": {"encode": encode, "rows": 50}}})

    def samples(users: Any, in_lists: bool) -> RawSamples:
        column = arrow.array([[user] for user in users.to_pylist()], arrow.list_(users.type)) if in_lists else users
        table = arrow.table({"y": [0, 1], "user": column})
        return raw_samples("clicks", [Piece(table, PartOfFile("clicks.parquet", "row group 0"))], schema)

    every = torch.ones(2, dtype=torch.bool)
    texts, other = arrow.array(["7", "8"]), [arrow.array([7, 8]), arrow.array([7, 8], arrow.uint64())]
    same = [texts.cast(arrow.large_string()), texts.cast(arrow.binary()), texts.dictionary_encode()]
    for in_lists in (False, True):
        as_text, as_integers = (Preprocessing.fit(samples(one, in_lists), every) for one in (texts, other[0]))
        for column in other:
            with pytest.raises(DataError, match=r"clicks: column user is of integers, where the model has text, .*st"):
                Preprocessing.fit(samples(column, in_lists), every, as_text)
            Preprocessing.fit(samples(column, in_lists), every, as_integers)
        for column in same if not in_lists else same[:2]:
            message = r'clicks: column user is of text, where the model has integers, .*types = \{ user = "int64" \}'
            with pytest.raises(DataError, match=message):
                Preprocessing.fit(samples(column, in_lists), every, as_integers)
            Preprocessing.fit(samples(column, in_lists), every, as_text)
        # A column of nulls is of any type, and a checkpoint of earlier days does not say it.
        nothing = samples(arrow.array([None, None]), in_lists)
        assert Preprocessing.fit(nothing, every, as_text).text() == as_text.text()
        content = as_text.as_json()
        del content["sparse"][0]["ids"]
        Preprocessing.fit(samples(other[0], in_lists), every, Preprocessing.from_json(content))


SCHEMA: dict[str, Any] = {
    "label": "clicked",
    "dense": {"price": {"clamp": [0, 9], "log1p": True}},
    "sparse": {"user": {"encode": "hash", "rows": 50, "salt": 3, "first": 2}},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"dense": {"price": {"clamp": [0, 9]}}},
            r"with clamp \(0.0, 9.0\) and log1p False, where the mod",
        ),
        (
            {"dense": {"price": {"clamp": [0, 8], "log1p": True}}},
            r"clamp \(0.0, 8.0\) and .* has clamp \(0.0, 9.0\) and",
        ),
        ({"sparse": {"user": {**SCHEMA["sparse"]["user"], "salt": 4}}}, "salt 4 and 50 rows.*, where .* salt 3 and 50"),
        ({"sparse": {"user": {**SCHEMA["sparse"]["user"], "rows": 60}}}, "salt 3 and 60 rows.*, where .* and 50 rows"),
        ({"sparse": {"user": {**SCHEMA["sparse"]["user"], "first": 1}}}, "the first 1, where .*, the first 2"),
        ({}, ""),
    ],
)
def test_a_schema_with_other_operators_than_the_model_is_refused(changed: dict[str, Any], message: str) -> None:
    """As when a run is resumed, or a `StreamLoader` gets the preprocessing of a model."""
    table = arrow.table({"clicked": [0, 1], "price": [1.5, 2.5], "user": [[7], [8, 9]]})
    schema = parse_schema(SCHEMA)
    made = raw_samples("clicks", [Piece(table, PartOfFile("clicks.parquet", "row group 0"))], schema)
    known = Preprocessing.parse(Preprocessing.fit(made, torch.ones(2, dtype=torch.bool)).text())
    if not changed:
        Encoder(schema, known, table.schema)
        return
    with pytest.raises(DataError, match=rf"data: column .*{message}"):
        Encoder(parse_schema(SCHEMA | changed), known, table.schema)


def test_a_stream_of_text_is_none_of_a_model_of_integers() -> None:
    table = arrow.table({"clicked": [0, 1], "price": [1.5, 2.5], "user": [[7], [8, 9]]})
    schema = parse_schema(SCHEMA)
    made = raw_samples("clicks", [Piece(table, PartOfFile("clicks.parquet", "row group 0"))], schema)
    known = Preprocessing.fit(made, torch.ones(2, dtype=torch.bool))
    types = table.schema.set(2, arrow.field("user", arrow.list_(arrow.string())))
    with pytest.raises(DataError, match="data: column user is of text, where the model has integers"):
        Encoder(schema, known, types)


def test_a_column_without_any_known_value_has_one_row() -> None:
    features = (Feature.categories("city", arrow.array([None, None, None, "Bonn", None], arrow.string())),)
    samples = Preprocessing.fit(raw(features=features), TRAINING).apply(raw(features=features)).samples()
    assert (samples.columns[0].row_count, samples.columns[0].values.tolist()) == (1, [0] * 5)
    nothing = raw(dense=torch.full((5, 2), torch.nan))
    assert Preprocessing.fit(nothing, TRAINING).apply(nothing).dense.tolist() == [[0.0, 0.0]] * 5


def test_other_features_than_the_models_are_named() -> None:
    fitted = Preprocessing.fit(raw(), TRAINING)
    with pytest.raises(DataError, match=r"features \['city'\], but the model has \['city', 'words', 'user', 'seen'\]"):
        fitted.apply(raw(features=raw().features[:1]))
    numbers = Feature.categories("city", arrow.array([1, 2, 3, 4, 5]))
    with pytest.raises(DataError, match="column city: text where the model knows numbers, or numbers for text"):
        fitted.apply(raw(features=(numbers, *raw().features[1:])))
    rows = Feature(name="city", row_count=3, values=np.zeros(5, np.int64))
    with pytest.raises(DataError, match="column city: encode = 'dictionary' in the model, but not in these data"):
        fitted.apply(raw(features=(rows, *raw().features[1:])))
    with pytest.raises(DataError, match="column city: categories without a vocabulary"):
        raw().samples()


@given(
    values=st.lists(
        st.one_of(st.none(), st.text(max_size=4), st.sampled_from(["\x00", "ß", "\U0001f600", "\ufffd"])), min_size=1
    ),
    data=st.data(),
)
def test_any_text_keeps_its_row(values: list[str | None], data: st.DataObject) -> None:
    """Goes through the file. The expected rows come from a Python dictionary."""
    mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    made = RawSamples(
        name="x",
        dense=torch.zeros(len(values), 1),
        labels=torch.zeros(len(values)),
        dense_fields=(DenseField(name="d"),),
        features=(Feature.categories("c", arrow.array(values, arrow.string())),),
    )
    fitted = Preprocessing.parse(Preprocessing.fit(made, torch.tensor(mask)).text())
    known = sorted({value for value, kept in zip(values, mask, strict=True) if kept and value is not None})
    rows = {value: row + 1 for row, value in enumerate(known)}
    expected = [0 if value is None else rows.get(value, 0) for value in values]
    assert fitted.apply(made).features[0].values.tolist() == expected


def test_categories_are_whatever_has_texts_or_integers() -> None:
    pandas = pytest.importorskip("pandas")
    texts, numbers = ["Ulm", "Kiel", "Ulm", "Bonn"], [3, 1, 3, 2]
    views = arrow.array(texts, arrow.string_view())
    names = arrow.array(texts).dictionary_encode()
    viewed = arrow.DictionaryArray.from_arrays(names.indices, names.dictionary.cast(arrow.string_view()))
    for column in (
        arrow.array(texts), texts, tuple(texts), np.array(texts), np.array(texts, object), pandas.Series(texts),
        pandas.Categorical(texts), views, names, viewed, arrow.chunked_array([texts[:1], texts[1:]]),
        arrow.chunked_array([viewed[:1], viewed[1:]]),
    ):  # fmt: skip
        found = Feature.categories("city", column)
        assert found.dictionary is not None
        assert (found.values.tolist(), found.dictionary.tolist()) == ([2, 1, 2, 0], ["Bonn", "Kiel", "Ulm"])
    for column in (numbers, np.array(numbers, np.int8), torch.tensor(numbers), pandas.Series(numbers)):
        found = Feature.categories("city", column)
        assert found.dictionary is not None
        assert (found.values.tolist(), found.dictionary.tolist()) == ([2, 0, 2, 1], [1, 2, 3])
    assert Feature.categories("city", ["Ulm", None]).values.tolist() == [0, -1]
    assert Feature.categories("city", [None, None]).values.tolist() == [-1, -1]


@pytest.mark.parametrize("column", [[True, False], [1.5, 2.0], [b"x"], [["a"], ["b"]], [1, "a"], 7, [{}], [2**70]])
def test_categories_of_other_types_are_refused(column: Any) -> None:
    with pytest.raises(DataError, match=r"column city: categories.*; allowed: integers"):
        Feature.categories("city", column)


@pytest.mark.parametrize("part", ["labels", "dense", "sample_weights"])
def test_an_array_is_no_tensor(part: str) -> None:
    changed: dict[str, Any] = {part: np.zeros(5, np.float32)}
    with pytest.raises(DataError, match=rf"made: {part} is a ndarray; allowed: a tensor"):
        raw(**changed)
    samples = Preprocessing.fit(raw(), TRAINING).apply(raw()).samples()
    with pytest.raises(DataError, match=rf"made: {part} is a ndarray; allowed: a tensor"):
        replace(samples, are_checked=False, **changed)


@pytest.mark.parametrize("values", [[2**64 - 1, 0, 2**63], [-(2**63), 2**63 - 1, 0]])
def test_integers_keep_all_their_bits(values: list[int]) -> None:
    kind = arrow.uint64() if max(values) > 2**63 else arrow.int64()
    made = raw(
        dense=torch.zeros(3, 1),
        labels=torch.zeros(3),
        dense_fields=(DenseField(name="d"),),
        features=(Feature.categories("c", arrow.array(values, kind)),),
    )
    fitted = Preprocessing.parse(Preprocessing.fit(made, torch.ones(3, dtype=torch.bool)).text())
    order = sorted(values)
    assert fitted.apply(made).features[0].values.tolist() == [order.index(value) + 1 for value in values]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(format=9),
        lambda content: content.pop("dense"),
        lambda content: content.update(dense=3),
        lambda content: content["sparse"][0].update(values=[1, "a"]),
        lambda content: content["sparse"][0].update(rows="x"),
        lambda content: content["dense"][0].update(clamp=[1]),
        lambda content: content["dense"][0].update(mean=None),
    ],
)
def test_a_damaged_file_is_an_error(damage: Any) -> None:
    content = json.loads(Preprocessing.fit(raw(), TRAINING).text())
    damage(content)
    with pytest.raises(ValueError, match=r"format 9|not the preprocessing|invalid literal|could not convert"):
        Preprocessing.parse(json.dumps(content))


def test_the_fingerprint_is_of_what_is_learnt_from() -> None:
    """Every part changes the fingerprint, but the name of the data set does not."""
    one = fingerprint(raw())
    assert one == fingerprint(raw(name="another"))
    features = raw().features
    others = [
        raw(labels=torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])),
        raw(dense=raw().dense + 1),
        raw(dense_fields=(DenseField(name="price"), raw().dense_fields[1])),
        raw(features=features[:-1]),
        raw(features=(features[1], features[0], *features[2:])),
        raw(features=(replace(features[0], name="town"), *features[1:])),
        raw(features=(*features[:-1], replace(features[-1], salt=4))),
        raw(features=(features[0], replace(features[1], first=2), *features[2:])),
        raw(features=(features[0], replace(features[1], offsets=np.array([0, 1, 2, 4, 6, 6])), *features[2:])),
        raw(features=(Feature.categories("city", arrow.array(["Ulm", None, "Kiel", "Born", "Ulm"])), *features[1:])),
        raw(features=(Feature.categories("city", arrow.array(["UlmK", None, "iel", "Bonn", "UlmK"])), *features[1:])),
    ]
    assert len({one, *map(fingerprint, others)}) == 1 + len(others)
