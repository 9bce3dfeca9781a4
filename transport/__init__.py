# SPDX-License-Identifier: Apache-2.0
"""Transport: configuration, rendezvous, collective plans, errors, and the native data plane behind them.

Importing this package loads no extension: plans, algorithms and the NumPy reference run without a build.
"""
