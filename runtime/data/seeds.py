# SPDX-License-Identifier: Apache-2.0
"""One seed controls a run. Every random stream is a pure function of the seed and the stream's name.

So a stream does not depend on the world size, on the placement of tables, or on earlier draws, and a resumed run needs
no generator state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream `names`."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def torch_stream(seed: int, *names: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_stream(seed: int, *names: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(derive(seed, *names)))
