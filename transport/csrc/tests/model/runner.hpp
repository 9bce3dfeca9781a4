// SPDX-License-Identifier: Apache-2.0
// Runs any number of schedules of a model, on all cores, and prints the seed of the first one that breaks a rule.
//
//   MODEL --schedules 1000000      seeds 1 to 1,000,000
//   MODEL --first N --schedules M  seeds N to N + M - 1
//   MODEL --seed N --verbose       one schedule, every event printed
#pragma once
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "model/violation.hpp"

namespace sennit::model {

constexpr uint64_t BLOCK = 256;  // seeds that a thread takes at a time
// A schedule takes well below a millisecond. Sanitizers and a busy machine turn this into a few milliseconds.
constexpr std::chrono::seconds STUCK{60};

struct Options {
  uint64_t first = 1, schedules = 1'000'000;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  bool is_verbose = false;
};

inline const char* program = "";
inline thread_local uint64_t running_seed = 0;

// A crash inside the flow must name its seed too. Uses only calls that a signal handler may make.
inline void on_crash(int signal_number) {
  std::array<char, 192> text;
  const int length = std::snprintf(text.data(), text.size(), "seed %llu crashed; replay: %s --seed %llu --verbose\n",
                                   static_cast<unsigned long long>(running_seed), program,
                                   static_cast<unsigned long long>(running_seed));
  if (write(STDERR_FILENO, text.data(), static_cast<size_t>(length)) < 0) _exit(3);
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

inline void report(uint64_t seed, const std::string& what, const std::string& world) {
  std::fprintf(stderr, "seed %llu: %s\n%sreplay: %s --seed %llu --verbose\n", static_cast<unsigned long long>(seed),
               what.c_str(), world.c_str(), program, static_cast<unsigned long long>(seed));
}

template <typename World>
class Runner {
 public:
  explicit Runner(const Options& options) : options_(options), current_(options.threads) {}

  bool run(World::Tally& total) {
    std::vector<std::jthread> threads;
    running_ = options_.threads;
    for (unsigned number = 0; number < options_.threads; ++number)
      threads.emplace_back([this, number, &total] { work(number, total); });
    watch();
    return !failed_;
  }

 private:
  void work(unsigned number, World::Tally& total) {
    const auto world = std::make_unique<World>();
    typename World::Tally tally{};
    const uint64_t end = options_.first + options_.schedules;
    while (!failed_) {
      const uint64_t from = next_.fetch_add(BLOCK) + options_.first;
      if (from >= end) break;
      for (uint64_t seed = from; seed < std::min(from + BLOCK, end) && !failed_; ++seed) {
        running_seed = current_[number] = seed;
        try {
          world->run(seed, options_.is_verbose, tally);
        } catch (const Violation& violation) {
          const std::lock_guard lock(mutex_);
          if (!failed_.exchange(true)) report(seed, violation.what(), world->describe());
        }
      }
    }
    const std::lock_guard lock(mutex_);
    total += tally;
    --running_;
    finished_.notify_one();
  }

  // Otherwise an endless loop would be a time-out without a seed.
  void watch() {
    std::unique_lock lock(mutex_);
    std::vector<uint64_t> before(options_.threads);
    while (!finished_.wait_for(lock, STUCK, [this] { return running_ == 0; })) {
      for (unsigned number = 0; number < options_.threads; ++number) {
        const uint64_t seed = current_[number];
        if (seed == before[number]) {
          report(seed, "stuck within one call", "");
          std::_Exit(1);
        }
        before[number] = seed;
      }
    }
  }

  const Options options_;
  std::atomic<uint64_t> next_ = 0;
  std::atomic<bool> failed_ = false;
  std::vector<std::atomic<uint64_t>> current_;
  std::mutex mutex_;
  std::condition_variable finished_;
  unsigned running_ = 0;
};

inline Options parse(int count, char** arguments) {
  Options options;
  const auto fail = [&](const char* what) {
    std::fprintf(stderr, "%s: %s\nusage: %s [--schedules M] [--first N] [--threads T] [--seed N] [--verbose]\n",
                 program, what, program);
    std::exit(2);
  };
  for (int at = 1; at < count; ++at) {
    const std::string option = arguments[at];
    if (option == "--verbose") {
      options.is_verbose = true;
      options.threads = 1;
      continue;
    }
    if (at + 1 == count) fail("an option lacks its number");
    const char* text = arguments[++at];
    const char* const end = text + std::strlen(text);
    uint64_t value = 0;
    if (std::from_chars(text, end, value).ptr != end || text == end) fail("not a number");
    if (option == "--seed") {
      options.first = value;
      options.schedules = options.threads = 1;
    } else if (option == "--first") {
      options.first = value;
    } else if (option == "--schedules" && value != 0) {
      options.schedules = value;
    } else if (option == "--threads" && value != 0 && value <= 1'024) {
      options.threads = static_cast<unsigned>(value);
    } else {
      fail("unknown option, or a number out of range");
    }
  }
  return options;
}

// A World runs one schedule a call of run(seed, is_verbose, tally), which throws Violation. describe() is the schedule
// that ran last, and summary(tally) what became of all.
template <typename World>
int run_model(int count, char** arguments) {
  program = arguments[0];
  const Options options = parse(count, arguments);
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(number, on_crash);
  typename World::Tally tally{};
  const auto began = std::chrono::steady_clock::now();
  const bool is_good = Runner<World>(options).run(tally);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  std::printf("%s: %llu schedules from seed %llu in %.1f s on %u threads: %s\n", is_good ? "ok" : "FAILED",
              static_cast<unsigned long long>(tally.schedules), static_cast<unsigned long long>(options.first), seconds,
              options.threads, World::summary(tally).c_str());
  return is_good ? 0 : 1;
}

}  // namespace sennit::model
