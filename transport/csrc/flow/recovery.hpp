// SPDX-License-Identifier: Apache-2.0
// Loss recovery: which packets are in flight, which of them are lost, when to look again.
//
// Driven by transmissions (on_sent, resend), acknowledgements (on_echo, on_acked, end_of_acks) and the
// timer. Three ways to find a loss, from fast to last resort:
//   order     a later packet of the same path was acknowledged, by 3 packets or by the reorder window
//             (RFC 8985's RACK, per path: spraying alone causes no retransmission)
//   probe     no acknowledgement for 2 round trips: the newest packet of the path is sent again on it, and
//             its acknowledgement shows what was lost before it (RFC 8985, 7)
//   timeout   RFC 6298 with back-off: all on the path is lost, the path is suspended
#pragma once
#include <cstdint>

#include "flow/outstanding.hpp"
#include "flow/paths.hpp"

namespace sennit::flow {

class Recovery {
 public:
  Recovery(const FlowConfig& config, FlowCounters& counters);

  // How many more packets may be sent now. The one place that decides how much is in flight: a fixed
  // window, and a few packets only after a timeout until the peer is heard again.
  uint32_t allowance() const;
  bool full() const { return outstanding_.full(); }
  bool has_lost() const { return !lost_.empty(); }
  uint32_t outstanding() const { return outstanding_.size(); }

  uint32_t choose_path(uint64_t now_us);
  // Most packets of the next batch on `path`: one while the path has not answered since its timeout.
  bool is_suspect(uint32_t path) const { return paths_[path].timeouts != 0; }
  void on_sent(uint64_t now_us, uint32_t path, const DataOut& packet);
  // The oldest lost packet, sent again on `path`.
  DataOut resend(uint64_t now_us, uint32_t path);
  // The tail probe of some path, if one is due.
  bool take_probe(uint64_t now_us, DataOut& out, uint32_t& path);

  void on_echo(uint64_t now_us, uint32_t immediate, uint64_t delay_us);
  void on_acked(uint64_t now_us, uint32_t immediate);
  void end_of_acks(uint64_t now_us);

  uint64_t next_timeout_us() const;
  void on_timeout(uint64_t now_us);
  void clear();

  const RoundTrip& round_trip() const { return round_trip_; }
  const Paths& paths() const { return paths_; }

 private:
  const RoundTrip& round_trip(const Path& path) const {
    return path.round_trip.sampled() ? path.round_trip : round_trip_;
  }
  uint64_t timeout_at_us(const Path& path) const;
  uint64_t probe_at_us(const Path& path) const;
  uint64_t reorder_at_us(const Path& path) const;
  void launch(uint64_t now_us, uint32_t path, uint32_t id);
  void mark_lost(Path& path, uint32_t id);
  void detect_losses(uint64_t now_us, Path& path);
  void time_out(uint64_t now_us, Path& path);

  const uint32_t window_packets_;
  const uint64_t peer_ack_delay_us_;
  FlowCounters& counters_;
  Outstanding outstanding_;
  Paths paths_;
  RecordList lost_;
  uint32_t in_flight_ = 0;
  uint32_t unanswered_timeouts_ = 0;  // on any path, since the last acknowledgement on any path
  uint64_t last_ack_us_ = 0;          // on any path
  RoundTrip round_trip_;              // over all paths: for those without a sample
};

}  // namespace sennit::flow
