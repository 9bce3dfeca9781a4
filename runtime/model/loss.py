# SPDX-License-Identifier: Apache-2.0
"""What is minimised: log loss, or a function of the user's by `package.module:function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from sennit import user_code
from sennit.known_names import hint
from sennit.transport.errors import ConfigError

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""`function(logits, labels)`, both float32 [B], or [B, labels] of several labels, returns the loss of each sample, [B],
or of each label, as torch's do with the option `reduction="none"`."""


def _log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


LOSSES: Final[dict[str, LossFunction]] = {"bce": _log_loss}


class Loss:
    """A loss summed over samples, so that slices of different sizes weigh what they should."""

    def __init__(self, name: str = "bce", label_count: int = 1) -> None:
        """`name`: one of `LOSSES`, or `package.module:function`, which is tried on two samples and on one.

        Raises `ConfigError` that says what is wrong with the function. Errors of its own go on as they are.
        """
        self._function = find_loss(name)
        for count in (2, 1) if name not in LOSSES else ():
            shape = (count,) if label_count == 1 else (count, label_count)
            given = torch.zeros(shape, requires_grad=True)
            try:
                found: Any = self._function(given, torch.zeros(shape))
            except Exception as error:
                error.add_note(f"loss {name} was tried on logits and labels of zeros, {shape}, before the first step")
                raise
            allowed = isinstance(found, Tensor) and found.shape in {(count,), shape} and found.is_floating_point()
            if not allowed:
                shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
                raise ConfigError(
                    f"loss {name} returned {shown} for {count} samples; allowed: a float tensor of shape ({count},), "
                    "the loss of each sample"
                )
            if not found.requires_grad:
                raise ConfigError(f"loss {name} has no gradient; allowed: a function that torch differentiates")

    def is_finite(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Bool [B]: whether the loss of each sample is finite, of all its labels."""
        with torch.no_grad():
            losses = self._function(logits, labels).isfinite()
        return losses if losses.ndim == 1 else losses.all(1)

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss, 0-dim, of samples with float32 [B] or [B, labels] logits and labels, and weights [B]."""
        losses = self._function(logits, labels)
        if losses.shape not in {logits.shape, logits.shape[:1]}:
            raise ConfigError(
                f"a loss of shape {tuple(losses.shape)} for logits of shape {tuple(logits.shape)}; allowed: one of "
                "each sample, or of each of its labels"
            )
        if weights is not None:
            losses = losses * (weights if losses.ndim == 1 else weights.unsqueeze(1))
        return losses.sum()


def check_name(name: str) -> None:
    """Raises `ConfigError` for what is neither a loss of sennit nor the name of a function. Imports nothing."""
    if name not in LOSSES and not user_code.is_name(name):
        raise ConfigError(
            f"loss {name!r}; allowed: {', '.join(LOSSES)}, or package.module:function{hint(name, LOSSES)}"
        )


def find_loss(name: str) -> LossFunction:
    """The function of this name. Imports a user's module. Raises `ConfigError`."""
    if name in LOSSES:
        return LOSSES[name]
    check_name(name)
    found: Any = user_code.find("loss", name)
    if not callable(found):
        raise ConfigError(f"loss {name} is a {type(found).__name__}; allowed: a function")
    user_code.check_arguments("loss", name, found, "logits", "labels")
    function: LossFunction = found
    return function
