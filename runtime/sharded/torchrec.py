# SPDX-License-Identifier: Apache-2.0
"""Sharded tables in the place of TorchRec's collections. TorchRec is not imported: its objects say what they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from sennit.runtime.backend.torch_versions import optimizer_in_backward
from sennit.runtime.sharded.module import ShardedEmbeddingBags, ShardedEmbeddings, ShardedTables
from sennit.runtime.sharded.outputs import KeyedVectors
from sennit.runtime.sharded.sent import Sent
from sennit.runtime.sharded.tables import DynamicIds, Initial, Optimizer, OptimizerSpec, Precision, Table
from sennit.transport.errors import ArgumentError, Unsupported

_PRECISIONS: Final = {"FP32": Precision.FP32, "FP16": Precision.FP16, "BF16": Precision.BF16}
_OPTIMIZERS: Final = {
    "SGD": Optimizer.SGD,
    "Adagrad": Optimizer.ADAGRAD,
    "RowWiseAdagrad": Optimizer.ROW_WISE_ADAGRAD,
    "Adam": Optimizer.ADAM,
    "PartialRowWiseAdam": Optimizer.PARTIAL_ROW_WISE_ADAM,
    "LAMB": Optimizer.LAMB,
}
_SETTINGS: Final = {"lr", "eps", "betas", "weight_decay", "momentum", "nesterov"}
_ROWS_AT_A_TIME: Final = 1 << 13


def from_torchrec(
    collection: Any,
    *,
    lr: float | None = None,
    optimizer: OptimizerSpec | str | None = None,
    row_shards: int = 1,
    column_shards: int = 1,
    ids: Mapping[str, DynamicIds | str] | DynamicIds | str | None = None,
    **options: Any,
) -> EmbeddingBagCollection | EmbeddingCollection:
    """Sharded tables in the place of a TorchRec `EmbeddingBagCollection` or `EmbeddingCollection`.

    They take its `KeyedJaggedTensor`, give its `KeyedTensor` or `JaggedTensor`s, and begin with its rows: those of
    rank 0, as with DDP. Tables on the device "meta" have no rows; their `init_fn` gives them.

    `lr`, `optimizer`: of all tables. Without them each table takes those of `apply_optimizer_in_backward`.
    `row_shards`, `column_shards`: those of all tables (`Table`).
    `ids`: "dynamic", or rules, of all tables or by name, for ids that have no list. Such tables take the place of
    TorchRec's managed collisions. They have as many rows as the collection's, and none of its values: nobody knows
    whose these are.
    `options`: those of `ShardedEmbeddingBags`, such as `placement`, `slices` and `gradients`.

    Collective. Raises `ArgumentError` for another object, for `ids` of a table that is not there, or if a table has no
    learning rate; `Unsupported` for a data type or an optimizer that is not here; and what the constructor of
    `ShardedEmbeddingBags` raises.
    """
    is_pooled = hasattr(collection, "embedding_bag_configs")
    if not is_pooled and not hasattr(collection, "embedding_configs"):
        allowed = "an EmbeddingBagCollection or an EmbeddingCollection"
        raise ArgumentError(f"a collection of type {type(collection).__name__}; allowed: {allowed}")
    configs = collection.embedding_bag_configs() if is_pooled else collection.embedding_configs()
    modules = collection.embedding_bags if is_pooled else collection.embeddings
    weights = {config.name: modules[config.name].weight for config in configs}
    rules = dict(ids) if isinstance(ids, Mapping) else dict.fromkeys(weights, ids)
    if unknown := rules.keys() - weights.keys():
        raise ArgumentError(f"ids of table {min(unknown)}; allowed: {', '.join(weights)}")
    shards = {"row_shards": row_shards, "column_shards": column_shards}
    tables = [
        _table(config, weights[config.name], lr, optimizer, ids=rules.get(config.name), **shards) for config in configs
    ]
    made = EmbeddingBagCollection if is_pooled else EmbeddingCollection
    found = made(collection, tables, lr=0.0 if lr is None else lr, **options)
    for name, weight in weights.items():
        if not weight.is_meta and rules.get(name) is None:
            _set_rows(found, name, weight.detach(), options.get("group"))
    return found


class EmbeddingBagCollection(ShardedEmbeddingBags):
    """`ShardedEmbeddingBags` with the methods and results of TorchRec's `EmbeddingBagCollection`."""

    def __init__(self, collection: Any, tables: Sequence[Table], **options: Any) -> None:
        """`collection`: TorchRec's, which `tables` describes. `options`: those of `ShardedEmbeddingBags`."""
        super().__init__(tables, outputs="keyed", **options)
        self._configs, self._is_weighted = collection.embedding_bag_configs(), bool(collection.is_weighted())

    def embedding_bag_configs(self) -> Any:
        """The configurations of the tables, as the collection had them."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether ids have weights. If not, weights of a batch are ignored."""
        return self._is_weighted

    def sender(self, group: dist.ProcessGroup | None) -> Callable[[Any, int | None], Sent]:
        send = super().sender(group)
        return lambda features, batch: send(_Taken.of(features, is_weighted=self._is_weighted, is_pooled=True), batch)

    def forward(self, features: Any, *, global_batch: int | None = None) -> Any:
        """A `KeyedTensor` with the pooled rows of each feature. Arguments and errors are those of the base class."""
        found: KeyedVectors = super().forward(features, global_batch=global_batch)
        kind = getattr(sys.modules.get("torchrec.sparse.jagged_tensor"), "KeyedTensor", None)
        if kind is None:
            return found
        return kind(keys=found.keys(), length_per_key=found.length_per_key(), values=found.values())


