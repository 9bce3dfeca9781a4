# SPDX-License-Identifier: Apache-2.0
"""A virtual machine with soft-RoCE for one command: what `sennit testbed vm` runs.

docs/how-to/soft-roce-vm.md describes it.

`kernels` finds, builds or downloads a kernel, `links` are the RoCE links, `job` is what the guest's first process does,
`runner` is the host's side of it.
"""
