# SPDX-License-Identifier: Apache-2.0
"""A rank written from docs/reference/wire.md in Python over pyverbs. It shares no code with the native engine.

    numbers    short numbers on the wire, long numbers inside
    offer      what ranks tell each other before the first packet
    controls   the control payload
    messages   eager payloads, and the header of a message
    receiving  the receiving half of a flow, whose memory the peer writes
    sending    the sending half, which writes the peer's memory
    queues     queue pairs, buffers and completions, through pyverbs
    rank       all parts together: one rank with one peer

conftest.py loads this folder as a package, because the tests are not one.
"""
