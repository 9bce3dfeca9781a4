# SPDX-License-Identifier: Apache-2.0
"""Part of `sennit bench gpu`: lookups and updates at the shape of FBGEMM's published times (`embedding_cuda`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sennit.testbed.bench.gpu.gpu import Settings
from sennit.testbed.bench.tables import embedding_cuda

SMALL: Final[dict[str, Any]] = {"device": "cpu", "lookups": 200, "rows": 50, "dim": 16}


def run(settings: Settings, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Raises RuntimeError if bits do not repeat."""
    shape, rounds = (SMALL, 1) if settings.interpreter else ({}, settings.rounds)
    return embedding_cuda.run(rounds=rounds, seed=settings.seed, save=save, **shape)
