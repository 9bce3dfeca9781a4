# SPDX-License-Identifier: Apache-2.0
"""`sennit testbed vm` and `sennit testbed kernel`. Each imports what it needs late, because every VM waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NoReturn

import typer

from sennit.command_line import EXIT_UNAVAILABLE, OutputLost, busy, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from sennit.testbed.vm.runner import Outcome

EXIT_SIGNALLED = 128
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Interrupted(BaseException):
    """A signal ended this process, and the VM before it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def vm(
    command: Annotated[list[str], typer.Argument(help="command to run in the VM; put it after --")],
    kind: Annotated[
        str,
        typer.Option(
            "--kernel", help="uml (User-Mode Linux), qemu (slow, with two processors), or auto: uml where it boots"
        ),
    ] = "auto",
    patch: Annotated[
        list[Path] | None,
        typer.Option(help="patch of the kernel, as given to `sennit testbed kernel`; may be repeated"),
    ] = None,
    links: Annotated[
        int, typer.Option(help="number of RoCE links; link k joins the devices rxe(2k) and rxe(2k+1)")
    ] = 1,
    mtu: Annotated[int, typer.Option(help="MTU of the links' interfaces, in bytes")] = 4200,
    netem: Annotated[
        list[str] | None,
        typer.Option(help="settings of tc-netem(8) for every device, or rxe0='loss 1%' for one; may be repeated"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="memory of the VM, with the unit M or G; taken from the host as it is used",
            show_default="4G, or three quarters of the room for it",
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds after which the VM is killed")] = 600.0,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, added to the environment of the command; may be repeated")
    ] = None,
    bring_back: Annotated[
        list[Path] | None,
        typer.Option(help="folder whose files are kept after the VM; may be repeated; the first is SENNIT_VM_OUT"),
    ] = None,
    make_kernel: Annotated[
        bool, typer.Option("--make-kernel", help="build or download the kernel first, if the cache has none that boots")
    ] = False,
    show_console: Annotated[
        bool, typer.Option("--console", help="show the messages of the VM's kernel on stderr")
    ] = False,
) -> None:
    """Run a command in a VM with soft-RoCE. It sees this machine's files. The files that it writes are gone afterwards.

    Exit status: that of the command; 124 after the time limit; 125 if the VM itself failed.
    """
    from sennit.errors import SennitError
    from sennit.testbed.vm import boot, runner
    from sennit.testbed.vm.links import Links

    try:
        kinds = boot.wanted(kind, patch or ())
        request = runner.Request(
            command=tuple(command),
            kind=kinds[0],
            patches=tuple(patch or ()),
            environment={**os.environ, **dict(_pair(text) for text in env or [])},
            links=Links(count=links, mtu=mtu, netem=tuple(netem or ())),
            memory_bytes=_bytes(memory) if memory is not None else None,
            timeout_s=timeout_s,
            keep=tuple(bring_back or ()),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with _interruptible():
            # A kernel that was named is not booted beforehand: if it fails, its console says why.
            choice = None
            if make_kernel:
                with busy("looking for a kernel, or making one"):
                    choice = boot.provide(kinds, _say, patches=request.patches)
            elif kind == boot.AUTO:
                choice = boot.choose(kinds, request.patches)
            if choice and choice.instead_because:
                typer.echo(f"sennit testbed vm: in {boot.NAMES[choice.kind]}: {choice.instead_because}", err=True)
            outcome = runner.run(
                replace(request, kind=choice.kind, kernel=choice.kernel) if choice else request,
                output=_writer(sys.stdout.buffer),
                errors=_writer(sys.stderr.buffer),
                console=_writer(sys.stderr.buffer) if show_console else lambda data: None,
            )
    except BrokenPipeError:
        # The reader of the output has gone. The interpreter must not write to it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_SIGNALLED + signal.SIGPIPE) from None
    except OutputLost:
        raise
    except (SennitError, OSError) as error:
        _fail(str(error), runner.EXIT_VM_FAILED)
    except Interrupted as signalled:
        _fail(f"ended by {signal.Signals(signalled.number).name}", EXIT_SIGNALLED + signalled.number)
    _explain(outcome)
    raise typer.Exit(outcome.code)


def kernel(
    kind: Annotated[str, typer.Argument(help="uml, qemu, or auto: uml where it boots, else qemu")] = "auto",
    newest: Annotated[
        bool, typer.Option("--newest", help="also if the cache has a kernel, but Debian has a newer one")
    ] = False,
    patch: Annotated[
        list[Path] | None,
        typer.Option(help="patch to apply to the source of the uml kernel, which is cached apart; may be repeated"),
    ] = None,
    key: Annotated[
        bool, typer.Option("--key", help="only print the name that the newest kernel has in the cache: a key for CI")
    ] = False,
) -> None:
    """Build or download the VM's kernel unless the cache has it, and check that it boots. Needs no root.

    Exit status: 69 if no kernel boots on this machine, or something must be installed first.
    """
    from sennit import debian
    from sennit.testbed.vm import boot, kernels

    try:
        kinds = boot.wanted(kind, patch or ())
        kernels.check_patches(kinds[0], patch or ())
        if key:
            typer.echo(kernels.key(kinds[0], patch or ()))
            return
        with busy("looking for a kernel, or making one"):
            found = boot.provide(kinds, _say, newest=newest, patches=patch or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except debian.Unavailable as error:
        typer.echo(f"kernel: {error}", err=True)
        raise typer.Exit(EXIT_UNAVAILABLE) from None
    except (debian.StepFailed, OSError) as error:
        fail(error)
    if found.instead_because:
        _say(f"taking {boot.NAMES[found.kind]}")
    typer.echo(f"kernel: ready: {found.kernel}")


def _say(what: str) -> None:
    typer.echo(f"kernel: {what}", err=True)


def _explain(outcome: Outcome) -> None:
    if not outcome.reason:
        return
    lines = [line for line in outcome.console.splitlines() if line.strip()][-CONSOLE_LINES:]
    if lines:
        typer.echo("\n".join(["the end of the VM's console:", *(f"  {line}" for line in lines)]), err=True)
    typer.echo(f"sennit testbed vm: {outcome.reason}", err=True)


CONSOLE_LINES = 25


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"sennit testbed vm: {message}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turns the first signal that asks this process to end into `Interrupted`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # A second signal must not interrupt the clean-up.
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _writer(stream: BinaryIO) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return write


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(f"--env {text!r}, must be NAME=VALUE")
    return name, value


def _bytes(text: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in UNITS:
        raise ValueError(f"--memory {text!r}, must be a number with the unit K, M or G")
    return int(number) * UNITS[unit]
