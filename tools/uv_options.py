# SPDX-License-Identifier: Apache-2.0
"""Says in options of `uv pip install` what pip is configured to do: `pip config list | uv_options.py`, one word a line.

uv reads no configuration of pip. Both look for packages in the same places then.
"""

import ast
import sys
from collections.abc import Iterable

# pip's name of a setting -> uv's option. uv takes a certificate from SSL_CERT_FILE, as pip does from PIP_CERT.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
}
# The last that has a setting is the one that counts.
SECTIONS = ("global", "install", ":env:")


def options(lines: Iterable[str]) -> list[str]:
    """The lines are those of `pip config list`: global.find-links='/wheels'."""
    settings: dict[str, tuple[int, str]] = {}
    for line in lines:
        name, _, value = line.strip().partition("=")
        section, _, key = name.rpartition(".")
        if key in OPTIONS and section in SECTIONS:
            settings[key] = max(settings.get(key, (-1, "")), (SECTIONS.index(section), str(ast.literal_eval(value))))
    # pip takes the newest release of all indexes.
    found = ["--index-strategy", "unsafe-best-match"]
    for key, (_, value) in settings.items():
        for word in value.split():
            found += [OPTIONS[key], word]
    return found


if __name__ == "__main__":
    print("\n".join(options(sys.stdin)))
