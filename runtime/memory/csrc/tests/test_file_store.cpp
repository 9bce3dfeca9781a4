// SPDX-License-Identifier: Apache-2.0
// Compares the file store with a model, over a disk that fails at every possible step.
#include <cerrno>
#include <map>
#include <memory>
#include <string>

#include <doctest/doctest.h>

#include "file_store.hpp"
#include "simulated_disk.hpp"
#include "store_error.hpp"

using namespace sennit::memory;

namespace {

using Model = std::vector<std::uint64_t>;  // by row: the number that all its bytes are made from

Geometry small_geometry(std::uint64_t rows, std::uint32_t weight_bytes = 60) {
  Geometry geometry;
  geometry.tables = {{"first", rows / 2}, {"second", rows - rows / 2}};
  geometry.parts = {{"weight", "float32", weight_bytes / 4, weight_bytes}, {"sum", "float32", 1, 4}};
  return geometry;
}

// Memory for `count` rows of a geometry, filled from one number per row.
struct Memory {
  Memory(const Geometry& geometry, std::size_t count) {
    for (const auto& part : geometry.parts) parts.emplace_back(part.row_bytes * count);
    for (std::size_t n = 0; n < parts.size(); n++)
      lines.parts.push_back({parts[n].data(), geometry.parts[n].row_bytes});
  }
  void fill(std::size_t line, std::uint64_t row, std::uint64_t number) {
    std::mt19937_64 random(row * 1'000'003 + number);
    for (const auto& part : lines.parts)
      for (std::size_t n = 0; n < part.row_bytes; n++)
        part.data[line * part.row_bytes + n] = static_cast<std::byte>(random());
  }
  bool same(std::size_t line, const Memory& other, std::size_t other_line) const {
    for (std::size_t n = 0; n < lines.parts.size(); n++) {
      const std::size_t size = lines.parts[n].row_bytes;
      if (std::memcmp(lines.parts[n].data + line * size, other.lines.parts[n].data + other_line * size, size) != 0)
        return false;
    }
    return true;
  }
  std::vector<std::vector<std::byte>> parts;
  Lines lines;
};

std::unique_ptr<Device> device(const std::shared_ptr<SimulatedDisk>& disk) {
  return std::make_unique<Device>(std::make_unique<SimulatedBackend>(disk), "disk", disk->bytes.size(),
                                  SimulatedDisk::SECTOR_BYTES);
}

std::shared_ptr<SimulatedDisk> new_disk(const Geometry& geometry, std::uint64_t seed) {
  auto disk = std::make_shared<SimulatedDisk>(StoreBuilder::size_bytes(geometry), seed);
  StoreBuilder builder(device(disk), geometry);
  Memory memory(geometry, 1);
  for (std::uint64_t row = 0; row < geometry.row_count(); row++) {
    memory.fill(0, row, 0);
    builder.append(memory.lines, 1);
  }
  builder.finish();
  return disk;
}

void check_rows(FileStore& store, const Geometry& geometry, const Model& model) {
  Memory found(geometry, model.size()), expected(geometry, 1);
  std::vector<RowAt> wanted;
  for (std::uint64_t row = 0; row < model.size(); row++) wanted.push_back({row, row});
  store.exchange({}, wanted, found.lines);
  for (std::uint64_t row = 0; row < model.size(); row++) {
    expected.fill(0, row, model[row]);
    REQUIRE_MESSAGE(found.same(row, expected, 0), "row ", row, " is not what was written as ", model[row]);
  }
}

// Writes `count` rows of a store and its model.
void write_rows(FileStore& store, const Geometry& geometry, Model& model, std::mt19937_64& random, std::size_t count,
                std::uint64_t number) {
  std::map<std::uint64_t, std::uint64_t> rows;
  while (rows.size() < count) rows[random() % model.size()] = number;
  Memory memory(geometry, rows.size());
  std::vector<RowAt> written;
  for (const auto& [row, value] : rows) {
    memory.fill(written.size(), row, value);
    written.push_back({row, written.size()});
    model[row] = value;
  }
  store.exchange(written, {}, memory.lines);
}

template <typename Function>
std::string error_of(Fault fault, Function function) {
  try {
    function();
  } catch (const StoreError& error) {
    CHECK(static_cast<int>(error.fault) == static_cast<int>(fault));
    return error.what();
  }
  FAIL("nothing was raised");
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("rows come back, also from the log and after it was cleaned many times") {
  const Geometry geometry = small_geometry(20'000);
  auto disk = new_disk(geometry, 1);
  disk->gives_short_transfers = true;
  std::mt19937_64 random(2);
  Model model(20'000);
  {
    FileStore store(device(disk), geometry);
    check_rows(store, geometry, model);
    for (std::uint64_t round = 1; round <= 40; round++) {
      write_rows(store, geometry, model, random, 5'000, round);
      if (round % 20 == 0) check_rows(store, geometry, model);
    }
    CHECK(store.log().counters().records_moved > 0);
    CHECK(store.device().counters().short_transfers > 0);
    CHECK(store.flush(77) == 1);
    check_rows(store, geometry, model);
    write_rows(store, geometry, model, random, 100, 1'000);
    check_rows(store, geometry, model);
    CHECK(store.flush(78) == 2);
  }
  FileStore store(device(disk), geometry);
  CHECK(store.generation() == 2);
  CHECK(store.tag() == 78);
  CHECK_FALSE(store.was_replayed());
  check_rows(store, geometry, model);
}

// Every operation of two flushes is the last one in turn. If a flush returned, its rows are there afterwards. If none
// returned, all rows are of one generation.
static void crash_at_every_step(bool is_power_cut) {
  const Geometry geometry = small_geometry(600);
  const auto fresh = new_disk(geometry, 3);
  std::size_t replays = 0, crashes = 0;
  for (std::uint64_t step = 0;; step++) {
    auto disk = std::make_shared<SimulatedDisk>(0, step);
    disk->bytes = fresh->bytes;
    disk->fail_at = step;
    std::mt19937_64 random(step);
    Model model(600);
    std::vector<Model> generations{model};
    std::uint64_t durable = 0;
    bool is_done = false;
    try {
      FileStore store(device(disk), geometry);
      for (std::uint64_t generation = 1; generation <= 2; generation++) {
        for (std::uint64_t part = 0; part < 3; part++)
          write_rows(store, geometry, model, random, 200, generation * 10 + part);
        generations.push_back(model);
        durable = store.flush(generation * 100);
      }
      write_rows(store, geometry, model, random, 200, 99);
      is_done = true;
    } catch (const Killed&) {
      crashes++;
    }
    // A crash while opening repairs an earlier crash changes nothing.
    for (int again = 0; again < 3; again++) {
      is_power_cut ? disk->cut_power() : disk->start_again();
      if (again < 2) disk->fail_at = disk->operations + random() % 12;
      try {
        FileStore store(device(disk), geometry);
        replays += store.was_replayed();
        REQUIRE(store.generation() >= durable);
        REQUIRE(store.generation() <= durable + 1);
        REQUIRE(store.tag() == store.generation() * 100);
        disk->fail_at = ~0ull;
        check_rows(store, geometry, generations.at(store.generation()));
        // The store goes on: no row of the lost generation appears in the next one.
        Model next = generations.at(store.generation());
        if (again == 2) {
          write_rows(store, geometry, next, random, 50, 7'000 + step);
          store.flush(1);
          check_rows(store, geometry, next);
        }
      } catch (const Killed&) {
      }
    }
    if (is_done) break;
  }
  CHECK(crashes > 20);
  CHECK(replays > 5);
}

TEST_CASE("a process killed at any step loses nothing that was reported durable") { crash_at_every_step(false); }

TEST_CASE("nor does a power cut, which tears and drops what was not synced") { crash_at_every_step(true); }

TEST_CASE("an error of the device names file and offset, and stops the store") {
  const Geometry geometry = small_geometry(600);
  const auto fresh = new_disk(geometry, 5);
  for (const int error_number : {EIO, ENOSPC}) {
    std::size_t errors = 0;
    for (std::uint64_t step = 0;; step++) {
      auto disk = std::make_shared<SimulatedDisk>(0, step);
      disk->bytes = fresh->bytes;
      disk->fail_at = step;
      disk->error_number = error_number;
      std::mt19937_64 random(step);
      Model model(600);
      const Model old = model;
      std::unique_ptr<FileStore> store;
      try {
        store = std::make_unique<FileStore>(device(disk), geometry);
        write_rows(*store, geometry, model, random, 300, 1);
        store->flush(1);
        break;
      } catch (const StoreError& error) {
        errors++;
        CHECK(error.error_number == error_number);
        const bool names_place = has(error.what(), "offset") || has(error.what(), "stable storage");
        CHECK(names_place);
        CHECK(has(error.what(), "disk: "));
        if (store) CHECK(has(error_of(Fault::DEVICE, [&] { store->flush(1); }), "open it again"));
      }
      store.reset();
      FileStore again(device(disk), geometry);
      check_rows(again, geometry, again.generation() == 0 ? old : model);
    }
    CHECK(errors > 5);
  }
}

TEST_CASE("bytes that changed on the disk are found, and named") {
  const Geometry geometry = small_geometry(600);
  auto disk = new_disk(geometry, 6);
  const Superblock block = lay_out(geometry);
  const std::uint64_t row = 301, offset = block.base_offset + row * geometry.record_bytes();
  disk->bytes[offset + 3] ^= std::byte{1};
  FileStore store(device(disk), geometry);
  Memory memory(geometry, 1);
  const RowAt wanted{row, 0};
  const std::string what = error_of(Fault::CORRUPT, [&] { store.exchange({}, {&wanted, 1}, memory.lines); });
  CHECK(has(what, "disk: table 'second' row 1 at offset " + std::to_string(offset)));
}

TEST_CASE("a segment of a complete generation that is missing is an error, not a row of last week") {
  const Geometry geometry = small_geometry(600);
  bool has_replay = false;
  for (std::uint64_t step = 0; !has_replay; step++) {
    REQUIRE(step < 100);
    auto disk = new_disk(geometry, 7);
    std::mt19937_64 random(8);
    Model model(600);
    disk->fail_at = disk->operations + step;
    try {
      FileStore store(device(disk), geometry);
      write_rows(store, geometry, model, random, 300, 1);
      store.flush(1);
    } catch (const Killed&) {
    }
    disk->start_again();
    auto copy = std::make_shared<SimulatedDisk>(*disk);
    has_replay = FileStore(device(copy), geometry).was_replayed();
    if (!has_replay) continue;
    const Superblock block = lay_out(geometry);
    disk->bytes[block.log_offset + 40] ^= std::byte{1};
    const std::string what = error_of(Fault::CORRUPT, [&] { FileStore(device(disk), geometry); });
    CHECK(has(what, "at offset " + std::to_string(block.log_offset)));
  }
}

TEST_CASE("a foreign, short or unfinished file is refused by name") {
  const Geometry geometry = small_geometry(600);
  auto disk = new_disk(geometry, 9);
  const auto refused = [&](Fault fault, auto change) {
    auto copy = std::make_shared<SimulatedDisk>(*disk);
    change(copy->bytes);
    return error_of(fault, [&] { FileStore(device(copy), geometry); });
  };
  using Bytes = std::vector<std::byte>;
  CHECK(has(refused(Fault::FOREIGN, [](Bytes& bytes) { std::fill_n(bytes.begin(), 8192, std::byte{7}); }),
            "not an embedding store"));
  CHECK(has(refused(Fault::FOREIGN, [](Bytes& bytes) { bytes.resize(100); }), "too short"));
  CHECK(has(refused(Fault::CORRUPT, [](Bytes& bytes) { bytes.resize(bytes.size() / 2); }), "the file at"));
  CHECK(has(refused(Fault::CORRUPT, [](Bytes& bytes) { bytes[4096 + 20] ^= std::byte{1}; }), "fail their CRC"));
  CHECK(has(refused(Fault::CORRUPT, [](Bytes& bytes) { bytes[8192 + 9] ^= std::byte{1}; }), "directory"));
  Geometry other = geometry;
  other.tables[1].row_count++;
  const std::string tables = error_of(Fault::FOREIGN, [&] { FileStore(device(disk), other); });
  CHECK(has(tables, "table 'second' of 300 rows where table 'second' of 301 rows"));
  other = geometry;
  other.parts[0].dtype = "float16";
  CHECK(has(error_of(Fault::FOREIGN, [&] { FileStore(device(disk), other); }), "weight [15] float32"));
  StoreBuilder unfinished(device(disk), geometry);
  CHECK(has(error_of(Fault::ARGUMENT, [&] { unfinished.finish(); }), "0 rows were given"));
  CHECK(has(error_of(Fault::FOREIGN, [&] { FileStore(device(disk), geometry); }), "cut short"));
}

TEST_CASE("rows out of range are refused before anything is written") {
  const Geometry geometry = small_geometry(600);
  auto disk = new_disk(geometry, 10);
  FileStore store(device(disk), geometry);
  Memory memory(geometry, 1);
  const RowAt bad{600, 0}, good{599, 0};
  CHECK(has(error_of(Fault::ARGUMENT, [&] { store.exchange({}, {&bad, 1}, memory.lines); }), "allowed: below 600"));
  store.exchange({}, {&good, 1}, memory.lines);
}

TEST_CASE("records larger than a block, and tables of no rows") {
  Geometry geometry = small_geometry(64, 16'384);
  geometry.tables.push_back({"empty", 0});
  auto disk = new_disk(geometry, 11);
  std::mt19937_64 random(12);
  Model model(64);
  FileStore store(device(disk), geometry);
  for (std::uint64_t round = 1; round < 40; round++) write_rows(store, geometry, model, random, 32, round);
  check_rows(store, geometry, model);
  store.flush(0);
  check_rows(store, geometry, model);
}
