// SPDX-License-Identifier: Apache-2.0
#include "flow/path_policy.hpp"

#include "flow/registry.hpp"

namespace sennit::flow {
namespace {

// Every path in turn: the baseline, and the best policy if all paths are equal.
class RoundRobin final : public PathPolicy {
 public:
  RoundRobin(uint32_t path_count, uint64_t seed) : cursor_(static_cast<uint32_t>(seed % path_count)) {}
  std::string_view name() const override { return "round_robin"; }

  uint32_t choose(uint64_t now_us, const Paths& paths, uint32_t avoided) override {
    return cursor_ = next_offered(paths, cursor_, now_us, avoided);
  }
  void on_feedback(const PathFeedback&) override {}

 private:
  uint32_t cursor_;
};

std::unique_ptr<PathPolicy> make_round_robin(uint32_t path_count, uint64_t seed) {
  return std::make_unique<RoundRobin>(path_count, seed);
}

constexpr Registry REGISTRY(std::to_array<Named<decltype(&make_reps)>>({
    {"round_robin", make_round_robin},
    {"reps", make_reps},
}));

}  // namespace

bool is_elsewhere(const Paths& paths, uint32_t path, uint32_t avoided) {
  if (avoided == Paths::NONE) return true;
  return path != avoided && (paths.rail_count() == 1 || paths.rail_of(path) != paths.rail_of(avoided));
}

uint32_t next_offered(const Paths& paths, uint32_t cursor, uint64_t now_us, uint32_t avoided) {
  uint32_t fallback = Paths::NONE;
  for (uint32_t step = 1; step <= paths.count(); ++step) {
    const uint32_t candidate = (cursor + step) % paths.count();
    if (!paths.offers(candidate, now_us)) continue;
    if (is_elsewhere(paths, candidate, avoided)) return candidate;
    if (fallback == Paths::NONE || fallback == avoided) fallback = candidate;
  }
  return fallback;
}

std::span<const std::string_view> path_policies() { return REGISTRY.names; }

std::unique_ptr<PathPolicy> make_path_policy(std::string_view name, uint32_t path_count, uint64_t seed) {
  return REGISTRY.find("path_policy", name)(path_count, seed);
}

}  // namespace sennit::flow
