// SPDX-License-Identifier: Apache-2.0
// Which path the next batch takes. FlowConfig::path_policy names one of the classes. path_policy.cpp lists them.
//
// A policy chooses among the available paths (Paths::offers). Recovery decides which paths these are, for all policies
// alike: those that are neither bad nor to be skipped.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "flow/congestion.hpp"
#include "flow/paths.hpp"

namespace sennit::flow {

class PathPolicy {
 public:
  virtual ~PathPolicy() = default;
  virtual std::string_view name() const = 0;
  // At least one path must be available. `avoided` (or Paths::NONE) is the path on which a packet was lost. Its
  // retransmission takes another path, and another rail if there is one.
  virtual uint32_t choose(uint64_t now_us, const Paths& paths, uint32_t avoided) = 0;
  virtual void on_feedback(const PathFeedback& feedback) = 0;
};

// Whether `path` differs from `avoided` (or Paths::NONE). With several rails: whether its rail does.
bool is_elsewhere(const Paths& paths, uint32_t path, uint32_t avoided);
// The next available path after `cursor`, if possible not `avoided`.
uint32_t next_offered(const Paths& paths, uint32_t cursor, uint64_t now_us, uint32_t avoided);

// The names of all classes.
std::span<const std::string_view> path_policies();
// Throws std::invalid_argument with the allowed names.
std::unique_ptr<PathPolicy> make_path_policy(std::string_view name, uint32_t path_count, uint64_t seed);

std::unique_ptr<PathPolicy> make_reps(uint32_t path_count, uint64_t seed);

}  // namespace sennit::flow
