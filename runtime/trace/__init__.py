# SPDX-License-Identifier: Apache-2.0
"""`sennit trace`: sessions on the tracepoints of ranks that already run, or of a command that the session starts."""
