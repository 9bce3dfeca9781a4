# SPDX-License-Identifier: Apache-2.0
"""`synthetic-yambda`: the published shape, and a preference that lies in the history and nowhere else."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict

import numpy as np
import pytest

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.source import Source
from sennit.runtime.stream.attainable import Attainable
from sennit.runtime.stream.histories import Histories
from sennit.runtime.stream.planted import F64, indices, probabilities
from sennit.runtime.stream.synthetic_data import index_of_synthetic, settings_of
from sennit.runtime.stream.yambda import ACTIONS, BLOCK_ROWS, LABEL, YambdaFile
from sennit.runtime.stream.yambda_planted import (
    EVENTS,
    LISTENS,
    MATCH,
    TIME_STEP_S,
    WINDOW,
    PlantedYambda,
    SyntheticYambda,
    logits_of_labels,
)
from sennit.transport.errors import ConfigError

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")

pytestmark = pytest.mark.timeout(120)

SMALL = SyntheticYambda(rows=100_000, users=500, items=2_000)


def entropy(true: F64, told: F64) -> float:
    """Normalised, in expectation: cross-entropy of what is told / entropy of the mean."""
    mean = true.mean()
    cross = -(true * np.log(told) + (1 - true) * np.log1p(-told)).mean()
    return float(cross / -(mean * np.log(mean) + (1 - mean) * np.log1p(-mean)))


def test_any_block_is_made_alone_and_says_whose_events_there_are() -> None:
    file = pickle.loads(pickle.dumps(YambdaFile(SMALL)))
    assert file.block_rows == (BLOCK_ROWS, SMALL.rows - BLOCK_ROWS)
    whole = pa.Table.from_batches([batch for block in (0, 1) for batch in file.read(block, file.schema.names)])
    assert whole.schema == file.schema
    assert len(whole) == SMALL.rows
    part = next(file.read(1, [LABEL, "uid"], begin=77))
    assert part.equals(whole.slice(BLOCK_ROWS + 77, len(part)).select([LABEL, "uid"]).combine_chunks().to_batches()[0])
    # How many events a user had is counted along the stream.
    before: Counter[int] = Counter()
    users, numbers = PlantedYambda(SMALL).events(indices(0, 20_000))
    for user, number in zip(users.tolist(), numbers.tolist(), strict=True):
        assert number == before[user]
        before[user] += 1
    assert whole["uid"].to_pylist()[:20_000] == users.tolist()


def test_the_shape_is_the_published_one() -> None:
    """Arxiv 2505.22238: table 2 has types of events and recommendations, table 3 lengths of histories, 3.3 times."""
    file = YambdaFile(SMALL)
    events = pa.Table.from_batches([batch for block in (0, 1) for batch in file.read(block, file.schema.names)])
    types = Counter(events["event_type"].to_pylist())
    total = sum(count for count, _ in EVENTS.values())
    for name, (count, recommended) in EVENTS.items():
        share = count / total
        assert types[name] / SMALL.rows == pytest.approx(share, abs=5 * (share / SMALL.rows) ** 0.5)
        organic = np.array(events.filter(pc.equal(events["event_type"], name))["is_organic"])
        assert organic.mean() == pytest.approx(1 - recommended / count, abs=2.5 / len(organic) ** 0.5)
    lengths = np.sort(np.bincount(np.array(events["uid"]), minlength=SMALL.users))
    median, most, more = np.quantile(lengths, [0.5, 0.9, 0.95])
    assert most / median == pytest.approx(12_956 / 3_076, rel=0.15)
    assert more / median == pytest.approx(17_030 / 3_076, rel=0.15)
    items = np.sort(np.bincount(np.array(events["item_id"]), minlength=SMALL.items))[::-1]
    assert items[: SMALL.items // 100].sum() > 0.3 * SMALL.rows
    assert items[SMALL.items // 2 :].sum() < 0.15 * SMALL.rows
    times = np.array(events["timestamp"])
    assert not (times % TIME_STEP_S).any()
    assert (np.diff(times) >= 0).all()
    assert (times[0], times[-1] // 86_400) == (0, SMALL.days - 1)
    listens = np.array(events["event_type"]) == "listen"
    labels, played = np.array(events[LABEL]) == 1, events["played_ratio_pct"].to_pandas()
    assert (played.isna() == ~listens).all()
    assert (labels == (played >= 50)).all()
    assert [ACTIONS[one] for one in events["action"].to_pylist()] == [
        LABEL if label else kind for label, kind in zip(labels, events["event_type"].to_pylist(), strict=True)
    ]


def test_what_is_planted_is_in_the_history() -> None:
    """True probabilities follow from the items of the history, and from a user and an item alone they do not."""
    source = Source(data="synthetic-yambda?rows=100000&users=500&items=2000&last=8")
    index, schema = index_of_synthetic(source, histories=True)
    planted, rows = PlantedYambda(SMALL), np.arange(70_000, 70_500)
    _, batch = next(index.read(70_000, 70_500, index.columns))
    assert schema.history is not None
    assert schema.history.last == WINDOW
    found = Histories.open(index, schema).expand(rows, batch)
    lists = [planted.clusters_of(np.array(items)) for items in found.column("item_id").to_pylist()]
    matches = np.array([int((items[:-1] == items[-1]).sum()) for items in lists])
    events = planted.events(rows.view(np.uint64))
    assert (matches == planted.matches(events)).all()
    assert np.array_equal(logits_of_labels(planted.outcomes(events, matches)), planted.logits(rows.view(np.uint64)))
    # The best that one can tell who knows all weights, and no history.
    every = indices(0, SMALL.rows)
    events = planted.events(every)
    shares = np.bincount(planted.matches(events), minlength=WINDOW + 1) / SMALL.rows
    weights = planted.outcomes(events, np.zeros(SMALL.rows, np.int64))
    blind = sum(share * LISTENS * probabilities(weights + MATCH * count) for count, share in enumerate(shares))
    best = Attainable.of(planted, 0, SMALL.rows)
    assert abs(best.normalised_entropy - best.expected) < 2 * best.half
    assert best.expected < 0.79
    assert entropy(probabilities(planted.logits(every)), np.asarray(blind)) > 0.95


def test_a_taste_drifts() -> None:
    """The clusters of a user's items soon say nothing of what comes later."""
    planted = PlantedYambda(SMALL)
    rows = indices(0, SMALL.rows)
    events = planted.events(rows)
    clusters = planted.clusters_of(planted.items(events))
    by_user: defaultdict[int, list[int]] = defaultdict(list)
    for user, cluster in zip(events.users.tolist(), clusters.tolist(), strict=True):
        by_user[user].append(cluster)

    def agreement(lag: int) -> float:
        pairs = [np.array(one[lag:]) == np.array(one[:-lag]) for one in by_user.values() if len(one) > 3 * lag]
        return float(np.concatenate(pairs).mean())

    # Half of the items are of the taste, so a quarter of the pairs.
    assert agreement(1) > 0.28
    assert agreement(3 * SMALL.drift) < 0.12


