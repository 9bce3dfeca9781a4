# SPDX-License-Identifier: Apache-2.0
"""Histories against a reference of dicts and lists: any stream, any order of reading, in memory and in files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from sennit.errors import DeviceError
from sennit.runtime.data import sources
from sennit.runtime.data.arrow_columns import Piece, raw_samples
from sennit.runtime.data.errors import DataError, MissingPackage
from sennit.runtime.data.order import OrderSettings
from sennit.runtime.data.schema import HISTORY_MAX, Schema, TimeField, parse_schema
from sennit.runtime.data.source import Source
from sennit.runtime.ingest.feed_stream import FeedStream
from sennit.runtime.stream import histories as histories_module
from sennit.runtime.stream.encoder import Encoder
from sennit.runtime.stream.files import PIECE_ROWS
from sennit.runtime.stream.follow_settings import FollowSettings
from sennit.runtime.stream.following import Follower
from sennit.runtime.stream.histories import Histories
from sennit.runtime.stream.index import StreamIndex, open_index
from sennit.runtime.stream.loader import StreamLoader
from sennit.runtime.stream.settings import StreamSettings, open_stream, short_stream
from sennit.runtime.stream.user_order import sort
from sennit.transport.errors import ConfigError
from tests.extent import examples
from tests.ranks import start
from tests.runtime.stream.stream_files import write

pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")

pytestmark = pytest.mark.timeout(120)

FIELDS = {"item": {"rows": 50}, "action": {"rows": 3}}


def schema_of(last: int = 3, sparse: Any = FIELDS, **history: Any) -> Schema:
    wanted = {"of": "user", "last": last, "columns": ["item"], "past": ["action"]} | history
    return parse_schema({"label": "clicked", "sparse": sparse, "history": wanted})


def rows_of(users: Any, **columns: Any) -> Any:
    """Each row has another item, as far as there are."""
    number = np.arange(len(users))
    return pa.table(
        {
            "clicked": pa.array(number % 2 == 0),
            "user": users if isinstance(users, pa.Array) else pa.array(users),
            "item": pa.array(number % 50),
            "action": pa.array(number % 3, pa.int8()),
        }
        | columns
    )


def expected(users: Sequence[Any], values: Sequence[Any], last: int) -> list[list[Any]]:
    """The last values that each user had before each row; null is nobody."""
    seen: dict[Any, list[Any]] = {}
    found = []
    for user, value in zip(users, values, strict=True):
        found.append(seen.get(user, [])[-last:] if user is not None else [])
        if user is not None:
            seen.setdefault(user, []).append(value)
    return found


def index_of(folder: Path, rows: Any, schema: Schema, **options: Any) -> StreamIndex:
    write(folder, rows, **options)
    return open_index([str(folder)], schema.read_columns)


def expanded(histories: Histories, index: StreamIndex, schema: Schema, cut: int = PIECE_ROWS) -> dict[str, list[Any]]:
    """All rows of the stream, expanded so many at once."""
    found: dict[str, list[Any]] = {name: [] for name in schema.read_columns}
    row = 0
    for _, batch in index.read(0, index.sample_count, schema.read_columns):
        for begin in range(0, len(batch), cut):
            piece = batch.slice(begin, cut)
            made = histories.expand(np.arange(row, row + len(piece)), piece)
            made.validate(full=True)
            row += len(piece)
            for name in found:
                found[name] += made.column(name).to_pylist()
    return found


def opened(index: StreamIndex, schema: Schema, *, in_files: bool) -> Histories:
    return Histories.open(index, schema, memory_bytes=0, part_bytes=200) if in_files else Histories.open(index, schema)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Not the fixture `monkeypatch`, which some tests undo.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
# As Arrow files of polars have categories.
VIEWED = pa.dictionary(pa.uint32(), pa.string_view())


@st.composite
def users(draw: st.DrawFn) -> Any:
    """A column of users: integers of any width, text, bytes; nulls among them."""
    kind = draw(st.sampled_from([*INTEGERS, *TEXTS, VIEWED]))
    names = st.sampled_from([0, 1, 2, 127, None])
    if kind in (pa.int64(), pa.uint64()):
        names = st.sampled_from([0, 1, 2**63 - 1, None])
    found = draw(st.lists(names, min_size=1, max_size=40))
    if pa.types.is_integer(kind):
        return pa.array(found, kind)
    texts = [None if one is None else f"user {one}" for one in found]
    if kind == VIEWED:
        plain = pa.array(texts, pa.dictionary(pa.uint32(), pa.string()))
        return pa.DictionaryArray.from_arrays(plain.indices, plain.dictionary.cast(pa.string_view()))
    return pa.array([None if one is None else one.encode() for one in texts] if kind == pa.binary() else texts, kind)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    users=users(),
    last=st.sampled_from([1, 2, 5, HISTORY_MAX]),
    files=st.integers(1, 3),
    group=st.integers(1, 9),
    in_files=st.booleans(),
)
def test_a_history_is_what_the_user_had_before(
    users: Any, last: int, files: int, group: int, in_files: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = [None if number % 4 == 0 else f"name {number % 5}" for number in range(len(users))]
    rows = rows_of(users, name=pa.array(names), tag=pa.array([f"tag {number % 3}" for number in range(len(users))]))
    sparse = FIELDS | {"name": {"encode": "dictionary"}, "tag": {"encode": "hash", "rows": 9}}
    schema = schema_of(last, sparse, columns=["item", "name", "tag"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder := tmp_path_factory.mktemp("rows")))
        index = index_of(folder / "data", rows, schema, files=min(files, len(rows)), group=group)
        found = expanded(opened(index, schema, in_files=in_files), index, schema, cut=group + 1)
    own = users.to_pylist()
    for name in ("item", "name"):
        values = rows[name].to_pylist()
        wanted = expected(own, values, last)
        assert found[name] == [[*history, value] for history, value in zip(wanted, values, strict=True)]
    wanted = expected(own, rows["action"].to_pylist(), last)
    assert found["action"] == wanted
    assert [len(one) for one in found["tag"]] == [len(one) for one in found["item"]]
    assert found["user"] == own
    assert found["clicked"] == rows["clicked"].to_pylist()


@pytest.mark.parametrize("in_files", [False, True])
def test_one_user_with_many_events_and_many_with_one(in_files: bool, tmp_path: Path) -> None:
    count = 100_000
    users = np.concatenate([np.zeros(count, np.int64), np.arange(1, 3_001)])
    schema = schema_of(1)
    index = index_of(tmp_path / "data", rows_of(users), schema, group=20_000)
    limits = {"memory_bytes": 0, "part_bytes": 1 << 20} if in_files else {}
    histories = Histories.open(index, schema, **limits)
    rows = np.array([0, 1, count - 1, count, count + 2_999])
    assert histories.lengths(rows).tolist() == [0, 1, 1, 0, 0]
    long = Histories.open(index, schema_of(HISTORY_MAX), **limits)
    assert long.lengths(rows).tolist() == [0, 1, count - 1, 0, 0]
    _, batch = next(index.read(count - 1, count, index.columns))
    (items,) = long.expand(np.array([count - 1]), batch).column("item").to_pylist()
    assert items == [number % 50 for number in range(count)]


def batches(folder: Path, schema: Schema, order: str = "files", take: range | None = None, **options: Any) -> list[Any]:
    """Lengths and values of batches."""
    loader = StreamLoader(
        str(folder), schema=schema, order=order, batch_size=20, eval_fraction=0.2, histories=True, **options
    )
    with loader:
        state = loader.state_dict()
        if take is not None:
            loader.load_state_dict(state | {"step": take.start})
        found = [(batch.lengths.tolist(), batch.values.tolist()) for batch in loader]
        if loader.evaluates:
            found += [(batch.lengths.tolist(), batch.values.tolist()) for batch in loader.evaluation()]
        return found


def samples_of(found: list[Any]) -> dict[int, tuple[list[int], list[int]]]:
    """By row: items and actions. The number of a row is its item."""
    samples = {}
    for (items, actions), values in found:
        parts = np.split(np.array(values), np.cumsum([*items, *actions])[:-1])
        for own, past in zip(parts[: len(items)], parts[len(items) :], strict=True):
            samples[int(own[-1])] = own.tolist(), past.tolist()
    return samples


@pytest.mark.parametrize("order", ["files", "shuffled"])
def test_batches_have_the_same_histories_in_any_order_and_after_any_stop(order: str, tmp_path: Path) -> None:
    users = np.arange(400) * 7 % 13
    # The number of a row is its item, so a sample says itself which row it is.
    rows = rows_of(users, item=pa.array(np.arange(400)))
    schema = schema_of(5, FIELDS | {"item": {"rows": 400}})
    write(tmp_path / "data", rows)
    wanted = expected(users.tolist(), list(range(400)), 5)
    found = batches(tmp_path / "data", schema, order)
    samples = samples_of(found)
    assert len(samples) == sum(len(items) for (items, _), _ in found) == 400
    for row, (items, actions) in samples.items():
        assert items == [*wanted[row], row]
        assert actions == [item % 3 for item in wanted[row]]
    assert batches(tmp_path / "data", schema, order, range(7, 16)) == found[7:]


def test_lists_that_need_another_encoder_are_encoded_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = schema_of(5, FIELDS | {"item": {"rows": 400}})
    write(tmp_path / "data", rows_of(np.arange(400) * 7 % 13))
    wanted = batches(tmp_path / "data", schema, max_steps=3)
    monkeypatch.setattr(Encoder, "encode_lists", lambda encoder, lists: None)
    assert batches(tmp_path / "data", schema, max_steps=3) == wanted


def read_shuffled(folder: Path) -> None:
    """Batches of one user with 20,000 events, of which a window has all rows, within 1 GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with StreamLoader(str(folder), schema=schema_of(HISTORY_MAX), batch_size=20, histories=True) as loader:
        lengths = [int(batch.lengths.max()) for batch in islice(loader, 3)]
    assert min(lengths) > 10_000


