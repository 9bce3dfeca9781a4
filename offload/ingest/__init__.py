# SPDX-License-Identifier: Apache-2.0
"""Which feeder sends which records to which trainer, and when. docs/reference/ingest.md has the protocol."""
