# SPDX-License-Identifier: Apache-2.0
"""Plans: the steps of a collective on one rank, their form in bytes, and their arithmetic."""
