# SPDX-License-Identifier: Apache-2.0
"""Names of threads, as `top -H`, `ps -L` and perf show them. Before Python 3.14, `threading` keeps them to itself."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Final

# Linux, TASK_COMM_LEN less the end of the string.
NAME_CHARS: Final = 15


def name_thread(name: str) -> None:
    """Names the calling thread. The kernel keeps the first 15 characters."""
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:NAME_CHARS], encoding="utf-8")
