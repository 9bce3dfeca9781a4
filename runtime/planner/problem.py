# SPDX-License-Identifier: Apache-2.0
"""What is to be planned: a model, how its rows are used, and where it is to run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sennit.runtime.planner.cluster import Cluster
from sennit.runtime.planner.constants import Constants
from sennit.runtime.planner.usage import Use
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import Table
from sennit.transport.codecs import Codec


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """What no placement changes, as measured (`dense`)."""

    input_sample_s: float = 0.0
    """Seconds for a sample of a rank to come from its source."""
    slice_s: float = 0.0
    """Forward and backward pass of the model for one slice of the batch."""
    early_s: float = 0.0
    """The part of it that needs no vectors of tables, such as a bottom MLP."""
    update_s: float = 0.0
    """Step of the dense optimizer."""
    gradient_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A model, its use and a cluster."""

    tables: tuple[Table, ...]
    uses: tuple[Use, ...]
    cluster: Cluster
    constants: Constants
    batch: int
    """Samples of all ranks in a step."""
    slices: int
    fixed: Fixed = Fixed()
    ahead: bool = False
    """Whether input and ids of the next batch go beside the rest of a step."""
    tables_beside: bool = False
    """Whether lookups, updates and their exchanges have a thread of their own (`Exchanges`)."""
    codec: Codec | None = None
    """Codes sums of bags and their gradients, which travel between ranks. Not LOSSLESS, whose size depends on data."""
    gradient_codec: Codec | None = None
    """Codes gradients of the model."""

    @property
    def samples(self) -> npt.NDArray[np.float64]:
        """Samples of each rank, [ranks]."""
        slices = Slices(count=self.slices, rank=0, world_size=self.cluster.ranks)
        spans = [slices.samples(rank, self.batch) for rank in range(self.cluster.ranks)]
        return np.array([span.high - span.low for span in spans], np.float64)
