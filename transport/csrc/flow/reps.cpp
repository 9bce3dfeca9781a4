// SPDX-License-Identifier: Apache-2.0
// Recycled entropies: a path that just delivered packets without a mark is used again (Bonato et al., REPS: Recycled
// Entropy Packet Spraying for Adaptive Load Balancing and Failure Mitigation, arXiv 2407.21625).
//
// Unmarked arrivals put their path into a small ring. A batch takes one of the two oldest paths of the ring: the one
// with the smaller measured delay. So a slow path, which returns fewer entropies, gets fewer batches. When the ring is
// empty, and for every eighth batch, the paths take turns: a path that is not used returns nothing, and would stay
// forgotten after it recovers.
#include <algorithm>
#include <array>
#include <vector>

#include "flow/path_policy.hpp"

namespace sennit::flow {
namespace {

constexpr uint32_t RING_COUNT = 64;
constexpr uint32_t EXPLORE_EVERY = 8;
// The mean batch size is taken over this many recent batches.
constexpr uint64_t BATCHES_REMEMBERED = 1'024;

class Reps final : public PathPolicy {
 public:
  Reps(uint32_t path_count, uint64_t seed) : returned_(path_count), cursor_(static_cast<uint32_t>(seed % path_count)) {}
  std::string_view name() const override { return "reps"; }

  uint32_t choose(uint64_t now_us, const Paths& paths, uint32_t avoided) override {
    ++batches_;
    if (++choices_ % EXPLORE_EVERY != 0) {
      const uint32_t first = take(now_us, paths, avoided);
      if (first != Paths::NONE) {
        const uint32_t second = take(now_us, paths, avoided);
        if (second == Paths::NONE) return first;
        // The path that is not used goes back to its place in front.
        const bool is_second_faster = paths[second].round_trip.smoothed_us() < paths[first].round_trip.smoothed_us();
        put_back(is_second_faster ? first : second);
        return is_second_faster ? second : first;
      }
    }
    return cursor_ = next_offered(paths, cursor_, now_us, avoided);
  }

  void on_feedback(const PathFeedback& feedback) override {
    arrived_packets_ += feedback.received_packets;
    if (feedback.marked_packets != 0) {
      returned_[feedback.path] = 0;
      return;
    }
    uint32_t& returned = returned_[feedback.path];
    const uint32_t batch_packets = mean_batch_packets();
    for (returned += feedback.received_packets; returned >= batch_packets; returned -= batch_packets)
      put(feedback.path);
  }

 private:
  // How many packets a batch has depends on the port: a NIC sends them one by one, a GSO send carries 64 KiB. Batches
  // in flight count as if they had returned nothing, so that entropies return too early rather than never.
  uint32_t mean_batch_packets() {
    if (batches_ >= BATCHES_REMEMBERED) {
      batches_ /= 2;
      arrived_packets_ /= 2;
    }
    return static_cast<uint32_t>(std::max<uint64_t>(arrived_packets_ / std::max<uint64_t>(batches_, 1), 1));
  }
  void put(uint32_t path) {
    if (end_ - first_ == RING_COUNT) ++first_;
    ring_[end_++ % RING_COUNT] = path;
  }
  void put_back(uint32_t path) { ring_[--first_ % RING_COUNT] = path; }
  // Drops paths that have since become bad, are to be skipped or have reached their limit.
  uint32_t take(uint64_t now_us, const Paths& paths, uint32_t avoided) {
    while (first_ != end_) {
      const uint32_t path = ring_[first_++ % RING_COUNT];
      if (paths.offers(path, now_us) && is_elsewhere(paths, path, avoided)) return path;
    }
    return Paths::NONE;
  }
  std::array<uint32_t, RING_COUNT> ring_{};
  uint64_t first_ = RING_COUNT, end_ = RING_COUNT;  // never below 0 by put_back
  std::vector<uint32_t> returned_;                  // by path: arrivals that do not make up a batch yet
  uint32_t cursor_;
  uint64_t choices_ = 0;
  uint64_t batches_ = 0, arrived_packets_ = 0;
};

}  // namespace

std::unique_ptr<PathPolicy> make_reps(uint32_t path_count, uint64_t seed) {
  return std::make_unique<Reps>(path_count, seed);
}

}  // namespace sennit::flow
