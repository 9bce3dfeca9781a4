# SPDX-License-Identifier: Apache-2.0
"""Which run a trainer belongs to, and how it resumes from that run's checkpoints.

One folder holds the checkpoints of one run. A new run does not begin in another run's folder. `--resume` only accepts
checkpoints with the same data, order, model and optimizer. A run that lost ranks only goes back to checkpoints that it
wrote itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from sennit.command_line import json_text
from sennit.runtime.backend.first_rank import on_first
from sennit.runtime.backend.torch_versions import Store
from sennit.runtime.checkpoint import folder as checkpoint
from sennit.runtime.checkpoint import reading
from sennit.runtime.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    check_same_run,
    code_versions,
    differences,
    new_run_id,
)
from sennit.runtime.checkpoint.writing import Saver
from sennit.runtime.data import preprocessing
from sennit.runtime.data.batch_source import BatchSource
from sennit.runtime.model.settings import as_json, described_ids
from sennit.runtime.sharded.tables import Table
from sennit.runtime.stream.following import SEEN, FollowingSource, seen_text
from sennit.runtime.stream.order import STREAM_ORDER_VERSION
from sennit.runtime.training import warm_start
from sennit.runtime.training.config import TrainingConfig
from sennit.runtime.training.metrics import Evaluation
from sennit.runtime.training.trainer import LOST, Trainer
from sennit.transport.errors import ConfigError

FIXED: Final = {
    "order": ("seed", "split", "eval_fraction", "batch_size", "slices"),
    "model": ("model", "bottom", "top"),
    "optimizer": ("dense_optimizer",),
}
"""Fields of `TrainingConfig` that a resumed run must have as the checkpoint has them."""

FREE: Final = (
    "epochs",
    "max_steps",
    "eval_every",
    "loss",
    "sparse_rate",
    "dense_rate",
    "decay",
    "warmup",
    "decay_start",
    "decay_steps",
    "decay_power",
    "decay_floor",
    "skip_samples",
    "clip_value",
    "clip_norm",
    "weight_decay",
    "device",
    "backend",
    "exchange",
    "gradient",
)
"""Fields that a resumed run may change. The manifest lists them for people."""

DATA_KEY: Final = "sennit/train/data"
WINDOWS: Final = "windows.json"
PREPROCESSING_KEY: Final = "sennit/train/preprocessing"


def fixed_of(config: TrainingConfig, source: BatchSource) -> dict[str, Any]:
    """The settings that decide the meaning of the weights, as JSON."""
    fixed = {part: {name: _plain(getattr(config, name)) for name in names} for part, names in FIXED.items()}
    fixed["order"]["stream"] = config.stream.fixed
    if config.source.evaluation:
        fixed["order"]["eval_rows"] = source.order.eval_count
    # Earlier checkpoints have none of these.
    if config.validation_fraction:
        fixed["order"]["validation_fraction"] = config.validation_fraction
    if len(source.label_names) > 1:
        fixed["model"]["labels"] = source.label_names
    if running := _running(source):
        fixed["order"]["running"] = running
    if source.history is not None:
        fixed["model"] |= {"layers": config.layers, "heads": config.heads, "history": _plain(source.history)}
        if config.attention != "fp32":
            fixed["model"]["attention"] = config.attention
    if unlisted := [table.name for table in source.tables if table.is_dynamic]:
        # Hashes of ids would be other ids.
        fixed["model"]["dynamic_ids"] = unlisted
    if config.warm_start is not None and source.preprocessing is not None:
        fixed["model"]["warm_start"] = _sha256(source.preprocessing.begun)
    fixed["model"] |= {
        "preprocessing": preprocessing.FORMAT,
        "dense_features": source.dense_count,
        "tables": {table.name: _table(table) for table in config.tables_of(source.tables)},
    }
    data: dict[str, Any] = {"samples": source.order.sample_count, "fingerprint": source.fingerprint}
    if isinstance(source, FollowingSource):
        # What all its checkpoints share. The files of each one lie beside it, and are compared when they are opened.
        data = {"begins_with": source.seen[0].digest}
    return {"data": data, **fixed}


def manifest_of(trainer: Trainer) -> Manifest:
    """The manifest of a checkpoint of the trainer's present state."""
    config = trainer.config
    tables = {described["name"]: described for described in as_json(trainer.tables.tables)}
    free = {"data": trainer.order.name, "ranks": trainer.world_size, "tables": tables}
    return Manifest(
        run_id=trainer.run_id,
        step=trainer.step,
        fixed=fixed_of(config, trainer.source),
        free=free | {name: _plain(getattr(config, name)) for name in FREE},
        code=code_versions(),
    )


