# SPDX-License-Identifier: Apache-2.0
"""Errors of data sources: the user must act, and the message says how."""

from __future__ import annotations

from sennit import extras
from sennit.errors import SennitError, Unsupported


class DataError(SennitError, ValueError):
    """A file, schema or value is wrong; the message names the place, the value and what is allowed."""


class Incomplete(DataError):
    """A file is not whole, or rows are too few. Where a folder grows, that may change."""


class MissingPackage(Unsupported):
    """A data set or output needs a Python package that is not installed."""

    def __init__(self, package: str, purpose: str, *, install: str | None = None) -> None:
        command = install or extras.install_command(package) or f"pip install {package}"
        super().__init__(f"package {package}", f"not installed, and {purpose} needs it: {command}")
        self.package = package
