// SPDX-License-Identifier: Apache-2.0
// Stores and caches of rows for Python. Rows are arrays of bytes, one for each part of a row.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <memory>

#include "batch_queue.hpp"
#include "dram_store.hpp"
#include "file_store.hpp"
#include "narrow_store.hpp"
#include "simulated_disk.hpp"
#include "store_error.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sennit::memory {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = std::vector<std::pair<std::string, std::uint64_t>>;
using Parts = std::vector<std::tuple<std::string, std::string, std::uint32_t, std::uint32_t>>;

Geometry to_geometry(const Tables& tables, const Parts& parts) {
  Geometry geometry;
  for (const auto& [name, row_count] : tables) geometry.tables.push_back({name, row_count});
  for (const auto& [name, dtype, columns, row_bytes] : parts)
    geometry.parts.push_back({name, dtype, columns, row_bytes});
  geometry.check();
  return geometry;
}

std::pair<Tables, Parts> from_geometry(const Geometry& geometry) {
  std::pair<Tables, Parts> found;
  for (const auto& table : geometry.tables) found.first.emplace_back(table.name, table.row_count);
  for (const auto& part : geometry.parts)
    found.second.emplace_back(part.name, part.dtype, part.columns, part.row_bytes);
  return found;
}

// `row_bytes` is the size of each part. Every array has at least `count` rows.
Lines to_lines(const std::vector<Bytes>& arrays, const std::vector<std::size_t>& row_bytes, std::size_t count) {
  Lines lines;
  if (arrays.size() != row_bytes.size())
    throw StoreError(Fault::ARGUMENT, std::to_string(arrays.size()) + " arrays; a row has " +
                                          std::to_string(row_bytes.size()) + " parts");
  for (std::size_t n = 0; n < arrays.size(); n++) {
    if (arrays[n].shape(1) != row_bytes[n] || arrays[n].shape(0) < count)
      throw StoreError(Fault::ARGUMENT, "part " + std::to_string(n) + " of [" + std::to_string(arrays[n].shape(0)) +
                                            ", " + std::to_string(arrays[n].shape(1)) + "] bytes; expected [" +
                                            std::to_string(count) + ", " + std::to_string(row_bytes[n]) + "]");
    lines.parts.push_back({reinterpret_cast<std::byte*>(arrays[n].data()), row_bytes[n]});
  }
  return lines;
}

std::vector<std::size_t> widths(const Geometry& geometry) {
  std::vector<std::size_t> found;
  for (const auto& part : geometry.parts) found.push_back(part.row_bytes);
  return found;
}

std::vector<RowAt> to_rows(const Rows& rows) {
  std::vector<RowAt> found(rows.shape(0));
  for (std::size_t n = 0; n < found.size(); n++) found[n] = {static_cast<std::uint64_t>(rows.data()[n]), n};
  return found;
}

std::chrono::steady_clock::time_point deadline(double timeout_s) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(timeout_s));
}

std::unique_ptr<Device> simulated(const std::shared_ptr<SimulatedDisk>& disk) {
  return std::make_unique<Device>(std::make_unique<SimulatedBackend>(disk), "simulated disk", disk->bytes.size(),
                                  SimulatedDisk::SECTOR_BYTES);
}

// A store that several calls share, with facts about its file for Python.
struct Store {
  std::vector<std::size_t> row_bytes;
  std::uint64_t row_count = 0;
  std::shared_ptr<Store> below;  // of a NarrowStore
  std::unique_ptr<RowStore> rows;
  std::vector<Bytes> memory;  // of a DramStore
  FileStore* file = nullptr;
  bool is_direct = false;
  std::string note;
  bool has_cache = false;

  void close() {
    rows.reset();
    file = nullptr;
    if (below) below->has_cache = false;
    below.reset();
  }
  ~Store() { close(); }
};

std::shared_ptr<Store> wrap(std::unique_ptr<FileStore> file) {
  auto store = std::make_shared<Store>();
  store->row_bytes = widths(file->geometry());
  store->row_count = file->geometry().row_count();
  store->file = file.get();
  store->rows = std::move(file);
  return store;
}

RowStore& rows_of(const Store& store) {
  if (!store.rows) throw StoreError(Fault::ARGUMENT, "the store is closed");
  if (store.has_cache) throw StoreError(Fault::ARGUMENT, "the store is used by a cache, which may hold newer rows");
  return *store.rows;
}

