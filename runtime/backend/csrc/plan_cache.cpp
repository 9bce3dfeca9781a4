// SPDX-License-Identifier: Apache-2.0
#include "plan_cache.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace sennit::runtime {
namespace {

using KeyHead = std::array<uint64_t, 2>;

KeyHead key_head(const PlanShape& shape) {
  const uint64_t flags =
      (shape.separate ? 1u : 0u) | (shape.is_send ? 2u : 0u) | (shape.in_place ? 4u : 0u) | (shape.on_device ? 8u : 0u);
  return {static_cast<uint64_t>(shape.collective) | uint64_t{shape.type_code} << 8 | uint64_t{shape.reduce} << 16 |
              flags << 24 | uint64_t{shape.item_bytes} << 32,
          uint64_t{shape.root} | static_cast<uint64_t>(shape.compiled_counts().size()) << 32};
}

// Multiply and fold, as wyhash's mixing step. A collision only costs a comparison.
uint64_t mix(uint64_t seed, uint64_t word) {
  const auto product = static_cast<unsigned __int128>(seed ^ 0x9E3779B97F4A7C15ULL) * (word ^ 0xE7037ED1A0B428DBULL);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t hash_key(const KeyHead& head, std::span<const uint64_t> counts) {
  uint64_t hash = mix(mix(0, head[0]), head[1]);
  for (const uint64_t count : counts) hash = mix(hash, count);
  return hash;
}

}  // namespace

PlanCache::PlanCache(CompilePlan compile, size_t max_bytes) : compile_(std::move(compile)), max_bytes_(max_bytes) {}

PlanCache::Entries::iterator PlanCache::find(uint64_t hash, std::span<const uint64_t> head,
                                             std::span<const uint64_t> counts) {
  auto [first, last] = by_hash_.equal_range(hash);
  for (; first != last; ++first) {
    const std::vector<uint64_t>& key = first->second->key;
    if (key.size() == head.size() + counts.size() && std::equal(head.begin(), head.end(), key.begin()) &&
        std::equal(counts.begin(), counts.end(), key.begin() + static_cast<std::ptrdiff_t>(head.size()))) {
      return first->second;
    }
  }
  return entries_.end();
}

PlanPointer PlanCache::get(const PlanShape& shape) {
  const KeyHead head = key_head(shape);
  const std::span<const uint64_t> counts = shape.compiled_counts();
  const uint64_t hash = hash_key(head, counts);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto hit = find(hash, head, counts); hit != entries_.end()) {
      if (hit != entries_.begin()) entries_.splice(entries_.begin(), entries_, hit);
      return hit->plan;
    }
  }
  // The lock is not held here: compiling takes the GIL, and the thread that holds the GIL may wait for the lock.
  const std::string bytes = compile_(shape);
  char reason[512] = {};
  sennit_plan* loaded = sennit_plan_load(bytes.data(), bytes.size(), reason, sizeof reason);
  if (loaded == nullptr) throw std::runtime_error(std::string("the core refused a compiled plan: ") + reason);
  PlanPointer plan(loaded, sennit_plan_release);

  const std::lock_guard<std::mutex> lock(mutex_);
  if (auto raced = find(hash, head, counts); raced != entries_.end()) return raced->plan;
  std::vector<uint64_t> key(head.begin(), head.end());
  key.insert(key.end(), counts.begin(), counts.end());
  const size_t size_bytes = bytes.size() + key.size() * sizeof(uint64_t) + sizeof(Entry);
  entries_.push_front(Entry{hash, std::move(key), plan, size_bytes});
  by_hash_.emplace(hash, entries_.begin());
  held_bytes_ += size_bytes;
  while (held_bytes_ > max_bytes_ && entries_.size() > 1) drop_oldest();
  return plan;
}

void PlanCache::drop_oldest() {
  const auto oldest = std::prev(entries_.end());
  auto [first, last] = by_hash_.equal_range(oldest->hash);
  for (; first != last; ++first) {
    if (first->second == oldest) {
      by_hash_.erase(first);
      break;
    }
  }
  held_bytes_ -= oldest->size_bytes;
  entries_.erase(oldest);
}

}  // namespace sennit::runtime