def test_a_window_of_rows_takes_no_memory_for_their_lists(tmp_path: Path) -> None:
    """Lists of all its rows would have 400 million ids."""
    write(tmp_path / "data", rows_of(np.zeros(20_000, np.int64)), files=1, group=5_000)
    process = start(partial(read_shuffled, tmp_path / "data"), log=tmp_path / "log")
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "log").read_text()


@pytest.mark.parametrize("form", ["csv", "csv.gz", "parquet"])
def test_rows_that_are_left_out_are_in_no_history(form: str, tmp_path: Path) -> None:
    users = (np.arange(200) * 7 % 11).tolist()
    labels = [7 if row in (3, 50, 51, 120) else row % 2 for row in range(200)]
    rows = rows_of(users, clicked=pa.array(labels), item=pa.array(np.arange(200)))
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / f"rows.{form}"
    if form == "parquet":
        write(tmp_path / "data", rows, files=1)
    else:
        with pa.CompressedOutputStream(str(path), "gzip") if form == "csv.gz" else path.open("wb") as sink:
            csv.write_csv(rows, sink)
    schema = parse_schema(
        {
            "label": "clicked",
            "skip_broken": 4,
            "sparse": FIELDS | {"item": {"rows": 200}},
            "history": {"of": "user", "last": 4, "columns": ["item"], "past": ["action"]},
        }
    )
    kept = [row for row in range(200) if labels[row] != 7]
    wanted = dict(zip(kept, expected([users[row] for row in kept], kept, 4), strict=True))
    found = samples_of(batches(tmp_path / "data", schema, max_steps=7))
    assert len(found) == 7 * 20 + 39
    assert all(found[row] == ([*wanted[row], row], [item % 3 for item in wanted[row]]) for row in kept if row in found)


