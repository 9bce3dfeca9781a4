# SPDX-License-Identifier: Apache-2.0
"""Training data as a stream: blocks of rows on files, one order, and the batches of one rank."""
