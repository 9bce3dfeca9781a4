// SPDX-License-Identifier: Apache-2.0
// Loss recovery: which packets are in flight, which are lost, when to look again, and thus the state of the paths.
//
// Driven by transmissions (on_sent, resend), acknowledgements (on_echo, on_acked, end_of_acks) and the timer. Only the
// peer's word condemns a packet, never the time alone (RFC 9002, 6.2). Threads that share a core do not run for
// milliseconds, and a retransmission to such a peer delays its answer further.
//   order     a later packet of the same path was acknowledged, and the reorder window has passed (RFC 8985's RACK,
//             per path: spraying alone causes no retransmission), or the echo of a later mark lacks it. The window
//             is judged by the timer alone, thus after everything that has arrived
//   silence   another packet of the same rail arrived, although it was sent a round trip of this path later: the
//             peer reads a rail's packets in order. Or the whole rail is silent for two rounds of others
//             (docs/decisions/0026). If nothing on the path arrived, the path is bad, and so is its rail if the
//             rail is silent
//   probe     nothing at all is heard: the oldest packet goes again on another path, followed by a mark; then
//             marks go on all rails, ever more rarely. The echo of a mark says when it was sent. An
//             acknowledgement of a packet that was sent twice does not (Karn's ambiguity)
// A bad path carries no data. Control packets probe it until one is answered.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "flow/congestion.hpp"
#include "flow/control.hpp"
#include "flow/mechanisms.hpp"
#include "flow/outstanding.hpp"
#include "flow/path_policy.hpp"
#include "flow/paths.hpp"

namespace sennit::flow {

class Recovery {
 public:
  // Throws std::invalid_argument for an unknown policy or congestion control.
  Recovery(const FlowConfig& config, FlowCounters& counters);

  // How many more packets may be sent now. The only place that decides how much is in flight.
  uint32_t allowance() const { return window_ > in_flight_ ? window_ - in_flight_ : 0; }
  // Send not before this time: the last batch is spread over its part of the round-trip time. 0: no pacing.
  uint64_t paced_until_us() const { return paced_until_us_; }
  bool full() const { return outstanding_.full(); }
  bool has_lost() const { return !lost_.empty(); }
  uint32_t outstanding() const { return outstanding_.size(); }

  uint32_t choose_path(uint64_t now_us);
  // Whether the next batch on `path` may have only one packet, because the path is bad and there is no better one.
  bool is_suspect(uint32_t path) const { return paths_[path].is_bad(); }
  void on_sent(uint64_t now_us, uint32_t path, const DataOut& packet);
  // Returns the oldest lost packet, to be sent again on `path`.
  DataOut resend(uint64_t now_us, uint32_t path);
  // Nothing waits to be sent. The receiver acknowledges a message's end at once, so the probe need not wait for the
  // acknowledgement delay. The end may just have left. Earlier packets are not overdue because of that.
  void set_tail(uint64_t now_us, bool is_tail) {
    if (is_tail && !is_tail_) tail_since_us_ = now_us;
    is_tail_ = is_tail;
  }
  void end_of_batch(uint64_t now_us, uint32_t packets);
  // The probe, if one is due.
  bool take_probe(uint64_t now_us, DataOut& out, uint32_t& path);
  // Returns a path on which a control packet shall mark how far data has been sent. Its echo shows at once which
  // earlier data was lost. Used at a tail with recent losses, behind probes, and if a verdict needs a later packet.
  bool take_tail_mark(uint64_t now_us, uint32_t& path);
  // The path is known to carry nothing any more.
  void on_path_failed(uint64_t now_us, uint32_t path) { make_bad(now_us, path); }
  // Returns a bad path that a control packet shall probe now.
  bool take_path_probe(uint64_t now_us, uint32_t& path);

  // A probe that the flow itself sends: any control that asks for the echo of its path.
  void begin_probe() { ++probe_number_; }
  // The number of the probe or mark taken last.
  uint16_t probe_number() const { return probe_number_; }

  // `control_waited_us`: how long the control that carried the echo was inside this host.
  void on_echo(uint64_t now_us, const Echo& echo, uint64_t control_waited_us);
  void on_acked(uint64_t now_us, uint32_t immediate);
  void end_of_acks(uint64_t now_us);

