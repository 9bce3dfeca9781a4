# SPDX-License-Identifier: Apache-2.0
"""Optimizers of embedding tables: the states of each, and the constants of one step.

docs/reference/embedding.md has the formulas, operation by operation. Everything in a step that does not depend on rows
or gradients is computed here once, in float64, and rounded to float32 once. So all implementations start from the same
bits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Final, Self

from sennit.known_names import hint
from sennit.runtime.kernels.spec import ShardSpec
from sennit.transport.errors import ConfigError


class Optimizer(Enum):
    """The optimizers, with the paper of each."""

    SGD = "sgd"
    """With `momentum` and `nesterov` as in torch: Sutskever et al. 2013. Rows without lookups are left alone."""

    ADAGRAD = "adagrad"
    """Duchi, Hazan, Singer 2011."""

    ROW_WISE_ADAGRAD = "row_wise_adagrad"
    """One accumulator per row: Gupta et al. 2014; Mudigere et al. 2022, section 4.1.4."""

    ADAM = "adam"
    """Kingma, Ba 2015; AdamW (Loshchilov, Hutter 2019) with decoupled decay. Rows without lookups are left alone."""

    PARTIAL_ROW_WISE_ADAM = "partial_row_wise_adam"
    """Adam with one second moment per row."""

    LAMB = "lamb"
    """You et al. 2020, applied to each row as to a layer."""

    FTRL = "ftrl"
    """FTRL-Proximal: McMahan et al. 2013, algorithm 1."""


class Decay(Enum):
    """Where weight decay acts. Rows without lookups do not decay."""

    L2 = "l2"
    """Decay is added to the gradient (L2)."""

    DECOUPLED = "decoupled"
    """Applied to the weight (for LAMB: added to the direction), past the moments."""


class StateShape(Enum):
    """Floats that a state has per row."""

    ELEMENT = "element"
    """A float for each column: [row_count, dim]."""

    ROW = "row"
    """One float a row: [row_count]."""


_STATES: dict[Optimizer, dict[str, StateShape]] = {
    Optimizer.SGD: {},
    Optimizer.ADAGRAD: {"sum": StateShape.ELEMENT},
    Optimizer.ROW_WISE_ADAGRAD: {"sum": StateShape.ROW},
    Optimizer.ADAM: {"moment1": StateShape.ELEMENT, "moment2": StateShape.ELEMENT},
    Optimizer.PARTIAL_ROW_WISE_ADAM: {"moment1": StateShape.ELEMENT, "moment2": StateShape.ROW},
    Optimizer.LAMB: {"moment1": StateShape.ELEMENT, "moment2": StateShape.ELEMENT},
    Optimizer.FTRL: {"z": StateShape.ELEMENT, "n": StateShape.ELEMENT},
}
_HAS_MOMENTS = frozenset({Optimizer.ADAM, Optimizer.PARTIAL_ROW_WISE_ADAM, Optimizer.LAMB})
_OWN_OPTIONS: Final = {
    "momentum": Optimizer.SGD,
    "nesterov": Optimizer.SGD,
    "beta": Optimizer.FTRL,
    "l1": Optimizer.FTRL,
    "l2": Optimizer.FTRL,
}

NAMED: Final[Mapping[str, Mapping[str, Any]]] = {kind.value: {"kind": kind} for kind in Optimizer} | {
    "adamw": {"kind": Optimizer.ADAM, "decay": Decay.DECOUPLED, "weight_decay": 0.01}
}
"""The names of optimizers, and the fields of `OptimizerSpec` that each stands for. AdamW has torch's weight decay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """An optimizer and its hyperparameters; the learning rate is an argument of each step.

    `kind` and `decay` may be given by name: `OptimizerSpec(kind="sgd", momentum=0.9)`.

    Raises `ConfigError` for a value out of range, and for an option that the optimizer does not have.
    """

    kind: Optimizer = Optimizer.ROW_WISE_ADAGRAD
    epsilon: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.0
    """Of SGD."""

    nesterov: bool = False
    """Of SGD with momentum."""

    beta: float = 1.0
    """Of FTRL: it slows the first steps down."""

    l1: float = 0.0
    """Of FTRL: elements whose sum of gradients stays below it are 0."""

    l2: float = 0.0
    """Of FTRL. Unlike `weight_decay` it acts on the sum of all gradients."""

    weight_decay: float = 0.0
    decay: Decay = Decay.L2
    max_gradient: float | None = None
    """Each element of a row's summed gradient is clipped to [-max_gradient, max_gradient]."""

    max_gradient_norm: float | None = None
    """A row's clipped gradient is then scaled down to this 2-norm if it is longer.

    As in LAMB, a row takes the place of a layer. The norm over all tables, which `clip_grad_norm_` uses, is known only
    after the last row is summed.
    """

    def __post_init__(self) -> None:
        def refuse(field: str, allowed: str) -> None:
            raise ConfigError(f"{field} {getattr(self, field)}; allowed: {allowed}")

        members: tuple[tuple[str, type[Enum]], ...] = (("kind", Optimizer), ("decay", Decay))
        for field, members_of in members:
            given = getattr(self, field)
            if isinstance(given, str) and given.lower() in {one.value for one in members_of}:
                object.__setattr__(self, field, members_of(given.lower()))
            elif not isinstance(given, members_of):
                names = [str(one.value) for one in members_of]
                refuse(field, f"{', '.join(names)}{hint(given, names)}")
        for field in ("epsilon", "l1", "l2", "weight_decay"):
            if not 0 <= getattr(self, field) < math.inf:
                refuse(field, "0 or more")
        for field in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, field) < 1:
                refuse(field, "[0, 1)")
        if not 0 < self.beta < math.inf:
            refuse("beta", "above 0")
        if self.nesterov and self.momentum == 0:
            refuse("nesterov", "False without a momentum")
        default = {one.name: one.default for one in fields(self)}
        for field, kind in _OWN_OPTIONS.items():
            if self.kind is not kind and getattr(self, field) != default[field]:
                refuse(field, f"{default[field]} for {self.kind.value} ({kind.value} has it)")
        if self.kind is Optimizer.FTRL and self.decay is Decay.DECOUPLED:
            refuse("decay", "l2 for ftrl, whose weights follow from its states")
        for field in ("max_gradient", "max_gradient_norm"):
            most = getattr(self, field)
            if most is not None and not 0 < most < math.inf:
                refuse(field, "above 0, or None")

    @classmethod
    def named(cls, name: str, **options: Any) -> Self:
        """The optimizer of this name (`NAMED`), in any case, with these fields.

        Raises `ConfigError` for a name that is none, with all that are.
        """
        found = NAMED.get(name.lower())
        if found is None:
            raise ConfigError(f"optimizer {name!r}; allowed: {', '.join(NAMED)}{hint(name, NAMED)}")
        return cls(**{**found, **options})

    def changed(self, **options: Any) -> Self:
        """A copy with these fields. With another kind, it does not keep what only the old kind has (`momentum`)."""
        if options.get("kind", self.kind) is not self.kind:
            options = {one.name: one.default for one in fields(self) if one.name in _OWN_OPTIONS} | options
        return replace(self, **options)

    @property
    def states(self) -> dict[str, StateShape]:
        """Names and shapes of the states in the order of the kernels. All are float32 and start at zero."""
        if self.momentum != 0:
            return {"momentum_buffer": StateShape.ELEMENT}
        return _STATES[self.kind]

    def state_shape(self, name: str, table: ShardSpec) -> tuple[int, ...]:
        """The shape of state `name` of `table`."""
        is_row = self.states[name] is StateShape.ROW
        return (table.row_count,) if is_row else (table.row_count, table.dim)

    def constants(self, *, step: int, rate: float) -> StepConstants:
        """The float32 constants of step `step` (from 1) at learning rate `rate`."""
        if step < 1:
            raise ConfigError(f"step {step}; allowed: 1 or more")
        if not math.isfinite(rate):
            raise ConfigError(f"learning rate {rate}; allowed: finite")
        correction1 = correction2 = 1.0
        if self.kind in _HAS_MOMENTS:
            correction1 = 1.0 / (1.0 - self.beta1**step)
            correction2 = 1.0 / math.sqrt(1.0 - self.beta2**step)
        is_lamb, is_ftrl = self.kind is Optimizer.LAMB, self.kind is Optimizer.FTRL
        decoupled = self.decay is Decay.DECOUPLED
        return StepConstants(
            rate=_f32(rate),
            scale1=_f32(correction1 if is_lamb else rate * correction1),
            scale2=_f32(correction2),
            epsilon=_f32(self.beta + rate * self.l2 if is_ftrl else self.epsilon),
            beta1=_f32(self.momentum if self.kind is Optimizer.SGD else self.beta1),
            beta1_rest=_f32(1.0 - self.beta1),
            beta2=_f32(self.beta2),
            beta2_rest=_f32(1.0 - self.beta2),
            decay=_f32(0.0 if decoupled and not is_lamb else self.weight_decay),
            decay_after=decoupled and is_lamb,
            keep=_f32(1.0 - rate * self.weight_decay if decoupled and not is_lamb else 1.0),
            max_gradient=_f32(math.inf if self.max_gradient is None else self.max_gradient),
            max_norm=_f32(math.inf if self.max_gradient_norm is None else self.max_gradient_norm),
            l1=_f32(rate * self.l1),
            nesterov=self.nesterov,
            step=step,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConstants:
    """The constants of one step. Floats have float32 values. A term whose constant changes nothing is left out."""

    rate: float
    scale1: float
    """Factor of the first moment: rate / (1 - beta1^step); for LAMB without the rate."""

    scale2: float
    """Factor of the second moment's root: 1 / sqrt(1 - beta2^step)."""

    epsilon: float
    """Is added to a root. FTRL: beta + rate · l2."""

    beta1: float
    """Factor of the first moment. SGD: its momentum; left out if 0."""

    beta1_rest: float
    """1 - beta1."""

    beta2: float
    beta2_rest: float
    """1 - beta2."""

    decay: float
    """The weight times this is added to the gradient, or to LAMB's direction if `decay_after`; left out if 0."""

    decay_after: bool

    keep: float
    """Decoupled decay: weights are multiplied by this before the step; left out if 1."""

    max_gradient: float
    """Left out if infinite."""

    max_norm: float
    """Left out if infinite."""

    l1: float
    """FTRL: rate · l1."""

    nesterov: bool

    step: int
    """Counts from 1. Its low 32 bits are the step's word in the counter of the random numbers."""

    @property
    def floats(self) -> tuple[float, ...]:
        """All floats, in the order in which the kernels take them."""
        return (
            self.rate, self.scale1, self.scale2, self.epsilon, self.beta1, self.beta1_rest, self.beta2,
            self.beta2_rest, self.decay, self.keep, self.max_gradient, self.max_norm, self.l1,
        )  # fmt: skip


def _f32(value: float) -> float:
    """The nearest float32, which may be infinite."""
    return ctypes.c_float(value).value
