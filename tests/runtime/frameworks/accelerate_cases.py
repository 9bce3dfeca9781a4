# SPDX-License-Identifier: Apache-2.0
"""Accelerate's own test scripts, which it installs, over sennit: run on each rank by test_packages.py.

Accelerate takes the default group that is there. `InitProcessGroupKwargs(backend="sennit")` it refuses on CPUs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from frameworks.over_sennit import as_under_torchrun, group_over_sennit  # type: ignore[import-not-found]


@contextmanager
def ready(rank: int, world: int, folder: str, port: int, name: str) -> Iterator[ModuleType]:
    """The module of a script, with a group, and a state of Accelerate that is not an earlier script's."""
    os.environ.update(as_under_torchrun(rank, world, port), ACCELERATE_USE_CPU="true")
    with group_over_sennit(rank, world, folder, name):
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        # Some scripts ask for a state without saying that it is one of CPUs, and then use the one that is there.
        PartialState(cpu=True)
        yield importlib.import_module(f"accelerate.test_utils.scripts.{name}")


def script(rank: int, world: int, folder: str, port: int, name: str) -> None:
    """Runs all of a script, which destroys the group in the end."""
    with ready(rank, world, folder, port, name) as module:
        module.main()


def data_loop(rank: int, world: int, folder: str, port: int) -> None:
    """Runs the parts of a script that need neither torchdata nor several GPUs.

    The others join uneven inputs. Accelerate warns that it joins those of GPUs only, and over gloo they hang.
    """
    with ready(rank, world, folder, port, "test_distributed_data_loop") as module:
        from torch.utils.data import DataLoader

        module.test_default_ensures_even_batch_sizes()
        module.test_can_disable_even_batches()
        module.test_pickle_accelerator()
        for is_shuffled in (False, True):
            loader = DataLoader(module.DummyDataset(), shuffle=is_shuffled, batch_size=module.BATCH_SIZE)
            module.test_data_loader(loader, module.create_accelerator())
