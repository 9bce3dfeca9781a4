# SPDX-License-Identifier: Apache-2.0
"""The DLRM: dense model, sharded embedding tables, and the exchanges between them."""
