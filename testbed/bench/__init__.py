# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: sennit beside its peers in one run, ratios first.

A conductor process drives workers over Unix sockets (`conductor`), one set of workers for all torch
backends and one for each other peer. It measures them in turn, round by round, so that a machine that slows
down for a minute slows all of them; between rounds the others sleep in a socket read.
"""
