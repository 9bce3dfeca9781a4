# SPDX-License-Identifier: Apache-2.0
"""The reading process of `sennit bench stream`: it prints what it took, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from sennit.runtime.data.preprocessing import Preprocessing
from sennit.runtime.stream.loader import StreamLoader
from sennit.testbed.bench.peak_memory import peak_bytes


def main(place: str, schema: str, known: str, batch_rows: str, steps: str, resume: str) -> None:
    began_s = time.perf_counter()
    loader = StreamLoader(
        place,
        schema=schema,
        batch_size=int(batch_rows),
        preprocessing=Preprocessing.parse(Path(known).read_text(encoding="utf-8")),
    )
    opened_s = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter()
    for _ in range(min(int(steps), len(loader))):
        next(batches)
    # Before there is a second loader.
    told = {"memory_bytes": peak_bytes(), "open_s": opened_s - began_s, "first_s": first_s - opened_s}
    resumed_s = None
    if int(resume) < loader.order.step_count:
        state = loader.state_dict() | {"step": int(resume)}
        # A run that resumes has read nothing.
        with StreamLoader(
            place, schema=schema, batch_size=int(batch_rows), preprocessing=loader.preprocessing
        ) as resumed:
            resumes_s = time.perf_counter()
            resumed.load_state_dict(state)
            next(iter(resumed))
            resumed_s = time.perf_counter() - resumes_s
    loader.close()
    print(json.dumps(told | {"resumed_s": resumed_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
