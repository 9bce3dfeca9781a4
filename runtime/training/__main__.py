# SPDX-License-Identifier: Apache-2.0
"""`torchrun … -m sennit.runtime.training`: the options of `sennit train`, in processes that torchrun starts."""

from sennit.runtime.training.command import main

main()
