// SPDX-License-Identifier: Apache-2.0
// Which path the next batch takes. FlowConfig::path_policy names one of the classes; path_policy.cpp lists them.
//
// A policy decides among the paths that offer themselves (Paths::offers); which ones those are (not bad, not
// to be skipped) is the same for all policies and is Recovery's business.
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
  // At least one path offers itself. `avoided` (or Paths::NONE) is where a packet was lost: the retransmission
  // takes another path, and another rail, where there is one.
  virtual uint32_t choose(uint64_t now_us, const Paths& paths, uint32_t avoided) = 0;
  virtual void on_feedback(const PathFeedback& feedback) = 0;
};

// Whether `path` is another way than `avoided` (or Paths::NONE): another rail, where there are several.
bool is_elsewhere(const Paths& paths, uint32_t path, uint32_t avoided);
// The next path after `cursor` that offers itself, preferably elsewhere.
uint32_t next_offered(const Paths& paths, uint32_t cursor, uint64_t now_us, uint32_t avoided);

// The names there are.
std::span<const std::string_view> path_policies();
// Throws std::invalid_argument naming the allowed names.
std::unique_ptr<PathPolicy> make_path_policy(std::string_view name, uint32_t path_count, uint64_t seed);

std::unique_ptr<PathPolicy> make_reps(uint32_t path_count, uint64_t seed);

}  // namespace sennit::flow
