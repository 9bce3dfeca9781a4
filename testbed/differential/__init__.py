# SPDX-License-Identifier: Apache-2.0
"""Random calls of torch.distributed on gloo and on sennit, in the same processes: the outcomes must be the same.

`python -m sennit.testbed.differential --calls 10000 --seed 7`. All ranks draw the same rounds of one to four calls from
the seed: kinds, groups, roots, types, operations, shapes, splits, mistakes, the order of waits (calls.py). Each rank
draws strides and shared memory of its own tensors (tensors.py). gloo gets the same call with contiguous tensors that
share nothing. With others it counts in the order of memory, so its outcome depends on strides, and it may write where
no tensor is.

Every outcome is values or a refusal, and is compared at once (outcomes.py). Where sennit refuses what gloo takes,
`DIFFERENCES` must say why (docs/reference/torch.md). What lies between the elements of an output must stay as it was.

With `--callbacks`, the calls are programs of callbacks (callbacks.py): random trees of calls on several groups, with
results that are known.
"""
