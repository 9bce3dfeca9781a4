# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call,import-not-found,union-attr"
"""A module on a device: run on each rank by test_replicas.py."""

from __future__ import annotations

import contextlib

import device_double
import torch
from replica_cases import VECTORS, WIDTH, Cross, batch, digest, mine

from sennit.runtime.replicas import Along, SlicedReplicas


def train_there(rank: int, world: int, device: str = "cpu", no_sync: bool = False) -> tuple[list[str], int]:
    """Three steps on `device` ("double": device_double). Returns hashes, and how often a step waited for it."""
    with device_double.Device() if device == "double" else contextlib.nullcontext() as double:
        there = device_double.DEVICE if device == "double" else torch.device(device)
        torch.manual_seed(5 if rank == 0 else rank)
        replicas = SlicedReplicas(device_double.moved(Cross("sum"), there), seed=3)
        optimizer = torch.optim.SGD(replicas.parameters(), lr=0.01, foreach=False)
        found, waits = [], 0
        for step, count in enumerate((104, 8, 37)):
            part = mine(replicas, count)
            dense, _, labels = batch(step, count)
            vectors = torch.randn(VECTORS, count, WIDTH, generator=torch.Generator().manual_seed(step))
            arguments = dense[part].to(there), Along(vectors[:, part].to(there), 1), labels[part].to(there)
            waits -= double.waits.total() if double else 0
            optimizer.zero_grad()
            if no_sync:
                with replicas.no_sync():
                    replicas.loss(replicas(*arguments, global_batch=count)[0], count).backward()
            losses = replicas(*arguments, global_batch=count)[0]
            replicas.loss(losses, count).backward()
            optimizer.step()
            total = replicas.global_loss(losses, count)
            waits += double.waits.total() if double else 0
            assert total.device.type == next(replicas.parameters()).grad.device.type == there.type
            found += [replicas.digest(), digest(total.cpu())]
    return found, waits
