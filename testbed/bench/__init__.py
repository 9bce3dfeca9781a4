# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: sennit beside its peers in one run, ratios first.

A conductor process drives workers over Unix sockets (`conductor`): one set of workers for all torch backends and one
for each other peer. It measures them in turn, round by round. A machine that slows down for a minute then slows all
of them. Between rounds the idle workers sleep in a socket read.
"""
