// SPDX-License-Identifier: Apache-2.0
// Flow: the reliable multi-path message layer between two ranks, sans-IO.
//
// A flow has no clock, socket, thread or random source: `now_us` and a seed come in, packets and events go out. It is
// driven by the message layer (send_eager, advertise, transfer), by packets (locate, on_data, on_control) and by a
// timer (next_timeout_us, on_timeout). The same object code runs under the udp, verbs and sim ports. Protocol:
// docs/reference/wire.md.
//
// How a port drives a flow:
//   arrival   data: locate -> place the bytes -> on_data (also for Verdict::duplicate, which must be
//             acknowledged again; not for a refused packet). Control: on_control.
//   then      poll_event until false
//   then      poll_data until 0, poll_control until 0, on_timeout when now_us >= next_timeout_us()
// Whatever may change has_event() or next_timeout_us() wakes the flow in the port's agenda, if there is one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flow/counters.hpp"
#include "flow/message.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {
class CounterPage;
}

namespace sennit::flow {

// The largest control payload: poll_control needs this much room. With payload_max_bytes below it, a control payload
// stays within max(payload_max_bytes, 1,024).
inline constexpr size_t CONTROL_MAX_BYTES = 4'096;
// The header before the data of an eager packet.
inline constexpr uint32_t EAGER_HEADER_BYTES = 32;

class Agenda;
class ReceiveBudget;

// The defaults of settings equal those of transport/config.py.
struct FlowConfig {
  uint32_t path_count = 8;                // entropies in use, 1..256
  uint32_t payload_max_bytes = 4'096;     // data packet payload, multiple of 4; equal on both sides
  uint32_t eager_slot_count = 64;         // receive ring for eager packets, power of two, 8..1,024; equal on both sides
  uint32_t window_bytes = 2'097'152;      // most data in flight, counted in full packets
  uint32_t ack_every_packets = 32;        // acknowledge at the latest after this many data packets ...
  uint32_t ack_delay_us = 400;            // ... or after this time; below the tail probe's 1 ms
  uint64_t peer_timeout_us = 10'000'000;  // a silent peer that somebody waits for is lost after this time (silence.hpp)
  uint64_t seed = 0;                      // the first path
  uint32_t rail_count = 1;                // interfaces below the paths: path p uses rail p mod rail_count
  uint32_t peer_key_count = 1;            // keys that open one region of the peer: one for each of its devices
  std::vector<uint8_t> key_of_rail = {};  // for each rail, which key its packets carry; empty: the first
  std::string_view path_policy = "round_robin";  // or "reps"; path_policy.hpp
  std::string_view congestion = "dctcp";         // or "fixed", "swift"; congestion.hpp
  uint64_t target_queue_us = 100;                // "swift": the target queueing delay in the fabric
  ReceiveBudget* receive_budget = nullptr;       // shared by the flows of a port, outlives them; null: no limit
  Agenda* agenda = nullptr;                      // of the port, outlives the flow; null: the port asks every flow
  uint32_t agenda_member = 0;                    // the flow's number there
  trace::Ends ends{};                            // only for tracepoints and counters
  CounterPage* counter_page = nullptr;           // where to count, outlives the flow; null: in the flow
};

// One data packet to send: UC RDMA WRITE ONLY with immediate. The payload stays valid until the next call that can
// complete its message (on_control, abort).
struct DataOut {
  uint64_t remote_address;
  uint32_t rkey;
  uint32_t immediate;
  const std::byte* payload;
  uint32_t size_bytes;
};

// Where an arriving data packet belongs.
struct Placement {
  std::byte* destination;  // null: do not place (duplicate or refused)
  uint32_t immediate;
  uint64_t address;  // expected RETH.va
  uint32_t size_bytes;
};

enum class Verdict : uint8_t { place, duplicate, bad_key, bad_range, bad_slot };

struct Event {
  enum class Kind : uint8_t { eager, advert, received, returned, sent, peer_lost, peer_aborted } kind;
  MessageHeader header;   // eager, advert, received, returned
  uint32_t flags;         // eager
  uint64_t id;            // advert: advert id; received, returned: receive id; sent: send id
  const std::byte* data;  // eager: valid until the next poll_event; received: the destination
  uint32_t data_bytes;    // eager: bytes at `data` (0 for EAGER_REQUEST, whatever header.size_bytes says)
  const char* reason;     // peer_lost, peer_aborted; valid as long as the flow
};

class Flow {
 public:
  // `eager_memory`: eager_slot_count * payload_max_bytes bytes, into which the peer writes eager packets (a registered
  // region with verbs). Its address and key go to the peer through rendezvous. Throws std::invalid_argument for a
  // configuration out of range.
  Flow(const FlowConfig& config, std::span<std::byte> eager_memory, uint32_t eager_rkey);
  ~Flow();
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;
  // Sets the address and key of the peer's eager ring, from rendezvous. Call it before the first poll_data.
  void set_remote_eager(uint64_t address, uint32_t rkey);

