# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, and what sennit does on it: probes, `sennit doctor`, benchmarks, scenarios of failure.

`capabilities` is the one probe module that tests and the doctor share, `bench` measures sennit beside its peers in one
run, `topology` joins namespaces by planes that lose and fail, `scenarios` plays on them (`sennit testbed run`),
`simulation` runs the flow in simulated fabrics (`sennit testbed simulate`), `vm` runs a command in a virtual machine
with soft-RoCE (`sennit testbed vm`), `setup` prepares a machine for `make build`.
"""
