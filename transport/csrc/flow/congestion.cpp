// SPDX-License-Identifier: Apache-2.0
#include "flow/congestion.hpp"

#include "flow/registry.hpp"

namespace sennit::flow {
namespace {

// Always the whole window: for hosts that share no queue with others, and as a baseline.
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

std::unique_ptr<CongestionControl> make_fixed_window(const CongestionLimits& limits) {
  return std::make_unique<FixedWindow>(limits);
}

constexpr Registry REGISTRY(std::to_array<Named<decltype(&make_swift)>>({
    {"dctcp", make_dctcp},
    {"fixed", make_fixed_window},
    {"swift", make_swift},
}));

}  // namespace

std::span<const std::string_view> congestion_controls() { return REGISTRY.names; }

std::unique_ptr<CongestionControl> make_congestion_control(std::string_view name, const CongestionLimits& limits) {
  return REGISTRY.find("congestion", name)(limits);
}

}  // namespace sennit::flow
