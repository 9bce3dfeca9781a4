# SPDX-License-Identifier: Apache-2.0
"""How fast this processor encodes and decodes, for the cost model (transport/choice/coded_cost.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from sennit.runtime.calibrate.machine import one_core
from sennit.transport import _core
from sennit.transport.choice.coded_cost import SPEEDS, CodecSpeed
from sennit.transport.codecs import Codec, CodecKind
from sennit.transport.plans.elements import Dtype

# The fields of a codec: number, block, whether it rounds at random, seed.
Native: TypeAlias = tuple[int, int, bool, int]

# More than a second-level cache holds: collectives code what lies in memory.
ELEMENTS: Final = 1 << 20
ROUNDS: Final = 11


def measure() -> dict[CodecKind, CodecSpeed]:
    """Times each codec on one thread, in about a tenth of a second. Medians; all take turns within a round."""
    values = (np.random.default_rng(1).standard_normal(ELEMENTS) * 1e-4).astype(np.float32)
    decoded, calls = np.empty_like(values), dict[tuple[CodecKind, str], Callable[[], object]]()
    for kind in SPEEDS:
        block = Codec(kind=kind).block or 0
        nearest, at_random = (kind, block, False, 0), (kind, block, True, 1)
        coded = np.empty(_core.coded_bytes(nearest, Dtype.F32, ELEMENTS), np.uint8)
        calls |= {
            (kind, "encode_stochastic_element_s"): _encode(at_random, values, coded),
            # The last one leaves what is decoded.
            (kind, "encode_element_s"): _encode(nearest, values, coded),
            (kind, "decode_element_s"): _decode(nearest, coded, decoded),
        }
    times: dict[tuple[CodecKind, str], list[float]] = {name: [] for name in calls}
    with one_core():
        for number in range(ROUNDS + 1):
            for name, call in calls.items():
                begin_s = time.perf_counter()
                call()
                if number:  # the first one touches memory
                    times[name].append(time.perf_counter() - begin_s)
    fields = ("encode_element_s", "encode_stochastic_element_s", "decode_element_s")
    return {
        kind: CodecSpeed(**{field: statistics.median(times[kind, field]) / ELEMENTS for field in fields})
        for kind in SPEEDS
    }


def _encode(native: Native, values: Any, coded: Any) -> Callable[[], object]:
    return lambda: _core.encode(native, Dtype.F32, values, 0, coded)


def _decode(native: Native, coded: Any, decoded: Any) -> Callable[[], object]:
    return lambda: _core.decode(native, Dtype.F32, coded, ELEMENTS, Dtype.F32, decoded)
