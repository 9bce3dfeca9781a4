# SPDX-License-Identifier: Apache-2.0
"""The torch side of sennit, one package for each part. The `__init__` of each lists its public names.

`backend` is the `torch.distributed` backend. `kernels` and `memory` hold embedding tables, `sharded` deals them to
ranks, `replicas` holds dense parameters. `data` and `ingest` bring samples. `model` has the models of `sennit train`,
`pipeline` overlaps the parts of their steps, `training` runs them, `checkpoint` saves them. `planner` chooses
placements with costs that `calibrate` measures. `timeline`, `telemetry` and `trace` show what ranks do.
"""
