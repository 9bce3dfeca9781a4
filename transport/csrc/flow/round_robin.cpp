// SPDX-License-Identifier: Apache-2.0
// Every path in turn: the baseline, and the best where all paths are equal.
#include "flow/path_policy.hpp"

namespace sennit::flow {
namespace {

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

}  // namespace

std::unique_ptr<PathPolicy> make_round_robin(uint32_t path_count, uint64_t seed) {
  return std::make_unique<RoundRobin>(path_count, seed);
}

}  // namespace sennit::flow
