# SPDX-License-Identifier: Apache-2.0
"""The time of a training step with a placement, from kernels, exchanges and imbalance (docs/reference/planner.md).

A table on ranks adds to a matrix of what each rank does, [kinds of work, ranks]. The sum over tables is a placement's
work. So a search adds and subtracts tables, and many placements are rated in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sennit.runtime.kernels.tensor_train import TensorTrainSpec
from sennit.runtime.memory.large_buffers import KEPT_BYTES
from sennit.runtime.planner.constants import Kernel
from sennit.runtime.planner.problem import Problem
from sennit.runtime.planner.schedule import FORWARD, PHASES, Schedule, Time
from sennit.runtime.replicas.reduction import BUCKET_BYTES
from sennit.runtime.sharded.engines import groups_of
from sennit.runtime.sharded.placement import EVERYWHERE
from sennit.runtime.sharded.slices import Slices
from sennit.runtime.sharded.tables import ENTRY_BYTES, Home, Shard, Table, directory_bytes, shard_bytes
from sennit.runtime.sharded.wire import row_codec
from sennit.transport.algorithms.leaves import Leaves
from sennit.transport.choice.coded_cost import coded_work
from sennit.transport.choice.cost_model import Traffic
from sennit.transport.choice.costs import Collective, Costs
from sennit.transport.choice.selection import Selection
from sennit.transport.plans.elements import Dtype
from sennit.transport.plans.hosts import Hosts
from sennit.transport.plans.tree import Span, cover


class Kind(IntEnum):
    """What a rank does for its shards: the rows of `Work`. Seconds are those of one thread that nobody disturbs."""

    IDS = 0
    """Seconds to take in the ids that come."""
    IDS_SENT = 1
    """Bytes of ids that come for each sample of any rank."""
    LOOKUP = 2
    """Seconds of lookups."""
    SUMS_SENT = 3
    """Bytes of sums that go back for each sample."""
    BAGS = 4
    """Seconds to put sums of a sample together, for each sample of the rank."""
    PACKED = 5
    """Seconds to pack the gradients of a sample."""
    GRADIENTS_SENT = 6
    """Bytes of gradients that come for each sample."""
    UPDATE = 7
    """Seconds of updates."""
    ROWS = 8
    """Seconds to read rows from files and to write them back."""
    MEMORY = 9
    """Bytes in the tier that tables are in."""
    SUMMED = 10
    """Replicated tables: seconds if sums of rows travel."""
    SUMMED_BYTES = 11
    """Replicated tables: bytes that each rank gives if sums of rows travel."""
    LISTED = 12
    """Replicated tables: seconds if lookups travel."""
    LISTED_BYTES = 13
    """Replicated tables: bytes if lookups travel."""
    FOUND = 15
    """Bytes that lookups write for a sample."""
    OWN = 14
    """Bytes in the memory of the rank, whatever the tier: replicas, tensor trains, tables whose home is there."""
    SUMS_CODED = 16
    """Seconds to code the sums of all samples."""
    GRADIENTS_DECODED = 17
    """Seconds to decode the gradients of all samples."""


KINDS: Final = len(Kind)
# Seconds of a rank's own work for all samples.
OWN_SECONDS: Final = (
    Kind.IDS,
    Kind.LOOKUP,
    Kind.SUMS_CODED,
    Kind.GRADIENTS_DECODED,
    Kind.UPDATE,
    Kind.ROWS,
)


Work = npt.NDArray[np.float64]
"""[..., kinds of work, ranks]."""

FLOAT_BYTES: Final = 4
LENGTH_BYTES: Final = 4


class Rating:
    """Rates placements of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.samples = problem.samples
        cluster, constants = problem.cluster, problem.constants
        self._by_host = (cluster.hosts, cluster.local_ranks)
        self._host_samples = np.repeat(self.samples.reshape(self._by_host).sum(1), cluster.local_ranks)
        # Ranks that share a core take turns. If they did so in the calibration, constants of the network include it.
        self._turns = max(1.0, cluster.local_ranks / cluster.cores)
        self.near = constants.network.network if cluster.has_no_shared_memory else constants.network.shared_memory
        self.far = constants.network.network
        if cluster.gbit is not None:
            self.far = self.far._replace(byte_s=8e-9 / cluster.gbit)
        self._far_byte_s = Traffic(peers=cluster.ranks - cluster.local_ranks, sent_bytes=1).seconds(self.far)
        self._groups = len(groups_of(problem.tables))
        self._empty = np.zeros((KINDS, cluster.ranks))
        self._pairs = list(zip(problem.tables, problem.uses, strict=True))
        self._ids = np.array([use.mean_length * len(table.features) for table, use in self._pairs])
        self._id_bytes = 8 if any(table.rows > 1 << 31 for table in problem.tables) else 4
        self._known: dict[int, tuple[Work, Work, Work]] = {}
        self._float_bytes = self._sent_float_bytes()
        self._encode_s = self._decode_s = 0.0
        if problem.codec is not None:
            speed = constants.network.codecs[problem.codec.kind]
            is_random = problem.codec.stochastic
            self._encode_s = speed.encode_stochastic_element_s if is_random else speed.encode_element_s
            self._decode_s = speed.decode_element_s
        self._sender_s = self._sender()

    def _sender(self) -> Work:
        """Seconds of each rank to check, deal and pack its ids. Replicated tables are packed, too."""
        costs, sample_s = self.problem.constants.ids, 0.0
        for (table, _), ids in zip(self._pairs, self._ids, strict=True):
            sample_s += ids * costs.id_s
            if table.row_shards > 1:
                sample_s += ids * costs.dealt_id_s + table.row_shards * len(table.features) * costs.dealt_bag_s
        overhead = self.problem.constants.overhead["ids"]
        parts = sum(table.row_shards * len(table.features) for table in self.problem.tables)
        return self.samples * sample_s + overhead.step_s + overhead.table_s * parts

    def _sent_float_bytes(self) -> list[float]:
        """Bytes that a float of each table travels in."""
        tables, codec = self.problem.tables, self.problem.codec
        found = [float(FLOAT_BYTES)] * len(tables)
        if codec is None:
            return found
        for group in groups_of(tables):
            columns = [(tables[number], column) for number in group for column in range(tables[number].column_shards)]
            coding = row_codec(codec, [table.column_range(column).size for table, column in columns]).coding(Dtype.F32)
            count = 1024 * max(coding.block, 1)
            for number in group:
                found[number] = coding.coded_bytes(count) / count
        return found

    def work(self, number: int, owners: npt.NDArray[np.int64]) -> Work:
        """What a table adds. `owners` [row shards, column shards]: a rank each, or all `EVERYWHERE`."""
        table, work = self.problem.tables[number], self._empty.copy()
        if owners.flat[0] == EVERYWHERE:
            self._replicate(number, work)
            return work
        features = len(table.features)
        shares, distinct, memory = self._of_batch(number)
        dims = np.array([table.column_range(column).size for column in range(table.column_shards)])
        lookup, update = self._seconds(number, shares, distinct)
        np.add.at(work[Kind.LOOKUP], owners, lookup)
        np.add.at(work[Kind.UPDATE], owners, update)
        is_beside = table.train_rank is not None
        if self.problem.cluster.cache_bytes is not None:
            is_beside = not self._is_in_file(table)
        np.add.at(work[Kind.OWN if is_beside else Kind.MEMORY], owners, memory)
        if table.ids is not None:
            # Directories are never in a file.
            is_in_memory = is_beside or self._is_in_file(table)
            directories = self._of_shards(number, directory_bytes)
            np.add.at(work[Kind.OWN if is_in_memory else Kind.MEMORY], owners, directories)
        if self._is_in_file(table):
            np.add.at(work[Kind.ROWS], owners, self._file_seconds(number, distinct))
        constants = self.problem.constants
        fold_s, copy_s, batch = self.near.fold_byte_s, constants.memory.copy_byte_s, self.problem.batch
        all_nodes = np.zeros(table.column_shards)
        for rank in np.unique(owners):
            mine = owners == rank
            rows = mine.any(1)
            work[Kind.IDS_SENT, rank] += self._ids[number] * shares[rows].sum() * self._id_bytes
            work[Kind.IDS_SENT, rank] += features * int(rows.sum()) * LENGTH_BYTES
            nodes = np.array([_nodes(np.flatnonzero(mine[:, column]), table.row_shards) for column in range(len(dims))])
            counts = mine.sum(0)
            work[Kind.FOUND, rank] += float((counts * dims).sum()) * features * FLOAT_BYTES
            all_nodes += nodes
            bag_bytes, float_bytes = features * dims * FLOAT_BYTES, self._float_bytes[number]
            sums, gradients = (float((times * dims).sum()) * features for times in (nodes, counts > 0))
            work[Kind.SUMS_SENT, rank] += sums * float_bytes
            work[Kind.GRADIENTS_SENT, rank] += gradients * float_bytes
            work[Kind.SUMS_CODED, rank] += batch * sums * self._encode_s
            work[Kind.GRADIENTS_DECODED, rank] += batch * gradients * self._decode_s
            if table.row_shards > 1 or table.column_shards > 1:
                # Lookups of several row shards are added up, and each gets a copy of the gradient.
                work[Kind.LOOKUP, rank] += batch * float(((counts - nodes) * bag_bytes).sum()) * 3 * fold_s
                work[Kind.LOOKUP, rank] += batch * float((nodes * bag_bytes).sum()) * copy_s
                work[Kind.UPDATE, rank] += batch * float((counts * bag_bytes).sum()) * copy_s
                work[Kind.IDS, rank] += batch * self._ids[number] * float(shares @ mine.sum(1)) * 4 * copy_s
        sums, whole = float((all_nodes * dims).sum()) * features, table.dim * features
        work[Kind.BAGS] += (sums - whole) * FLOAT_BYTES * 3 * fold_s + sums * self._decode_s
        if table.column_shards > 1:
            work[Kind.BAGS] += whole * FLOAT_BYTES * copy_s
        given = float((((owners[..., None] == np.unique(owners)).any(0)).sum(1) * dims).sum()) * features
        # Column shards are made contiguous first.
        work[Kind.PACKED] += given * FLOAT_BYTES * copy_s * (2 if table.column_shards > 1 else 1)
        work[Kind.PACKED] += given * self._encode_s
        return work

    def _of_batch(self, number: int) -> tuple[Work, Work, Work]:
        """The share of each row shard, the distinct rows there of a batch, and the bytes of each shard's rows."""
        if number not in self._known:
            table, use = self._pairs[number]
            ids = self.problem.batch * self._ids[number]
            shares, distinct = use.shares(table.row_shards), use.distinct(ids, table.row_shards)
            self._known[number] = shares, distinct, self._of_shards(number, _row_bytes)
        return self._known[number]

    def _seconds(self, number: int, shares: Work, distinct: Work) -> tuple[Work, Work]:
        """Seconds of the lookup and of the update of each shard, [row shards, column shards]."""
        problem, table = self.problem, self.problem.tables[number]
        constants, features = problem.constants, len(table.features)
        dims = np.array([table.column_range(column).size for column in range(table.column_shards)])[None, :]
        ids, rows = problem.batch * self._ids[number] * shares[:, None], distinct[:, None]
        bags = float(problem.batch * features)
        name = table.precision.name.lower()
        lookup = constants.lookup[name].seconds(bags=bags, ids=ids, rows=rows, dim=dims)
        kernel = constants.update[name] if table.train_rank else constants.update_of(name, table.optimizer)
        update = kernel.seconds(bags=bags, ids=ids, rows=rows, dim=dims)
        if table.train_rank is not None:
            # A row is a product of cores; its gradient takes two products for each. The optimizer sees elements of
            # cores, which are few.
            flops = _train_flops(table)
            lookup = lookup + rows * flops * constants.gemm.flop_s
            update = update + 3 * rows * flops * constants.gemm.flop_s
        lookup = lookup + constants.overhead["lookup"].seconds(features, problem.slices)
        return lookup, update + constants.overhead["update"].seconds(features, problem.slices)

    def _of_shards(self, number: int, count: Callable[[Sequence[Table], Shard], float]) -> Work:
        """[row shards, column shards]: a number for each shard of a table."""
        table, tables = self.problem.tables[number], self.problem.tables
        columns = range(table.column_shards)
        return np.array(
            [[count(tables, Shard(number, row, column)) for column in columns] for row in range(table.row_shards)],
            np.float64,
        )

    def _file_seconds(self, number: int, distinct: Work) -> Work:
        """Seconds for rows that the cache does not hold: the share of tables that it has no room for."""
        problem, memory = self.problem, self._of_batch(number)[2]
        cached = min(1.0, (problem.cluster.cache_bytes or 0) * problem.cluster.ranks / max(self.file_bytes, 1.0))
        rows = np.maximum(1, np.diff(problem.tables[number].row_borders))[:, None]
        costs = problem.constants.memory
        found: Work = (1 - cached) * distinct[:, None] * (costs.file_row_s + memory / rows * costs.file_byte_s)
        return found

    def _is_in_file(self, table: Table) -> bool:
        """Whether a table is in a file unless it is replicated."""
        return self.problem.cluster.homes.of(table) is Home.FILE

    @cached_property
    def file_bytes(self) -> float:
        """Bytes of all tables in files."""
        in_files = [number for number, table in enumerate(self.problem.tables) if self._is_in_file(table)]
        return sum(float(self._of_batch(number)[2].sum()) for number in in_files)

    def _replicate(self, number: int, work: Work) -> None:
        """Every rank looks up its own samples, and updates all rows."""
        table, use = self._pairs[number]
        problem, constants, shards = self.problem, self.problem.constants, table.row_shards
        features, batch, ids = len(table.features), float(problem.batch), self._ids[number]
        name, dim, columns = table.precision.name.lower(), table.dim, table.column_shards
        of_all = float(use.distinct(batch * ids, shards).sum())
        sizes, which = np.unique(self.samples, return_inverse=True)
        of_rank = np.array([float(use.distinct(own * ids, shards).sum()) for own in sizes])[which]

        def of(kernel: Kernel, bags: Any, ids: Any, rows: Any) -> Any:
            """Each row shard has all bags, each column shard all ids."""
            return columns * kernel.seconds(bags=bags * shards, ids=ids, rows=rows, dim=dim / columns)

        lookup, update = constants.lookup[name], constants.update_of(name, table.optimizer)
        bags, own, parts = self.samples * features, self.samples * ids, features * shards * columns
        bag_bytes = self.samples * features * dim * FLOAT_BYTES
        copy_s, split = constants.memory.copy_byte_s, shards > 1 or columns > 1
        work[Kind.LOOKUP] += of(lookup, bags, own, of_rank)
        work[Kind.LOOKUP] += bag_bytes * ((shards - 1) * 3 * self.near.fold_byte_s + split * copy_s)
        work[Kind.LOOKUP] += constants.overhead["lookup"].seconds(parts, problem.slices)
        copied = split * shards * bag_bytes * copy_s
        given = of_rank * (8 + FLOAT_BYTES * dim)
        merged = of(update, 0.0, of_rank.sum(), of_all) + (2 * given + given.sum()) * copy_s
        listed = of(update, batch * features, batch * ids, of_all)
        overhead = constants.overhead["update"].seconds(parts, problem.slices) + constants.replicas.table_s
        # To sum its rows a rank does what an update does, without the optimizer.
        work[Kind.SUMMED] += of(constants.update[name], bags, own, of_rank) + copied + merged + overhead
        work[Kind.LISTED] += listed + copied * problem.cluster.ranks + overhead * problem.cluster.ranks / 2
        # Rows travel as int64.
        work[Kind.SUMMED_BYTES] += given
        work[Kind.LISTED_BYTES] += parts * self.samples * LENGTH_BYTES + shards * bag_bytes + own * self._id_bytes
        work[Kind.PACKED] += features * dim * FLOAT_BYTES * constants.memory.copy_byte_s
        work[Kind.OWN if problem.cluster.cache_bytes is not None else Kind.MEMORY] += float(
            self._of_batch(number)[2].sum()
        )

    # The methods below turn work into seconds.

    def phases(self, work: Work) -> dict[str, Any]:
        """Seconds of each phase on the slowest rank, [...] each. What hides behind other phases is left out."""
        own, dense, many = self.samples, self._dense_ranks, self.problem.batch
        all_sums = work[..., Kind.SUMS_SENT, :].sum(-1, keepdims=True)
        all_gradients = work[..., Kind.GRADIENTS_SENT, :].sum(-1, keepdims=True)
        ids, ids_far = self._to_owners(work[..., Kind.IDS_SENT, :])
        sums, sums_far = self._from_owners(work[..., Kind.SUMS_SENT, :])
        gradients, gradients_far = self._to_owners(work[..., Kind.GRADIENTS_SENT, :])
        replicas, replicas_far = self._gathered(work)
        computed = {
            "input": np.broadcast_to(own * self.problem.fixed.input_sample_s, ids.shape),
            "id exchange": self._sender_s + work[..., Kind.IDS, :] + ids,
            "lookup": work[..., Kind.LOOKUP, :] + self._fresh(many * work[..., Kind.FOUND, :]),
            "pooled exchange": sums
            + own * work[..., Kind.BAGS, :]
            + work[..., Kind.SUMS_CODED, :]
            + self._fresh(own * all_sums),
            "dense": np.broadcast_to(dense, ids.shape),
            "gradient exchange": own * work[..., Kind.PACKED, :]
            + gradients
            + work[..., Kind.GRADIENTS_DECODED, :]
            + self._fresh(own * all_gradients)
            + self._fresh(many * work[..., Kind.GRADIENTS_SENT, :]),
            "update": work[..., Kind.UPDATE, :] + self._fresh(many * work[..., Kind.FOUND, :]),
            "replicas": replicas,
        }
        waited = {
            "id exchange": (ids_far, 1 + 2 * self._groups),
            "pooled exchange": (sums_far, self._groups),
            "gradient exchange": (gradients_far, self._groups),
            "replicas": (replicas_far, np.where(work[..., Kind.LISTED_BYTES, :].any(-1), 4, 0)),
        }
        found = {}
        for phase, seconds in computed.items():
            far, rounds = waited.get(phase, (0.0, 0))
            found[phase] = self._waiting(Time(self._compute(seconds)), far, rounds)
        file_s = self._compute(work[..., Kind.ROWS, :])
        found["wait for rows"] = Time(0.0, np.maximum(file_s - found["dense"].seconds, 0.0))
        found["AllReduce"] = self._all_reduce
        return self._schedule.exposed({phase: found[phase] for phase in PHASES})

    def _waiting(self, time: Time, far_s: Any, rounds: Any) -> Time:
        """Adds bytes to other hosts, and rounds. Without other hosts a wait for a round takes a core: ranks poll."""
        rounds_s = rounds * self._round_s
        if self.problem.cluster.hosts == 1:
            return time + Time(rounds_s)
        return time + Time(0.0, far_s + rounds_s, far_s)

    @cached_property
    def _schedule(self) -> Schedule:
        problem, cluster = self.problem, self.problem.cluster
        own = Slices(count=problem.slices, rank=0, world_size=cluster.ranks)
        slices = max(own.of(rank).high - own.of(rank).low for rank in range(cluster.ranks))
        return Schedule(
            ahead=problem.ahead,
            tables_beside=problem.tables_beside,
            looks_ahead=cluster.cache_bytes is None,
            cores=max(cluster.cores / cluster.local_ranks, 1.0),
            early=Time(self._compute(np.full(cluster.ranks, slices * problem.fixed.early_s))),
            optimizer=Time(self._compute(np.full(cluster.ranks, problem.fixed.update_s))),
            switches=problem.constants.sharing.switches,
        )

    def seconds(self, work: Work) -> Any:
        """Seconds of a step, [...]."""
        return sum(self.phases(work).values())

    def rank_seconds(self, work: Work) -> Work:
        """What each rank does itself, without waiting, [..., ranks]: the most is the one to relieve."""
        byte_s = max(self._near_byte_s, self._far_byte_s if self.problem.cluster.hosts > 1 else 0.0)
        own = work[..., OWN_SECONDS, :].sum(-2)
        sent = work[..., [Kind.IDS_SENT, Kind.SUMS_SENT, Kind.GRADIENTS_SENT], :].sum(-2)
        found: Work = own + sent * self.problem.batch * byte_s
        return found

    def _compute(self, seconds: Work) -> Any:
        """The ranks of a host share its cores: the longest rank, or all of them in turns."""
        by_host = seconds.reshape(*seconds.shape[:-1], *self._by_host)
        longest = np.maximum(by_host.max(-1), by_host.sum(-1) / self.problem.cluster.cores).max(-1)
        return longest * self._slower

    @property
    def _slower(self) -> float:
        """The factor by which a rank computes slower than one that is alone on the host."""
        cluster = self.problem.cluster
        several = min(cluster.cores, cluster.local_ranks) > 1
        crowd = self.problem.constants.sharing.crowd * min(self._turns - 1, 1.0)
        return (1 + crowd) * (self.problem.constants.contention if several else 1.0)

    def _to_owners(self, sent: Work) -> tuple[Work, Any]:
        """An exchange in which every sample of every rank sends `sent[r]` bytes to rank r.

        The seconds that each rank copies, [..., ranks], and those of the network, [...].
        """
        here = self._per_host(sent)
        copied = self.samples * ((here - sent) * self._near_byte_s + sent * self._own_byte_s)
        out = self.samples * (sent.sum(-1, keepdims=True) - here)
        arriving = sent * (self.problem.batch - self._host_samples)
        return copied, np.maximum(out, arriving).max(-1) * self._far_byte_s * self._far_turns

    def _from_owners(self, sent: Work) -> tuple[Work, Any]:
        """An exchange in which rank r sends `sent[r]` bytes to every sample of every rank."""
        copied = sent * ((self._host_samples - self.samples) * self._near_byte_s + self.samples * self._own_byte_s)
        out = sent * (self.problem.batch - self._host_samples)
        arriving = self.samples * (sent.sum(-1, keepdims=True) - self._per_host(sent))
        return copied, np.maximum(out, arriving).max(-1) * self._far_byte_s * self._far_turns

    @property
    def _own_byte_s(self) -> float:
        """Seconds for a byte that a rank sends to itself. A rank alone sends nothing."""
        return self.problem.constants.memory.copy_byte_s if self.problem.cluster.ranks > 1 else 0.0

    def _fresh(self, size_bytes: Work) -> Work:
        """Seconds for the pages of a buffer that is too large to be used again."""
        fresh_byte_s = self.problem.constants.memory.fresh_byte_s
        return np.where(size_bytes > KEPT_BYTES, size_bytes * fresh_byte_s, 0.0)

    def _per_host(self, values: Work) -> Work:
        by_host = values.reshape(*values.shape[:-1], *self._by_host).sum(-1)
        return np.repeat(by_host, self.problem.cluster.local_ranks, axis=-1)

    @property
    def _near_byte_s(self) -> float:
        peers = self.problem.cluster.local_ranks - 1
        return Traffic(peers=peers, sent_bytes=1).seconds(self.near) / self.problem.constants.crowding()

    @property
    def _far_turns(self) -> float:
        """The time of bytes on the network, which take a core of both ends."""
        return max(1.0, self._turns / self.problem.constants.crowding())

    @cached_property
    def _round_s(self) -> float:
        """The time of small messages to all other ranks."""
        cluster = self.problem.cluster
        if cluster.ranks == 1:
            return 0.0
        near, far = cluster.local_ranks - 1, cluster.ranks - cluster.local_ranks
        way: Costs = self.far if far else self.near
        found = way.round_s + near * self.near.message_s + far * self.far.message_s
        return found * max(1.0, self._turns / self.problem.constants.crowding())

    def _gathered(self, work: Work) -> tuple[Work, Any]:
        """The exchange of replicated tables, by the way that sends less, as `SparseAllReduce` does. Returns what
        `_to_owners` returns.
        """
        sizes, computed, waited = [], [], []
        for seconds, given in ((Kind.SUMMED, Kind.SUMMED_BYTES), (Kind.LISTED, Kind.LISTED_BYTES)):
            own = work[..., given, :]
            here = self._per_host(own)
            sizes.append(own.sum(-1))
            step_s = self.problem.constants.replicas.step_s * (sizes[-1] > 0)[..., None]
            computed.append(work[..., seconds, :] + (here - own) * self._near_byte_s + step_s)
            waited.append((own.sum(-1, keepdims=True) - here).max(-1) * self._far_byte_s * self._far_turns)
        is_summed = sizes[0] < sizes[1]
        return np.where(is_summed[..., None], *computed), np.where(is_summed, *waited)

    @cached_property
    def _dense_ranks(self) -> Work:
        """Seconds of the model: slices of a rank one after the other, and the step of the optimizer."""
        fixed, world = self.problem.fixed, self.problem.cluster.ranks
        own = Slices(count=self.problem.slices, rank=0, world_size=world)
        slices = np.array([own.of(rank).high - own.of(rank).low for rank in range(world)], np.float64)
        found: Work = slices * fixed.slice_s + fixed.update_s
        return found

    @cached_property
    def _all_reduce(self) -> Time:
        """The time of the AllReduce of the model's gradients, by the algorithm that the transport takes."""
        cluster, size_bytes = self.problem.cluster, self.problem.fixed.gradient_bytes
        if cluster.ranks == 1 or not size_bytes:
            return Time()
        selection = Selection(hosts=Hosts.equal(cluster.ranks, cluster.hosts), near=self.near, far=self.far)
        codec = self.problem.gradient_codec
        if codec is None:
            leaves = Leaves(cluster.ranks, self.problem.slices, partial=True)
            rated = selection.rate(Collective.ALLREDUCE, size_bytes=size_bytes, leaves=leaves)
            work, coding_s = rated[selection.choose(rated)], 0.0
        else:
            coding = codec.coding(Dtype.F32)
            coded = coded_work(
                Collective.ALLREDUCE, hosts=selection.hosts, elements=size_bytes // FLOAT_BYTES, coding=coding
            )
            assert coded is not None
            speed = self.problem.constants.network.codecs[codec.kind]
            work, coding_s = coded.work, coded.coding_seconds(coding, speed)
        seconds = work.seconds(self.near, self.far) * self._far_turns
        coding_s = float(self._compute(np.full(cluster.ranks, coding_s)))
        if self.problem.tables_beside and codec is None:
            # All buckets but the last go while the last slice of a rank is in its backward pass (`Exchanges`).
            early_s = max(1 - BUCKET_BYTES / size_bytes, 0.0) * seconds
            seconds -= min(early_s, (1 - FORWARD) * self.problem.fixed.slice_s)
        if cluster.hosts == 1:
            return Time(coding_s + seconds)
        link_s = work.far.seconds(self.far._replace(round_s=0.0, message_s=0.0)) * self._far_turns
        return Time(coding_s, seconds, min(link_s, seconds))

    def fits(self, work: Work) -> Any:
        """Whether no rank needs more memory than it has, [...]."""
        cluster = self.problem.cluster
        fitting = np.full(work.shape[:-2], True)
        for kind, limits in ((Kind.MEMORY, cluster.limits), (Kind.OWN, cluster.beside)):
            if limits is not None:
                fitting &= (work[..., kind, :] <= np.asarray(limits, np.float64)).all(-1)
        return fitting

    def total(self, owners: Mapping[int, npt.NDArray[np.int64]] | Sequence[npt.NDArray[np.int64]]) -> Work:
        """The work of a whole placement."""
        items = owners.items() if isinstance(owners, Mapping) else enumerate(owners)
        return sum((self.work(number, one) for number, one in items), self._empty.copy())


def _row_bytes(tables: Sequence[Table], shard: Shard) -> int:
    """Memory of a shard's rows with their optimizer states, without the ids of a dynamic table."""
    table = tables[shard.table]
    entries = 0 if table.ids is None else ENTRY_BYTES * len(table.ids.directories)
    return shard_bytes(tables, shard) - table.row_range(shard.row).size * entries


def _nodes(rows: npt.NDArray[np.int64], row_shards: int) -> int:
    """Sums that a rank with these row shards sends for a bag: nodes of the tree that it has whole."""
    if not len(rows):
        return 0
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return sum(len(list(cover(Span(int(run[0]), int(run[-1]) + 1), row_shards))) for run in runs)


def _train_flops(table: Table) -> float:
    """Floating-point operations for a row of a tensor train: a product of its slices of three cores."""
    spec = table.spec_of(0, 0)
    if not isinstance(spec, TensorTrainSpec):
        return 0.0
    (d1, d2, d3), (r1, r2) = spec.column_factors, spec.ranks
    return 2.0 * d1 * d2 * r2 * (r1 + d3)
