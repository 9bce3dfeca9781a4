# SPDX-License-Identifier: Apache-2.0
"""The `torch.distributed` backend "sennit": process groups in C++ (`csrc/`), registration, elastic groups.

`import torch` registers it by itself. `reconfigure` and `join` replace the default group after a failure.
`all_reduce_leaves` sums to the same bits with any number of ranks. `all_reduce_coded` and `coded_hook` send fewer
bytes. `symmetric_empty` and `symmetric_memory` give tensors that the ranks of a host share.
"""

from typing import TYPE_CHECKING

from sennit.exports import exporter

if TYPE_CHECKING:
    from sennit.runtime.backend.coded import all_reduce_coded as all_reduce_coded
    from sennit.runtime.backend.coded import coded_hook as coded_hook
    from sennit.runtime.backend.elastic import join as join
    from sennit.runtime.backend.elastic import reconfigure as reconfigure
    from sennit.runtime.backend.elastic import waiting_count as waiting_count
    from sennit.runtime.backend.leaves import all_reduce_leaves as all_reduce_leaves
    from sennit.runtime.backend.process_group import BACKEND_NAME as BACKEND_NAME
    from sennit.runtime.backend.process_group import Options as Options
    from sennit.runtime.backend.process_group import communicator as communicator
    from sennit.runtime.backend.process_group import register as register
    from sennit.runtime.backend.symmetric import is_symmetric as is_symmetric
    from sennit.runtime.backend.symmetric import symmetric_empty as symmetric_empty
    from sennit.runtime.backend.symmetric import symmetric_memory as symmetric_memory

__getattr__ = exporter(
    __name__,
    {
        "all_reduce_coded": "coded",
        "coded_hook": "coded",
        "join": "elastic",
        "reconfigure": "elastic",
        "waiting_count": "elastic",
        "all_reduce_leaves": "leaves",
        "BACKEND_NAME": "process_group",
        "Options": "process_group",
        "communicator": "process_group",
        "register": "process_group",
        "is_symmetric": "symmetric",
        "symmetric_empty": "symmetric",
        "symmetric_memory": "symmetric",
    },
)
