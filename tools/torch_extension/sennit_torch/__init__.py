# SPDX-License-Identifier: Apache-2.0
"""Holds the extension `_c10d` for one torch and one Python. `sennit.runtime.backend.extension` loads it."""