def test_running_means_beside_histories(tmp_path: Path) -> None:
    """A block of running columns has rows of other ranks, which have no part in this rank's lists."""
    users = (np.arange(600) * 7 % 11).tolist()
    price = pa.array(np.random.default_rng(1).standard_normal(600))
    write(tmp_path / "data", rows_of(users, price=price, item=pa.array(np.arange(600))))
    content = {
        "label": "clicked",
        "dense": {"price": {"running": 700}},
        "sparse": FIELDS | {"item": {"rows": 600}},
        "history": {"of": "user", "last": 4, "columns": ["item"], "past": ["action"]},
    }
    schema = parse_schema(content)
    wanted = expected(users, range(600), 4)
    found = samples_of(batches(tmp_path / "data", schema))
    assert len(found) == 600
    for row, (items, actions) in found.items():
        assert items == [*wanted[row], row]
        assert actions == [item % 3 for item in wanted[row]]


def test_times_that_go_backwards(tmp_path: Path) -> None:
    rows = rows_of(np.arange(300) % 7, at=pa.array([*range(299), 5]))
    write(tmp_path / "data", rows)
    content = {"label": "clicked", "time": "at", "sparse": FIELDS}
    schema = parse_schema(content | {"history": {"of": "user", "last": 4, "columns": ["item"]}})
    with pytest.raises(DataError, match=r"part-2.parquet: column at.* 284 s back; allowed: 0 s"):
        batches(tmp_path / "data", schema, "time")


