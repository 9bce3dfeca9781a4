# SPDX-License-Identifier: Apache-2.0
"""A virtual machine with soft-RoCE for one command: what `sennit testbed vm` runs.

docs/how-to/soft-roce-vm.md describes it. `kernels` finds, builds or downloads a kernel. `links` are the RoCE links.
`job` tells the guest's first process what to do. `runner` starts the VM and passes on its output.
"""
