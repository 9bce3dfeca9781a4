# SPDX-License-Identifier: Apache-2.0
"""eBPF: a small layer over libbpf, and the BPF programs. docs/reference/ebpf.md has examples.

`compiler` compiles, `loader` loads, `maps` and `arena` show their memory as NumPy arrays with the types that `btf`
reads, `links` attaches, `ringbuffer` reads events, `trial` runs a program on a packet, `kernel_features` says what is
missing.
"""
