# SPDX-License-Identifier: Apache-2.0
"""What ranks that are fed tell feeders and their receivers: run on each rank by test_ingest_train.py."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest

from sennit.offload.batches import BatchLayout
from sennit.offload.ingest import session
from sennit.offload.ingest.protocol import Terms
from sennit.offload.ingest.target import IngestTarget
from sennit.offload.xdp_source import generate
from sennit.runtime.data import sources
from sennit.runtime.data.source import Source
from sennit.runtime.ingest.facts import encode
from sennit.runtime.ingest.fed import Door, FedSource
from sennit.runtime.model.sharding_settings import sharding_of
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.trainer import Trainer


def plans(rank: int, world: int, *, port: int, sharding: str) -> dict[str, Any]:
    """The plan of a rank's receiver, the XDP program made of it, what feeders hear; and the shards of the rank."""
    data = sources.load(Source(data="synthetic", samples=300, row_limit=50), seed=1)
    facts, _ = encode(data, "0" * 64, body_max_bytes=4_096)
    config = TrainingConfig(
        batch_size=24, embedding_dim=4, bottom=(8,), top=(8,), row_shards=4, sharding=sharding_of(sharding)
    )
    layouts: list[BatchLayout] = []
    terms: list[Terms] = []
    receiver, begin = IngestTarget.receiver, session.Session.__init__

    def receives(self: IngestTarget, layout: BatchLayout, *place: Any, **options: Any) -> Any:
        layouts.append(layout)
        return receiver(self, layout, *place, **options)

    def begins(self: session.Session, listener: Any, told: Terms, **options: Any) -> None:
        terms.append(told)
        begin(self, listener, told, **options)

    with pytest.MonkeyPatch.context() as patch, Door(IngestTarget.parse(f"cpu://127.0.0.1:{port}"), rank) as door:
        patch.setattr(IngestTarget, "receiver", receives)
        patch.setattr(session.Session, "__init__", begins)
        door.facts = facts
        source = FedSource(door, config.order_settings, rank=rank, world_size=world, timeout_s=60.0, is_elastic=False)
        with Trainer(config, source) as trainer:
            source.begin(0)
            shards = sorted(map(str, trainer.own_shards))
        source.close()
    (layout,), (told,) = layouts, terms
    program = generate(layout)
    return {
        "facts": source.facts.as_json(),
        "layout": [layout.batch_rows, layout.slots],
        # The session has a random number.
        "terms": dataclasses.asdict(told) | {"session": 0},
        "program": hashlib.sha256(program.text.encode()).hexdigest(),
        "arrays": {name: array.tolist() for name, array in program.tables.items()},
        "shards": shards,
    }