def saver_of(config: TrainingConfig) -> Saver:
    """What saves the run's checkpoints."""
    assert config.checkpoint is not None
    return Saver(
        config.checkpoint,
        keep=config.keep,
        increments=config.checkpoint_increments,
        in_background=config.checkpoint_async,
        timeout_s=config.timeout_s,
    )


def save(trainer: Trainer, saver: Saver | None = None) -> None:
    """Saves the trainer's present state. Collective. Without `saver` it is durable at the end."""
    with contextlib.nullcontext(saver) if saver is not None else saver_of(trainer.config) as own:
        changes = trainer.changes if trainer.config.checkpoint_increments else None
        documents = _documents(trainer, {})
        own.save(manifest_of(trainer), trainer.state, changes=changes, copied=trainer.in_files, documents=documents)


def save_whole(trainer: Trainer, folder: Path, documents: Mapping[str, str]) -> None:
    """Saves the trainer's present state as the only checkpoint of the run in `folder`, durably. Collective.

    `documents` (file name to text) lie beside it. Increments elsewhere do not notice.
    """
    with Saver(folder, keep=1, timeout_s=trainer.config.timeout_s) as saver:
        saver.save(
            manifest_of(trainer), trainer.whole_state, copied=trainer.in_files, documents=_documents(trainer, documents)
        )


def _documents(trainer: Trainer, more: Mapping[str, str]) -> dict[str, str]:
    """What lies beside a checkpoint. Rank 0 writes it."""
    if trainer.rank:
        return {}
    made, known = dict(more), trainer.source.preprocessing
    if known is not None:
        if (scales := trainer.source.scales(trainer.step)) is not None:
            known = known.scaled(scales)
        made[preprocessing.NAME] = known.text()
    if isinstance(trainer.source, FollowingSource):
        made[SEEN] = seen_text(trainer.source.seen)
    if trainer.windows:
        made[WINDOWS] = json_text([asdict(one) for one in trainer.windows], indent=2)
    return made


