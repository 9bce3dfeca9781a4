# SPDX-License-Identifier: Apache-2.0
"""`sennit trace`: sessions on the tracepoints of the native core, for processes that run already or one it starts."""