  // Message side. A small message goes eagerly, a large one into memory that its receiver has advertised. The peer's
  // advertised address is `destination` itself, which may be null only for a message of size 0.
  uint64_t eager_max_bytes() const;
  bool send_eager(const MessageHeader& header, uint32_t flags, const void* data, uint64_t now_us);
  void advertise(uint64_t receive_id, const MessageHeader& header, std::byte* destination, const Keys& keys,
                 uint64_t now_us);
  // The peer waits to send the message of a receive, as that of a point-to-point message always does.
  void ask(uint64_t receive_id, uint64_t now_us);
  void transfer(uint64_t send_id, uint64_t advert_id, const std::byte* data, uint64_t size_bytes);
  // The peer has no credit for a message that this side waits to send. Gives back an old advert that no transfer has
  // used: its header and id. It may not be used any more, and comes anew. False: there is none, or no need.
  bool give_back(Event& out);
  // `returned`: the peer gave the advert back, so advertise the message anew.
  bool poll_event(Event& out);
  bool has_event() const;
  // The last eager event could not be taken. There is no eager event until poll_event has returned false once. Then the
  // same one comes again.
  void defer_eager();

  // Wire side. poll_data fills up to out.size() packets that all go on one path (a GSO batch: all but the last have
  // payload_max_bytes) and returns their number. poll_control writes one control payload (`out` of CONTROL_MAX_BYTES)
  // and returns its size, or 0 if none is due.
  size_t poll_data(uint64_t now_us, std::span<DataOut> out, uint32_t& path);
  size_t poll_control(uint64_t now_us, std::span<std::byte> out, uint32_t& path);
  // Counts what it refuses, and changes nothing else.
  Verdict locate(uint32_t immediate, uint64_t address, uint32_t rkey, uint32_t size_bytes, Placement& out) const;
  // The packets that are most likely to arrive next, so that a port can receive straight into place. Only places
  // without valid bytes, because a wrong packet may land there before it is checked.
  size_t predict(std::span<Placement> out) const;
  // The same for a port that has seen the immediate of the next packet.
  size_t predict_from(uint32_t immediate, std::span<Placement> out) const;
  // `ecn_marked`: the IP header said "congestion experienced". `waited_us`: how long the packet has already been inside
  // this host (now minus the kernel's receive timestamp). That is no queueing in the fabric.
  void on_data(uint64_t now_us, uint32_t path, uint32_t immediate, uint32_t size_bytes, bool ecn_marked = false,
               uint64_t waited_us = 0);
  void on_control(uint64_t now_us, uint32_t path, std::span<const std::byte> payload, uint64_t waited_us = 0);
  // 0: there is something to send now.
  uint64_t next_timeout_us() const;
  void on_timeout(uint64_t now_us);
  // Somebody here waits for the peer. Call it every LOOK_MAX_US while that lasts. The flow asks a silent peer for a
  // sign of life, by probes over one path after the other. A peer that gives none for peer_timeout_us is lost. In the
  // middle of a bulk message the flow looks by itself.
  void expect(uint64_t now_us);
  // The port has heard the peer itself, in the network trial that ends before the flow begins.
  void on_heard(uint64_t now_us);
  // The port knows that nothing passes over a path any more (link down, queue pair in error). The flow probes the path
  // from now on, like any silent path.
  void on_path_failed(uint64_t now_us, uint32_t path);
  // The port knows that the peer is gone (connection refused, device removed). Ignored after a goodbye.
  void on_peer_failed(std::string_view reason);

  // When the last valid packet of the peer came. 0 before the first.
  uint64_t last_heard_us() const;
  // How long the peer has been silent while somebody waited.
  uint64_t silent_us() const;
  bool ended() const;                   // aborted by either side, or the peer is lost
  std::string_view end_reason() const;  // empty before
  bool idle() const;                    // everything sent is acknowledged
  void revoke() noexcept;               // forgets all user memory and tells nobody
  void abort(std::string_view reason);  // the same, and the next controls carry the reason
  void close();                         // the next controls say goodbye
  const FlowCounters& counters() const;
  std::string describe() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sennit::flow
