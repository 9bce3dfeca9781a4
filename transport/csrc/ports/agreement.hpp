// SPDX-License-Identifier: Apache-2.0
// What two ranks' offers lead to: the pairs of rails, the path count, the packet size. Both ends get the same result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "flow/flow.hpp"
#include "ports/roce_offer.hpp"
#include "ports/send_config.hpp"
#include "wire/packet.hpp"

namespace sennit {

inline constexpr uint32_t EAGER_SLOT_COUNT = 64;
inline constexpr size_t EAGER_RING_BYTES = size_t{EAGER_SLOT_COUNT} * wire::PAYLOAD_MAX_BYTES;

struct Agreement {
  RailPairs rails;
  uint32_t path_count = 0;  // of each pair
  flow::FlowConfig flow;    // as far as the offers decide, over rails.first
};

using PairPayload = std::function<uint32_t(const RoceOffer::Rail& ours, const RoceOffer::Rail& theirs)>;

// Throws std::invalid_argument unless `peer` is another rank of the group that is not yet connected.
void check_peer(const std::string& port_name, const RoceOffer& ours, uint32_t peer, bool is_connected);
// `payload_of` gives the largest payload between two rails. Throws std::invalid_argument, with both sides' values, if
// the offers do not fit together.
Agreement agree(const RoceOffer& ours, uint32_t peer, const RoceOffer& theirs, const SendConfig& send,
                const PairPayload& payload_of);

}  // namespace sennit
