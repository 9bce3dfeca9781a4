# SPDX-License-Identifier: Apache-2.0
"""What is right, in NumPy and Python: plans, codecs and packets, for tests and explanations."""
