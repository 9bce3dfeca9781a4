# SPDX-License-Identifier: Apache-2.0
"""Every scenario of the testbed in its short form, in namespaces of this machine. Goals about speed are ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="the extra `testbed` is not installed")

from sennit.testbed.scenarios import runner
from sennit.testbed.scenarios.catalogue import SCENARIOS
from sennit.testbed.scenarios.model import Library
from sennit.testbed.scenarios.results import Status
from sennit.testbed.topology import Impairer

# Others cover these: a death after that of a plane, packets that come late, twice or broken, and the tests of ranks,
# of collectives that lose packets, of the stage beside gloo, and of training.
COVERED = {
    "incast", "loss-0.1-allreduce", "loss-0.1-alltoall", "loss-1-allreduce", "loss-1-alltoall", "loss-5-allreduce",
    "loss-5-alltoall", "lossless-allreduce", "lossless-alltoall", "peer-killed", "peer-silent", "plane-off",
    "planes-dead", "rack", "same-bits", "same-bits-fp8", "same-bits-fp8-alltoall", "same-bits-int8",
    "same-bits-dynamic", "same-bits-int8-alltoall", "same-bits-training", "split-networks",
}  # fmt: skip


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.needs(*scenario.needs(Impairer.BPF)),
                *([pytest.mark.long] if name in COVERED else []),
            ],
        )
        for name, scenario in SCENARIOS.items()
    ],
)
def test_short_form_passes(name: str, seed: int, tmp_path: Path) -> None:
    case = runner.run_case(
        SCENARIOS[name].shortened(), short=True, strict=False, seed=seed, folder=tmp_path, say=lambda what: None
    )
    if case.status == Status.UNSUPPORTED and Library.GLOO in SCENARIOS[name].libraries:
        pytest.skip(case.reason)
    assert case.status == Status.PASSED, f"{case.reason}\n{case.log_tails}"
