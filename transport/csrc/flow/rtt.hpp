// SPDX-License-Identifier: Apache-2.0
// Round-trip time and retransmission timeout, RFC 6298, in microseconds.
#pragma once
#include <algorithm>
#include <cstdint>

namespace sennit::flow {

// RFC 6298 (2.4) asks for 1 s, which suits the Internet. Here no timer declares a packet lost. After this time a side
// only asks again for what it misses. 5 ms is more than one scheduling slice of a peer that shares its core.
inline constexpr uint64_t RTO_MIN_US = 5'000;
// Before the first sample (RFC 6298 (2.1): 1 s).
inline constexpr uint64_t RTO_INITIAL_US = 20'000;
// RFC 6298 (2.5) allows 60 s, but a path that comes back must be found long before the peer counts as lost.
inline constexpr uint64_t RTO_MAX_US = 1'000'000;
// RFC 6298's G: ports are driven by a poll loop whose rounds take up to this long.
inline constexpr uint64_t CLOCK_GRANULARITY_US = 100;
// The minimum probe timeout. The timeout is 2 * SRTT (RFC 8985, 7.2) without the variation, which a single pause of the
// peer makes large. A probe costs two packets.
inline constexpr uint64_t PTO_MIN_US = 350;
// Smallest reorder window of the RACK check (RFC 8985, 6.2: a quarter of the round trip).
inline constexpr uint64_t REORDER_MIN_US = 50;
// The delay that a host's network stack may add to one path and not to another.
inline constexpr uint64_t SILENCE_MIN_US = 300;

// A route may become longer, so a minimum older than this is forgotten (BBR's min_rtt filter keeps 10 s).
inline constexpr uint64_t MINIMUM_AGE_US = 5'000'000;

// The minimum over the last one to two MINIMUM_AGE_US.
class RecentMinimum {
 public:
  void add(uint64_t now_us, uint64_t sample_us) {
    if (now_us >= since_us_ + MINIMUM_AGE_US) {
      older_us_ = now_us >= since_us_ + 2 * MINIMUM_AGE_US ? UINT64_MAX : newer_us_;
      newer_us_ = UINT64_MAX;
      since_us_ = now_us;
    }
    newer_us_ = std::min(newer_us_, sample_us);
  }
  uint64_t min_us() const { return std::min(older_us_, newer_us_); }

 private:
  uint64_t older_us_ = UINT64_MAX, newer_us_ = UINT64_MAX, since_us_ = 0;
};

class RoundTrip {
 public:
  bool sampled() const { return min_us_ != UINT64_MAX; }
  uint64_t smoothed_us() const { return smoothed_8_ / 8; }
  uint64_t min_us() const { return sampled() ? min_us_ : 0; }

  void add_sample(uint64_t sample_us) {
    sample_us = std::min(std::max<uint64_t>(sample_us, 1), RTO_MAX_US);
    if (!sampled()) {  // (2.2)
      smoothed_8_ = 8 * sample_us;
      variation_4_ = 2 * sample_us;
    } else {  // (2.3): alpha 1/8, beta 1/4, kept scaled by their inverse as in Jacobson's appendix
      const uint64_t smoothed = smoothed_8_ / 8;
      const uint64_t error = smoothed > sample_us ? smoothed - sample_us : sample_us - smoothed;
      variation_4_ = variation_4_ - variation_4_ / 4 + error;
      smoothed_8_ = smoothed_8_ - smoothed + sample_us;
    }
    min_us_ = std::min(min_us_, sample_us);
  }

  uint64_t rto_us() const {
    if (!sampled()) return RTO_INITIAL_US;
    return std::clamp(smoothed_us() + std::max(variation_4_, CLOCK_GRANULARITY_US), RTO_MIN_US, RTO_MAX_US);
  }
  uint64_t pto_us(uint64_t ack_delay_us) const { return std::max(2 * smoothed_us() + ack_delay_us, PTO_MIN_US); }
  // How much longer a packet of this path may take than packets of other paths.
  uint64_t silence_us() const {
    return std::max(smoothed_us() + std::max(variation_4_, CLOCK_GRANULARITY_US), SILENCE_MIN_US);
  }
  // Once a later packet of its path has arrived, a packet is lost this long after it was sent.
  uint64_t reorder_deadline_us() const { return smoothed_us() + std::max(smoothed_us() / 4, REORDER_MIN_US); }

 private:
  uint64_t smoothed_8_ = 0, variation_4_ = 0, min_us_ = UINT64_MAX;
};

}  // namespace sennit::flow
