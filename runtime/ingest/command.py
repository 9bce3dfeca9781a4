# SPDX-License-Identifier: Apache-2.0
"""The command line of `sennit feed`. Its modules are imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sennit.command_line import check_writable, fail, json_text
from sennit.options import with_options
from sennit.runtime.data.source import Source

if TYPE_CHECKING:
    from rich.console import Console

    from sennit.offload.ingest.feeder import FeedCounters
    from sennit.runtime.ingest.feed import FeedReport

EXIT_INTERRUPTED = 130


@with_options
def feed(
    *,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[DATA]...", help="files, folders, patterns or URLs")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="the same, or a data set by name: flights, movielens, adult, synthetic, package.module:function; may "
            "be repeated"
        ),
    ] = None,
    eval_data: Annotated[
        list[str] | None, typer.Option(help="files whose rows are for evaluation alone; may be repeated")
    ] = None,
    source: Source,
    to: Annotated[str, typer.Option(metavar="HOST:PORT", help="address of any rank of the run")] = "127.0.0.1:4800",
    workers: Annotated[int, typer.Option(help="number of processes that send", min=1, max=256)] = 1,
    timeout: Annotated[float, typer.Option(help="seconds to wait for the trainer or the network")] = 300.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the report to this file")] = None,
    seed: Annotated[int, typer.Option(help="synthetic: seed, equal to the trainer's", min=0)] = 1,
) -> None:
    """Send a data set to the ranks of `sennit train --ingest` until the run ends."""
    import torch
    from rich.console import Console
    from rich.text import Text

    from sennit.runtime.data import sources
    from sennit.runtime.ingest import feed as feeding
    from sennit.runtime.ingest.address import Address
    from sennit.runtime.ingest.feed_stream import FeedStream
    from sennit.transport.errors import ConfigError, SennitError

    # One thread, as in a rank: otherwise the sums behind means would depend on the number of threads.
    torch.set_num_threads(1)
    console = Console(stderr=True, highlight=False, markup=False)
    name = platform.node() or "feeder"
    try:
        if bool(paths) == bool(data):
            raise ConfigError("--data beside paths; allowed: one of the two" if data else "the data set is missing")
        first, *further = data or paths or []
        source = replace(source, data=first, further=tuple(further), evaluation=tuple(eval_data or ()))
        if not 0 < timeout <= 86_400:
            raise ConfigError(f"--timeout {timeout} s; allowed: above 0, at most 86,400")
        address = Address.parse(to)
        if json_path is not None:
            check_writable(json_path, "--json")
        _check_fed(first)
        sources.check(source)
        with console.status(Text(f"waiting for a trainer at {address}")):
            asking = feeding.Asking(address, name=name, timeout_s=timeout)
        with asking, console.status(Text(f"reading {first}")):
            try:
                stream = FeedStream.open(source, asking.terms, seed=seed)
            except SennitError as error:
                asking.give_up(str(error))
                raise
        facts = stream.facts
        console.print(f"{facts.name}: {facts.sample_count:,} samples, {len(facts.tables)} tables")
        if skipped := stream.stream.index.skipped_rows:
            console.print(f"{facts.name}: {skipped:,} broken lines are left out")
        with _Display(console) as display:
            report = feeding.run(
                address,
                stream,
                asking.terms,
                name=name,
                workers=workers,
                timeout_s=timeout,
                on_event=console.print,
                on_progress=display.show,
            )
    except SennitError as error:
        fail(error)
    except KeyboardInterrupt:
        typer.echo("interrupted; the trainer goes on with other feeders, or waits for one", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _summarise(report)
    if json_path is not None:
        try:
            json_path.write_text(json_text(report.as_json()), encoding="utf-8")
        except OSError as error:
            fail(f"--json {json_path}: {error.strerror}; the run itself was fed to its end")


def _check_fed(data: str) -> None:
    """Raises ConfigError for a stream that is made when it is read: feeders send files, and samples in memory."""
    from sennit.runtime.data.sources import MADE
    from sennit.transport.errors import ConfigError

    name = data.partition("?")[0]
    if name not in MADE:
        return
    instead = "`sennit make-stream` writes it as files, with a schema" if name == MADE[0] else "another data set"
    raise ConfigError(f"--data {data} is made when it is read, and not fed; allowed: {instead}")


class _Display:
    """Shows progress as one changing line on a terminal."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("feeding")
        self._before = (time.monotonic(), 0)

    def __enter__(self) -> _Display:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, counters: FeedCounters) -> None:
        now_s = time.monotonic()
        then_s, records = self._before
        if now_s - then_s < 0.5:
            return
        self._before = (now_s, counters.records)
        rate = (counters.records - records) / (now_s - then_s)
        self._status.update(f"feeding: {rate:,.0f} records/s, {counters.records:,} in all")


def _summarise(report: FeedReport) -> None:
    counters = report.counters
    typer.echo(
        f"fed {counters.records:,} records in {counters.packets:,} packets within {report.feeding_s:.1f} s "
        f"({report.records_per_s:,.0f} records/s); ranks: {report.ranks}, workers: {report.workers}, "
        f"orders to send again: {counters.rewinds}"
    )
    if (each := report.processor_s_per_million_records) is not None:
        share = report.system_s / max(report.user_s + report.system_s, 1e-9)
        typer.echo(f"cost: {each:.2f} s of processors for a million records, {share:.0%} in the kernel")
