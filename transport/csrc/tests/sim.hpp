// SPDX-License-Identifier: Apache-2.0
// The simulator port: flows on links of virtual time. A run is a pure function of its seed.
//
// Packets are encoded as on the wire and decoded again, ICRC included, so that corruption is met as in a real port. The
// simulator is event-driven: step() jumps to the next arrival or timer. Links are one-way, and any number of flows may
// share them. Path p of a flow uses the p-th of its links, modulo their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <queue>
#include <span>
#include <vector>

#include "flow/flow.hpp"
#include "wire/icrc.hpp"

namespace sennit {

// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
class SimRandom {
 public:
  explicit SimRandom(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t mixed = state_ += 0x9E37'79B9'7F4A'7C15;
    mixed = (mixed ^ mixed >> 30) * 0xBF58'476D'1CE4'E5B9;
    mixed = (mixed ^ mixed >> 27) * 0x94D0'49BB'1331'11EB;
    return mixed ^ mixed >> 31;
  }
  uint64_t below(uint64_t bound) { return bound == 0 ? 0 : next() % bound; }
  bool chance(double fraction) { return static_cast<double>(next() >> 11) * 0x1p-53 < fraction; }

 private:
  uint64_t state_;
};

struct SimWindow {
  uint64_t from_us, until_us;
};

struct SimLinkConfig {
  uint64_t delay_us = 10;
  uint64_t jitter_us = 0;            // uniform extra delay: reorders within the link
  uint64_t rate_bytes_per_s = 0;     // 0: no limit
  uint64_t queue_limit_bytes = 0;    // further packets are dropped; 0: no limit. Needs a rate
  uint64_t ecn_threshold_bytes = 0;  // packets that find more than this in the queue are marked; 0: none. Needs a rate
  double loss_fraction = 0;
  double duplicate_fraction = 0;
  double corrupt_fraction = 0;           // one flipped bit
  std::vector<SimWindow> black_holes{};  // everything is lost
};

// The thread that drives a flow does not run. Arrivals wait in its sockets, one for each rail, and no timer is checked.
// Then the thread continues where it was.
struct SimPause {
  enum class Where : uint8_t {
    outside,    // of the port
    receiving,  // it has read its first `sockets_read` sockets in this round, and found them empty
    sending,    // it has a batch, with its time, but has not given it to the network; from_us or later
  };
  uint64_t from_us, until_us;
  Where where = Where::outside;
  uint32_t sockets_read = 0;
};

struct SimCounters {
  uint64_t sent, lost, queue_drops, marked, duplicated, corrupted, delivered, refused;
};

class SimNetwork {
 public:
  // Called after every event of a flow, to poll its events and give it new work.
  using Progress = std::function<void(uint64_t now_us)>;

  explicit SimNetwork(uint64_t seed) : random_(seed) {}
  // Like a port that receives straight into predicted places: garbage overwrites some of them before every arrival.
  void set_scribbling(bool is_on) { scribbling_ = is_on; }

  uint32_t add_link(const SimLinkConfig& config);
  // Two flows, the first to the second over `there`, back over `back`. They outlive the network's last step.
  void connect(flow::Flow& first, flow::Flow& second, std::span<const uint32_t> there, std::span<const uint32_t> back,
               Progress progress_first, Progress progress_second);

  // For the endpoints in the order of connect(). `pauses` are in order of time and do not overlap. Path p arrives at
  // socket p mod `socket_count`. Call it before the first step.
  void set_pauses(uint32_t endpoint, uint32_t socket_count, std::vector<SimPause> pauses);

  uint64_t now_us() const { return now_us_; }
  // Lets every flow send what it has. Call it after a flow got work from outside of its Progress.
  void kick();
  // Somebody else's packet on a link, which shares its queue and has no loss of its own: when it arrives. Nothing: the
  // queue was full, or would have marked it. It knows no ECN, and then a router drops (RFC 3168, 5).
  std::optional<uint64_t> carry(uint32_t link, size_t size_bytes);
  // Calls back at `at_us` or, if that is over, next.
  void call_at(uint64_t at_us, std::function<void()> call);
  // What waits in front of a packet that comes to the link now.
  uint64_t queued_bytes(uint32_t link) const;
  // Handles the next event. False: nothing will ever happen again.
  bool step();
  // Steps through all events up to `until_us`, and lets the time pass until then.
  void advance(uint64_t until_us);
  // Steps until `done`. False if virtual time passes `deadline_us`, or if there are no more events before.
  bool run(uint64_t deadline_us, const std::function<bool()>& done);

  // A hash over every packet's time, way, kind and fate. Equal for equal seeds.
  uint64_t trace_hash() const { return trace_hash_; }
  const SimCounters& counters() const { return counters_; }

 private:
  struct Link {
    SimLinkConfig config;
    uint64_t busy_until_ns = 0;
  };
  struct Endpoint {
    flow::Flow* flow;
    Progress progress;
    std::vector<uint32_t> links;
    uint32_t peer;
    wire::NetworkCrc crc;  // of what it sends
    uint32_t next_psn;
    uint64_t wake_us;
    std::vector<SimPause> pauses;  // the current and the next ones
    bool is_paused = false;
    std::vector<std::deque<uint32_t>> sockets;          // packets that arrived in a pause
    std::vector<std::pair<uint32_t, uint32_t>> handed;  // path and packet of a batch that a pause holds back
  };
  struct Happening {
    uint64_t at_ns, order;
    uint32_t endpoint;
    uint32_t
        packet;  // index into packets_; NO_PACKET: a timer, RESUME: the end of a pause, CALL: `endpoint` is a call's
    bool operator>(const Happening& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : order > other.order;
    }
  };
  static constexpr uint32_t NO_PACKET = UINT32_MAX, RESUME = UINT32_MAX - 1, CALL = UINT32_MAX - 2;

  void service(uint32_t endpoint);
  void happen(const Happening& happening);
  void begin_pause(uint32_t endpoint);
  void resume(uint32_t endpoint);
  void send_data(uint32_t endpoint, uint32_t path, const flow::DataOut& data);
  void send_control(uint32_t endpoint, uint32_t path, std::span<const std::byte> payload);
  void finish_packet(const Endpoint& endpoint, std::vector<std::byte>& packet, size_t header_bytes);
  void transmit(uint32_t endpoint, uint32_t path, uint32_t packet);
  void receive(uint32_t endpoint, uint32_t packet);
  void scribble(flow::Flow& flow);
  uint32_t new_packet();
  void schedule(uint64_t at_ns, uint32_t endpoint, uint32_t packet);
  void trace(uint64_t value);
  // A packet enters the link's queue: when its last byte leaves. Nothing: the queue was full.
  std::optional<uint64_t> enqueue_ns(Link& link, size_t size_bytes, bool& is_marked);

  SimRandom random_;
  std::vector<Link> links_;
  std::vector<Endpoint> endpoints_;
  std::priority_queue<Happening, std::vector<Happening>, std::greater<>> happenings_;
  std::vector<std::vector<std::byte>> packets_;
  struct Label {  // what the packet's bytes have no room for
    uint32_t path;
    bool is_marked;  // in the IP header
  };
  std::vector<Label> labels_;  // by packet
  std::vector<uint32_t> free_packets_;
  std::vector<std::function<void()>> calls_;
  std::vector<uint32_t> free_calls_;
  uint64_t now_us_ = 0, order_ = 0;
  uint64_t trace_hash_ = 0xCBF2'9CE4'8422'2325;  // FNV-1a, 64 bits
  SimCounters counters_{};
  bool scribbling_ = false;
};

}  // namespace sennit
