# SPDX-License-Identifier: Apache-2.0
"""eBPF programs, their loader and typed views of their maps.

`compiler` compiles `programs/*.bpf.c` when they are needed, `loader` loads them and reads their maps. So far there is
the testbed's switch. What comes: the programs that preprocess samples in XDP and make every packet of the transport
visible.
"""
