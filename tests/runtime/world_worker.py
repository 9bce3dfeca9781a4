# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""One rank of a World (conftest.py): runs functions of case files on request, in its own process.

`python world_worker.py RANK WORLD STORE INIT TIMEOUT_S`. Requests and answers are JSON, one per line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import sennit  # noqa: F401  the backend, in a checkout without entry points too


def load(path: str, loaded: dict[str, ModuleType]) -> ModuleType:
    if path not in loaded:
        spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        loaded[path] = module
    return loaded[path]


def main() -> None:
    rank, world, store, backend, timeout_s = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    # Answers go to the pipe. All other output goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("error")
    # torch always warns about its own complex32.
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if backend:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=float(timeout_s)),
        )
    print(json.dumps({"value": "ready"}), file=answers, flush=True)
    loaded: dict[str, ModuleType] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            function = getattr(load(request["file"], loaded), request["function"])
            answer = {"value": function(rank, world, **request["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
