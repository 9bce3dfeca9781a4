# SPDX-License-Identifier: Apache-2.0
"""The transport in fabrics of a thousand hosts: scenarios as data, a runner, the report of docs/lab/simulation.md.

The network is simulated (testbed/csrc/fabric), the flows in it are the real ones. A result is a pure function of
its scenario, seed included, so it does not matter which machine computes it, nor how fast.
"""
