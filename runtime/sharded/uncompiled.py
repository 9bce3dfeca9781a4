# SPDX-License-Identifier: Apache-2.0
"""Functions that `torch.compile` leaves alone, without torch's compiler until one of them is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Like `torch.compiler.disable`, which imports torch's compiler at once: a second of processor time.

    Programs that only start ranks never need it. torch's own optimizers do the same with `torch._disable_dynamo`.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not disabled:
            import torch

            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **options)

    return call  # type: ignore[return-value]
