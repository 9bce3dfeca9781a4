# SPDX-License-Identifier: Apache-2.0
"""The torch side of sennit, one room for each part; each room's page of names is its `__init__`.

`backend` is the `torch.distributed` backend. `kernels` and `memory` hold embedding tables, `data` and `ingest` bring
samples, `model` is the DLRM, `training` a run of it. `telemetry` and `trace` watch ranks while they run.
"""
