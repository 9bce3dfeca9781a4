# SPDX-License-Identifier: Apache-2.0
"""The pages that the programs of transport/csrc/tests/networks fill."""

import json
from pathlib import Path

import pytest

from sennit.testbed.simulation import congestion_page, recovery_page


def network(name: str, congestion: str, again: int) -> str:
    samples = 521
    return json.dumps(
        {
            "name": name,
            "congestion": congestion,
            "marks": False,
            "sample_us": 500,
            "rate": 1_250_000_000,
            "drops": again,
            "again": again,
            "sent": 1000 + again,
            # 1,000 packets of 4,096 bytes take 3,277 us.
            "finished_us": [3000, 6554],
            "queued": [125_000] * samples,
            # The first flow has a quarter of the link, the second one three quarters.
            "bytes": [[156_250 * at, 468_750 * at] for at in range(samples)],
        }
    )


def test_a_row_has_times_and_shares_and_what_was_sent_again(tmp_path: Path) -> None:
    names = ("incast 32", "pairs 32", "two jobs", "beside TCP")
    (tmp_path / "lines").write_text(
        "\n".join(network(name, control, 250) for name in names for control in congestion_page.CONTROLS)
    )
    runs = congestion_page.read(tmp_path / "lines")
    rows = congestion_page.table(runs).splitlines()[2:]
    assert rows[0] == "| incast 32 " + "| 2.00; 20.0 %; 100 µs " * 3 + "|"
    assert rows[2] == "| two jobs " + "| 25 : 75; 20.0 %; 100 µs " * 3 + "|"
    congestion_page.plot(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


def test_a_mechanism_that_is_needed_shows_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"networks": 20000, "sent": 1000, "p50_us": 1500, "p99_us": 2e4, "p999_us": 3e7, "slower_p1": 0.5}
    lines = [
        {**common, "off": "nothing", "failed": 0, "again": 10, "controls": 100, "mean_us": 3000, "slower_p99": 1},
        {**common, "off": "probe", "failed": 7, "again": 20, "controls": 150, "mean_us": 2e6, "slower_p99": 900},
    ]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
    page = tmp_path / "lab" / "recovery.md"
    page.parent.mkdir()
    page.write_text(f"before\n{recovery_page.BEGIN}\n<!-- end of results -->\nafter\n")
    monkeypatch.setattr("sys.argv", ["recovery_page", str(tmp_path), str(tmp_path / "lines")])
    recovery_page.main()
    text = page.read_text()
    assert "20,000 networks." in text
    assert "| nothing | 0 | 3 ms | 1.5 ms | 20 ms | 30 s | 1.00 | 0.50 | 1.00 % | 1.00 |" in text
    assert "| probe | 7 | 2 s | 1.5 ms | 20 ms | 30 s | – | 0.50 | 2.00 % | 1.50 |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
