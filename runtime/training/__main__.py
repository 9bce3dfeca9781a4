# SPDX-License-Identifier: Apache-2.0
"""`sennit train` as a process of its own, and `torchrun … -m sennit.runtime.training` with the same options."""

import contextlib
import os
from collections.abc import Sequence

from sennit.command_line import loading


def main(arguments: Sequence[str] | None = None) -> None:
    """Takes this process for a run. Call it before NumPy or torch is imported."""
    is_rank = "RANK" in os.environ
    if not is_rank:
        # NumPy and torch read it on import. With more threads, this process could not be forked into its ranks.
        os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.nullcontext() if is_rank else loading("torch"):
        from sennit.runtime.training import command

    command.main(arguments, forked=True)


if __name__ == "__main__":
    from sennit.command_line import output

    with output():
        main()
