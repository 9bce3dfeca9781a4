# SPDX-License-Identifier: Apache-2.0
# Torch types its collectives thinly:
# mypy: disable-error-code="attr-defined,no-untyped-call,arg-type,union-attr,assignment,type-arg,func-returns-value"
"""One rank of a World (conftest.py): runs functions of case files on request, in its own process.

Requests and answers are messages in JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
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


def serve(
    requests: Connection, variables: dict[str, str], rank: int, world: int, store: str, backend: str, timeout_s: float
) -> None:
    """Answers requests until the World closes its end. `variables`: the whole environment."""
    os.environ.clear()
    os.environ.update(variables)
    # Case files import modules beside them.
    sys.path.insert(0, os.path.dirname(__file__))
    # All output goes to standard error.
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
            timeout=timedelta(seconds=timeout_s),
        )
    requests.send_bytes(json.dumps({"value": "ready"}).encode())
    loaded: dict[str, ModuleType] = {}
    while True:
        try:
            request = json.loads(requests.recv_bytes())
        except EOFError:
            break
        answer: dict[str, Any]
        try:
            function = getattr(load(request["file"], loaded), request["function"])
            answer = {"value": function(rank, world, **request["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        requests.send_bytes(json.dumps(answer).encode())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(*globals()["ARGUMENTS"])  # From the World, through runpy.
