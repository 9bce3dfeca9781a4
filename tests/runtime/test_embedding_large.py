# SPDX-License-Identifier: Apache-2.0
"""Tables of more than 2^31 elements and 2^32 bytes. Few rows are touched, so the kernel backs few pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sennit.runtime.data.seeds import torch_stream
from sennit.runtime.kernels.batch import Batch
from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.implementations import IMPLEMENTATIONS
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Precision, Rounding, ShardSpec
from sennit.transport.errors import Unsupported

DIM = 64
ROWS = (1 << 31) // DIM + 1_000_000
# At the limits of 2^31 bytes, 2^31 elements (2^32 bytes), and of the table.
IDS = torch.tensor([0, 1, (1 << 30) // DIM, (1 << 31) // DIM - 1, (1 << 31) // DIM, ROWS - 1])


def trained(implementation: str, row_count: int, ids: Tensor, seed: int) -> list[Tensor]:
    """Returns results, rows and states of two steps on the rows `ids`."""
    spec = ShardSpec(name="t", row_count=row_count, dim=DIM, precision=Precision.FP16)
    engine = EmbeddingEngine(
        [spec],
        OptimizerSpec(kind=Optimizer.PARTIAL_ROW_WISE_ADAM),
        implementation_name=implementation,
        rounding=Rounding.NEAREST,
    )
    generator = torch_stream(seed, "large")
    engine.weight("t")[ids] = torch.randn(len(ids), DIM, generator=generator).to(torch.float16)
    found = []
    for _ in range(2):
        picked = torch.randint(len(ids), (40,), generator=generator)
        batch = Batch(
            table_of_block=(0,), bags_of_block=(20,), lengths=torch.full((20,), 2), values=ids[picked]
        )  # fmt: skip
        result = engine.lookup(batch)
        engine.update(batch, torch.randn(len(result), generator=generator), rate=0.1)
        found.append(result)
    return [*found, engine.weight("t")[ids], *(state[ids] for state in engine.states("t").values())]


@pytest.mark.skipif(torch.cuda.is_available(), reason="triton reaches no CPU memory beside a GPU")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_beyond_2_to_the_31_elements_are_rows_like_others(implementation: str, seed: int) -> None:
    """A table of just these rows gives the same bits."""
    try:
        with np.errstate(all="ignore"):
            found = trained(implementation, ROWS, IDS, seed)
    except Unsupported as reason:
        pytest.skip(str(reason))
    except OSError as reason:
        pytest.skip(f"13 GB of addresses for a table and its states: {reason}")
    wanted = trained("reference", len(IDS), torch.arange(len(IDS)), seed)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
