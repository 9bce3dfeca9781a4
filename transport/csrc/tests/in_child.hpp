// SPDX-License-Identifier: Apache-2.0
// Runs part of a test in a forked child, which may do what the test's own process must not.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace sennit::test {

// Checks of a child. The first that fails ends it, with its text.
struct Child {
  int report;
  [[noreturn]] void fail(std::string_view what) const {
    [[maybe_unused]] const ssize_t written = write(report, what.data(), what.size());
    _exit(1);
  }
};
#define CHILD_REQUIRE(child, condition) \
  if (!(condition)) (child).fail(#condition)

// A child that does not end within a minute is ended. Children of children work as well.
template <class Body>
std::string failure_in_child(Body body) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t process = fork();
  if (process < 0) return "no process";
  if (process == 0) {
    close(ends[0]);
    alarm(60);
    body(Child{ends[1]});
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char bytes[256];
  for (ssize_t count; (count = read(ends[0], bytes, sizeof bytes)) > 0;) text.append(bytes, static_cast<size_t>(count));
  close(ends[0]);
  int status = 0;
  if (waitpid(process, &status, 0) != process) return "lost the child";
  if (status == 0 && text.empty()) return "";
  return text.empty() ? "the child ended with status " + std::to_string(status) : text;
}

template <class Body>
void check_in_child(Body body) {
  const std::string failure = failure_in_child(body);
  CHECK(failure == "");
}

}  // namespace sennit::test
