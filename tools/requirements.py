# SPDX-License-Identifier: Apache-2.0
"""Prints what pyproject.toml requires for a list of extras, one requirement a line.

Used by build.sh so that the packages are installed before, and apart from, the native build.
"""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """The build system's, the project's and the extras' requirements, sorted, each once."""
    document = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    wanted = {*document["build-system"]["requires"], *project["dependencies"]}
    for extra in extras:
        wanted.update(project["optional-dependencies"][extra])
    return sorted(wanted)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1].split(","))))
