# SPDX-License-Identifier: Apache-2.0
"""The DLRM: dense model, sharded embedding tables, the exchanges between them, optimizers and schedules.

`place` gives each table a rank, `EmbeddingTables` holds those of this rank, `Exchange` moves ids and pooled rows.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.model.dcnv2 import DCNv2 as DCNv2
    from sennit.runtime.model.deepfm import DeepFM as DeepFM
    from sennit.runtime.model.dlrm import DLRM as DLRM
    from sennit.runtime.model.embedding import EmbeddingTables as EmbeddingTables
    from sennit.runtime.model.embedding import ResidentTables as ResidentTables
    from sennit.runtime.model.exchange import Exchange as Exchange
    from sennit.runtime.model.factory import build as build
    from sennit.runtime.model.inputs import ModelInputs as ModelInputs
    from sennit.runtime.model.inputs import TableInput as TableInput
    from sennit.runtime.model.model import DenseModel as DenseModel
    from sennit.runtime.model.optimizer import dense_optimizer as dense_optimizer
    from sennit.runtime.model.schedule import RateSchedule as RateSchedule
    from sennit.runtime.model.sharding import Placement as Placement
    from sennit.runtime.model.sharding import place as place
    from sennit.runtime.model.stored import StoredTables as StoredTables
    from sennit.runtime.model.stored import TableStore as TableStore

__getattr__ = exporter(
    __name__,
    {
        "ModelInputs": "inputs",
        "TableInput": "inputs",
        "DLRM": "dlrm",
        "DCNv2": "dcnv2",
        "DeepFM": "deepfm",
        "build": "factory",
        "EmbeddingTables": "embedding",
        "ResidentTables": "embedding",
        "Exchange": "exchange",
        "DenseModel": "model",
        "dense_optimizer": "optimizer",
        "RateSchedule": "schedule",
        "Placement": "sharding",
        "place": "sharding",
        "StoredTables": "stored",
        "TableStore": "stored",
    },
)
