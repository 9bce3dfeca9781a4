# SPDX-License-Identifier: Apache-2.0
"""`python -m sennit` is the command `sennit`."""

from sennit.commands.cli import app

if __name__ == "__main__":
    app()
