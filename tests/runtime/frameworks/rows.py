# SPDX-License-Identifier: Apache-2.0
"""The rows of the tables of frameworks, in the README and in docs/reference/frameworks.md: what runs, and where.

A row that the tables call run by CI must not be skipped there for want of its package. To move a row from the long
tests to CI, change its word here and in both tables, and let `make test` install its package.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Final

import pytest

CI: Final = "CI"
"""With what `make test` installs."""

LONG: Final = "test-long"
"""By `make test-long`: its part `frameworks` installs more, and gives `--long`."""

CLONE: Final = "clone"
"""Where an environment variable names a clone of the program."""


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    test: str
    where: str
    package: str | None = None
    """The module that must be installed. None: torch, which always is."""


ROWS: Final = (
    Row(name="TorchRec", test="test_torchrec", where=LONG, package="torchrec"),
    Row(name="collectives", test="test_collectives", where=CI),
    Row(name="DDP", test="test_ddp", where=CI),
    Row(name="DDP's communication hooks", test="test_ddp_hooks", where=CI),
    Row(name="ZeRO in a hook of DDP", test="test_overlapped_zero", where=CI),
    Row(name="FSDP2", test="test_fsdp2", where=CI),
    Row(name="DTensor", test="test_dtensor", where=CI),
    Row(name="DCP", test="test_checkpoint", where=CI),
    Row(name="functional collectives", test="test_functional_collectives", where=CI),
    Row(name="`torch.compile`", test="test_compile", where=CI),
    Row(name="DLRM", test="test_dlrm", where=CLONE),
    Row(name="PARAM", test="test_param", where=CLONE),
    Row(name="HSTU, SASRec", test="test_generative_recommenders", where=CLONE),
    Row(name="pytorch/examples", test="test_examples", where=CLONE),
    Row(name="Lightning", test="test_lightning", where=LONG, package="lightning"),
    Row(name="Accelerate", test="test_accelerate", where=LONG, package="accelerate"),
    Row(name="Accelerate, uneven data", test="test_accelerate_data_loop", where=LONG, package="accelerate"),
)


def must_run(row: Row, *, in_ci: bool, is_long: bool) -> bool:
    """Whether the test of this row must not be skipped in a run."""
    return is_long or (in_ci and row.where == CI)


def need_package(test: str, *, is_long: bool) -> None:
    """Skips the test of a row, by its name, where its package is not installed; or fails it, where it must run.

    Does not import it: that takes seconds, and only the ranks need it.
    """
    row = next(row for row in ROWS if row.test == test)
    if row.package is None or importlib.util.find_spec(row.package) is not None:
        return
    text = f"the package {row.package} is not installed: make frameworks"
    if must_run(row, in_ci=os.environ.get("CI") == "true", is_long=is_long):
        pytest.fail(f"{text}; the tables say that {row.where} runs {row.name}")
    pytest.skip(text)
