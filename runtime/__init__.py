# SPDX-License-Identifier: Apache-2.0
"""The torch side of sennit, one package for each part. The `__init__` of each lists its public names.

`backend` is the `torch.distributed` backend. `kernels` and `memory` hold embedding tables, `data` and `ingest` bring
samples, `model` is the DLRM, `training` a run of it. `telemetry` and `trace` watch ranks while they run.
"""
