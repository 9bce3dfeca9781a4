# SPDX-License-Identifier: Apache-2.0
"""Preprocessing of samples off the host's socket path.

Nothing is here yet. What comes: the feature schema, the feature plan (hash, clip, log, bucketise), its
backends (XDP, native CPU, the NumPy reference), and the ingest of samples into batches.
"""