@pytest.mark.parametrize("in_files", [False, True])
def test_times_of_one_user_that_fall_are_named_before_the_run(in_files: bool, tmp_path: Path) -> None:
    """Times of different users may be in any order, if samples are not in that of time."""
    at = 1_000 * (np.arange(300) % 7) + np.arange(300)
    content = {"label": "clicked", "time": "at", "sparse": FIELDS | {"at": {"encode": "value"}}}
    schema = parse_schema(content | {"history": {"of": "user", "last": 4, "columns": ["item", "at"]}})
    limits = {"memory_bytes": 0, "part_bytes": 1 << 10} if in_files else {}
    Histories.open(index_of(tmp_path / "good", rows_of(np.arange(300) % 7, at=pa.array(at)), schema), schema, **limits)
    at[[100, 207]] = 5
    index = index_of(tmp_path / "bad", rows_of(np.arange(300) % 7, at=pa.array(at)), schema)
    with pytest.raises(DataError, match=r"column at, .*: time 5 after \d+ of the same user .* sorted by it"):
        Histories.open(index, schema, **limits)
    # A model that does not read them does not care.
    others = parse_schema(content | {"history": {"of": "user", "last": 4, "columns": ["item"]}})
    Histories.open(index, others, **limits)


def test_a_value_that_int64_lacks_is_named(tmp_path: Path) -> None:
    """A model would read it as a negative one."""
    content = {"label": "clicked", "sparse": FIELDS | {"at": {"encode": "value"}}}
    schema = parse_schema(content | {"history": {"of": "user", "last": 4, "columns": ["item", "at"]}})
    at = [*range(250), 2**63 - 1, 2**63, *range(48)]
    index = index_of(tmp_path / "data", rows_of(np.arange(300) % 7, at=pa.array(at, pa.uint64())), schema)
    message = r"part-2\.parquet: column at, row group 0, row 51: value 9223372036854775808; allowed .* 'value': int64"
    with pytest.raises(DataError, match=message):
        Histories.open(index, schema)
    for place, rows in index.read(251, 252, schema.columns):
        with pytest.raises(DataError, match=message):
            raw_samples("rows", [Piece(rows, place)], schema)


def test_ranks_of_a_host_make_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = schema_of()
    index = index_of(tmp_path / "data", rows_of(np.arange(3_000) % 70), schema)
    sorts = []

    def counted(*arguments: Any, **options: Any) -> None:
        sorts.append(arguments)
        sort(*arguments, **options)

    monkeypatch.setattr(histories_module, "sort", counted)
    with ThreadPoolExecutor(4) as pool:
        opened_by = list(pool.map(lambda _: opened(index, schema, in_files=True), range(4)))
    assert len(sorts) == 1
    wanted = expanded(opened(index, schema, in_files=False), index, schema)
    assert all(expanded(one, index, schema) == wanted for one in opened_by)


def test_a_schema_has_histories_only_if_somebody_asks(tmp_path: Path) -> None:
    write(tmp_path / "data", rows_of(np.arange(100) % 5))
    run = OrderSettings(
        seed=1, split="last", eval_fraction=0.1, batch_size=10, epochs=1, max_steps=None, eval_every=None
    )
    source = Source(data=str(tmp_path / "data"))
    plain, full = (
        open_stream(source, schema_of(), StreamSettings(order="files"), run, histories=asked) for asked in (False, True)
    )
    assert plain.stream.schema.columns == ["clicked", "item"]
    assert plain.stream.index.columns == ("clicked", "item")
    assert full.stream.index.columns == ("clicked", "item", "action", "user")
    longer = open_stream(source, schema_of(4), StreamSettings(order="files"), run, histories=True)
    assert len({one.stream.fingerprint for one in (plain, full, longer)}) == 3
    with pytest.raises(DataError, match="histories, which a feeder does not send; allowed: ranks that read"):
        FeedStream.of(full)
    assert [table.name for table in FeedStream.of(plain).facts.tables] == ["item"]


