# SPDX-License-Identifier: Apache-2.0
"""The model that `synthetic-yambda` plants: listening whose outcome depends on what the user listened to just before.

The shape is that of Yambda-5B (Ploshkin et al., arXiv 2505.22238): who has how many events, which events there are, and
how often a recommendation led to them. Everything of an event is a function of (seed, user, number among the user's
events), and both follow from its row. So any block can be made without the others.

- **Items** are in hidden clusters, and popular by Zipf's law.
- **Users** have a taste, a cluster, which changes after `drift` events. Half of their items are of it.
- **Whether a track is listened to** by half has a logit: an intercept, a weight of the user, one of the item, and
  `MATCH` for each of the last `WINDOW` events of the user whose item is in the same cluster.

So one who sees a user and an item cannot know whether they fit at present, and one who reads the history can.
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sennit.offload.hashing import U64, splitmix64
from sennit.offload.permutation import KeyedPermutation
from sennit.options import Option, check
from sennit.runtime.data.seeds import derive
from sennit.runtime.stream.planted import F64, I64, probabilities

VERSION: Final = 1
"""Incremented when the same settings give other events."""

# Table 2 of the paper: events, and how many of them a recommendation led to.
EVENTS: Final = {
    "listen": (4_649_567_411, 2_266_400_808),
    "like": (89_334_605, 37_789_576),
    "dislike": (11_579_143, 5_612_434),
    "unlike": (32_944_520, 1_651_117),
    "undislike": (2_434_208, 239_135),
}
LISTENS: Final = EVENTS["listen"][0] / sum(count for count, _ in EVENTS.values())

SPREAD: Final = 1.1
"""Deviation of the logarithm of a user's events: Table 3 of the paper has 3,076 at the median and 12,956 at 90 %."""

TIME_STEP_S: Final = 5
WINDOW: Final = 8
MATCH: Final = 0.6
INTERCEPT: Final = -1.3
USER_SCALE: Final = 0.3
ITEM_SCALE: Final = 0.5
_CYCLE: Final = 16
"""Events that a user has in a cycle, in the mean. The order of users repeats itself from cycle to cycle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticYambda:
    """Which stream. All fields decide bits. Yambda-50M has 10,000 users, 934,057 items and 47.9 million events."""

    rows: Annotated[int, Option(low=1, high=1 << 40)] = 1_000_000
    """Events of all users."""

    users: Annotated[int, Option(low=1, high=10_000_000)] = 1_000
    items: Annotated[int, Option(low=1, high=1 << 27)] = 10_000
    clusters: Annotated[int, Option(low=1, high=65_536)] = 20
    """Hidden groups of items."""

    drift: Annotated[int, Option(low=1, high=1 << 30)] = 40
    """Events of a user after which the taste is another one."""

    zipf: Annotated[float, Option(low=0, high=4)] = 1.0
    """Exponent of Zipf's law among items; 0 is uniform."""

    days: Annotated[int, Option(low=1, high=36_500)] = 300
    """Days that the events are spread over."""

    last: Annotated[int, Option(low=1, high=1 << 20)] = 200
    """Events of a history at most. It decides no event."""

    seed: Annotated[int, Option(low=0, high=2**63 - 1)] = 1

    def __post_init__(self) -> None:
        check(self)

    @property
    def identity(self) -> dict[str, int | float]:
        """What decides the events."""
        return {name: value for name, value in asdict(self).items() if name != "last"} | {"version": VERSION}


class Events(NamedTuple):
    """n events: whose they are, and how many the same user has before."""

    users: U64
    numbers: U64


