# SPDX-License-Identifier: Apache-2.0
"""A training step as a graph of tasks, so that exchanges, input and computation overlap: with the bits of a serial one.

`Pipeline(model, optimizer, loader)` is what programs use.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.pipeline.ahead import BatchesAhead as BatchesAhead
    from sennit.runtime.pipeline.pipeline import Pipeline as Pipeline
    from sennit.runtime.pipeline.scheduler import Scheduler as Scheduler
    from sennit.runtime.pipeline.task import Record as Record
    from sennit.runtime.pipeline.task import Task as Task

__getattr__ = exporter(
    __name__,
    {
        "BatchesAhead": "ahead",
        "Pipeline": "pipeline",
        "Record": "task",
        "Scheduler": "scheduler",
        "Task": "task",
    },
)
