# SPDX-License-Identifier: Apache-2.0
"""The versions that two processes must share, and the message if they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

from sennit.transport.light_tuple import LightTuple

# What ranks exchange through the store: rendezvous and membership records, the udp offer, plans
# (docs/reference/plans.md), the shared-memory layout; and which paths their trial of the network has. Increased when
# any of them changes.
PROTOCOL_VERSION: Final = 11
# What ranks send to each other: packets, control payloads (docs/reference/wire.md). Increased when any of them changes,
# together with flow::CONTROL_VERSION.
WIRE_REVISION: Final = 4


class Versions(LightTuple):
    """The versions of one process. The package's version is for people. Only the other two are compared."""

    package: str
    protocol: int
    wire: int

    @classmethod
    def ours(cls) -> Self:
        # Imported late, because the package's root imports this module.
        import sennit

        return cls(package=sennit.__version__, protocol=PROTOCOL_VERSION, wire=WIRE_REVISION)

    def as_record(self) -> dict[str, Any]:
        """Returns the fields of a record in a store."""
        return {"version": self.protocol, "wire": self.wire, "package": self.package}

    def mismatch(self, record: Mapping[str, Any]) -> str | None:
        """Returns why the writer of `record` cannot talk to us, or None. Raises KeyError for a record without versions.

        Protocol versions are compared first, because another version may change everything else in a record.
        """
        if record["version"] == self.protocol and record["wire"] == self.wire:
            return None
        theirs = f"protocol version {record['version']}, wire revision {record.get('wire', 'unknown')}"
        return (
            f"speaks {theirs} (sennit {record.get('package', 'unknown')}), this process protocol version "
            f"{self.protocol}, wire revision {self.wire} (sennit {self.package}): install one version of sennit on "
            "all hosts"
        )