def test_names_and_options() -> None:
    assert settings_of(Source(data="synthetic-yambda")) == SyntheticYambda()
    assert settings_of(Source(data="synthetic-yambda?zipf=0.5&rows=7")) == SyntheticYambda(rows=7, zipf=0.5)
    plain, schema = index_of_synthetic(Source(data="synthetic-yambda?rows=100"))
    assert schema.history is None
    assert plain.columns == (LABEL, "uid", "item_id", "timestamp")
    longer, _ = index_of_synthetic(Source(data="synthetic-yambda?rows=100&last=9"))
    other, _ = index_of_synthetic(Source(data="synthetic-yambda?rows=100&seed=2"))
    assert plain.fingerprint == longer.fingerprint != other.fingerprint
    with pytest.raises(DataError, match=r"'row'; allowed: rows, users, items.*; did you mean rows\?"):
        settings_of(Source(data="synthetic-yambda?row=3"))
    with pytest.raises(ConfigError, match="users 0; allowed: 1 to 10000000"):
        settings_of(Source(data="synthetic-yambda?users=0"))
    with pytest.raises(DataError, match="no column 'track'; allowed: uid, item_id"):
        next(YambdaFile(SMALL).read(0, ["track"]))


def test_few_users_few_items_and_few_rows() -> None:
    for settings in (
        SyntheticYambda(rows=1, users=1, items=1, clusters=1),
        SyntheticYambda(rows=50, users=1, items=3, clusters=30, drift=1),
        SyntheticYambda(rows=5, users=1_000, items=1, zipf=0),
    ):
        file = YambdaFile(settings)
        (batch,) = file.read(0, file.schema.names)
        assert len(batch) == settings.rows
        assert max(batch.column("item_id").to_pylist()) < settings.items
        assert max(batch.column("uid").to_pylist()) < settings.users
