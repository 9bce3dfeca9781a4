# SPDX-License-Identifier: Apache-2.0
"""`sennit train` whose ranks die at given steps: DEATHS is JSON, [[rank, step, marker file], ...].

A death happens once: its marker file keeps it from happening again. Also under torchrun. The ranks that `sennit train`
starts import this file, so they are mortal too.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from sennit.runtime.train import main
from sennit.runtime.trainer import Trainer

_train_step = Trainer.train_step


def mortal_step(self: Trainer) -> float:
    for rank, step, marker in json.loads(os.environ.get("DEATHS", "[]")):
        if (self.rank, self.step) == (rank, step) and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return _train_step(self)


Trainer.train_step = mortal_step  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
