# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP2, DTensor, functional and compiled collectives, DCP and the debug wrapper run unchanged over sennit."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

CASES = "framework_cases.py"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        "ddp",
        "ddp_variants",
        "ddp_sparse",
        "fsdp2",
        "dtensor",
        "functional_collectives",
        "compiled",
        "names",
        "logged_name",
    ],
)
def test_framework(kept_world: Callable[..., Any], size: int, case: str) -> None:
    kept_world(size).run(CASES, case)


def test_subgroups(kept_world: Callable[..., Any]) -> None:
    kept_world(4).run(CASES, "subgroups")


def test_checkpoint(kept_world: Callable[..., Any], tmp_path: Path) -> None:
    kept_world(2).run(CASES, "checkpoint", folder=str(tmp_path))


def test_a_name_serves_other_ranks_after_destroy(new_world: Callable[..., Any], tmp_path: Path) -> None:
    new_world(2, backend="").run(CASES, "names_again", folder=str(tmp_path))


def test_detail_debug_mode(new_world: Callable[..., Any]) -> None:
    new_world(2, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).run(CASES, "one_of_each")


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("sennit")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
assert total.item() == 3.0
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("sennit")
dist.all_reduce(total)
assert total.item() == 6.0
"""


def has_entry_point() -> bool:
    return any(point.name == "sennit" for point in importlib.metadata.entry_points(group="torch.backends"))


@pytest.mark.skipif(not has_entry_point(), reason="sennit is not installed: torch finds no entry point")
def test_unmodified_script_under_torchrun(tmp_path: Path) -> None:
    """The script does not import sennit, makes groups twice over one store, and does not call destroy_process_group."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        check=True,
        timeout=120,
        cwd=tmp_path,
    )


def run_python(code: str, **environment: str) -> str:
    import os

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, **environment},
    )
    return result.stdout


def test_import_sennit_registers_in_any_order() -> None:
    for imports in ("import sennit, torch", "import torch, sennit"):
        run_python(f"{imports}; import torch.distributed as d; assert 'sennit' in d.Backend.backend_list")
    run_python(
        "import sennit; import torch.distributed as d; assert 'sennit' in d.Backend.backend_list",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_registration_loads_nothing_native() -> None:
    run_python(
        """
        import sys, sennit, torch
        from sennit.runtime.backend.process_group import register
        register()
        assert "sennit.runtime.backend._c10d" not in sys.modules
        assert "sennit.transport" not in sys.modules
        """
    )
