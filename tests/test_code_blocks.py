# SPDX-License-Identifier: Apache-2.0
"""Every block of code of every page is tested.

The README and the tutorials are run (tests/pages.py), but for blocks whose page says why not. Elsewhere commands are
parsed with all their options, programs are compiled and their calls compared with the signatures, and files are read.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from sennit.commands.cli import app
from sennit.runtime.training import command as training
from sennit.runtime.training import roofline_command, shard_command
from tests import pages
from tests.pages import Block

PAGES = [pages.ROOT / "README.md", pages.ROOT / "CONTRIBUTING.md", *sorted((pages.ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in pages.blocks(page)]
# Pages that are run -> the tests that do it.
RUN_BY = {
    "README.md": "tests/runtime/test_tutorials.py",
    "docs/tutorials/first-allreduce.md": "tests/runtime/test_tutorials.py",
    "docs/tutorials/first-trace.md": "tests/testbed/test_trace_tutorial.py",
    "docs/tutorials/first-training-run.md": "tests/runtime/test_tutorials.py",
    "docs/tutorials/first-vm.md": "tests/testbed/test_vm.py",
    "docs/tutorials/move-your-model.md": "tests/runtime/test_tutorials.py",
    "docs/tutorials/train-on-a-stream.md": "tests/runtime/test_tutorials.py",
}
TRAINER = "sennit.runtime.training"
TARGETS = set(re.findall(r"^([a-z-]+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE))
# Programs of others, and words of the shell.
OTHERS = {
    *(".", "cd", "cp", "export", "git", "install", "ls", "mkdir", "rm", "scp", "ssh"),
    *("bpftool", "bpftrace", "docker", "dpu", "kubectl", "pip", "podman", "python", "python3", "sbatch", "srun"),
    "torchrun",
}


def train_options() -> Any:
    options = typer.Typer()
    options.command()(training.command)
    return typer.main.get_command(options)


# Commands that read their options when they run -> what reads them, one after the other.
LATER = {
    "train": [train_options()],
    "shard": [typer.main.get_command(shard_command.app), train_options()],
    "roofline": [typer.main.get_command(roofline_command.app), train_options()],
}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block, without comments, variables set for it, and the end of a background one."""
    for line in re.sub(r"\\\n", " ", text).split("\n"):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[:1] == ["sudo"]:
            words.pop(0)
        if words:
            yield words[: words.index("&")] if "&" in words else words


def check_sennit(words: list[str]) -> None:
    """Parses a command: names, options and their values must be right. Nothing is run."""
    group: Any = typer.main.get_command(app)
    context = None
    while hasattr(group, "commands"):
        assert words, "a command is missing"
        name, *words = words
        assert name in group.commands, f"there is no command {name}"
        group, context = group.commands[name], group.make_context(name, [], parent=context, resilient_parsing=True)
    rest = group.make_context(group.name, words, parent=context).args
    for command in LATER.get(group.name, ()) if rest[:1] != ["diff"] else ():
        rest = command.make_context(group.name, rest).args


def check_command(words: list[str]) -> None:
    program = words[0].rpartition("/")[2]
    for word in words:
        if word.startswith(("docs/", "examples/", "tests/")):
            assert [*pages.ROOT.glob(word)], f"there is no {word}"
    if TRAINER in words:
        words = ["sennit", "train", *words[words.index(TRAINER) + 1 :]]
        program = "sennit"
    if "sennit" in words[1:3] and words[words.index("sennit") - 1] == "-m":
        check_sennit(words[words.index("sennit") + 1 :])
    elif program == "sennit":
        check_sennit(words[1:])
    elif program == "make":
        assert {word for word in words[1:] if "=" not in word} <= TARGETS
    else:
        assert program in OTHERS or words[0].startswith("build/"), f"no such program: {words[0]}"


def check_shell(block: Block) -> None:
    # bpftrace's programs span lines; tests/testbed compiles them.
    if "bpftrace -e" in block.text:
        return
    for words in commands(block.text):
        check_command(words)


def called(tree: ast.AST) -> Iterator[tuple[Any, ast.Call]]:
    """Each call of something that the block imports from sennit."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sennit"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                found = getattr(module, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            path = ast.unparse(node.func).split(".")
            if path[0] in names:
                target = names[path[0]]
                for part in path[1:]:
                    target = getattr(target, part)
                yield target, node


def check_python(block: Block) -> None:
    """`…` stands for what the reader writes."""
    tree = ast.parse(block.text.replace("…", "..."))
    for target, call in called(tree):
        positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        try:
            inspect.signature(target).bind(*positional, **keywords)
        except TypeError as error:
            raise AssertionError(f"{ast.unparse(call)}: {error}") from None


CHECKS: dict[str, Callable[[Block], object]] = {
    "json": lambda block: None,  # what commands print, cut
    "mermaid": lambda block: None,  # tests/testbed/test_flowcharts.py
    "python": check_python,
    "sh": check_shell,
    "toml": lambda block: tomllib.loads(block.text),
    "yaml": lambda block: yaml.safe_load(block.text),
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_right(block: Block) -> None:
    CHECKS[block.language](block)


def test_no_block_of_the_readme_and_the_tutorials_is_untested() -> None:
    tutorials = {str(page.relative_to(pages.ROOT)) for page in (pages.ROOT / "docs" / "tutorials").glob("*.md")}
    assert tutorials | {"README.md"} == RUN_BY.keys()
    untested = []
    for block in BLOCKS:
        if block.page in RUN_BY and block.language in ("sh", "python") and not block.not_run:
            test = RUN_BY[block.page]
            # A program without a name could not be run by a command of the page.
            named = block.language == "sh" or block.saved_as or block.page == "README.md"
            is_run = test and Path(block.page).name in (pages.ROOT / test).read_text()
            if not (named and is_run):
                untested.append(str(block))
    assert not untested


def test_a_page_that_says_why_a_block_is_not_run_names_what_there_is() -> None:
    reasons = [block.not_run for block in BLOCKS if block.not_run]
    assert reasons
    for path in re.findall(r"tests/[\w./]+\.py", " ".join(reasons)):
        assert (pages.ROOT / path).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sennit trian --data flights", "there is no command trian"),
        ("sennit train --no-such-option", "--no-such-option"),
        ("sennit train --ranks many", "integer"),
        ("sennit shard --cluster a.toml --no-such-option", "--no-such-option"),
        ("sennit testbed vm --no-such-option -- true", "--no-such-option"),
        ("make no-such-target", "no-such-target"),
        ("no-such-program", "no such program"),
        ("python -m pytest tests/no_such_test.py", "there is no tests/no_such_test.py"),
        (f"torchrun --nnodes 2 -m {TRAINER} --no-such-option", "--no-such-option"),
        ("SENNIT_TRANSPORT=udp sennit bench collectives --sizes", "--sizes"),
    ],
)
def test_a_wrong_command_is_found(text: str, message: str) -> None:
    (words,) = commands(text)
    with pytest.raises(Exception, match=message):
        check_command(words)


def test_a_wrong_call_is_found() -> None:
    text = "from sennit.runtime.sharded import Table\nTable(name='a', rows=1, dim=2, colour=3)\n"
    block = Block(page="", line=1, language="python", text=text, saved_as="", not_run="", shown="")
    with pytest.raises(AssertionError, match="colour"):
        check_python(block)
