// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "telemetry/counter_page.hpp"

using namespace sennit;

namespace {

struct Some {
  uint64_t first, second;
  static constexpr const char* GROUP = "some";
  static std::vector<std::string> names() { return {"first", "second"}; }
};

struct Wide {
  uint64_t values[512];
  static constexpr const char* GROUP = "wide";
  static std::vector<std::string> names() { return std::vector<std::string>(512, "value"); }
};

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_locked(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  const bool locked = flock(fd, LOCK_EX | LOCK_NB) != 0;
  close(fd);
  return locked;
}

}  // namespace

TEST_CASE("what is counted is in the file at once") {
  CounterPage page(3, 8);
  REQUIRE_FALSE(page.path().empty());
  Some& counters = page.place<Some>(7, 2);
  CHECK(counters.first == 0);
  counters.first = 0x1122334455667788;
  const std::string bytes = content(page.path());
  CHECK(bytes.find(std::string("some\0first\0second\0", 18)) != std::string::npos);
  CHECK(bytes.find("\x88\x77\x66\x55\x44\x33\x22\x11") != std::string::npos);
  CHECK(is_locked(page.path()));
}

TEST_CASE("a page grows, and what was placed stays where it is") {
  CounterPage page(0, 2);
  Some& first = page.place<Some>(1);
  first.second = 42;
  for (uint32_t i = 0; i < 200; ++i) page.place<Wide>(i).values[511] = i;
  CHECK(first.second == 42);
  CHECK(content(page.path()).size() > 200 * sizeof(Wide));
}

TEST_CASE("the file goes with the page") {
  std::string path;
  {
    CounterPage page(0, 1);
    path = page.path();
  }
  CHECK(access(path.c_str(), F_OK) != 0);
}

TEST_CASE("a killed process leaves its counters, without a lock") {
  int pipe_fds[2];
  REQUIRE(pipe(pipe_fds) == 0);
  const pid_t child = fork();
  if (child == 0) {
    CounterPage page(1, 2);
    page.place<Some>(0).first = 0x5A5A5A5A5A5A5A5A;
    const char text[64] = {};
    std::memcpy(const_cast<char*>(text), page.path().data(), page.path().size());
    if (write(pipe_fds[1], text, sizeof text) != sizeof text) _exit(1);
    _exit(0);  // without destructors, as a killed one
  }
  char path[64] = {};
  REQUIRE(read(pipe_fds[0], path, sizeof path) == sizeof path);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK_FALSE(is_locked(path));
  CHECK(content(path).find("ZZZZZZZZ") != std::string::npos);
  unlink(path);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

TEST_CASE("without a page counters are kept all the same") {
  const Counted<Some> counters(nullptr);
  ++counters->first;
  CHECK((*counters).first == 1);
}

TEST_CASE("counters are listed under the names of their page, and added") {
  Some sum{1, 2};
  add_counters(sum, Some{10, 20});
  CounterList list{{"before", 0}};
  append_counters(list, sum);
  CHECK(list == CounterList{{"before", 0}, {"first", 11}, {"second", 22}});
}