const FileStore& file_of(const Store& store) {
  if (!store.rows || store.file == nullptr) throw StoreError(Fault::ARGUMENT, "the store is closed, or not on a file");
  return *store.file;
}

class Cache {
 public:
  Cache(std::shared_ptr<Store> store, std::vector<Bytes> memory, std::uint64_t set_count, std::uint64_t spare_count,
        bool is_lfu)
      : store_(std::move(store)),
        memory_(std::move(memory)),
        cache_(rows_of(*store_), to_lines(memory_, store_->row_bytes, set_count * RowCache::WAYS + spare_count),
               set_count, spare_count, is_lfu ? Policy::LFU : Policy::LRU) {
    store_->has_cache = true;
    queue_ = std::make_unique<BatchQueue>(cache_, store_->row_count);
  }
  ~Cache() { close(); }

  BatchQueue& queue() {
    if (!queue_) throw StoreError(Fault::ARGUMENT, "the cache is closed");
    return *queue_;
  }
  // Changed rows that were not flushed are lost.
  void close() {
    queue_.reset();
    store_->has_cache = false;
  }
  std::uint64_t set_of(std::uint64_t row) const { return cache_.set_of(row); }
  const std::vector<std::size_t>& row_bytes() const { return store_->row_bytes; }

 private:
  std::shared_ptr<Store> store_;
  std::vector<Bytes> memory_;
  RowCache cache_;
  std::unique_ptr<BatchQueue> queue_;
};

using BatchPointer = std::shared_ptr<BatchQueue::Batch>;

// What Python holds. A shared_ptr that nanobind makes from a Python object takes the GIL when it is released. The
// queue's thread must never do that, because other threads wait for its lock while they hold the GIL.
struct BatchHandle {
  BatchPointer batch;
};

