// SPDX-License-Identifier: Apache-2.0
#include "plan_cache.hpp"

#include <stdexcept>

namespace sennit::runtime {
namespace {

// Everything that a plan depends on.
PlanKey key_of(const PlanShape& shape) {
  const uint64_t flags =
      (shape.separate ? 1u : 0u) | (shape.is_send ? 2u : 0u) | (shape.in_place ? 4u : 0u) | (shape.on_device ? 8u : 0u);
  PlanKey key{static_cast<uint64_t>(shape.collective) | uint64_t{shape.type_code} << 8 | uint64_t{shape.reduce} << 16 |
                  flags << 24 | uint64_t{shape.item_bytes} << 32,
              shape.root | uint64_t{shape.size_class} << 32};
  const std::span<const uint64_t> counts = shape.compiled_counts();
  key.append(counts.begin(), counts.end());
  return key;
}

// Multiply and fold, as wyhash's mixing step. A collision only costs a comparison.
uint64_t mix(uint64_t seed, uint64_t word) {
  const auto product = static_cast<unsigned __int128>(seed ^ 0x9E3779B97F4A7C15ULL) * (word ^ 0xE7037ED1A0B428DBULL);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

size_t PlanCache::Hash::operator()(const PlanKey& key) const {
  uint64_t hash = 0;
  for (const uint64_t word : key) hash = mix(hash, word);
  return hash;
}

PlanCache::PlanCache(CompilePlan compile, size_t max_bytes) : compile_(std::move(compile)), max_bytes_(max_bytes) {}

PlanPointer PlanCache::get(const PlanShape& shape) {
  const PlanKey key = key_of(shape);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto hit = by_key_.find(key); hit != by_key_.end()) {
      entries_.splice(entries_.begin(), entries_, hit->second);
      return hit->second->plan;
    }
  }
  // The lock is not held here: compiling takes the GIL, and the thread that holds the GIL may wait for the lock.
  const std::string bytes = compile_(shape);
  char reason[512] = {};
  sennit_plan* loaded = sennit_plan_load(bytes.data(), bytes.size(), reason, sizeof reason);
  if (loaded == nullptr) throw std::runtime_error(std::string("the core refused a compiled plan: ") + reason);
  const PlanPointer plan(loaded, sennit_plan_release);

  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto raced = by_key_.find(key); raced != by_key_.end()) return raced->second->plan;
  const size_t size_bytes = bytes.size() + key.size() * sizeof(uint64_t) + sizeof(Entry);
  entries_.push_front({key, plan, size_bytes});
  by_key_.emplace(key, entries_.begin());
  held_bytes_ += size_bytes;
  while (held_bytes_ > max_bytes_ && entries_.size() > 1) {
    held_bytes_ -= entries_.back().size_bytes;
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  return plan;
}

}  // namespace sennit::runtime
