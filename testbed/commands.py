# SPDX-License-Identifier: Apache-2.0
"""`sennit testbed`: scenarios on networks of this machine, and simulations. A command imports what it needs itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sennit.command_line import busy, fail, stdout_console, writable_file, writable_folder
from sennit.testbed.simulation.training_command import simulate_steps
from sennit.testbed.vm.commands import kernel, vm

if TYPE_CHECKING:
    from rich.console import Console

    from sennit.testbed.scenarios.results import Case
    from sennit.testbed.simulation.outcome import Outcome

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Try sennit on bad networks: scenarios of failure, a VM with soft-RoCE, simulated fabrics.",
)

app.command(
    no_args_is_help=True,
    context_settings={"allow_interspersed_args": False},
    epilog="Example: sennit testbed vm --links 2 --netem 'loss 1%' -- rdma link show",
)(vm)
app.command(epilog="Example: sennit testbed kernel uml --patch rxe-fix.patch")(kernel)
app.command("simulate-steps", epilog="Example: sennit testbed simulate-steps --hosts 16,64")(simulate_steps)

DEFAULT_FOLDER = Path("build/testbed")
RESULTS_NAME = "results.json"
PAGE_NAME = "report.html"
COLOURS = {"passed": "green", "failed": "bold red", "unsupported": "yellow"}
# Measures that are zero when all is well.
QUIET = ("results", "wrong_results", "failed_ranks", "distinct_digests", "failed_trainings")


def _check_packages(*packages: str) -> None:
    """Ends the command if pyroute2 or matplotlib is not installed: scenarios need both."""
    for package in packages or ("pyroute2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            fail(f"{package} is not installed: pip install 'sennit[testbed]'", 2)


@app.command("list", epilog="Example: sennit testbed list")
def list_() -> None:
    """List the scenarios, and whether this machine can run them."""
    _check_packages()
    from rich.table import Table

    from sennit.doctor import capabilities
    from sennit.testbed.scenarios.catalogue import SCENARIOS
    from sennit.testbed.topology.switch import Impairer, resolve

    impairer = resolve(Impairer.AUTO)
    table = Table("scenario", "what happens", "here", box=None, pad_edge=False)
    for scenario in SCENARIOS.values():
        table.add_row(scenario.name, scenario.title, capabilities.missing(*scenario.needs(impairer)) or "can run")
    stdout_console().print(table)


@app.command(epilog="Example: sennit testbed run plane-off --short --seed 7")
def run(
    names: Annotated[list[str], typer.Argument(help="scenarios of 'sennit testbed list', or all")],
    short: Annotated[
        bool, typer.Option("--short", help="less data and fewer rounds: some seconds per scenario")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="a case that misses a goal about speed fails")] = False,
    seed: Annotated[int, typer.Option(help="seed of the payload; a scenario has its own seed of losses", min=0)] = 1,
    impairment: Annotated[
        str, typer.Option(help="what impairs the network: bpf, netem, or auto (bpf where it is available)")
    ] = "auto",
    folder: Annotated[
        Path, typer.Option(help="folder for logs, captures, results and report", callback=writable_folder)
    ] = DEFAULT_FOLDER,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="also write the results to this file", callback=writable_file)
    ] = None,
) -> None:
    """Run scenarios and write a report.

    Exit status: 0 if no case failed, 1 if one did, 2 if the command was wrong.
    """
    _check_packages()
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from sennit.testbed.scenarios import catalogue, runner
    from sennit.testbed.scenarios import report_page as page
    from sennit.testbed.scenarios.results import Status
    from sennit.testbed.topology import Impairer

    if impairment not in tuple(Impairer):
        raise typer.BadParameter(f"--impairment {impairment}; allowed: {', '.join(Impairer)}")
    try:
        scenarios = catalogue.choose(names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = stdout_console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True, markup=False), transient=True) as progress:
        task = progress.add_task("", total=len(scenarios))

        def finished(case: Case) -> None:
            progress.advance(task)
            show(case, console)

        def say(what: str) -> None:
            progress.update(task, description=what)

        outcome = runner.begin(short=short, strict=strict, seed=seed, impairer=Impairer(impairment))
        try:
            runner.run(outcome, scenarios, folder=folder, say=say, finished=finished)
        finally:
            # Also after an interruption, because the finished cases took minutes.
            for path in (folder / RESULTS_NAME, *([json_path] if json_path else [])):
                outcome.write(path)
            page.write(outcome, folder / PAGE_NAME)
    counts = ", ".join(f"{outcome.count(status)} {status}" for status in Status)
    console.print(f"{counts}; report: {folder / PAGE_NAME}")
    if outcome.count(Status.FAILED):
        raise typer.Exit(1)


@app.command(epilog="Example: sennit testbed report --html report.html")
def report(
    folder: Annotated[Path, typer.Option(help="folder of the results of 'sennit testbed run'")] = DEFAULT_FOLDER,
    html: Annotated[
        Path | None, typer.Option(help="page to write; default: report.html in the folder", callback=writable_file)
    ] = None,
) -> None:
    """Show the cases of the last run, and write its report again."""
    _check_packages()
    from sennit.testbed.scenarios import report_page as page
    from sennit.testbed.scenarios import results

    try:
        outcome = results.read(folder / RESULTS_NAME)
    except OSError as error:
        raise typer.BadParameter(f"{folder / RESULTS_NAME}: {error.strerror}; run 'sennit testbed run' first") from None
    except ValueError as error:
        raise typer.BadParameter(f"{error}; run 'sennit testbed run' first") from None
    console = stdout_console()
    for case in outcome.cases:
        show(case, console)
    target = html or folder / PAGE_NAME
    page.write(outcome, target)
    console.print(f"report: {target}")


def show(case: Case, console: Console) -> None:
    """One line per case, and one for each goal that was missed."""
    from rich.text import Text

    line = Text.assemble((f"{case.status:12}", COLOURS[case.status]), f"{case.name:24}", f"{case.seconds:6.1f} s  ")
    shown = [goal for goal in case.goals if goal["value"] is not None and goal["measure"] not in QUIET]
    line.append(case.reason or ", ".join(f"{goal['measure']} {goal['value']:.4g}" for goal in shown))
    console.print(line, soft_wrap=True)
    for goal in case.goals:
        if goal["word"] == "short":
            value = "not measured" if goal["value"] is None else f"{goal['value']:.4g}"
            console.print(f"{'':12}short of its goal: {goal['measure']} {value}, goal {goal['text']}")
    if case.trainings:
        from sennit.testbed.scenarios.results import digest_table

        for row in digest_table(case.trainings):
            console.print(row, soft_wrap=True)


@app.command(epilog="Example: sennit testbed simulate --quick --only permutation")
def simulate(
    quick: Annotated[
        bool, typer.Option("--quick", help="64 hosts instead of 1,024: takes seconds instead of minutes")
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            help="folder for outcomes, table and figure; outcomes that fit are reused", callback=writable_folder
        ),
    ] = Path("build/simulation"),
    page: Annotated[Path | None, typer.Option(help="also write table and figure into this page")] = None,
    seed: Annotated[int, typer.Option(help="seed of everything random", min=0)] = 1,
    jobs: Annotated[
        int | None, typer.Option(help="runs at a time: by default one a core, if each has 4 GiB of memory", min=1)
    ] = None,
    only: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
) -> None:
    """Run the plans of 1,024 ranks on simulated hosts, beside static ECMP.

    `make simulate` writes docs/lab/simulation.md with it.
    """
    _check_packages("matplotlib")
    from sennit.testbed.simulation import report, runner, suite

    cases = [case for case in suite.cases(quick=quick, seed=seed) if only in case.name]
    if not cases:
        raise typer.BadParameter(f"no case has {only!r} in its name")
    typer.echo(f"seed {seed}, {len(cases)} runs; outcomes in {out}")

    def show(case: suite.Case, outcome: Outcome) -> None:
        state = "" if outcome.is_complete else f" (did not end: {outcome.failure or 'deadline'})"
        typer.echo(f"{case.name}: {outcome.ratio:.2f} x ideal{state}, {outcome.wall_s:.0f} s, {outcome.trace_hash}")

    with busy(f"simulating {len(cases)} runs"):
        outcomes = runner.run_cases(cases, out, jobs=jobs or runner.jobs_of_this_machine(), done=show)
    text = f"{report.provenance(cases, outcomes)}\n\n{report.table(cases, outcomes)}"
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    report.plot(cases, outcomes, out / "simulation.png")
    if page is not None:
        try:
            picture = f"![completion times, goodput, use of uplinks]({page.with_suffix('.png').name})"
            report.write_page(page, f"{picture}\n\n{text}")
        except (OSError, ValueError) as error:
            fail(error, 2)
        report.plot(cases, outcomes, page.with_suffix(".png"))
