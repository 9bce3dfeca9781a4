# SPDX-License-Identifier: Apache-2.0
"""How many batches may be on their way while one is computed."""

from __future__ import annotations

from typing import Final

BATCHES_AHEAD_MAX: Final = 3
"""More batches need more memory, and hide no more."""
