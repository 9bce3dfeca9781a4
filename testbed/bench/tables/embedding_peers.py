# SPDX-License-Identifier: Apache-2.0
"""The peers of `sennit bench embedding`: sennit, its tensor trains, fbgemm on the CPU, torch's modules.

All get the same ids and gradient, and (except tensor trains) the same initial weights. The timed part is a forward
pass, and a backward pass that ends with updated tables.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from sennit.runtime.kernels.engine import EmbeddingEngine
from sennit.runtime.kernels.operators import FusedTables
from sennit.runtime.kernels.optimizers import Optimizer, OptimizerSpec
from sennit.runtime.kernels.spec import Pooling, Precision, Rounding, ShardSpec
from sennit.runtime.kernels.tensor_train import TensorTrainSpec, initialise
from sennit.transport.errors import Unsupported

RATE: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained."""

    name: str
    table_count: int = 26
    row_count: int = 100_000
    dim: int = 64
    features_a_table: int = 1
    bags: int = 2048
    """Bags per feature."""

    length: int = 20
    """Lookups per bag."""

    precision: Precision = Precision.FP32
    optimizer: Optimizer = Optimizer.ROW_WISE_ADAGRAD
    pooling: Pooling = Pooling.SUM
    zipf: float | None = None
    """Zipf exponent of the rows' frequencies, in random order; None for uniform."""

    @property
    def feature_count(self) -> int:
        return self.table_count * self.features_a_table

    @property
    def lookup_count(self) -> int:
        return self.feature_count * self.bags * self.length


@dataclass(frozen=True, kw_only=True)
class Data:
    """The input of all peers for one shape."""

    ids: Tensor
    """Int64 [features · bags · length], feature after feature."""

    gradient: Tensor
    """Float32 [features, bags (lookups for sequences), dim]."""

    weights: list[Tensor]
    """Float32 [row_count, dim] for each table."""


class Peer(ABC):
    """One peer on one shape."""

    HOLDS_ANY_WEIGHTS: ClassVar[bool] = True
    """If False, its results differ by design and are not compared."""

    @abstractmethod
    def __init__(self, shape: Shape, data: Data, threads: int) -> None:
        """Raises `Unsupported` if the peer is not installed or cannot run this shape. Sets torch to `threads` too."""

    @abstractmethod
    def forward(self) -> Tensor:
        """Runs the forward pass. Returns the argument of `backward`."""

    @abstractmethod
    def backward(self, result: Tensor) -> None:
        """Updates the tables."""

    @abstractmethod
    def vectors(self, result: Tensor) -> Tensor:
        """The result in the order of `Data.gradient`."""

    @abstractmethod
    def weight(self, table: int) -> Tensor:
        """The current weights of a table."""


