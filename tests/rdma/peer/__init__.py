# SPDX-License-Identifier: Apache-2.0
"""A rank written from docs/reference/wire.md in Python over pyverbs, which shares no code with the native engine.

    numbers    short numbers on the wire, long ones inside
    offer      what ranks tell each other before the first packet
    controls   the control payload
    messages   eager payloads, and what a message is
    receiving  the half of a flow that has memory written
    sending    the half that writes the peer's
    queues     queue pairs, buffers and completions, through pyverbs
    rank       all of it together: one rank with one peer

conftest.py loads it as a package of its own, for tests have none.
"""
