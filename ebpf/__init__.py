# SPDX-License-Identifier: Apache-2.0
"""eBPF programs, their loader and typed views of their maps.

Nothing is here yet. What comes: `programs/*.bpf.c` with shared headers in `include/`, a small libbpf
loader, and the programs that preprocess samples in XDP and make every packet of the transport visible.
"""
