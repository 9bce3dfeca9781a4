// SPDX-License-Identifier: Apache-2.0
// Tests every backend that this kernel permits on real files.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include "aligned_buffer.hpp"
#include "device.hpp"
#include "store_error.hpp"

using namespace sennit::memory;

namespace {

// A file name in a new folder, which is removed at the end.
struct Folder {
  Folder() {
    char made[] = "/tmp/sennit-memory-XXXXXX";
    REQUIRE(mkdtemp(made) != nullptr);
    path = made;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(const std::string& name) const { return path + "/" + name; }
  std::string path;
};

void write_and_read(const std::string& backend) {
  const Folder folder;
  FileOptions options;
  options.backend = backend;
  options.depth = 8;
  constexpr std::size_t BLOCKS = 300, BLOCK = 4096;
  OpenedFile opened;
  try {
    opened = create_file(folder.file("rows"), BLOCKS * BLOCK, options);
  } catch (const StoreError& error) {
    if (backend == "io_uring" && error.fault == Fault::ARGUMENT) {
      MESSAGE("skipped: ", error.what());
      return;
    }
    throw;
  }
  Device& device = *opened.device;
  CHECK(std::string(device.backend_name()) == backend);
  AlignedBuffer written(BLOCKS * BLOCK), found(BLOCKS * BLOCK);
  std::mt19937_64 random(1);
  for (std::size_t n = 0; n < written.size_bytes(); n++) written.data()[n] = static_cast<std::byte>(random());
  std::vector<Operation> operations;
  for (std::size_t n = 0; n < BLOCKS; n++)
    operations.push_back({Operation::Kind::WRITE, n * BLOCK, written.data() + n * BLOCK, BLOCK, 0});
  std::shuffle(operations.begin(), operations.end(), random);
  device.run(operations);
  device.sync();
  operations.clear();
  for (std::size_t n = 0; n < BLOCKS; n++)
    operations.push_back({Operation::Kind::READ, n * BLOCK, found.data() + n * BLOCK, BLOCK, 0});
  std::shuffle(operations.begin(), operations.end(), random);
  device.run(operations);
  CHECK(std::memcmp(written.data(), found.data(), BLOCKS * BLOCK) == 0);
  CHECK(device.counters().reads == BLOCKS);
  try {
    device.read(BLOCKS * BLOCK, {found.data(), BLOCK});
    FAIL("read past the end");
  } catch (const StoreError& error) {
    CHECK(std::string(error.what()).find("offset " + std::to_string(BLOCKS * BLOCK)) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("io_uring moves what it is asked for") { write_and_read("io_uring"); }

TEST_CASE("threads move what they are asked for") { write_and_read("threads"); }

TEST_CASE("a file is locked, never overwritten, and cut behind its back is an error with an offset") {
  const Folder folder;
  const std::string path = folder.file("rows");
  const OpenedFile opened = create_file(path, 1 << 20, {});
  const auto error_number_of = [](auto function) {
    try {
      function();
    } catch (const StoreError& error) {
      return error.error_number;
    }
    return 0;
  };
  CHECK(error_number_of([&] { create_file(path, 1 << 20, {}); }) == EEXIST);
  CHECK(error_number_of([&] { open_file(path, {}); }) == EWOULDBLOCK);
  CHECK(error_number_of([&] { open_file(folder.path, {}); }) == EISDIR);
  CHECK(error_number_of([&] { open_file(folder.file("none"), {}); }) == ENOENT);
  REQUIRE(truncate(path.c_str(), 8192) == 0);
  AlignedBuffer buffer(16'384);
  try {
    opened.device->read(0, buffer.span());
    FAIL("read what is no longer there");
  } catch (const StoreError& error) {
    CHECK(std::string(error.what()).find("at offset 8192: the device moved 0 bytes") != std::string::npos);
  }
}
