# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, and whether two machines reach each other: `sennit doctor`."""
