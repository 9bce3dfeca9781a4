# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`: its commands, an example of each, and `sennit bench all`.

A command imports what it needs when it runs, so that `--help` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sennit.command_line import fail, stdout_console, writable_folder, write_text
from sennit.testbed.bench.gpu.gpu_command import gpu
from sennit.testbed.bench.running import measured, progress, write
from sennit.testbed.bench.samples.samples_commands import feed, file_input, ingest, offload, stream
from sennit.testbed.bench.tables.table_commands import dynamic, embedding, tiers
from sennit.testbed.bench.training.training_commands import (
    attention,
    balance,
    cost,
    drift,
    overlap,
    placements,
    planner,
    quality,
    scaling,
    sharded,
    slices,
    timeline,
)
from sennit.testbed.bench.transport.transport_commands import aggregate, codecs, collectives, group, rack, rdma, start


def compare(
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="write JSON, tables and two pictures there: send it with your machine",
            callback=writable_folder,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="turns of each peer; the median is reported", min=2)] = 15,
    quick: Annotated[
        bool, typer.Option("--quick", help="small sizes: shows that all runs, and says little about speed")
    ] = False,
) -> None:
    """Run every peer that is installed beside sennit: gloo, OpenMPI, FBGEMM, TorchRec, plain torch. Takes minutes."""
    from rich.markdown import Markdown

    from sennit.testbed.bench import comparison, comparison_page

    settings = comparison.Settings(rounds=rounds, quick=quick)
    try:
        with progress() as update:
            found = comparison.run(settings, update)
    except comparison.FAILURES as error:
        fail(error)
    stdout_console().print(Markdown(comparison_page.tables(found)))
    if report is not None:
        write(report / comparison_page.FIGURES, found.as_json())
        for name, text in comparison_page.files(found).items():
            write_text(report / name, text)
        typer.echo(f"written to {report}: {comparison_page.PAGE} has it all")


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure sennit and its peers in turn, in one run.")

app.command("collectives", epilog="Example: sennit bench collectives --against gloo --sizes 4KiB,64MiB")(
    measured(collectives)
)
app.command("aggregate", epilog="Example: sennit bench aggregate --rounds 5")(measured(aggregate))
app.command("rack", epilog="Example: sennit bench rack --ranks 8 --mbit 200,1000,0")(measured(rack))
app.command("all", epilog="Example: sennit bench all --report comparison")(measured(compare))
app.command("planner", epilog="Example: sennit bench planner --only held-out")(measured(planner))
app.command("placements", epilog="Example: sennit bench placements --ranks 4 --confined")(measured(placements))
app.command("cost", epilog="Example: sennit bench cost --kind bare --data synthetic")(measured(cost))
app.command("scaling", epilog="Example: sennit bench scaling --worlds 1,2,4")(measured(scaling))
app.command("overlap", epilog="Example: sennit bench overlap --hosts 2 --round-trip-us 1000")(measured(overlap))
app.command("group", epilog="Example: sennit bench group --world 64 --against gloo --transport udp")(measured(group))
app.command("start", epilog="Example: sennit bench start --world 16 --rounds 3")(measured(start))
app.command("timeline", epilog="Example: sennit bench timeline --rounds 300")(measured(timeline))
app.command("attention", epilog="Example: sennit bench attention --sequences 64 --longest 1024")(measured(attention))
app.command("balance", epilog="Example: sennit bench balance --batches 32,64")(measured(balance))
app.command("slices", epilog="Example: sennit bench slices --slices 8 --batch 1024")(measured(slices))
app.command("sharded", epilog="Example: sennit bench sharded --zipf 1.2")(measured(sharded))
app.command("quality", epilog="Example: sennit bench quality --seeds 3 --batch-sizes 256,2048,16384")(measured(quality))
# Its figures are no times, so that a busy machine changes none.
app.command("drift", epilog="Example: sennit bench drift --seeds 3 --drift-days 60")(drift)
app.command("offload", epilog="Example: sennit bench offload --end-to-end")(measured(offload))
app.command("codecs", epilog="Example: sennit bench codecs --size 4MiB")(measured(codecs))
app.command("dynamic", epilog="Example: sennit bench dynamic --rows 100000")(measured(dynamic))
app.command("tiers", epilog="Example: sennit bench tiers --folder /mnt/nvme")(measured(tiers))
app.command("feed", epilog="Example: sennit bench feed --rounds 7")(measured(feed))
app.command("ingest", epilog="Example: sennit bench ingest --data flights")(measured(ingest))
app.command("input", epilog="Example: sennit bench input --rows 500000")(measured(file_input))
app.command("stream", epilog="Example: sennit bench stream --rows 1000000,10000000")(measured(stream))
app.command("embedding", epilog="Example: sennit bench embedding --against torch --rounds 5")(measured(embedding))
# A GPU is lent by the minute: what was measured there is kept, and a person reads it.
app.command("gpu", epilog="Example: sennit bench gpu --json gpu.json")(gpu)
app.command("rdma", epilog="Example: sennit testbed vm -- sennit bench rdma --rounds 3")(measured(rdma))