class EmbeddingCollection(ShardedEmbeddings):
    """`ShardedEmbeddings` with the methods and results of TorchRec's `EmbeddingCollection`."""

    def __init__(self, collection: Any, tables: Sequence[Table], **options: Any) -> None:
        """`collection`: TorchRec's, which `tables` describes. `options`: those of `ShardedEmbeddings`."""
        super().__init__(tables, **options)
        self._configs, self._needs_ids = collection.embedding_configs(), bool(collection.need_indices())

    def embedding_configs(self) -> Any:
        """The configurations of the tables, as the collection had them."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether results have their ids as weights."""
        return self._needs_ids

    def embedding_dim(self) -> int:
        """The columns of all tables."""
        return self.tables[0].dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the results of each table."""
        names = iter(self.feature_names)
        return [[next(names) for _ in table.features] for table in self.tables]

    def sender(self, group: dist.ProcessGroup | None) -> Callable[[Any, int | None], Sent]:
        send = super().sender(group)
        return lambda features, batch: send(_Taken.of(features, is_weighted=False, is_pooled=False), batch)

    def forward(self, features: Any, *, global_batch: int | None = None) -> dict[str, Any]:
        """A `JaggedTensor` by result. Arguments and errors are those of the base class; a batch that was sent is no
        argument here, because results have the lengths of the ids."""
        if not hasattr(features, "to_dict"):
            raise ArgumentError(f"ids are a {type(features).__name__}; allowed: a KeyedJaggedTensor")
        found: Mapping[str, Tensor] = super().forward(features, global_batch=global_batch)
        given = features.to_dict()
        results = {}
        for name, feature in zip(found, (feature for table in self.tables for feature in table.features), strict=True):
            ids = given[feature]
            weights = ids.values() if self._needs_ids else None
            results[name] = type(ids)(values=found[name], lengths=ids.lengths(), weights=weights)
        return results


class _Taken:
    """What a collection takes of a `KeyedJaggedTensor`."""

    def __init__(self, features: Any, *, is_weighted: bool, is_pooled: bool) -> None:
        self._features, self._is_weighted, self._is_pooled = features, is_weighted, is_pooled

    @classmethod
    def of(cls, features: Any, *, is_weighted: bool, is_pooled: bool) -> Any:
        """`features` themselves, if they are in another form."""
        if not hasattr(features, "weights_or_none"):
            return features
        return cls(features, is_weighted=is_weighted, is_pooled=is_pooled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._features, name)

    def weights_or_none(self) -> Tensor | None:
        """Raises `ArgumentError` if there are none for a weighted collection."""
        if not self._is_weighted:
            return None
        weights: Tensor | None = self._features.weights_or_none()
        if weights is None:
            raise ArgumentError("ids without weights for a weighted collection; allowed: a weight for each id")
        return weights

    def inverse_indices_or_none(self) -> Any:
        """An `EmbeddingCollection` gives the rows of bags, whichever samples have them."""
        has_some = self._is_pooled and hasattr(self._features, "inverse_indices_or_none")
        return self._features.inverse_indices_or_none() if has_some else None


def _table(
    config: Any, weight: Tensor, lr: float | None, optimizer: OptimizerSpec | str | None, **options: Any
) -> Table:
    """`options`: of `Table`, beside what the collection says."""
    if (kind := config.data_type.value) not in _PRECISIONS:
        raise Unsupported(f"table {config.name} of data type {kind}", f"allowed: {', '.join(_PRECISIONS)}")
    in_backward = optimizer_in_backward(weight)
    own_lr = None
    if in_backward is not None:
        own_spec, own_lr = _optimizer(config.name, *in_backward)
        optimizer = own_spec if optimizer is None else optimizer
    if lr is None and own_lr is None:
        reason = "and none from apply_optimizer_in_backward; allowed: one of them"
        raise ArgumentError(f"no lr for table {config.name}, {reason}")
    return Table(
        name=config.name,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        features=tuple(config.feature_names),
        pooling=config.pooling.value if hasattr(config, "pooling") else "none",
        precision=_PRECISIONS[kind],
        optimizer=OptimizerSpec() if optimizer is None else optimizer,
        lr=own_lr if lr is None else None,
        initial=_initial(config.init_fn) if weight.is_meta and config.init_fn is not None else None,
        **options,
    )


def _optimizer(table: str, kind: type, settings: Mapping[str, Any]) -> tuple[OptimizerSpec, float | None]:
    """What `apply_optimizer_in_backward` was given, and the learning rate in it."""
    others = [name for name, value in settings.items() if name not in _SETTINGS and value]
    if kind.__name__ not in _OPTIMIZERS or others:
        what = f"{kind.__name__}{f' with {others[0]}' if others else ''}"
        allowed = f"{', '.join(_OPTIMIZERS)} with {', '.join(sorted(_SETTINGS))}"
        raise Unsupported(f"table {table} with optimizer {what}", f"allowed: {allowed}; or give `optimizer` and `lr`")
    default = OptimizerSpec()
    beta1, beta2 = settings.get("betas", (default.beta1, default.beta2))
    spec = OptimizerSpec(
        kind=_OPTIMIZERS[kind.__name__],
        epsilon=settings.get("eps", default.epsilon),
        beta1=beta1,
        beta2=beta2,
        weight_decay=settings.get("weight_decay", 0.0),
        momentum=settings.get("momentum", 0.0),
        nesterov=settings.get("nesterov", False),
    )
    return spec, settings.get("lr")


def _initial(fill: Callable[[Tensor], object]) -> Initial:
    """`init_fn` for blocks of rows. It draws from torch's default generator, which is left as it was."""

    def initial(rows: Tensor, generator: Generator) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            fill(rows)

    return initial


def _set_rows(module: ShardedTables, name: str, weight: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gives a table the rows that rank 0 has."""
    handle, gives = module[name], dist.get_rank(group) == 0
    for low in range(0, handle.rows, _ROWS_AT_A_TIME):
        ids = torch.arange(low, min(low + _ROWS_AT_A_TIME, handle.rows)) if gives else torch.arange(0)
        handle.set_rows(ids, weight[ids.to(weight.device)])