  uint64_t next_timeout_us() const;
  void on_timeout(uint64_t now_us);
  void clear();

  const RoundTrip& round_trip() const { return round_trip_; }
  const Paths& paths() const { return paths_; }
  const PathPolicy& policy() const { return *policy_; }
  const CongestionControl& congestion() const { return *congestion_; }
  // The newest standing queue that an echo showed since the last take, at least 1. 0: none did.
  uint64_t newest_queue_us() const { return is_overflowing_ ? QUEUE_OVERFLOWED_US : newest_queue_us_; }
  uint64_t take_queue_us();

 private:
  const RoundTrip& round_trip(const Path& path) const {
    return path.round_trip.sampled() ? path.round_trip : round_trip_;
  }
  // How much longer than others a packet may take over this path. Delays inside hosts are left to the rounds.
  uint64_t silence_us(const Path& path) const {
    return (path.fabric_round_trip.sampled() ? path.fabric_round_trip : fabric_round_trip_).silence_us();
  }
  uint64_t probe_at_us() const;
  uint64_t confirm_at_us() const;
  uint64_t reorder_at_us(const Path& path) const;
  bool is_overtaken(const Path& path) const;
  bool is_silent(uint32_t index, const PacketRecord& record) const;
  void note_arrived(uint32_t path, const Transmission& transmission);
  void want_mark(uint32_t path);
  void launch(uint64_t now_us, uint32_t path, uint32_t id);
  void unlink_in_flight(Path& path, uint32_t id);
  void mark_lost(Path& path, uint32_t id);
  void detect_losses(uint64_t now_us, uint32_t index, bool has_read_all);
  void detect_silence(uint64_t now_us, uint32_t index);
  void note_window();
  void note_losses(uint64_t now_us, uint32_t index, uint32_t packets);

  // The states of paths.
  void set_state(Path& path, PathState state);
  void note_arrivals(uint64_t now_us, const Echo& echo, uint64_t fabric_us);
  void on_answer(uint64_t now_us, Path& path);
  void make_bad(uint64_t now_us, uint32_t index);
  void make_rail_bad(uint64_t now_us, uint32_t index, uint64_t silent_since);
  bool marks_tail() const { return is_tail_ && lossy_packets_ != 0 && uses(Mechanism::tail_marks); }
  uint32_t probe_path(uint64_t now_us, uint32_t from, bool is_moved);
  bool is_mark_due(const Path& path) const;
  bool may_probe() const;
  uint64_t next_path_probe_us() const;

  const trace::Ends ends_;
  const uint32_t window_packets_;
  const uint64_t peer_ack_delay_us_;
  FlowCounters& counters_;
  std::vector<PathCounters> own_path_counters_;
  std::vector<PathCounters*> path_counters_;  // by path: where other processes can read them, or own_path_counters_
  Outstanding outstanding_;
  Paths paths_;
  std::unique_ptr<PathPolicy> policy_;
  std::unique_ptr<CongestionControl> congestion_;
  RecordList lost_;
  uint32_t window_ = 0;  // window of the congestion control
  uint32_t in_flight_ = 0;
  uint32_t bad_paths_ = 0;
  uint64_t last_sent_us_ = 0, last_heard_us_ = 0;
  uint32_t unanswered_probes_ = 0;
  bool is_probe_due_ = false, is_mark_wanted_ = false;
  // A round ends when something that was sent in it arrived. So it takes a round-trip time, and the peer has read its
  // sockets meanwhile.
  uint64_t next_serial_ = 1, round_begin_ = 1, previous_begin_ = 1;
  uint64_t heard_below_ = 0;  // two rounds have ended since these were sent
  Transmission arrived_;      // the newest transmission that is known to have arrived
  uint32_t arrived_path_ = 0, probe_turn_ = 0;
  uint64_t paced_until_us_ = 0;
  bool is_tail_ = false, is_overflowing_ = false;
  uint64_t tail_since_us_ = 0;
  uint32_t lossy_packets_ = 0;  // packets to send until losses are forgotten
  uint16_t probe_number_ = 0;
  uint64_t path_probed_us_ = 0;
  uint64_t newest_queue_us_ = 0;
  RoundTrip round_trip_, fabric_round_trip_;  // over all paths, for paths without a sample
};

}  // namespace sennit::flow
