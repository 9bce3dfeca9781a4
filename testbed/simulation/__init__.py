# SPDX-License-Identifier: Apache-2.0
"""The transport in fabrics of a thousand hosts: scenarios as data, a runner, the report of docs/lab/simulation.md.

The network is simulated (testbed/csrc/fabric), but its flows are the transport's own code. A result is a pure function
of its scenario, seed included. So it does not depend on the machine that computes it.
"""