class Sennit(Peer):
    """The native kernels, driven by autograd."""

    def __init__(self, shape: Shape, data: Data, threads: int) -> None:
        specs = [self._spec(str(table), shape) for table in range(shape.table_count)]
        engine = EmbeddingEngine(specs, OptimizerSpec(kind=shape.optimizer), rounding=Rounding.NEAREST, threads=threads)
        for spec, weight in zip(specs, data.weights, strict=True):
            self._fill(engine, spec, weight)
        self._tables = FusedTables(engine, lr=RATE)
        self._shape, self._ids = shape, data.ids
        self._gradient = data.gradient.flatten()
        self._lengths = torch.full((shape.feature_count * shape.bags,), shape.length, dtype=torch.int32)

    def _spec(self, name: str, shape: Shape) -> ShardSpec:
        return ShardSpec(name=name, row_count=shape.row_count, dim=shape.dim, precision=shape.precision)

    def _fill(self, engine: EmbeddingEngine, spec: ShardSpec, weight: Tensor) -> None:
        engine.weight(spec.name).copy_(weight)

    def forward(self) -> Tensor:
        shape = self._shape
        result: Tensor = self._tables(
            self._lengths,
            self._ids,
            table_of_block=[feature // shape.features_a_table for feature in range(shape.feature_count)],
            bags_of_block=[shape.bags] * shape.feature_count,
            pooling=shape.pooling,
        )
        return result

    def backward(self, result: Tensor) -> None:
        torch.autograd.backward(result, self._gradient)

    def vectors(self, result: Tensor) -> Tensor:
        return result.detach().view(self._shape.feature_count, -1, self._shape.dim)

    def weight(self, table: int) -> Tensor:
        return self._tables.engine.weight(str(table))


class SennitTensorTrain(Sennit):
    """The same tables in tensor-train form, to show the cost where plain tables would fit."""

    HOLDS_ANY_WEIGHTS = False
    RANK: Final = 16

    def _spec(self, name: str, shape: Shape) -> TensorTrainSpec:
        return TensorTrainSpec.of_rank(
            name=name, row_count=shape.row_count, dim=shape.dim, rank=self.RANK, precision=shape.precision
        )

    def _fill(self, engine: EmbeddingEngine, spec: ShardSpec, weight: Tensor) -> None:
        assert isinstance(spec, TensorTrainSpec)
        cores = [engine.weight(core.name) for core in spec.cores]
        initialise(spec, cores, float(weight.std()), torch.Generator().manual_seed(0))


class Fbgemm(Peer):
    """fbgemm_gpu's split table-batched embeddings on the CPU."""

    def __init__(self, shape: Shape, data: Data, threads: int) -> None:
        # The package prints and warns about GPUs on import.
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
                from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
                from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                    ComputeDevice,
                    SplitTableBatchedEmbeddingBagsCodegen,
                )
        except (ImportError, OSError) as error:
            hint = "torch 2.13 takes fbgemm-gpu-cpu 1.8.0: pip install 'sennit[bench-fbgemm]'"
            raise Unsupported("fbgemm-gpu-cpu", f"cannot be imported ({error}); {hint}") from None
        optimizers = {
            Optimizer.ROW_WISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            Optimizer.SGD: EmbOptimType.EXACT_SGD,
        }
        precisions = {Precision.FP32: SparseType.FP32, Precision.FP16: SparseType.FP16}
        is_sequence = shape.pooling is Pooling.NONE
        self._tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.row_count, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * shape.table_count,
            feature_table_map=[feature // shape.features_a_table for feature in range(shape.feature_count)],
            optimizer=optimizers[shape.optimizer],
            learning_rate=RATE,
            weights_precision=precisions[shape.precision],
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.NONE if is_sequence else PoolingMode.SUM,
            stochastic_rounding=False,
        )
        for own, weight in zip(self._tables.split_embedding_weights(), data.weights, strict=True):
            own.data.copy_(weight)
        self._shape, self._ids = shape, data.ids
        self._offsets = torch.arange(shape.feature_count * shape.bags + 1) * shape.length
        columns = shape.feature_count * shape.dim
        self._gradient = (
            data.gradient.view(-1, shape.dim)
            if is_sequence
            else data.gradient.transpose(0, 1).reshape(shape.bags, columns).contiguous()
        )

    def forward(self) -> Tensor:
        result: Tensor = self._tables(self._ids, self._offsets)
        return result

    def backward(self, result: Tensor) -> None:
        torch.autograd.backward(result, self._gradient)

    def vectors(self, result: Tensor) -> Tensor:
        shape = self._shape
        if shape.pooling is Pooling.NONE:
            return result.detach().view(shape.feature_count, -1, shape.dim)
        return result.detach().view(shape.bags, shape.feature_count, shape.dim).transpose(0, 1)

    def weight(self, table: int) -> Tensor:
        weight: Tensor = self._tables.split_embedding_weights()[table].detach()
        return weight


class Torch(Peer):
    """nn.EmbeddingBag (nn.Embedding for sequences) with sparse gradients, one per table, and torch's optimizer.

    torch has no row-wise AdaGrad. Plain AdaGrad takes its place, and the updated weights are not compared.
    """

    def __init__(self, shape: Shape, data: Data, threads: int) -> None:
        if shape.precision is not Precision.FP32:
            raise Unsupported("torch's EmbeddingBag", f"{shape.precision.name} with sparse gradients is not compared")
        # Explicit, so that torch does not warn that it does not check by itself.
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        self._weights = [torch.nn.Parameter(weight.clone()) for weight in data.weights]
        made = torch.optim.SGD if shape.optimizer is Optimizer.SGD else torch.optim.Adagrad
        self._optimizer = made(self._weights, lr=RATE)
        self._shape = shape
        self._ids = data.ids.view(shape.feature_count, -1)
        self._offsets = torch.arange(shape.bags) * shape.length
        self._gradient = data.gradient

    def forward(self) -> Tensor:
        parts = []
        for feature, ids in enumerate(self._ids):
            weight = self._weights[feature // self._shape.features_a_table]
            if self._shape.pooling is Pooling.NONE:
                parts.append(torch.nn.functional.embedding(ids, weight, sparse=True))
            else:
                parts.append(torch.nn.functional.embedding_bag(ids, weight, self._offsets, mode="sum", sparse=True))
        return torch.stack(parts)

    def backward(self, result: Tensor) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(result, self._gradient)
        self._optimizer.step()

    def vectors(self, result: Tensor) -> Tensor:
        return result.detach()

    def weight(self, table: int) -> Tensor:
        return self._weights[table].detach()


PEERS: Final[dict[str, type[Peer]]] = {
    "sennit": Sennit,
    "fbgemm": Fbgemm,
    "torch": Torch,
    "tensor-train": SennitTensorTrain,
}
