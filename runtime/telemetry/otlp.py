# SPDX-License-Identifier: Apache-2.0
"""Sends counters to an OpenTelemetry collector, with OpenTelemetry's own SDK (OTLP over HTTP)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricReader, MetricsData
from opentelemetry.sdk.resources import Resource

from sennit.runtime.telemetry import samples

TIMEOUT_S: Final = 5.0
"""Seconds for one export."""
METER: Final = "sennit"
VALUE_MAX: Final = (1 << 63) - 1
"""OTLP has signed integers. Only a page that lies has more."""


class _OnDemand(MetricReader):
    """Hands over the result of one collection."""

    def __init__(self, exporter: OTLPMetricExporter) -> None:
        super().__init__()
        self._exporter = exporter
        self.has_succeeded = False

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 0, **options: object) -> None:
        del options
        result = self._exporter.export(metrics_data, timeout_millis=timeout_millis or 1000 * TIMEOUT_S)
        self.has_succeeded = result is MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 0, **options: object) -> None:
        del options
        self._exporter.shutdown(timeout_millis=timeout_millis)


class Exporter:
    """One instrument for each counter, created when the counter first appears."""

    def __init__(self, endpoint: str) -> None:
        self._reader = _OnDemand(OTLPMetricExporter(endpoint=endpoint, timeout=TIMEOUT_S))
        self._provider = MeterProvider(
            metric_readers=[self._reader], resource=Resource.create({"service.name": "sennit"}), shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter(METER)
        self._now: dict[str, list[Observation]] = {}
        self._known: set[str] = set()

    def send(self, found: Iterable[samples.Sample] | None = None) -> bool:
        """Exports all samples of this machine, or the given ones, once. False if the collector did not take them."""
        now: dict[str, list[Observation]] = defaultdict(list)
        gauges = set()
        for sample in samples.read() if found is None else found:
            now[sample.name].append(Observation(min(sample.value, VALUE_MAX), sample.labels))
            if sample.is_gauge:
                gauges.add(sample.name)
        self._now = now
        for name in sorted(now.keys() - self._known):
            make = self._meter.create_observable_gauge if name in gauges else self._meter.create_observable_counter
            make(name, callbacks=[self._observe(name)])
            self._known.add(name)
        self._reader.has_succeeded = not now
        self._reader.collect(timeout_millis=1000 * TIMEOUT_S)
        return self._reader.has_succeeded

    def _observe(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda options: self._now.get(name, [])

    def close(self) -> None:
        self._provider.shutdown(timeout_millis=1000 * TIMEOUT_S)
