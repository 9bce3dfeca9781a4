# SPDX-License-Identifier: Apache-2.0
"""`sennit bench`: its commands, and an example of each."""

import typer

from sennit.testbed.bench.comparison_command import compare
from sennit.testbed.bench.gpu.gpu_command import gpu
from sennit.testbed.bench.running import measured
from sennit.testbed.bench.samples.samples_commands import feed, ingest, offload
from sennit.testbed.bench.tables.table_commands import embedding, tiers
from sennit.testbed.bench.training.training_commands import (
    cost,
    overlap,
    placements,
    planner,
    quality,
    scaling,
    sharded,
    slices,
    timeline,
)
from sennit.testbed.bench.transport.transport_commands import codecs, collectives, group, rdma

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure sennit and its peers in turn, in one run.")

app.command("collectives", epilog="Example: sennit bench collectives --against gloo --sizes 4KiB,64MiB")(
    measured(collectives)
)
app.command("all", epilog="Example: sennit bench all --report comparison")(measured(compare))
app.command("planner", epilog="Example: sennit bench planner --only held-out")(measured(planner))
app.command("placements", epilog="Example: sennit bench placements --ranks 4 --confined")(measured(placements))
app.command("cost", epilog="Example: sennit bench cost --kind bare --data synthetic")(measured(cost))
app.command("scaling", epilog="Example: sennit bench scaling --worlds 1,2,4")(measured(scaling))
app.command("overlap", epilog="Example: sennit bench overlap --hosts 2 --round-trip-us 1000")(measured(overlap))
app.command("group", epilog="Example: sennit bench group --world 64 --against gloo --transport udp")(measured(group))
app.command("timeline", epilog="Example: sennit bench timeline --rounds 300")(measured(timeline))
app.command("slices", epilog="Example: sennit bench slices --slices 8 --batch 1024")(measured(slices))
app.command("sharded", epilog="Example: sennit bench sharded --zipf 1.2")(measured(sharded))
app.command("quality", epilog="Example: sennit bench quality --seeds 3 --batch-sizes 256,2048,16384")(measured(quality))
app.command("offload", epilog="Example: sennit bench offload --end-to-end")(measured(offload))
app.command("codecs", epilog="Example: sennit bench codecs --size 4MiB")(measured(codecs))
app.command("tiers", epilog="Example: sennit bench tiers --folder /mnt/nvme")(measured(tiers))
app.command("feed", epilog="Example: sennit bench feed --rounds 7")(measured(feed))
app.command("ingest", epilog="Example: sennit bench ingest --data flights")(measured(ingest))
app.command("embedding", epilog="Example: sennit bench embedding --against torch --rounds 5")(measured(embedding))
# A GPU is lent by the minute: what was measured there is kept, and a person reads it.
app.command("gpu", epilog="Example: sennit bench gpu --json gpu.json")(gpu)
app.command("rdma", epilog="Example: sennit testbed vm -- sennit bench rdma --rounds 3")(measured(rdma))
