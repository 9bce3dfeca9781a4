# SPDX-License-Identifier: Apache-2.0
"""Plays training runs whose data set and table files lie on disks of another host, over NVMe/TCP.

The last host has the disks. The others have a rank each: its own disk for the rows of tables, and one with the data set
that all of them read. Disks come over plane 0, the front-end network, and collectives pass plane 1. Three runs must end
with the same weights: on disks of this machine; over the network; over the network with a disk that is pulled in the
middle, and a new one in its place, on which the run resumes.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sennit.offload.opi.nvme_target import Port
from sennit.testbed.scenarios.cast import Cast, anybody
from sennit.testbed.scenarios.model import RemoteDisk
from sennit.testbed.scenarios.ranks import RankError
from sennit.testbed.scenarios.split_networks import BACK, PLANES, RANK_PORTS, counted
from sennit.testbed.topology import Planes, nvme

STORE_PORT: Final = 29400
DATA_BYTES, TABLES_BYTES = 64 << 20, 96 << 20
COLUMNS: Final = 4
TABLE_ROWS: Final = 100_000
DIM: Final = 16
# A tenth of the rows or so: those of two batches, and some more.
TABLE_MEMORY: Final = "4MiB"
# A rank sees its disks where every other rank sees its own, in a mount namespace that ends with it.
MOUNT: Final = 'mount -o ro "$1" "$2" && mount "$3" "$4" && shift 4 && exec "$@"'


def play(job: RemoteDisk, planes: Planes, folder: Path, say: Callable[[str], None]) -> dict[str, float]:
    """All three runs, with their logs below `folder`. Raises RankError if a process fails, or at the deadline."""
    _write_data(job, folder)
    hosts = _Hosts(job, planes, folder)
    say("on disks of this machine")
    with hosts.local_disks() as disks:
        reports = [hosts.run("local", disks)]
    say("on disks of another host")
    with hosts.remote_disks() as disks, counted(planes) as passed:
        reports.append(hosts.run("remote", disks))
    say("a disk is pulled")
    errors = hosts.run_until_pulled("pulled")
    say("on a new disk")
    with hosts.remote_disks() as disks:
        reports.append(hosts.run("pulled", disks, "--resume"))
    return {
        "trainings": len(reports),
        "distinct_digests": len({report["weights_sha256"] for report in reports}),
        "disk.remote_to_local": reports[1]["samples_per_s"] / reports[0]["samples_per_s"],
        "disk.errors_naming_it": float(errors),
        "disk.bytes_read": reports[1]["rows"]["bytes_read"],
        "disk.evictions": reports[1]["rows"]["evictions"],
        **passed,
    }


def _write_data(job: RemoteDisk, folder: Path) -> None:
    """A disk with a Parquet file of clicks, and its schema. All ids are as frequent, so that a cache helps little."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {"label": rng.integers(0, 2, job.samples)}
    columns |= {f"c{n}": rng.integers(0, TABLE_ROWS, job.samples) for n in range(COLUMNS)}
    nvme.make_disk(folder / "data.img", DATA_BYTES)
    place = folder / "data"
    place.mkdir()
    with nvme.looped(folder / "data.img") as device, nvme.mounted(device, place):
        parquet.write_table(pa.table(columns), place / "clicks.parquet", row_group_size=4096)
    described = ['label = "label"']
    described += [f'[sparse.c{n}]\nencode = "hash"\nrows = {TABLE_ROWS}' for n in range(COLUMNS)]
    (folder / "schema.toml").write_text("\n".join(described) + "\n", encoding="utf-8")