def _read_windows(path: Path) -> list[Evaluation]:
    try:
        return [Evaluation.from_json(one) for one in json.loads((path / WINDOWS).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / WINDOWS} is not what a run wrote: {error}") from error


def begin(trainer: Trainer) -> list[str]:
    """Begins the run, or resumes it if that is asked for and there is a checkpoint. Collective.

    Returns lines for people about what a resumed run has changed, and where there was nothing to resume. Raises
    `ConfigError` if the folder belongs to another run, and `CheckpointError` if its newest checkpoint cannot be used.
    The trainer is unchanged then.
    """
    config = trainer.config
    folder = config.checkpoint
    found = None
    if folder is not None:
        _check_equal_ranks(trainer)
        # Rank 0 chooses, so that all ranks take the same checkpoint.
        with reading_folders():
            found = on_first(lambda: _find(trainer, folder) if config.resume else check_unused(folder))
    if found is None:
        trainer.run_id = on_first(new_run_id)
        told = [f"--resume: {folder} has no checkpoint, so a new run begins"] if config.resume else []
        return [*told, *_begin_new(trainer)]
    path, about = found
    forgotten = _load(trainer, path, about)
    ours = manifest_of(trainer)
    told = [f"resumes run {about.run_id} after step {about.step}"]
    changed = [*differences(about.free, _as_json(ours.free)), *differences(about.code, _as_json(ours.code))]
    return [*told, *(f"  {line}" for line in [*changed, *forgotten])]


def go_back(trainer: Trainer) -> list[str]:
    """Takes an elastic run back to its newest checkpoint, or to its start if it has none. Collective.

    Returns lines for people about what cannot be used of the checkpoint.
    """
    folder = trainer.config.checkpoint
    if folder is None:
        return _begin_new(trainer)

    def look() -> tuple[Path, Manifest] | None:
        path = checkpoint.latest_of(folder, trainer.run_id)
        return None if path is None else (path, Manifest.read(path))

    with reading_folders():
        found = on_first(look)
    return _begin_new(trainer) if found is None else _load(trainer, *found)


def _begin_new(trainer: Trainer) -> list[str]:
    """Begins the run at its first step. Collective."""
    config = trainer.config
    if config.warm_start is None:
        return []
    return warm_start.begin(trainer, config.warm_start, _as_json(fixed_of(config, trainer.source)["model"]))


def check_unused(folder: Path) -> None:
    """Raises `ConfigError` if a folder has checkpoints, because a new run would mix its own with them."""
    path = checkpoint.latest(folder)
    if path is not None:
        raise ConfigError(
            f"--checkpoint {folder} has checkpoints of a run, the newest {path.name}; "
            "give --resume to go on with it, or another folder"
        )


def what_is_kept(config: TrainingConfig) -> str:
    """What a run that was interrupted has left in its folder, and how to go on from there."""
    if config.checkpoint is None:
        return "no checkpoint is kept without --checkpoint FOLDER"
    with reading_folders():
        path = checkpoint.latest(config.checkpoint)
    if path is None:
        return f"--checkpoint {config.checkpoint} has no checkpoint yet; --checkpoint-every STEPS saves them on the way"
    return f"the newest checkpoint is {path}; the same command with --resume goes on from it"


def publish_data(store: Store, fingerprint: str, known: preprocessing.Preprocessing) -> None:
    """Publishes the fingerprint of an elastic run's data for newcomers, and what they cannot fit themselves."""
    store.set(PREPROCESSING_KEY, known.text())
    store.set(DATA_KEY, fingerprint)


def published_preprocessing(store: Store) -> preprocessing.Preprocessing:
    """What the run that a newcomer joins was fitted with."""
    return preprocessing.Preprocessing.parse(store.get(PREPROCESSING_KEY).decode())


def check_data(store: Store, fingerprint: str) -> None:
    """A newcomer checks its data before it joins."""
    theirs = store.get(DATA_KEY).decode()
    if theirs != fingerprint:
        raise ConfigError(f"the data of the run have the fingerprint {theirs}, but those loaded here {fingerprint}")


def _find(trainer: Trainer, folder: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint. Raises unless it is of the same run."""
    path = checkpoint.latest(folder)
    if path is None:
        return None
    found, ours = Manifest.read(path), fixed_of(trainer.config, trainer.source)
    version = found.fixed.get("order", {}).get("stream", {}).get("version")
    if version != STREAM_ORDER_VERSION:
        raise ConfigError(
            f"{path} is in the middle of an order of samples that is no more (version {version}, here "
            f"{STREAM_ORDER_VERSION}); allowed: a new run that begins with its weights, --warm-start {path}"
        )
    try:
        check_same_run(path, found, ours)
    except ConfigError as error:
        names = [line.partition(":")[0] for line in differences(found.fixed, _as_json(ours))]
        if not all(name == "order.slices" or name.endswith(".row_shards") for name in names):
            raise
        raise ConfigError(
            f"{error}\nGive --slices and --row-shards as in the checkpoint, or make one with others: sennit convert"
        ) from None
    return path, found


def _load(trainer: Trainer, path: Path, about: Manifest) -> list[str]:
    """Returns lines for people about what cannot be used of the checkpoint."""
    state = trainer.state()
    lost = [name for name in state if name.startswith(LOST)]
    forgotten = [name for name in lost if name not in about.tensors]
    for name in forgotten:
        del state[name]
    reading.load(path, state)
    if state["position"]["step"] != about.step:
        raise CheckpointError(
            f"{path}: its manifest is of step {about.step}, its weights are of step {state['position']['step']}"
        )
    trainer.restore(state)
    trainer.owes_evaluation = trainer.step > 0 and trainer.order.evaluates(trainer.step)
    trainer.run_id = about.run_id
    trainer.windows[:] = _read_windows(path)
    if forgotten and any(name.startswith(LOST) for name in about.tensors):
        before = about.free.get("ranks")
        return [f"error feedback of gradients begins at zero: the checkpoint has that of {before} ranks"]
    return []


def _check_equal_ranks(trainer: Trainer) -> None:
    """Raises unless all ranks have loaded the same data with the same settings."""
    mine = _as_json(fixed_of(trainer.config, trainer.source))
    every: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(every, mine)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            lines = "\n  ".join(differences(theirs, every[0], where=(f"on rank {rank}", "on rank 0")))
            raise ConfigError(f"rank {rank} has other data or settings than rank 0:\n  {lines}")


@contextlib.contextmanager
def reading_folders() -> Iterator[None]:
    """Makes errors of the system those of checkpoints, which end a command with a sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(str(error)) from error


def _running(source: BatchSource) -> dict[str, int]:
    """The columns whose scales follow the stream, and what they had before counts as."""
    scales = () if source.preprocessing is None else source.preprocessing.scales
    return {scale.field.name: scale.field.running for scale in scales if scale.field.running is not None}


def _table(table: Table) -> dict[str, Any]:
    """What decides the meaning of a table's weights and states."""
    dynamic = {} if table.ids is None else {"ids": described_ids(table.ids)}
    return dynamic | {
        "rows": table.rows,
        "dim": table.dim,
        "pooling": table.pooling.value,
        "precision": table.precision.name.lower(),
        "optimizer": table.optimizer.kind.value + (" with momentum" if table.optimizer.momentum else ""),
        "row_shards": table.row_shards,
        "column_shards": table.column_shards,
        "train_rank": table.train_rank,
    }


@functools.lru_cache(maxsize=1)
def _sha256(known: preprocessing.Preprocessing) -> str:
    return hashlib.sha256(known.text().encode()).hexdigest()


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | tuple | list) else str(value)


def _as_json(content: Any) -> Any:
    return json.loads(json.dumps(content))
