# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel `sennit-torch`. Its version and its requirements name the torch that it is compiled for.

An installer then takes the one that fits: `pip install torch==2.13.0 sennit-torch` chooses 0.1.0+torch2.13. The sdist
fits every torch, and has the version alone.
"""

import importlib.metadata
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

VERSION = "0.1.0"


class Compile(build_ext):
    """Compiles what the installed `sennit` brings."""

    def build_extension(self, ext: Extension) -> None:
        from sennit.runtime.backend.building import compile_into

        folder = Path(self.get_ext_fullpath(ext.name)).parent
        folder.mkdir(parents=True, exist_ok=True)
        compile_into(folder)


def metadata() -> tuple[str, list[str]]:
    """Returns the version, and what it requires."""
    requires = [f"sennit=={VERSION}"]
    if "sdist" in sys.argv:
        return VERSION, requires
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return f"{VERSION}+torch{minor}", [*requires, f"torch=={minor}.*"]


version, requires = metadata()
setup(
    version=version,
    install_requires=requires,
    ext_modules=[Extension("sennit_torch._c10d", sources=[])],
    cmdclass={"build_ext": Compile},
)
