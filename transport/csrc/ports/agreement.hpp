// SPDX-License-Identifier: Apache-2.0
// The settings of a network port, and what two ranks' offers lead to: the pairs of rails, the path count, the packet
// size. Both ends get the same result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "flow/flow.hpp"
#include "ports/roce_offer.hpp"
#include "wire/packet.hpp"

namespace sennit {

class CounterPage;

inline constexpr uint32_t PATH_MAX_COUNT = 256;

// How this rank sends, over every network port. Peers may have other settings. If path counts differ, the smaller one
// is used.
struct SendConfig {
  uint32_t path_count = flow::FlowConfig{}.path_count;  // entropies for each peer and rail
  uint64_t seed = 0;  // for choices that tests repeat; keys and queue pairs are always random
  std::string path_policy{flow::FlowConfig{}.path_policy};  // flow/path_policy.hpp
  std::string congestion{flow::FlowConfig{}.congestion};    // flow/congestion.hpp
  // The most in flight to one peer, whose receive memory may allow less. More than fits into the processor's
  // second-level cache only makes copies slower, unless the network holds more in one round trip.
  uint32_t window_bytes = flow::FlowConfig{}.window_bytes;
  // A peer that others wait for is lost after this time of silence.
  uint64_t peer_timeout_us = flow::FlowConfig{}.peer_timeout_us;
  CounterPage* counter_page = nullptr;  // where to count, outlives the port; null: in the port

  // Throws std::invalid_argument with the value and the allowed range.
  void check(const std::string& port_name, size_t rail_count) const;
  // "4 paths a rail (round_robin), window 2097152 bytes (fixed)"
  std::string describe() const;
};

inline constexpr uint32_t EAGER_SLOT_COUNT = 64;
inline constexpr size_t EAGER_RING_BYTES = size_t{EAGER_SLOT_COUNT} * wire::PAYLOAD_MAX_BYTES;

struct Agreement {
  RailPairs rails;
  // The numbers of each pair's paths. Packets between two sockets of one address pass no switch that hashes source
  // ports, so one path is enough. As far as the paths suffice, each peer of a rank gets another path, so that a socket
  // has one destination.
  uint32_t first_path = 0, path_count = 0;
  flow::FlowConfig flow;  // as far as the offers decide, over rails.first
};

using PairPayload = std::function<uint32_t(const RoceOffer::Rail& ours, const RoceOffer::Rail& theirs)>;

// Throws std::invalid_argument unless `peer` is another rank of the group that is not yet connected.
void check_peer(const std::string& port_name, const RoceOffer& ours, uint32_t peer, bool is_connected);
// `payload_of` gives the largest payload between two rails. Throws std::invalid_argument, with both sides' values, if
// the offers do not fit together.
Agreement agree(const RoceOffer& ours, uint32_t peer, const RoceOffer& theirs, const SendConfig& send,
                const PairPayload& payload_of);

}  // namespace sennit