void bind_stores(nb::module_& module) {
  nb::class_<FileOptions>(module, "FileOptions")
      .def(nb::init<bool, std::string, unsigned, unsigned>(), "is_direct"_a, "backend"_a, "depth"_a, "threads"_a);

  nb::class_<SimulatedDisk>(module, "SimulatedDisk")
      .def(nb::init<std::uint64_t, std::uint64_t>(), "size_bytes"_a, "seed"_a)
      .def_rw("operations", &SimulatedDisk::operations)
      .def_rw("fail_at", &SimulatedDisk::fail_at)
      .def_rw("error_number", &SimulatedDisk::error_number)
      .def_rw("gives_short_transfers", &SimulatedDisk::gives_short_transfers)
      .def("start_again", &SimulatedDisk::start_again)
      .def("cut_power", &SimulatedDisk::cut_power);

  nb::class_<StoreBuilder>(module, "StoreBuilder")
      .def(
          "append",
          [](StoreBuilder& builder, const std::vector<Bytes>& arrays, const std::vector<std::size_t>& row_bytes,
             std::uint64_t count) {
            const Lines lines = to_lines(arrays, row_bytes, count);
            const nb::gil_scoped_release released;
            builder.append(lines, count);
          },
          "parts"_a, "row_bytes"_a, "count"_a)
      .def("finish", &StoreBuilder::finish, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Store>(module, "Store")
      .def(
          "read",
          [](Store& store, const Rows& rows, const std::vector<Bytes>& arrays) {
            const Lines lines = to_lines(arrays, store.row_bytes, rows.shape(0));
            RowStore& found = rows_of(store);
            const nb::gil_scoped_release released;
            found.exchange({}, to_rows(rows), lines);
          },
          "rows"_a, "parts"_a)
      .def(
          "write",
          [](Store& store, const Rows& rows, const std::vector<Bytes>& arrays) {
            const Lines lines = to_lines(arrays, store.row_bytes, rows.shape(0));
            RowStore& found = rows_of(store);
            const nb::gil_scoped_release released;
            found.exchange(to_rows(rows), {}, lines);
          },
          "rows"_a, "parts"_a)
      .def(
          "flush", [](Store& store, std::uint64_t tag) { return rows_of(store).flush(tag); }, "tag"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def("close",
           [](Store& store) {
             if (store.has_cache) throw StoreError(Fault::ARGUMENT, "the store is used by a cache: close that first");
             store.close();
           })
      .def_ro("row_count", &Store::row_count)
      .def_ro("is_direct", &Store::is_direct)
      .def_ro("note", &Store::note)
      .def_prop_ro("geometry", [](const Store& store) { return from_geometry(file_of(store).geometry()); })
      .def_prop_ro("generation", [](const Store& store) { return file_of(store).generation(); })
      .def_prop_ro("tag", [](const Store& store) { return file_of(store).tag(); })
      .def_prop_ro("was_replayed", [](const Store& store) { return file_of(store).was_replayed(); })
      .def_prop_ro("backend", [](const Store& store) { return std::string(file_of(store).device().backend_name()); })
      .def_prop_ro("counters", [](const Store& store) {
        const Device::Counters& device = file_of(store).device().counters();
        const SpillLog::Counters& log = file_of(store).log().counters();
        nb::dict found;
        found["reads"] = device.reads;
        found["bytes_read"] = device.bytes_read;
        found["writes"] = device.writes;
        found["bytes_written"] = device.bytes_written;
        found["syncs"] = device.syncs;
        found["short_transfers"] = device.short_transfers;
        found["rows_spilled"] = log.records;
        found["rows_moved"] = log.records_moved;
        return found;
      });

  module.def(
      "build_file",
      [](const std::string& path, const Tables& tables, const Parts& parts, const FileOptions& options) {
        const Geometry geometry = to_geometry(tables, parts);
        return std::make_shared<StoreBuilder>(
            std::move(create_file(path, StoreBuilder::size_bytes(geometry), options).device), geometry);
      },
      "path"_a, "tables"_a, "parts"_a, "options"_a);
  module.def(
      "build_simulated",
      [](const std::shared_ptr<SimulatedDisk>& disk, const Tables& tables, const Parts& parts) {
        return std::make_shared<StoreBuilder>(simulated(disk), to_geometry(tables, parts));
      },
      "disk"_a, "tables"_a, "parts"_a);
  module.def(
      "store_bytes",
      [](const Tables& tables, const Parts& parts) { return StoreBuilder::size_bytes(to_geometry(tables, parts)); },
      "tables"_a, "parts"_a);
  module.def(
      "open_file",
      [](const std::string& path, const std::optional<std::pair<Tables, Parts>>& expected, const FileOptions& options) {
        std::optional<Geometry> geometry;
        if (expected) geometry = to_geometry(expected->first, expected->second);
        OpenedFile opened = sennit::memory::open_file(path, options);
        auto store = wrap(std::make_unique<FileStore>(std::move(opened.device), geometry));
        store->is_direct = opened.is_direct;
        store->note = opened.note;
        return store;
      },
      "path"_a, "expected"_a.none(), "options"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "open_simulated",
      [](const std::shared_ptr<SimulatedDisk>& disk) { return wrap(std::make_unique<FileStore>(simulated(disk))); },
      "disk"_a);
  module.def(
      "dram_store",
      [](const std::vector<Bytes>& arrays, std::uint64_t row_count) {
        auto store = std::make_shared<Store>();
        for (const Bytes& array : arrays) store->row_bytes.push_back(array.shape(1));
        store->row_count = row_count;
        store->rows = std::make_unique<DramStore>(to_lines(arrays, store->row_bytes, row_count), row_count);
        store->memory = arrays;
        return store;
      },
      "parts"_a, "row_count"_a);
}

// Tables as (rows, first global row, stream), for random numbers.
using Streams = std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>>;

std::shared_ptr<Store> narrow_store(const std::shared_ptr<Store>& below, const Streams& streams, std::uint32_t dim,
                                    bool is_bf16, bool is_stochastic, std::uint64_t seed, std::uint64_t number) {
  if (below->row_bytes.empty() || below->row_bytes[0] != dim * sizeof(std::uint16_t))
    throw StoreError(Fault::ARGUMENT, "weights are not " + std::to_string(dim) + " numbers of 16 bits");
  std::vector<kernels::Table> tables;
  std::uint64_t row_count = 0;
  for (const auto& [rows, first_row, stream] : streams) {
    const auto precision = is_bf16 ? kernels::Precision::bf16 : kernels::Precision::fp16;
    tables.push_back({nullptr, rows, dim, precision, first_row, stream, {nullptr, nullptr}});
    row_count += rows;
  }
  if (row_count != below->row_count)
    throw StoreError(Fault::ARGUMENT,
                     std::to_string(row_count) + " rows of tables over a store of " + std::to_string(below->row_count));
  auto store = std::make_shared<Store>();
  store->rows = std::make_unique<NarrowStore>(rows_of(*below), std::move(tables), is_stochastic, seed, number);
  store->row_bytes = below->row_bytes;
  store->row_bytes[0] = dim * sizeof(float);
  store->row_count = row_count;
  store->file = below->file;
  store->is_direct = below->is_direct;
  store->note = below->note;
  store->below = below;
  below->has_cache = true;
  return store;
}

void bind_cache(nb::module_& module) {
  module.def("narrow_store", &narrow_store, "below"_a, "tables"_a, "dim"_a, "is_bf16"_a, "is_stochastic"_a, "seed"_a,
             "number"_a);

  nb::class_<BatchHandle>(module, "Batch");
  nb::class_<Cache>(module, "Cache")
      .def(nb::init<std::shared_ptr<Store>, std::vector<Bytes>, std::uint64_t, std::uint64_t, bool>(), "store"_a,
           "parts"_a, "set_count"_a, "spare_count"_a, "is_lfu"_a)
      .def(
          "fetch",
          [](Cache& cache, const Rows& rows, const Rows& begins) {
            std::vector<std::int64_t> copied(rows.data(), rows.data() + rows.shape(0));
            std::vector<std::int64_t> begun(begins.data(), begins.data() + begins.shape(0));
            BatchQueue& queue = cache.queue();
            const nb::gil_scoped_release released;
            return BatchHandle{queue.fetch(std::move(copied), std::move(begun))};
          },
          "rows"_a, "begins"_a)
      .def(
          "wait",
          [](Cache& cache, const BatchHandle& handle, double timeout_s) -> nb::object {
            const BatchPointer& batch = handle.batch;
            bool is_done = false;
            {
              BatchQueue& queue = cache.queue();
              const nb::gil_scoped_release released;
              is_done = queue.wait(batch, deadline(timeout_s));
            }
            if (!is_done) return nb::none();
            nb::capsule owner(new BatchPointer(batch),
                              [](void* held) noexcept { delete static_cast<BatchPointer*>(held); });
            return nb::cast(
                nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(batch->lines.data(), {batch->lines.size()}, owner));
          },
          "batch"_a, "timeout_s"_a)
      .def(
          "release",
          [](Cache& cache, const BatchHandle& handle, bool is_dirty) { cache.queue().release(handle.batch, is_dirty); },
          "batch"_a, "is_dirty"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "read",
          [](Cache& cache, const Rows& rows, const std::vector<Bytes>& arrays, bool is_between, double timeout_s) {
            std::vector<std::int64_t> copied(rows.data(), rows.data() + rows.shape(0));
            const Lines out = to_lines(arrays, cache.row_bytes(), rows.shape(0));
            BatchQueue& queue = cache.queue();
            const nb::gil_scoped_release released;
            const auto parts = queue.read(std::move(copied), cache.row_bytes(), is_between, deadline(timeout_s));
            if (parts)
              for (std::size_t n = 0; n < parts->size(); n++)
                std::memcpy(out.parts[n].data, (*parts)[n].data(), (*parts)[n].size());
            return parts != nullptr;
          },
          "rows"_a, "parts"_a, "is_between"_a, "timeout_s"_a)
      .def(
          "flush",
          [](Cache& cache, std::uint64_t tag, double timeout_s) {
            return cache.queue().flush(tag, deadline(timeout_s));
          },
          "tag"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Cache::close, nb::call_guard<nb::gil_scoped_release>())
      .def("set_of", &Cache::set_of, "row"_a)
      .def_prop_ro("counters", [](Cache& cache) {
        const RowCache::Counters counters = cache.queue().counters();
        nb::dict found;
        found["batches"] = counters.batches;
        found["lookups"] = counters.lookups;
        found["hits"] = counters.hits;
        found["misses"] = counters.misses;
        found["conflicts"] = counters.conflicts;
        found["evictions"] = counters.evictions;
        found["write_backs"] = counters.write_backs;
        found["begun"] = counters.begun;
        return found;
      });
}

}  // namespace

NB_MODULE(_memory, module) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const StoreError& error) {
      const nb::object made = nb::module_::import_("sennit.runtime.memory.errors")
                                  .attr("from_fault")(static_cast<int>(error.fault), error.what(), error.error_number);
      PyErr_SetObject(made.type().ptr(), made.ptr());
    }
  });
  nb::exception<Killed>(module, "Killed");
  module.def("uring_problem", [] {
    // The ring is for a descriptor that is never used.
    std::string problem;
    make_uring_backend(-1, 1, problem);
    return problem;
  });
  bind_stores(module);
  bind_cache(module);
}

}  // namespace sennit::memory
