# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other: the store, rails, membership, and the trial of the network."""