class _Hosts:
    """Hosts with a rank each, and one with their disks."""

    def __init__(self, job: RemoteDisk, planes: Planes, folder: Path) -> None:
        self._job, self._planes, self._folder = job, planes, folder
        self._ranks, self._storage = planes.hosts - 1, planes.hosts - 1
        self._front = [planes.ipv4_addresses(host)[0] for host in range(planes.hosts)]
        self._starts = 0
        (folder / "tables").mkdir()

    @contextlib.contextmanager
    def local_disks(self) -> Iterator[list[tuple[Path, Path]]]:
        """For each rank: the disk with the data set, and an empty one."""
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(nvme.looped(self._folder / "data.img"))
            yield [(data, stack.enter_context(nvme.looped(self._empty(rank)))) for rank in range(self._ranks)]

    @contextlib.contextmanager
    def remote_disks(self, exports: list[nvme.Export] | None = None) -> Iterator[list[tuple[Path, Path]]]:
        """The same over the network. Appends what each rank has to `exports`."""
        with contextlib.ExitStack() as stack:
            port = Port(self._front[self._storage])
            port.begin()
            stack.callback(port.end)

            def export(file: Path) -> nvme.Export:
                made = nvme.Export(port, stack.enter_context(nvme.looped(file)), file.stem)
                stack.callback(made.end)
                self._planes.within(self._storage, made.begin)
                return made

            def connect(made: nvme.Export, rank: int) -> Path:
                connection = nvme.Connection(made.port, made.name, self._planes.netns_name(rank))
                stack.callback(connection.end)
                return self._planes.within(rank, connection.begin)

            data = export(self._folder / "data.img")
            disks = []
            for rank in range(self._ranks):
                own = export(self._empty(rank))
                if exports is not None:
                    exports.append(own)
                disks.append((connect(data, rank), connect(own, rank)))
            yield disks

    def run(self, name: str, disks: Sequence[tuple[Path, Path]], *options: str) -> dict[str, Any]:
        """Trains to the end. Returns the report."""
        with self._started(name, disks, *options) as cast:
            cast.wait()
        report: dict[str, Any] = json.loads((self._folder / name / "report.json").read_text(encoding="utf-8"))
        return report

    def run_until_pulled(self, name: str) -> int:
        """Pulls the last rank's disk after the first checkpoint. Returns 1 if that rank's error names it, or 0."""
        exports: list[nvme.Export] = []
        with self.remote_disks(exports) as disks, self._started(name, disks) as cast:
            saved = self._folder / name / "checkpoints"
            cast.wait_until(lambda: any(saved.glob("step-*/*")), "no checkpoint")
            exports[-1].pull()
            cast.wait(may_fail=anybody)
            codes = cast.codes()
            said = cast.said(list(codes)[-1])
        if 0 in codes.values():
            raise RankError(f"{name}: a rank ended as if no disk had been pulled")
        return int(str(self._folder / "tables") in said)

    @contextlib.contextmanager
    def _started(self, name: str, disks: Sequence[tuple[Path, Path]], *options: str) -> Iterator[Cast]:
        """The ranks of a run, each with its disks, in turn."""
        job, folder = self._job, self._folder
        (folder / name).mkdir(exist_ok=True)
        self._starts += 1
        arguments = [
            f"--data={folder / 'data' / 'clicks.parquet'}", f"--schema={folder / 'schema.toml'}", f"--dim={DIM}",
            "--bottom=", "--top=32", "--slices=4", "--sharding=row_wise", "--row-shards=2",
            f"--batch-size={job.batch_size}", f"--steps={job.steps}",
            "--epochs=1000", f"--table-store={folder / 'tables'}", f"--table-memory={TABLE_MEMORY}",
            f"--checkpoint={folder / name / 'checkpoints'}", f"--checkpoint-every={job.checkpoint_every}",
            f"--json={folder / name / 'report.json'}", f"--timeout={job.timeout_s:g}", *options,
        ]  # fmt: skip
        with Cast(self._planes, folder, timeout_s=job.timeout_s) as cast:
            for rank, (data, own) in enumerate(disks):
                variables = self._planes.environment(rank) | {
                    "SENNIT_INTERFACES": PLANES[BACK], "SENNIT_PORTS": "-".join(map(str, RANK_PORTS)),
                    "RANK": f"{rank}", "WORLD_SIZE": f"{self._ranks}", "LOCAL_RANK": "0",
                    "MASTER_ADDR": self._front[0], "MASTER_PORT": f"{STORE_PORT}",
                }  # fmt: skip
                trainer = [sys.executable, "-m", "sennit.runtime.training"]
                places = [str(data), str(folder / "data"), str(own), str(folder / "tables")]
                command = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", *places, *trainer, *arguments]
                cast.start(f"{self._starts}-{name}-rank{rank}", rank, command, variables)
            yield cast

    def _empty(self, rank: int) -> Path:
        file = self._folder / f"tables-{rank}.img"
        nvme.make_disk(file, TABLES_BYTES)
        return file
