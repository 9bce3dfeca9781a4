# SPDX-License-Identifier: Apache-2.0
"""The counters of this machine's ranks: `sennit top` for people, `sennit metrics` for Prometheus and OpenTelemetry."""
