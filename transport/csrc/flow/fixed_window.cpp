// SPDX-License-Identifier: Apache-2.0
// Always the whole window: for hosts that share no queue with anybody, and as a baseline.
#include "flow/congestion.hpp"

namespace sennit::flow {
namespace {

class FixedWindow final : public CongestionControl {
 public:
  explicit FixedWindow(const CongestionLimits& limits) : window_packets_(limits.window_max_packets) {}
  std::string_view name() const override { return "fixed"; }
  uint32_t window_packets() const override { return window_packets_; }
  bool paces() const override { return false; }
  void on_feedback(const PathFeedback&, uint32_t, uint32_t) override {}
  void on_losses(uint64_t, uint32_t, uint32_t) override {}

 private:
  const uint32_t window_packets_;
};

}  // namespace

std::unique_ptr<CongestionControl> make_fixed_window(const CongestionLimits& limits) {
  return std::make_unique<FixedWindow>(limits);
}

}  // namespace sennit::flow
