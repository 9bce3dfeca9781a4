# SPDX-License-Identifier: Apache-2.0
"""The `sennit` command: its subcommands, and what `sennit explain` prints."""
