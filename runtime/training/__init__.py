# SPDX-License-Identifier: Apache-2.0
"""A training run: configuration, step, checkpoints, elastic runs, report and progress display.

`sennit train` and `torchrun … -m sennit.runtime.training` start one; `Trainer` is one rank's part of it.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.training.config import TrainingConfig as TrainingConfig
    from sennit.runtime.training.convert import Converted as Converted
    from sennit.runtime.training.convert import convert as convert
    from sennit.runtime.training.export import export_int8 as export_int8
    from sennit.runtime.training.metrics import Quality as Quality
    from sennit.runtime.training.predictions import quality as quality
    from sennit.runtime.training.report import RankReport as RankReport
    from sennit.runtime.training.report import RunReport as RunReport
    from sennit.runtime.training.trainer import StepReport as StepReport
    from sennit.runtime.training.trainer import Trainer as Trainer
    from sennit.runtime.training.trainer import TrainingError as TrainingError

__getattr__ = exporter(
    __name__,
    {
        "TrainingConfig": "config",
        "Converted": "convert",
        "convert": "convert",
        "export_int8": "export",
        "Quality": "metrics",
        "quality": "predictions",
        "RankReport": "report",
        "RunReport": "report",
        "StepReport": "trainer",
        "Trainer": "trainer",
        "TrainingError": "trainer",
    },
)
