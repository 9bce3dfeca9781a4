# SPDX-License-Identifier: Apache-2.0
"""What a program hands to the tables: ids by feature and sample, in one of the forms that programs have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from sennit.runtime.kernels.checks import GradientError as GradientError
from sennit.runtime.kernels.checks import IdError as IdError
from sennit.runtime.kernels.spec import Bounds
from sennit.runtime.sharded.forms import INTEGERS, bags_of, kind_of, lengths_of
from sennit.runtime.sharded.tables import Table
from sennit.transport.errors import ArgumentError

PADDING: Final = -1
"""The id that stands for none, where a table's bounds are `IGNORE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """F features of B samples in the combined format (Mudigere et al., ISCA 2022, section 4.4)."""

    lengths: Tensor
    """Int32 or int64 [F, B]: how many ids sample b has in feature f."""

    values: Tensor
    """Int32 or int64 [lengths.sum()]: ids, feature after feature, and sample after sample in a feature."""

    weights: Tensor | None = None
    """Float32, a weight for each id: rows are multiplied by it. It may require gradients."""

    names: tuple[str, ...] | None = None
    """Names of the features; None: all of the model, in its order."""

    @classmethod
    def from_offsets(
        cls,
        values: Tensor,
        offsets: Tensor,
        *,
        features: int = 1,
        include_last_offset: bool = False,
        weights: Tensor | None = None,
        names: tuple[str, ...] | None = None,
    ) -> Features:
        """The same from the offsets of `nn.EmbeddingBag`, or of FBGEMM.

        `offsets`: int32 or int64 [F * B], where each sample of each feature begins in `values`; with
        `include_last_offset` one more, where they end. `features`: F, unless there are `names`.

        Raises `ArgumentError` for offsets that do not fit `features` and `values`.
        """
        count = len(values)
        features = features if names is None else len(names)
        lengths = lengths_of(offsets, count, include_last=include_last_offset)
        if features < 1 or len(lengths) % features:
            raise ArgumentError(f"{len(lengths)} offsets for {features} features; allowed: one for each sample of each")
        lengths = lengths.view(features, len(lengths) // features)
        return cls(lengths=lengths, values=values, weights=weights, names=names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """Checked ids of all features in host memory, in the model's order. Owners copy them to their device."""

    lengths: Tensor
    """[F, B], contiguous."""

    values: Tensor
    counts: list[int]
    """Ids of each feature."""

    given_lengths: Tensor
    """[F, B]: lengths that count ignored ids, too. A mean divides by them."""

    weights: Tensor | None = None
    """The weights, if they were given."""

    host_weights: Tensor | None = None
    """The same weights in host memory, detached from autograd."""

    kept: Mapping[int, Tensor] = field(default_factory=dict)
    """For each feature of which ids are ignored: bool [ids that were given], which of them are in `values`."""

    @property
    def sample_count(self) -> int:
        return self.lengths.shape[1]


def features_of(tables: Sequence[Table]) -> list[tuple[str, int]]:
    """The model's features in its order, each with the number of its table."""
    return [(feature, number) for number, table in enumerate(tables) for feature in table.features]


def ids_of(given: Any, tables: Sequence[Table], *, include_last_offset: bool = False) -> Outgoing:
    """The ids in the model's order of features, with the tables' bounds applied.

    `given` is one of these:

    - `Features`, or any object with `lengths` and `values` in that form, such as `runtime.data.Batch`;
    - an object like TorchRec's `KeyedJaggedTensor`: methods `keys`, `lengths`, `values` and `weights_or_none`; with a
      variable stride also `stride_per_key` and `inverse_indices_or_none`;
    - a mapping from a feature's name to ids in any form of `bags_of`, such as [B, n] for n ids a sample; or an object
      with `keys` and `[name]`, as a DataFrame. `include_last_offset`: of those in such forms.

    Ids on a device are copied to the host. Features that the model does not have are left out. Raises `ArgumentError`
    if one is missing, or tensors do not fit each other, `IdError` for an id out of range where a table's bounds are
    `ERROR`.
    """
    features = features_of(tables)
    has_keys = callable(getattr(given, "keys", None))
    if isinstance(given, Mapping) or (has_keys and not hasattr(given, "lengths")):
        ids = _of_mapping(given, features, include_last_offset)
    elif has_keys:
        ids = _of_keyed(given, features)
    elif wrong := [part for part in ("lengths", "values") if not isinstance(getattr(given, part, None), Tensor)]:
        what = f"ids are a {type(given).__name__}"
        if isinstance(given, Features):
            what += f" whose {wrong[0]} are a {type(getattr(given, wrong[0])).__name__}, and no tensor"
        raise ArgumentError(f"{what}; allowed: a mapping, Features, a KeyedJaggedTensor")
    else:
        names = getattr(given, "names", None)
        ids = _in_order(given.lengths, given.values, getattr(given, "weights", None), names, features)
    ids = _within_bounds(ids, tables, features)
    return ids if ids.weights is None else dataclasses.replace(ids, host_weights=ids.weights.detach().cpu())


def _of_mapping(given: Any, features: Sequence[tuple[str, int]], include_last_offset: bool) -> Outgoing:
    found = []
    for name, _ in features:
        if name not in given:
            raise ArgumentError(f"no ids for feature {name}; given: {', '.join(map(str, given))}")
        found.append(bags_of(name, given[name], include_last_offset=include_last_offset))
    _check_samples({name: len(bags.lengths) for (name, _), bags in zip(features, found, strict=True)})
    lengths, values = torch.stack([bags.lengths for bags in found]), torch.cat([bags.values for bags in found])
    weights = None
    if any(bags.weights is not None for bags in found):
        device = next(bags.weights.device for bags in found if bags.weights is not None)
        # Ids without weights count once.
        weights = torch.cat(
            [torch.ones(len(own), device=device) if weights is None else weights for _, own, weights in found]
        )
    return _in_order(lengths, values, weights, [name for name, _ in features], features)


def _of_keyed(given: Any, features: Sequence[tuple[str, int]]) -> Outgoing:
    names = list(given.keys())
    lengths, values = given.lengths(), given.values()
    weights = given.weights_or_none() if hasattr(given, "weights_or_none") else None
    strides: list[int] = given.stride_per_key() if hasattr(given, "stride_per_key") else []
    inverse = given.inverse_indices_or_none() if hasattr(given, "inverse_indices_or_none") else None
    if len(set(strides)) > 1 or inverse is not None:
        if inverse is not None:
            inverse = dict(zip(*inverse, strict=True))
        return _of_strides(names, strides, lengths, values, weights, inverse, features)
    if not names or len(lengths) % len(names):
        raise ArgumentError(f"{len(lengths)} lengths for {len(names)} keys")
    return _in_order(lengths.view(len(names), len(lengths) // len(names)), values, weights, names, features)


def _of_strides(
    names: Sequence[str],
    strides: Sequence[int],
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    inverse: Mapping[str, Tensor] | None,
    features: Sequence[tuple[str, int]],
) -> Outgoing:
    """The ids of keys that have bags of their own number: `strides`, one for each of `names`.

    `inverse`: for each key int [samples], the bag of each sample. Without it, bags are samples. The model's features
    need as many samples as each other.
    """
    if len(strides) != len(names) or sum(strides) != len(lengths):
        raise ArgumentError(f"{len(lengths)} lengths for {len(names)} keys of strides {strides}")
    _check_present(names, features)
    bags = torch.split(torch.arange(len(lengths)), list(strides))
    wanted = list(dict.fromkeys(name for name, _ in features))
    of_key = {name: bags[names.index(name)] for name in wanted}
    if inverse is not None:
        of_key = {name: own[_of_samples(name, inverse, len(own))] for name, own in of_key.items()}
    _check_samples({name: len(own) for name, own in of_key.items()})
    chosen = torch.cat(list(of_key.values()))
    lengths, values = lengths.cpu(), values.cpu()
    _check_lengths(lengths, len(values))
    _check_weights(weights, values)
    ends = torch.cumsum(lengths, 0, dtype=torch.int64)
    counts = lengths[chosen].to(torch.int64)
    # The place of each id: the end of its bag, less what is left of the bag, itself among it.
    places = torch.arange(int(counts.sum())) + torch.repeat_interleave(ends[chosen] - torch.cumsum(counts, 0), counts)
    own = None if weights is None else weights[places.to(weights.device)]
    return _in_order(lengths[chosen].view(len(wanted), -1), values[places], own, wanted, features)


def _of_samples(name: str, inverse: Mapping[str, Tensor], bags: int) -> Tensor:
    """Int64 [samples]: the bag of each sample."""
    if name not in inverse:
        raise ArgumentError(f"no inverse indices for feature {name}; given: {', '.join(inverse)}")
    found = inverse[name].cpu().to(torch.int64)
    if len(found) and not 0 <= (wrong := int(found[((found < 0) | (found >= bags)).to(torch.int8).argmax()])) < bags:
        raise ArgumentError(f"inverse index {wrong} of feature {name}; allowed: 0 to {bags - 1}")
    return found


def _check_present(names: Sequence[str], features: Sequence[tuple[str, int]]) -> None:
    missing = [name for name, _ in features if name not in names]
    if missing:
        raise ArgumentError(f"no ids for feature {missing[0]}; given: {', '.join(names)}")


def _check_samples(sizes: Mapping[str, int]) -> None:
    if len(set(sizes.values())) > 1:
        raise ArgumentError(f"features of different numbers of samples: {sizes}; allowed: one number for all")


def _check_lengths(lengths: Tensor, count: int) -> None:
    """Raises `ArgumentError` unless `lengths`, in host memory, count the ids."""
    if lengths.numel() and int(lengths.min()) < 0:
        raise ArgumentError(f"a length of {int(lengths.min())}; allowed: 0 or more")
    if (total := int(lengths.sum(dtype=torch.int64))) != count:
        raise ArgumentError(f"lengths of {total} ids in all, but {count} ids")


def _check_weights(weights: Tensor | None, values: Tensor) -> None:
    if weights is not None and (weights.dtype is not torch.float32 or weights.shape != values.shape):
        raise ArgumentError(
            f"weights are {weights.dtype} of shape {tuple(weights.shape)}; allowed: float32 of ({len(values)},)"
        )


def _in_order(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    names: Sequence[str] | None,
    features: Sequence[tuple[str, int]],
) -> Outgoing:
    rows = len(features) if names is None else len(names)
    if lengths.ndim != 2 or lengths.shape[0] != rows or lengths.dtype not in INTEGERS:
        raise ArgumentError(
            f"lengths are {lengths.dtype} of shape {tuple(lengths.shape)}; allowed: int32 or int64 of ({rows}, samples)"
        )
    if values.ndim != 1 or values.dtype not in INTEGERS:
        raise ArgumentError(f"ids are {kind_of(values)}; allowed: int32 or int64, one dimension")
    lengths, values = lengths.cpu(), values.cpu()
    _check_lengths(lengths, len(values))
    counts: list[int] = lengths.sum(1, dtype=torch.int64).tolist()
    _check_weights(weights, values)
    if names is None or list(names) == [name for name, _ in features]:
        lengths = lengths.contiguous()
        return Outgoing(
            lengths=lengths, values=values.contiguous(), counts=counts, given_lengths=lengths, weights=weights
        )
    place_of = {name: place for place, name in enumerate(names)}
    if len(place_of) < len(names):
        twice = next(name for place, name in enumerate(names) if place_of[name] != place)
        raise ArgumentError(f"feature {twice} is given twice; allowed: once")
    _check_present(names, features)
    order = [place_of[name] for name, _ in features]
    parts = torch.split(values, counts)
    lengths = lengths[order]
    return Outgoing(
        lengths=lengths,
        given_lengths=lengths,
        values=torch.cat([parts[place] for place in order]),
        counts=[counts[place] for place in order],
        weights=None if weights is None else torch.cat([torch.split(weights, counts)[place] for place in order]),
    )


def _outside(ids: Tensor, table: Table) -> Tensor | None:
    """Which ids have no row, bool [n]; None if all have one. In a dynamic table that ignores padding, it has none."""
    if table.ids is not None:
        found = ids == PADDING if table.bounds is Bounds.IGNORE else None
        return found if found is not None and found.any() else None
    if not len(ids):
        return None
    low, high = (int(bound) for bound in ids.aminmax())
    if low >= 0 and high < table.rows:
        return None
    return (ids < 0) | (ids.to(torch.int64) >= table.rows)


def _within_bounds(ids: Outgoing, tables: Sequence[Table], features: Sequence[tuple[str, int]]) -> Outgoing:
    """Applies the tables' bounds. Ignored ids are left out; `given_lengths` and `kept` still know them."""
    lengths, values, weights = ids.lengths, list(torch.split(ids.values, ids.counts)), None
    all_kept: dict[int, Tensor] = {}
    changed = False
    if ids.weights is not None:
        weights = list(torch.split(ids.weights, ids.counts))
    for place, (name, number) in enumerate(features):
        table, own = tables[number], values[place]
        if (is_outside := _outside(own, table)) is None:
            continue
        own = own.to(torch.int64)  # The number of rows may not fit int32.
        if table.bounds is Bounds.ERROR:
            position = int(is_outside.nonzero()[0])
            raise IdError(
                f"feature {name}: id {int(own[position])} at position {position}; table {table.name} has rows 0 to "
                f"{table.rows - 1}"
            )
        if table.bounds is Bounds.WRAP:
            values[place] = torch.remainder(own, table.rows)
        else:
            kept = ~is_outside
            bags = torch.repeat_interleave(torch.arange(ids.sample_count), lengths[place].to(torch.int64))
            if not all_kept:
                lengths = lengths.clone()
            all_kept[place] = kept
            lengths[place] = torch.bincount(bags[kept], minlength=ids.sample_count).to(lengths.dtype)
            values[place] = own[kept]
            if weights is not None:
                weights[place] = weights[place][kept]
        changed = True
    if not changed:
        return ids
    return Outgoing(
        lengths=lengths,
        given_lengths=ids.given_lengths,
        values=torch.cat(values),
        counts=[len(part) for part in values],
        weights=None if weights is None else torch.cat(weights),
        kept=all_kept,
    )
