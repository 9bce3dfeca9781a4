# SPDX-License-Identifier: Apache-2.0
"""The stream of a feeder: its files, their order in a run, and how samples become records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from sennit.offload.ingest.facts import Facts
from sennit.offload.ingest.protocol import ProtocolError, Terms, has_room
from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.data.source import Source
from sennit.runtime.ingest.layout import RecordLayout, Survey, check_columns
from sennit.runtime.ingest.order import numbering_of, settings_of
from sennit.runtime.stream.fitting import fit
from sennit.runtime.stream.order import StreamOrder
from sennit.runtime.stream.settings import OpenedStream, open_source
from sennit.runtime.stream.source import Stream


@dataclass(frozen=True, kw_only=True)
class FeedStream:
    """What all workers of a feeder send from."""

    stream: Stream
    order: StreamOrder
    preprocessing: Preprocessing
    layout: RecordLayout
    facts: Facts

    @classmethod
    def open(cls, source: Source, terms: Terms, *, seed: int) -> Self:
        """Opens the data set as a run with these terms reads it, and fits its preprocessing. That is one pass. A run
        that has gone on from a checkpoint tells its own.

        Raises DataError for data or settings that give no stream, ConfigError for settings that contradict each other,
        and ProtocolError for settings of another version, or a preprocessing that is none.
        """
        run, stream = settings_of(terms.order)
        known = None
        if terms.preprocessing is not None:
            try:
                known = Preprocessing.from_json(terms.preprocessing)
            except ValueError as error:
                raise ProtocolError(f"terms: preprocessing: {error}") from error
        return cls.of(open_source(source, stream, run, seed=seed), min_frequency=source.min_frequency, known=known)

    @classmethod
    def of(cls, opened: OpenedStream, *, min_frequency: int = 1, known: Preprocessing | None = None) -> Self:
        """Fits the preprocessing of an open stream, and looks at all its rows on the way.

        `known`: the preprocessing that the run has. Only columns whose records depend on their rows are read then. With
        data of other features it is of no use, and the trainer says what differs.
        """
        stream, order = opened.stream, opened.order
        check_columns(stream)
        part, survey = order.training_part(), Survey(stream)
        if known is not None and known.is_of(stream.schema):
            preprocessing = known
            survey.read(0, stream.index.sample_count)
        else:
            preprocessing = fit(
                stream.name,
                stream.index,
                stream.schema,
                part,
                opened.fitted,
                min_frequency=min_frequency,
                observe=survey.add,
            )
            begin, end = part.rows(opened.fitted)
            survey.read(0, begin)
            survey.read(end, stream.index.sample_count)
        extents = [survey.extents[encoding.name] for encoding in preprocessing.encodings]
        layout = RecordLayout.of(stream.name, stream.schema, preprocessing, extents)
        facts = Facts(
            name=stream.name,
            fingerprint=stream.index.fingerprint,
            sample_count=stream.index.sample_count,
            numbering=numbering_of(order),
            tables=layout.tables,
            dense_names=tuple(scale.field.name for scale in preprocessing.scales),
            label_names=stream.schema.labels,
            has_weights=stream.schema.sample_weight is not None,
            plan=layout.plan,
        )
        told = preprocessing.as_json()
        if has_room(told):
            facts = replace(facts, preprocessing=told)
        return cls(stream=stream, order=order, preprocessing=preprocessing, layout=layout, facts=facts)
