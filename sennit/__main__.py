# SPDX-License-Identifier: Apache-2.0
"""`python -m sennit` is the command `sennit`."""

from sennit.cli import app

if __name__ == "__main__":
    app()