def test_movielens_has_histories_of_users_in_order_of_time() -> None:
    try:
        raw = sources.load(Source(data="movielens"), seed=1, histories=True)
    except MissingPackage as error:
        pytest.skip(str(error))
    plain = raw.without_history()
    assert [part.name for part in plain.features] == ["user", "film", "age", "gender", "occupation", "genre"]
    users, seconds, ratings = (part.values for part in raw.features if part.name in ("user", "rating", "rated_at_s"))
    assert raw.labels.tolist() == (ratings >= 4).tolist()
    wanted = expected(users.tolist(), range(len(raw)), 200)
    with StreamLoader("movielens", order="time", batch_size=500, histories=True) as loader:
        assert [table.name for table in loader.tables] == [*(part.name for part in plain.features), "rating"]
        loader.load_state_dict(loader.state_dict() | {"step": 40})
        batch = next(iter(loader))
    rows = [wanted[row] for row in range(20_000, 20_500)]
    assert batch.lengths[1].tolist() == [len(one) + 1 for one in rows]
    assert batch.lengths[-1].tolist() == [len(one) for one in rows]
    assert batch.values[-int(batch.lengths[-1].sum()) :].tolist() == [ratings[one] for row in rows for one in row]
    assert batch.integers is not None
    own = [seconds[one] for number, row in enumerate(rows, 20_000) for one in (*row, number)]
    assert batch.integers.values.tolist() == own


def test_times_of_samples_in_memory_are_read_only_where_they_order(seed: int) -> None:
    try:
        raw = sources.load(Source(data="movielens"), seed=1)
    except MissingPackage as error:
        pytest.skip(str(error))
    run = OrderSettings(
        seed=seed, split="last", eval_fraction=0.1, batch_size=10, epochs=1, max_steps=None, eval_every=None
    )
    timed, untimed = (short_stream(raw, StreamSettings(order=order), run) for order in ("time", "files"))
    assert timed.times is not None
    assert (timed.times.first_s, timed.times.last_s) == (874724710, 893286638)
    without = short_stream(replace(raw, times=None), StreamSettings(order="files"), run)
    assert untimed.stream.fingerprint == without.stream.fingerprint != timed.stream.fingerprint


def test_a_folder_that_grows_has_no_histories(tmp_path: Path) -> None:
    write(tmp_path / "data", rows_of(np.arange(100) % 5))
    run = OrderSettings(
        seed=1, split="last", eval_fraction=0.1, batch_size=10, epochs=1, max_steps=None, eval_every=None
    )
    settings = StreamSettings(order="files", follow=FollowSettings(follow=True), fit_rows=10)
    source = Source(data=str(tmp_path / "data"), evaluation=(str(tmp_path / "data"),))
    with pytest.raises(ConfigError, match="--follow with histories, which are sorted"):
        Follower(source, schema_of(), settings, run, histories=True)
    Follower(source, schema_of(), settings, run)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"item": pa.array([1, 2, None, 4])}, r"part-1.parquet: column item, row group 0, row 0: null; allowed in a"),
        ({"action": pa.array([0, 1, 2, 7])}, r"column action, row group 0, row 1: row id 7; allowed in table action"),
        ({"item": pa.array([[1], [2], [3], [4]])}, "column item is list.*; allowed in a history: one id a row"),
        ({"user": pa.array([1.0, 2.0, 1.0, 1.0])}, "column user is double; allowed for history.of: integer, string"),
    ],
)
def test_values_that_no_history_can_have(changed: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "data", rows_of([1, 1, 1, 1], **changed), files=2)
    with pytest.raises(DataError, match=message):
        StreamLoader(
            str(tmp_path / "data"), schema=schema_of(), order="files", batch_size=1, histories=True, eval_fraction=0.25
        )


