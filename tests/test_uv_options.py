# SPDX-License-Identifier: Apache-2.0
"""uv looks for packages where pip is configured to look."""

from __future__ import annotations

from tools.uv_options import options

NEWEST = ["--index-strategy", "unsafe-best-match"]


def test_without_a_configuration_only_the_order_of_indexes_is_that_of_pip() -> None:
    assert options([]) == NEWEST
    assert options([":env:.default-timeout='180'\n", "global.cert='/ca.pem'\n"]) == NEWEST


def test_every_place_becomes_an_option() -> None:
    lines = [
        "global.constraint='/most.txt'",
        "global.extra-index-url='file:///a/simple https://b/simple?c=d'",
        "global.index-url='https://own/simple'",
    ]
    assert options(lines) == [
        *NEWEST, "--constraints", "/most.txt", "--index", "file:///a/simple", "--index", "https://b/simple?c=d",
        "--default-index", "https://own/simple",
    ]  # fmt: skip


def test_a_variable_of_the_environment_goes_before_a_file_and_the_command_before_all_commands() -> None:
    lines = [
        ":env:.find-links='/of-the-variable'",
        "download.find-links='/of-another-command'",
        "global.find-links='/of-the-file'",
        "global.index-url='https://of-all'",
        "install.index-url='https://of-install'",
    ]
    assert options(lines) == [*NEWEST, "--find-links", "/of-the-variable", "--default-index", "https://of-install"]
