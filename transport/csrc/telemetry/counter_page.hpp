// SPDX-License-Identifier: Apache-2.0
// Counters that other processes can read. The data plane counts directly in a file of /dev/shm. Nothing is copied, so
// the values are current while a rank computes, and remain after the rank was killed.
//
// Layout, native byte order (docs/reference/counters.md): a header, then records. Each record is a multiple of 8 bytes
// and begins with its length. A record holds the names of a kind of counters, or a block of such counters. There is one
// writer. A reader takes `used_bytes` first, then the records below it. Counters are 64 bits wide, aligned, and written
// by one thread at a time.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace sennit {

inline constexpr uint32_t ANY_PEER = UINT32_MAX;
inline constexpr uint32_t NO_PATH = UINT32_MAX;

class CounterPage {
 public:
  // If the file cannot be made (no /dev/shm, or it is full), the counters are kept in this process's memory.
  CounterPage(uint32_t rank, uint32_t world);
  ~CounterPage();
  CounterPage(const CounterPage&) = delete;
  CounterPage& operator=(const CounterPage&) = delete;

  // Returns zeroed counters that live as long as the page. `Counters` is a struct of 64-bit integers and has
  //   static constexpr const char* GROUP;     the subject, such as "flow"
  //   static std::vector<std::string> names() one for each integer
  template <class Counters>
  Counters& place(uint32_t peer, uint32_t path = NO_PATH) {
    static_assert(std::is_trivially_destructible_v<Counters> && alignof(Counters) == 8 && sizeof(Counters) % 8 == 0);
    return *new (add(Counters::GROUP, &Counters::names, sizeof(Counters) / 8, peer, path)) Counters{};
  }

  // Empty without a file.
  const std::string& path() const { return path_; }

 private:
  struct Header;
  struct Entry;
  using Names = std::vector<std::string> (*)();

  CounterPage() = default;
  void* add(std::string_view group, Names names, size_t count, uint32_t peer, uint32_t path);
  uint32_t names_id(std::string_view group, Names names, size_t count);
  std::byte* append(uint32_t kind, uint32_t names_id, uint32_t peer, uint32_t path, size_t payload_bytes);
  bool grow(size_t bytes);
  void publish(size_t bytes);
  bool create(uint32_t rank, uint32_t world);

  std::string path_;
  int fd_ = -1;  // until the file has its name
  std::byte* base_ = nullptr;
  size_t reserved_bytes_ = 0, file_bytes_ = 0, used_bytes_ = 0;
  std::vector<std::string> groups_;                    // by names_id
  std::vector<std::unique_ptr<uint64_t[]>> unshared_;  // blocks that did not fit into the file
};

// Counters on a page, or without a page in this object.
template <class Counters>
class Counted {
 public:
  explicit Counted(CounterPage* page, uint32_t peer = ANY_PEER, uint32_t path = NO_PATH)
      : counters_(page != nullptr ? page->place<Counters>(peer, path) : own_) {}
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  Counters& operator*() const { return counters_; }
  Counters* operator->() const { return &counters_; }

 private:
  Counters own_{};
  Counters& counters_;
};

// Counters with their names, as a rank reads its own. The names are those of its page (counter_page.hpp).
using CounterList = std::vector<std::pair<std::string, uint64_t>>;

// Returns the integers of a struct of 64-bit integers, in order.
template <class Counters>
auto words_of(const Counters& counters) {
  return std::bit_cast<std::array<uint64_t, sizeof(Counters) / sizeof(uint64_t)>>(counters);
}

template <class Counters>
void append_counters(CounterList& out, const Counters& counters) {
  const auto words = words_of(counters);
  const std::vector<std::string> names = Counters::names();
  for (size_t i = 0; i < words.size(); ++i) out.emplace_back(names.at(i), words[i]);
}

template <class Counters>
void add_counters(Counters& sum, const Counters& one) {
  auto words = words_of(sum);
  const auto more = words_of(one);
  for (size_t i = 0; i < words.size(); ++i) words[i] += more[i];
  sum = std::bit_cast<Counters>(words);
}

}  // namespace sennit
