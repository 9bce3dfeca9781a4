# SPDX-License-Identifier: Apache-2.0
"""Imitates networks, machines and failures, and measures.

`topology` joins namespaces by planes that lose and fail, `scenarios` plays on them (`sennit testbed run`), `simulation`
runs the flow in simulated fabrics (`sennit testbed simulate`), `vm` runs a command in a virtual machine with soft-RoCE
(`sennit testbed vm`), `bench` measures sennit beside its peers in one run.
"""

from sennit.testbed import probes as probes
