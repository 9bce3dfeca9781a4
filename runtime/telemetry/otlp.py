# SPDX-License-Identifier: Apache-2.0
"""Sends counters to an OpenTelemetry collector, with OpenTelemetry's own exporter (OTLP over HTTP).

The points are made here, not by instruments of the SDK: those keep every name and every set of labels for ever, and
count what is above 2,000 sets of a name as one.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from sennit.runtime.telemetry import samples

TIMEOUT_S: Final = 5.0
"""Seconds for one request."""
POINTS_MAX: Final = 10_000
"""Points of one request, about 3 MB. A collector takes 20 MiB (its `max_request_body_size`)."""
SCOPE: Final = "sennit"
VALUE_MAX: Final = (1 << 63) - 1
"""OTLP has signed integers. Only a page that lies has more."""


class Exporter:
    """Sends what is counted now. Sums are cumulative."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._resource = Resource.create({"service.name": "sennit"})
        self._began_ns = time.time_ns()

    def send(self, found: Iterable[samples.Sample] | None = None) -> bool:
        """Exports all samples of this machine, or the given ones, once. False if the collector did not take them."""
        left = iter(samples.read() if found is None else found)
        while some := list(itertools.islice(left, POINTS_MAX)):
            result = self._exporter.export(self._data(some), timeout_millis=1000 * TIMEOUT_S)
            if result is not MetricExportResult.SUCCESS:
                return False
        return True

    def _data(self, found: Sequence[samples.Sample]) -> MetricsData:
        now_ns = time.time_ns()
        points: defaultdict[tuple[str, bool], list[NumberDataPoint]] = defaultdict(list)
        for sample in found:
            points[sample.name, sample.is_gauge].append(
                NumberDataPoint(
                    attributes=sample.labels,
                    start_time_unix_nano=self._began_ns,
                    time_unix_nano=now_ns,
                    value=min(sample.value, VALUE_MAX),
                )
            )
        metrics = [
            Metric(name=name, description="", unit="", data=Gauge(some) if is_gauge else _sum(some))
            for (name, is_gauge), some in points.items()
        ]
        scope = ScopeMetrics(scope=InstrumentationScope(SCOPE), metrics=metrics, schema_url="")
        return MetricsData([ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")])

    def close(self) -> None:
        self._exporter.shutdown(timeout_millis=1000 * TIMEOUT_S)


def _sum(points: Sequence[NumberDataPoint]) -> Sum:
    return Sum(data_points=points, aggregation_temporality=AggregationTemporality.CUMULATIVE, is_monotonic=True)
