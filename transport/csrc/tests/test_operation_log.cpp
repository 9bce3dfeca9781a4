// SPDX-License-Identifier: Apache-2.0
// The log of operations: a ring, the names of groups, many threads.
#include <doctest/doctest.h>

#include <string_view>
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

}  // namespace

TEST_CASE("the log keeps the last records, and counts those before") {
  OperationLog log;
  int host = 0;
  log.add(&host, numbered(1));
  CHECK(log.read().records.empty());
  log.begin(4);
  CHECK(log.is_on());
  for (uint64_t sequence = 1; sequence <= 10; ++sequence) log.add(&host, numbered(sequence));
  OperationLog::Content content = log.read();
  CHECK(content.lost == 6);
  REQUIRE(content.records.size() == 4);
  for (uint64_t i = 0; i < 4; ++i) CHECK(content.records[i].sequence == 7 + i);
  log.begin(4);
  log.add(&host, numbered(11));
  content = log.read();
  CHECK(content.lost == 0);
  CHECK(content.records.size() == 1);
  log.end();
  CHECK_FALSE(log.is_on());
  log.add(&host, numbered(12));
  CHECK(log.read().records.empty());
}

TEST_CASE("a record has the name that its group has when it ends") {
  OperationLog log;
  int one = 0, other = 0;
  log.name_group(&one, "world");
  log.begin(8);
  log.add(&one, numbered(1));
  log.add(&other, numbered(2));
  log.name_group(&one, "a later group at the same address");
  log.add(&one, numbered(3));
  const OperationLog::Content content = log.read();
  REQUIRE(content.records.size() == 3);
  CHECK(content.groups.at(content.records[0].group) == "world");
  CHECK(content.records[1].group == OperationRecord::NO_GROUP);
  CHECK(content.groups.at(content.records[2].group) == "a later group at the same address");
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
  log.begin(4'000);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&log, thread] {
      for (uint64_t i = 0; i < 1'000; ++i) {
        log.add(&log, numbered(thread * 1'000 + i));
        if (i % 100 == 0) CHECK(log.read().lost == 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<bool> seen(4'000);
  for (const OperationRecord& record : log.read().records) seen[record.sequence] = true;
  CHECK(seen == std::vector<bool>(4'000, true));
}
