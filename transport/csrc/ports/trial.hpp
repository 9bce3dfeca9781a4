// SPDX-License-Identifier: Apache-2.0
// The trial of a network: before two ranks use their paths, both send the largest packet over every one of them.
//
// Sans-IO: the time and arrivals come in, probes go out. A probe is a packet of the size that it tries. It tells which
// sizes its sender has received over which path, so both ranks learn both directions. One of the two ranks decides: it
// sets the packet size to what passes on every path where anything passes, and tells the other. A path on which nothing
// arrives in one direction stays out of use in that direction. Where the network carries nothing, the same message may
// come another way (through the rendezvous store). A pair of rails may have a reserve, which the deciding rank uses in
// its place if the pair does not carry packets both ways. docs/reference/wire.md, Trial.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "messages/lane.hpp"
#include "wire/endpoint.hpp"

namespace sennit {

class Trial {
 public:
  // A probe must have room at least for its message.
  static constexpr size_t MESSAGE_MAX_BYTES = 256;

  struct Config {
    uint32_t path_count;                    // 1 to 256
    uint32_t payload_max_bytes;             // what the interfaces at both ends take: a power of two from 256 to 4,096
    bool decides;                           // true at exactly one of the two ends
    uint32_t pair_count = 1;                // of rails, reserves last; path p belongs to pair p mod pair_count
    std::vector<uint32_t> reserve_of = {};  // for each reserve: the pair that it stands in for
    uint32_t peer_count = 1;                // tried at the same time: the more, the later they may answer
  };
  struct Probe {
    uint32_t path;
    uint32_t payload_bytes;
  };

  explicit Trial(const Config& config);

  // The next packet to send. False: none is due.
  bool poll(uint64_t now_us, Probe& out);
  // The content of a probe's beginning. The rest of the probe is zero.
  std::vector<std::byte> message() const;
  // A probe that arrived over `path`. A malformed probe changes nothing.
  void on_probe(uint64_t now_us, uint32_t path, std::span<const std::byte> payload);
  // The peer's message, received another way than over the network.
  void on_message(uint64_t now_us, std::span<const std::byte> message);
  // A message another way than over the network: the peer found every path good at the largest size.
  void settle_as_perfect();
  uint64_t next_timeout_us() const;
  // Something must be sent now, whatever the time.
  bool has_due() const { return !due_.empty(); }

  // Both ends know the packet size.
  bool is_settled() const { return settled_level_ != 0; }
  // Whether the flow gets the path. Only once settled.
  bool is_used(uint32_t path) const { return is_used_[path % is_used_.size()]; }
  // Every path takes the largest packet both ways, reserves aside.
  bool is_perfect() const;
  uint32_t payload_bytes() const { return bytes_of(settled_level_); }
  // The largest payload that arrived over a path here, and at the peer. 0: none did.
  uint32_t heard_bytes(uint32_t path) const { return bytes_of(heard_[path]); }
  uint32_t told_bytes(uint32_t path) const { return bytes_of(told_[path]); }
  uint32_t path_count() const { return static_cast<uint32_t>(heard_.size()); }
  uint32_t payload_max_bytes() const { return bytes_of(target_); }

 private:
  using Level = uint8_t;  // 0: nothing; n: a payload of 256 << (n - 1) bytes

  static uint32_t bytes_of(Level level) { return level == 0 ? 0 : 128u << level; }
  bool has_contact() const { return contact_us_ != UINT64_MAX; }
  uint32_t first_pairs() const { return static_cast<uint32_t>(is_used_.size() - reserve_of_.size()); }
  bool is_reserve(uint32_t path) const { return path % is_used_.size() >= first_pairs(); }
  unsigned directions_of(uint32_t pair) const;  // in which anything arrived over it: 1 here, 2 at the peer
  bool all_reach(const std::vector<Level>& levels) const;
  void choose_pairs();
  void note_contact(uint64_t now_us);
  void start_round(uint64_t now_us);
  void decide(uint64_t now_us);
  void settle(Level level);
  void send_message(uint32_t copies);

  const Level target_;
  const bool decides_;
  const uint64_t wait_us_;
  const std::vector<uint32_t> reserve_of_;
  std::vector<bool> is_used_;        // by pair
  std::vector<Level> heard_, told_;  // by path
  Level settled_level_ = 0;
  bool is_heard_told_ = false;    // a message has told the peer that everything arrived
  bool is_peer_settled_ = false;  // as far as this end knows
  std::deque<Probe> due_;
  uint64_t next_round_us_ = 0, contact_us_ = UINT64_MAX, news_us_ = 0;
  uint32_t round_ = 0, rounds_of_contact_ = 0, next_path_ = 0;
};

// One path to a peer, and what its trial found in each direction.
struct TriedPath {
  wire::Endpoint out_source, out_listen, in_source, in_listen;
  uint32_t told_bytes, heard_bytes;  // the largest payload that arrived at the peer, and here; 0: none
  int error;                         // errno of our last send, or of the network's report; 0: no error
  bool is_used;                      // by the flow, once the trial is over
  std::string device;                // our RDMA device; empty: a socket
};

// A port that can be tried before it is used.
class TriedPort : public Port {
 public:
  // Begins to send packets over every path both ways. To be called before connect(), for all peers or for none. `info`
  // and `sink` as for connect(). Reliable queue pairs are not tried: their device itself repeats packets, and reports
  // those that it loses.
  virtual void begin_trial(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) = 0;
  // Runs one round without waiting. True when there is nothing more to find out about any peer.
  virtual bool try_network(uint64_t now_us) = 0;
  virtual uint64_t next_trial_us() const = 0;  // when try_network() must be called even if nothing arrived
  // Null for a peer that is not tried.
  virtual Trial* trial(uint32_t peer) = 0;
  virtual std::vector<TriedPath> tried_paths(uint32_t peer) const = 0;
};

}  // namespace sennit
