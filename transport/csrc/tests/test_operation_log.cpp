// SPDX-License-Identifier: Apache-2.0
// The log of operations: a ring in a file, the names of groups, many threads.
#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <algorithm>

#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "executor/operation_log.hpp"

using namespace sennit;

namespace {

OperationRecord numbered(uint64_t sequence) {
  OperationRecord record;
  record.sequence = sequence;
  return record;
}

class File {
 public:
  explicit File(size_t room) : room_(room), fd_(memfd_create("test", MFD_CLOEXEC)) {
    REQUIRE(ftruncate(fd_, static_cast<off_t>(room * sizeof(OperationRecord))) == 0);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(fd_); }

  int fd() const { return fd_; }
  // As another process reads it: in the order of their numbers.
  std::vector<OperationRecord> records() const {
    std::vector<OperationRecord> found(room_);
    const auto size = static_cast<ssize_t>(room_ * sizeof(OperationRecord));
    REQUIRE(pread(fd_, found.data(), static_cast<size_t>(size), 0) == size);
    std::erase_if(found, [](const OperationRecord& one) { return one.number == 0; });
    std::sort(found.begin(), found.end(), [](const auto& one, const auto& other) { return one.number < other.number; });
    return found;
  }

 private:
  size_t room_;
  int fd_;
};

}  // namespace

TEST_CASE("the file has the last records, and their numbers say how many there were") {
  OperationLog log;
  const File first(4), second(4);
  int host = 0;
  log.add(&host, numbered(1));
  log.begin(first.fd(), 0, 4);
  CHECK(log.is_on());
  CHECK(first.records().empty());
  for (uint64_t sequence = 1; sequence <= 10; ++sequence) log.add(&host, numbered(sequence));
  std::vector<OperationRecord> found = first.records();
  REQUIRE(found.size() == 4);
  for (uint64_t i = 0; i < 4; ++i) CHECK((found[i].sequence == 7 + i && found[i].number == 7 + i));
  log.begin(second.fd(), 0, 4);
  log.add(&host, numbered(11));
  found = second.records();
  REQUIRE(found.size() == 1);
  CHECK((found[0].sequence == 11 && found[0].number == 1));
  log.end();
  CHECK_FALSE(log.is_on());
  log.add(&host, numbered(12));
  CHECK(second.records().size() == 1);
}

TEST_CASE("a file that ends before the ring, or is none, is refused, and the log stays as it was") {
  OperationLog log;
  const File file(4);
  log.begin(file.fd(), 0, 4);
  CHECK_THROWS_AS(log.begin(file.fd(), 0, 5), std::invalid_argument);
  CHECK_THROWS_AS(log.begin(file.fd(), 4'096, 4), std::invalid_argument);
  CHECK_THROWS_AS(log.begin(file.fd(), 0, 0), std::invalid_argument);
  CHECK_THROWS_AS(log.begin(file.fd(), 8, 3), std::system_error);
  CHECK_THROWS_AS(log.begin(-1, 0, 4), std::system_error);
  log.add(&log, numbered(1));
  CHECK(file.records().size() == 1);
}

TEST_CASE("a record has the name that its group has when it ends") {
  OperationLog log;
  const File file(8);
  int one = 0, other = 0;
  log.name_group(&one, "world");
  log.begin(file.fd(), 0, 8);
  log.add(&one, numbered(1));
  log.add(&other, numbered(2));
  log.name_group(&one, "a later group at the same address, of a long name");
  log.add(&one, numbered(3));
  const std::vector<OperationRecord> found = file.records();
  REQUIRE(found.size() == 3);
  CHECK(std::string_view(found[0].group.data()) == "world");
  CHECK(std::string_view(found[1].group.data()).empty());
  CHECK(std::string_view(found[2].group.data()) == "a later group at the same address, of a long na");
}

TEST_CASE("the first wait counts, and names are cut") {
  OperationTimes times;
  times.note_post();
  times.note_wait();
  const uint64_t first_ns = times.wait_ns;
  times.note_wait();
  OperationRecord record;
  record.set(times, "the name of an algorithm that nobody would want to read to its end");
  CHECK(record.posted_ns <= first_ns);
  CHECK(record.wait_ns == first_ns);
  CHECK(record.waiting_thread == record.posting_thread);
  CHECK(std::string_view(record.name.data()) == "the name of an algorithm that nobody wo");
}

TEST_CASE("operations of several threads are all there") {
  OperationLog log;
  const File file(4'000);
  log.begin(file.fd(), 0, 4'000);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&log, thread] {
      for (uint64_t i = 0; i < 1'000; ++i) log.add(&log, numbered(thread * 1'000 + i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<OperationRecord> found = file.records();
  REQUIRE(found.size() == 4'000);
  std::vector<bool> seen(4'000);
  for (const OperationRecord& record : found) seen[record.sequence] = true;
  CHECK(seen == std::vector<bool>(4'000, true));
}
