# SPDX-License-Identifier: Apache-2.0
"""Sends the same packet to a queue pair of the kernel's RoCE and to the udp port: docs/reference/conformance.md.

    packets      a packet of any shape, right or wrong, as bytes
    cases        the table: what is sent, and what each side does with it
    rxe_target   an unreliable connected queue pair of rdma_rxe, through pyverbs
    udp_target   a rank with the udp port and one open message
    page         the table as a page

test_conformance.py loads this folder as a package, because the tests are not one.
"""
