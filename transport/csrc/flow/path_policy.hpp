// SPDX-License-Identifier: Apache-2.0
// Which path the next batch takes. FlowConfig::path_policy names one of the classes; path_policy.cpp lists them.
//
// A policy chooses among the paths that offer themselves (Paths::offers). Which paths do, those that are neither bad
// nor to be skipped, is the same for all policies: Recovery decides it.
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
  // At least one path must offer itself. `avoided` (or Paths::NONE) is the path on which a packet was lost: its
  // retransmission takes another path, and another rail where there is one.
  virtual uint32_t choose(uint64_t now_us, const Paths& paths, uint32_t avoided) = 0;
  virtual void on_feedback(const PathFeedback& feedback) = 0;
};

// Whether `path` differs from `avoided` (or Paths::NONE); where there are several rails, whether its rail does.
bool is_elsewhere(const Paths& paths, uint32_t path, uint32_t avoided);
// The next path after `cursor` that offers itself, if possible not `avoided`.
uint32_t next_offered(const Paths& paths, uint32_t cursor, uint64_t now_us, uint32_t avoided);

// All names.
std::span<const std::string_view> path_policies();
// Throws std::invalid_argument naming the allowed names.
std::unique_ptr<PathPolicy> make_path_policy(std::string_view name, uint32_t path_count, uint64_t seed);

std::unique_ptr<PathPolicy> make_reps(uint32_t path_count, uint64_t seed);

}  // namespace sennit::flow
