# SPDX-License-Identifier: Apache-2.0
"""Models by name: those of sennit, and a user's by `package.module:factory` (docs/reference/models.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from sennit import user_code
from sennit.known_names import hint
from sennit.runtime.data.seeds import derive
from sennit.runtime.model.dcnv2 import DCNv2
from sennit.runtime.model.deepfm import DeepFM
from sennit.runtime.model.dlrm import DLRM
from sennit.runtime.model.inputs import ModelInputs
from sennit.runtime.model.trial import Trial
from sennit.transport.errors import ConfigError

DENSE_OPTIMIZERS = ("adagrad", "adam", "sgd")


def dense_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, rate: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """The optimizer of the dense part. `weight_decay` times the weight is added to its gradient (L2)."""
    match name:
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=rate, eps=1e-8, weight_decay=weight_decay, foreach=False)
        case "adam":
            return torch.optim.Adam(parameters, lr=rate, weight_decay=weight_decay, foreach=False)
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate, weight_decay=weight_decay, foreach=False)
    raise ConfigError(f"dense optimizer {name!r}; allowed: {', '.join(DENSE_OPTIMIZERS)}")


class _Hstu:
    """Imports the model when it is made: its attention is an operator of torch, which takes 15 ms to register."""

    reads_histories: ClassVar[bool] = True

    def __call__(self, inputs: ModelInputs) -> nn.Module:
        from sennit.runtime.model.hstu import Hstu

        return Hstu(inputs)


MODELS: Final[dict[str, Callable[[ModelInputs], nn.Module]]] = {
    "dlrm": DLRM, "dcnv2": DCNv2, "deepfm": DeepFM, "hstu": _Hstu(),
}  # fmt: skip


def build(name: str, inputs: ModelInputs) -> nn.Module:
    """A new model: one of `MODELS`, or what the user's factory returns for `inputs`.

    A factory runs with torch's default generator as (seed, "model") say, so all ranks and all runs get the same
    weights. The model is called twice without gradients, which also initialises lazy modules. Raises `ConfigError` that
    says what about the factory or its model is wrong; errors of the user's own code go on as they are, with a note.
    """
    if name in MODELS:
        return MODELS[name](inputs)
    # The import has its own stream of numbers: a module is imported once, and may draw numbers then.
    with _random_numbers(inputs.seed):
        make = find(name)
    with _random_numbers(inputs.seed):
        with _noted(f"in {name}, called with {inputs}"):
            model = make(inputs)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model {name} returned {_described(model)}; allowed: a torch.nn.Module")
        _check_results(name, model, inputs)
    return model


def check_name(name: str) -> None:
    """Raises `ConfigError` for what is neither a model of sennit nor the name of a factory. Imports nothing."""
    if name not in MODELS and not user_code.is_name(name):
        allowed = f"{', '.join(MODELS)}, or package.module:factory"
        raise ConfigError(f"model {name!r}; allowed: {allowed}{hint(name, MODELS)}")


def reads_histories(name: str) -> bool:
    """Whether the model `name` takes sequences: its factory has a true attribute `reads_histories`.

    Imports a user's module. Raises `ConfigError`.
    """
    return bool(getattr(find(name), "reads_histories", False))


def find(name: str) -> Callable[[ModelInputs], Any]:
    """The callable that makes the model `name`. Imports a user's module. Raises `ConfigError`."""
    if name in MODELS:
        return MODELS[name]
    check_name(name)
    found = user_code.find("model", name)
    if isinstance(found, nn.Module):
        raise ConfigError(f"model {name} is a module already; allowed: a function or class that makes one")
    if not callable(found):
        raise ConfigError(f"model {name} is {_described(found)}; allowed: a function or class that makes a module")
    user_code.check_arguments("model", name, found, "ModelInputs")
    return found  # type: ignore[no-any-return]


def _check_results(name: str, model: nn.Module, inputs: ModelInputs) -> None:
    """Runs the model on zeros, as for evaluation, so that nothing of it changes."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    reads = reads_histories(name)
    # One sample alone, because `squeeze()` would drop that dimension, too.
    for samples in (2, 1):
        dense = torch.zeros(samples, inputs.dense_count)
        trial = Trial(inputs, samples, reads_histories=reads)
        shapes = {table: tuple(rows.shape) for table, rows in trial.leaves.items()}
        with torch.no_grad(), _noted(f"in model {name}, called with dense {tuple(dense.shape)} and vectors {shapes}"):
            logits = model(dense, *trial.arguments())
        shape = inputs.logits_shape(samples)
        if not isinstance(logits, Tensor) or logits.shape != shape or not logits.is_floating_point():
            raise ConfigError(
                f"model {name} returned {_described(logits)} for {samples} samples; allowed: a float tensor of shape "
                f"{shape}, one logit for each label of each sample"
            )
    for module, was_training in modes.items():
        module.training = was_training


@contextlib.contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Seeds torch's default generator inside the block, and restores it afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(derive(seed, "model"))
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _noted(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
