# SPDX-License-Identifier: Apache-2.0
"""`sennit calibrate`: measures what the cost model and the planner must know of this cluster."""
