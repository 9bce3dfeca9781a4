# SPDX-License-Identifier: Apache-2.0
"""The agent that loads XDP programs for trainers without rights (docs/reference/agent.md)."""