class PlantedYambda:
    """The events of a stream by row, uint64 [n], and the true model behind them."""

    def __init__(self, settings: SyntheticYambda) -> None:
        self.settings = settings
        self._turns = _turns(settings.users, derive(settings.seed, "synthetic-yambda", "turns"))
        self._catalogue = _catalogue(settings.items, settings.clusters, settings.zipf, settings.seed)

    @property
    def row_count(self) -> int:
        return self.settings.rows

    def times(self, rows: U64) -> I64:
        """Int64 [n]: seconds since the stream begins, in steps of 5."""
        steps = np.uint64(self.settings.days * 86_400 // TIME_STEP_S)
        whole, rest = (steps // np.uint64(self.row_count), steps % np.uint64(self.row_count))
        found = rows * whole + (rows.astype(np.float64) * (float(rest) / self.row_count)).astype(np.uint64)
        return (found * np.uint64(TIME_STEP_S)).view(np.int64)

    def events(self, rows: U64) -> Events:
        """Whose events these are."""
        return self._turns.events(rows)

    def items(self, events: Events) -> I64:
        """Int64 [n]: which item each event is about."""
        return self._catalogue.ids[self._places(events)]

    def clusters_of(self, items: I64) -> I64:
        """Int64 [n]: the hidden cluster of each item."""
        found: I64 = self._catalogue.clusters[self._catalogue.places[items]]
        return found

    def matches(self, events: Events) -> I64:
        """Int64 [n]: how many of the last events of the same user are of the item's cluster."""
        clusters = self._catalogue.clusters
        own, found = clusters[self._places(events)], np.zeros(len(events.users), np.int64)
        for lag in range(1, WINDOW + 1):
            is_there = events.numbers >= np.uint64(lag)
            before = Events(events.users, np.where(is_there, events.numbers - np.uint64(lag), np.uint64(0)))
            found += is_there & (clusters[self._places(before)] == own)
        return found

    def outcomes(self, events: Events, matches: I64) -> F64:
        """Float64 [n]: the true logit of a listen by half, if the event is a listen with so many `matches`."""
        user = self._weights("user", events.users) * USER_SCALE
        item = self._weights("item", self.items(events).view(np.uint64)) * ITEM_SCALE
        logits: F64 = INTERCEPT + user + item + MATCH * matches
        return logits

    def logits(self, rows: U64) -> F64:
        """Float64 [n]: the true logit of the label. No model predicts better."""
        events = self.events(rows)
        return logits_of_labels(self.outcomes(events, self.matches(events)))

    def labels(self, rows: U64, logits: F64 | None = None) -> npt.NDArray[np.bool_]:
        """Bool [n]: whether an event is a listen by half. `logits`: the true ones, if they are there."""
        chances = probabilities(self.logits(rows) if logits is None else logits)
        listened: npt.NDArray[np.bool_] = self._uniform("labels", rows) < chances
        return listened

    def types(self, rows: U64, logits: F64, labels: npt.NDArray[np.bool_]) -> I64:
        """Int64 [n]: which of `EVENTS` these are. All that is labelled is a listen."""
        is_other = ~labels & (self._uniform("other", rows) < (1 - LISTENS) / (1 - probabilities(logits)))
        counts = np.array([count for count, _ in EVENTS.values()][1:], np.float64)
        other = np.searchsorted(np.cumsum(counts) / counts.sum(), self._uniform("type", rows), side="right")
        return np.where(is_other, 1 + np.minimum(other, len(counts) - 1), 0).astype(np.int64)

    def is_organic(self, rows: U64, types: I64) -> npt.NDArray[np.bool_]:
        """Bool [n]: whether no recommendation led to the event."""
        shares = np.array([recommended / count for count, recommended in EVENTS.values()])
        found: npt.NDArray[np.bool_] = self._uniform("organic", rows) >= shares[types]
        return found

    def played(self, rows: U64, labels: npt.NDArray[np.bool_]) -> I64:
        """Int64 [n]: how much of the track was played, in percent, if the event is a listen."""
        drawn = self._random("played", rows)
        return np.where(labels, 50 + drawn % np.uint64(51), 1 + drawn % np.uint64(49)).astype(np.int64)

    def _places(self, events: Events) -> I64:
        """The places of the events' items in the catalogue."""
        keys = (events.users << np.uint64(32)) | events.numbers
        drift = np.uint64(self.settings.drift)
        # Not all tastes change at the same time.
        age = (self._random("age", events.users) % drift) + events.numbers
        tastes = self._random("taste", (events.users << np.uint64(32)) | (age // drift))
        is_taste = self._random("choice", keys) >> np.uint64(63) == 1
        cluster = (tastes % np.uint64(self.settings.clusters)).astype(np.int64)
        return self._catalogue.drawn(self._uniform("item", keys), cluster, is_taste)

    def _weights(self, name: str, numbers: U64) -> F64:
        """Float64 [n]: uniform, with mean 0 and variance 1."""
        return (self._uniform(f"weight/{name}", numbers) - 0.5) * math.sqrt(12)

    def _uniform(self, name: str, numbers: U64) -> F64:
        return (self._random(name, numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _random(self, name: str, numbers: U64) -> U64:
        return splitmix64(derive(self.settings.seed, "synthetic-yambda", name), numbers)


def logits_of_labels(outcomes: F64) -> F64:
    """Float64 [n]: logits of labels, from those of listens by half: other events have the label 0."""
    chances = LISTENS * probabilities(outcomes)
    found: F64 = np.log(chances / (1 - chances))
    return found


class _Turns(NamedTuple):
    """Whose turn it is. The order of users repeats itself."""

    users: I64
    """[slots] of a cycle."""

    before: I64
    """[slots]: how many slots the same user has before, in a cycle."""

    counts: I64
    """[users]: how many slots a user has in a cycle."""

    def events(self, rows: U64) -> Events:
        cycle, slot = np.divmod(rows.view(np.int64), len(self.users))
        users = self.users[slot]
        return Events(users.view(np.uint64), (cycle * self.counts[users] + self.before[slot]).view(np.uint64))


@functools.lru_cache(maxsize=2)
def _turns(users: int, key: int) -> _Turns:
    # Quantiles of a lognormal distribution with the mean `_CYCLE`.
    normal = statistics.NormalDist(math.log(_CYCLE) - SPREAD**2 / 2, SPREAD)
    counts = np.array([max(1, round(math.exp(normal.inv_cdf((user + 0.5) / users)))) for user in range(users)])
    slots = int(counts.sum())
    whose = np.repeat(np.arange(users), counts)[KeyedPermutation(slots, str(key))(np.arange(slots))]
    order = np.argsort(whose, kind="stable")
    before = np.empty(slots, np.int64)
    before[order] = np.arange(slots) - np.repeat(np.cumsum(counts) - counts, counts)
    return _Turns(whose, before, counts)


class _Catalogue(NamedTuple):
    """The items, cluster by cluster."""

    ids: I64
    """[items]: the id at each place."""

    places: I64
    """[items]: the place of each id."""

    clusters: I64
    """[items]: the cluster at each place."""

    ends: F64
    """[items]: how popular the items up to a place are, together."""

    bounds: I64
    """[clusters + 1]: the first place of each cluster."""

    def drawn(self, uniform: F64, clusters: I64, is_of: npt.NDArray[np.bool_]) -> I64:
        """Places that numbers in [0, 1) draw: among the items of `clusters` where `is_of`, or else among all."""
        ends = np.concatenate([[0.0], self.ends])[self.bounds]
        low, high = ends[clusters], ends[clusters + 1]
        chosen = np.where(is_of, low + uniform * (high - low), uniform * self.ends[-1])
        found: I64 = np.minimum(np.searchsorted(self.ends, chosen, side="right"), len(self.ids) - 1)
        return found


@functools.lru_cache(maxsize=2)
def _catalogue(items: int, clusters: int, zipf: float, seed: int) -> _Catalogue:
    popularity = np.arange(1, items + 1, dtype=np.float64) ** -zipf
    ranks = np.arange(items, dtype=np.uint64)
    drawn = splitmix64(derive(seed, "synthetic-yambda", "cluster"), ranks) % np.uint64(clusters)
    order = np.argsort(drawn, kind="stable")
    # The id of an item does not tell how popular it is.
    ids = KeyedPermutation(items, str(derive(seed, "synthetic-yambda", "ids")))(order)
    places = np.empty(items, np.int64)
    places[ids] = np.arange(items)
    sorted_clusters = drawn[order].astype(np.int64)
    return _Catalogue(
        ids=ids,
        places=places,
        clusters=sorted_clusters,
        ends=np.cumsum(popularity[order]),
        bounds=np.searchsorted(sorted_clusters, np.arange(clusters + 1)),
    )
