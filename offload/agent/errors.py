# SPDX-License-Identifier: Apache-2.0
"""Why the agent does not do what a trainer asks."""

from __future__ import annotations

from sennit.errors import SennitError


class AgentError(SennitError):
    """The agent refuses, or what it was told is no request. The message is for whoever asked."""
