# SPDX-License-Identifier: Apache-2.0
"""What `sennit train` makes of its options: models, settings of tables, shardings, optimizers and schedules.

Models are plain torch modules. `build` finds them by name, or a user's own.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.model.dcnv2 import DCNv2 as DCNv2
    from sennit.runtime.model.deepfm import DeepFM as DeepFM
    from sennit.runtime.model.dlrm import DLRM as DLRM
    from sennit.runtime.model.factory import build as build
    from sennit.runtime.model.factory import dense_optimizer as dense_optimizer
    from sennit.runtime.model.inputs import ModelInputs as ModelInputs
    from sennit.runtime.model.schedule import RateSchedule as RateSchedule

__getattr__ = exporter(
    __name__,
    {
        "ModelInputs": "inputs",
        "DLRM": "dlrm",
        "DCNv2": "dcnv2",
        "DeepFM": "deepfm",
        "build": "factory",
        "dense_optimizer": "factory",
        "RateSchedule": "schedule",
    },
)
