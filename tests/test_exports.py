# SPDX-License-Identifier: Apache-2.0
"""Names that a package imports when they are first used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PACKAGE = """
from sennit.exports import exporter

__getattr__ = exporter(__name__, {"fold": "fold", "width": "fold"})
"""
FOLD = """
def fold():
    return 1

def width():
    return 2
"""


def test_a_function_keeps_its_name_from_the_module_that_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "fold.py").write_text(FOLD)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import lazily  # type: ignore[import-not-found]

        assert "lazily.fold" not in sys.modules
        assert lazily.width() == 2  # imports the module, and so sets its name
        assert lazily.fold() == 1
        del sys.modules["lazily.fold"]
        from lazily.fold import width  # type: ignore[import-not-found]

        assert (lazily.fold(), width()) == (1, 2)
        found: dict[str, object] = {}
        exec("from lazily import *", found)
        assert {"fold", "width"} == found.keys() - {"__builtins__"}
        with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'other'"):
            _ = lazily.other
    finally:
        for name in ("lazily", "lazily.fold"):
            sys.modules.pop(name, None)
