# SPDX-License-Identifier: Apache-2.0
"""The torch side of sennit: the `torch.distributed` backend, and the DLRM trainer that uses it."""