def test_a_file_without_the_column_of_users(tmp_path: Path) -> None:
    write(tmp_path / "data", rows_of([1, 2, 3, 4]).drop_columns(["user"]), files=1)
    with pytest.raises(DataError, match="no column user"):
        StreamLoader(str(tmp_path / "data"), schema=schema_of(), order="files", batch_size=1, histories=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"of": ""}, "history.of is ''; allowed: the name of a column"),
        ({"of": None}, "history.of is None; allowed"),
        ({"last": 0}, "history.last is 0; allowed: an integer from 1 to 1048576"),
        ({"last": 1.0}, "history.last is 1.0; allowed"),
        ({"columns": []}, "history.columns has no column; allowed: one or more"),
        ({"columns": "item"}, "history.columns is 'item'; allowed: a list of columns of ids"),
        ({"columns": ["item", "price"]}, "history has column 'price'; allowed: columns of sparse: item, action"),
        ({"columns": ["action"]}, "history has column 'action' twice; allowed: once"),
        ({"past": [1]}, r"history.past is \[1\]; allowed: a list of columns of ids"),
        ({"lasts": 1}, "history has the unknown key 'lasts'; allowed: of, last, columns, past"),
    ],
)
def test_a_schema_that_describes_no_history(changed: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        schema_of(**changed)
    with pytest.raises(DataError, match="history is 'user'; allowed: a table"):
        parse_schema({"label": "clicked", "sparse": FIELDS, "history": "user"})
    with pytest.raises(DataError, match="'item', which has first = 2; allowed: columns of one id a row"):
        schema_of(sparse=FIELDS | {"item": {"rows": 5, "first": 2}})


def cached() -> list[Path]:
    return sorted((Path(os.environ["XDG_CACHE_HOME"]) / "sennit").glob("histories-*"))


def test_files_are_made_once_and_again_if_they_are_not_whole(tmp_path: Path) -> None:
    schema = schema_of()
    rows = rows_of(np.arange(300) % 7)
    index = index_of(tmp_path / "data", rows, schema)
    wanted = expanded(opened(index, schema, in_files=True), index, schema)
    (entry,) = cached()
    assert not [path for path in entry.parent.rglob(".*") if path.is_dir() or "part" in path.name]
    made = (entry / "places.npy").stat().st_ino
    # Another length has the same events.
    opened(index, schema_of(9), in_files=True)
    assert cached() == [entry]
    assert (entry / "places.npy").stat().st_ino == made
    about = entry / "about.json"
    for damage in (
        lambda: os.truncate(entry / "before.npy", 500),
        lambda: (entry / "column-0.npy").write_bytes(b"x" * (entry / "column-0.npy").stat().st_size),
        lambda: about.write_text(about.read_text().replace("sennit histories", "others")),
        lambda: about.write_text("[]"),
        about.unlink,
    ):
        damage()
        with pytest.warns(RuntimeWarning, match=r"histories-\w+: .*; histories are made anew"):
            assert expanded(opened(index, schema, in_files=True), index, schema) == wanted
        assert expanded(opened(index, schema, in_files=True), index, schema) == wanted
    # Other rows have other files.
    other = index_of(tmp_path / "other", rows_of(np.arange(300) % 5), schema)
    opened(other, schema, in_files=True)
    assert len(cached()) == 2


def test_files_of_rows_that_look_alike_are_made_anew(tmp_path: Path) -> None:
    """Footers have sizes, least and greatest values, which are those of other rows, too."""
    schema = schema_of()
    one, other = (
        index_of(tmp_path / name, rows_of(users), schema, files=1)
        for name, users in (("one", [0, 0, 1, 1]), ("other", [0, 1, 0, 1]))
    )
    assert one.fingerprint == other.fingerprint
    histories = opened(one, schema, in_files=True)
    with pytest.warns(RuntimeWarning, match="row 1 of the stream: column user has another value.*made anew"):
        assert expanded(opened(other, schema, in_files=True), other, schema)["item"] == [[0], [1], [0, 2], [1, 3]]
    with pytest.raises(DataError, match="row 1 of the stream: column user has another value than when histories"):
        expanded(histories, other, schema)


def test_files_serve_only_what_they_were_checked_for(tmp_path: Path) -> None:
    """Rows that one schema allows and the next refuses: as many rows of a table, and the order of time."""
    rows = rows_of([0, 1, 0, 1])
    ids = {"item": {"encode": "id", "rows": 50}, "action": {"rows": 3}}
    allows = schema_of(sparse=ids, columns=["item"], past=[])
    index = index_of(tmp_path / "ids", rows, allows)
    opened(index, allows, in_files=True)
    few = schema_of(sparse=ids | {"item": {"encode": "id", "rows": 3}}, columns=["item"], past=[])
    with pytest.raises(DataError, match=r"column item.*: row id 3; allowed in table item: \[0, 3\)"):
        opened(index, few, in_files=True)
    index = index_of(tmp_path / "times", rows_of([0, 1, 0, 1], item=pa.array([9, 9, 5, 5])), allows)
    opened(index, allows, in_files=True)
    with pytest.raises(DataError, match="time 5 after 9 of the same user"):
        opened(index, replace(allows, time=TimeField(column="item")), in_files=True)


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = schema_of()
    index = index_of(tmp_path / "data", rows_of(np.arange(300) % 7), schema)

    def full(file: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeviceError, match=r"No space left on device.*; set XDG_CACHE_HOME to a folder"):
        opened(index, schema, in_files=True)
    assert not cached()
    monkeypatch.undo()
