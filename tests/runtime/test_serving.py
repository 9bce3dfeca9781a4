# SPDX-License-Identifier: Apache-2.0
"""torch alone feeds raw samples to an exported model, and predicts what the trainer predicts.

The way to do so is in docs/reference/checkpoints.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sennit.commands.cli import app

pytest.importorskip("pyarrow")
CASES = "serving_cases.py"


def serving_cases() -> Any:
    spec = importlib.util.spec_from_file_location("serving_cases", Path(__file__).with_name(CASES))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [1, 2])
def test_plain_torch_predicts_what_the_trainer_does(kept_world: Any, seed: int, tmp_path: Path, size: int) -> None:
    """Runs in a process that cannot import sennit."""
    predicted = kept_world(size).run(CASES, "train_and_predict", seed=seed, folder=str(tmp_path))
    model = tmp_path / "model.pt"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "saved"), str(model)])
    assert done.exit_code == 0, done.output
    fresh = serving_cases().clicks(seed + 1, 40)
    fresh["city"][0] = "nowhere"
    del fresh["clicked"]
    # A null list counts as an empty list.
    fresh["tags"] = [ids or [] for ids in fresh["tags"]]
    answer = subprocess.run(
        [sys.executable, "-S", "-c", _PRELUDE + Path(__file__).with_name("plain_serving.py").read_text(), str(model)],
        input=json.dumps({"samples": fresh, "path": sys.path}),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert len(found) == 40
    for logits in predicted:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(logits), rtol=1e-4, atol=1e-5)
    assert len({round(logit, 6) for logit in found}) > 30


# Only torch and its dependencies. Without the site module sennit's import hook is not installed.
_PRELUDE = """
import json, sys
asked = json.load(sys.stdin)
sys.path += [path for path in asked["path"] if "-packages" in path]
"""
