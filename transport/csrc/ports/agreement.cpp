// SPDX-License-Identifier: Apache-2.0
#include "ports/agreement.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "flow/congestion.hpp"
#include "flow/path_policy.hpp"
#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr uint32_t WINDOW_MIN_BYTES = 64 << 10, WINDOW_MAX_BYTES = 64 << 20;
constexpr uint64_t WINDOW_MIN_PACKETS = 4;
constexpr uint32_t ACKS_PER_WINDOW = 8, ACK_MAX_PACKETS = 64;

}  // namespace

void SendConfig::check(const std::string& port_name, size_t rail_count) const {
  if (rail_count == 0) throw std::invalid_argument(port_name + ": no rail given; name at least one local address");
  if (path_count < 1 || path_count * rail_count > PATH_MAX_COUNT)
    throw std::invalid_argument(port_name + ": " + std::to_string(path_count) + " paths over " +
                                std::to_string(rail_count) + " rails; 1 to " + std::to_string(PATH_MAX_COUNT) +
                                " in all are allowed");
  if (window_bytes < WINDOW_MIN_BYTES || window_bytes > WINDOW_MAX_BYTES)
    throw std::invalid_argument(port_name + ": a window of " + std::to_string(window_bytes) + " bytes; " +
                                std::to_string(WINDOW_MIN_BYTES) + " to " + std::to_string(WINDOW_MAX_BYTES) +
                                " are allowed");
  // Flows are made with their peers, but a wrong name must fail before that.
  flow::make_path_policy(path_policy, path_count, seed);
  flow::make_congestion_control(congestion, {.window_max_packets = 1, .path_count = 1, .target_queue_us = 1});
}

std::string SendConfig::describe() const {
  return std::to_string(path_count) + " paths a rail (" + path_policy + "), window " + std::to_string(window_bytes) +
         " bytes (" + congestion + ")";
}

void check_peer(const std::string& port_name, const RoceOffer& ours, uint32_t peer, bool is_connected) {
  if (peer < ours.size && peer != ours.rank && !is_connected) return;
  throw std::invalid_argument(port_name + ": rank " + std::to_string(peer) + " cannot be connected: this is rank " +
                              std::to_string(ours.rank) + " of " + std::to_string(ours.size) +
                              ", and each peer is connected once");
}

Agreement agree(const RoceOffer& ours, uint32_t peer, const RoceOffer& theirs, const SendConfig& send,
                const PairPayload& payload_of) {
  const std::string who = "rank " + std::to_string(peer);
  if (theirs.rank != peer || theirs.size != ours.size)
    throw std::invalid_argument("the offer is of rank " + std::to_string(theirs.rank) + " of " +
                                std::to_string(theirs.size) + "; expected: " + who + " of " +
                                std::to_string(ours.size));
  if (theirs.eager_slot_count != ours.eager_slot_count)
    throw std::invalid_argument(who + " has " + std::to_string(theirs.eager_slot_count) + " eager slots, this rank " +
                                std::to_string(ours.eager_slot_count));
  Agreement out;
  out.rails = pair_rails(ours, theirs);
  const std::vector<RailPairs::Pair>& pairs = out.rails.first;
  if (pairs.empty())
    throw std::invalid_argument(who + " listens at " + text_of(theirs.rails[0].listen) + ", this rank at " +
                                text_of(ours.rails[0].listen) +
                                ": they have no address of one family (IPv4 or IPv6); give their interfaces such "
                                "addresses, or choose others by SENNIT_INTERFACES");
  if (ours.is_reliable != theirs.is_reliable)
    throw std::invalid_argument(who + (theirs.is_reliable ? " uses" : " does not use") +
                                " reliable queue pairs, this rank does" + (ours.is_reliable ? "" : " not") +
                                ": set SENNIT_VERBS_SERVICE to the same on all ranks");
  // A device chooses the identifications of its IPv4 packets itself, and a socket cannot see them. A device sends to
  // one UDP port only (docs/reference/wire.md).
  if (ours.is_device != theirs.is_device) {
    const RoceOffer& socket = ours.is_device ? theirs : ours;
    for (const auto& [mine, other] : pairs) {
      const RoceOffer::Rail& rail = socket.rails[ours.is_device ? other : mine];
      const std::string where = "rank " + std::to_string(socket.rank) + " listens at " + text_of(rail.listen) + ", ";
      if (!rail.listen.is_ipv6)
        throw std::invalid_argument(where + "but with an RDMA device at the other end IPv6 is needed");
      if (rail.listen.port != wire::ROCE_UDP_PORT)
        throw std::invalid_argument(where + "but the RDMA device at the other end sends to UDP port " +
                                    std::to_string(wire::ROCE_UDP_PORT) +
                                    " only: another process there has it, or SENNIT_PORTS leaves it out");
    }
  }
  out.path_count = std::min(ours.path_count, theirs.path_count);
  const bool stays_here =
      !ours.is_device && !theirs.is_device && std::all_of(pairs.begin(), pairs.end(), [&](const RailPairs::Pair& pair) {
        return ours.rails[pair.first].listen.address == theirs.rails[pair.second].listen.address;
      });
  if (stays_here) {
    out.first_path = (ours.rank + peer) % out.path_count;
    out.path_count = 1;
  }
  flow::FlowConfig& flow = out.flow;
  flow.payload_max_bytes = wire::PAYLOAD_MAX_BYTES;
  for (const auto& [mine, other] : pairs)
    flow.payload_max_bytes = std::min(flow.payload_max_bytes, payload_of(ours.rails[mine], theirs.rails[other]));
  if (flow.payload_max_bytes < 256 || !std::has_single_bit(flow.payload_max_bytes))
    throw std::invalid_argument(who + " offers a payload of " + std::to_string(flow.payload_max_bytes) +
                                " bytes a packet; powers of two from 256 to 4096 are allowed");
  // The trial of the network does not try these packets: it tries none that are larger than a network takes.
  if (stays_here && ours.takes_local_packets && theirs.takes_local_packets &&
      flow.payload_max_bytes == wire::PAYLOAD_MAX_BYTES)
    flow.payload_max_bytes = wire::LOCAL_PAYLOAD_MAX_BYTES;
  flow.path_count = static_cast<uint32_t>(out.path_count * pairs.size());
  flow.rail_count = static_cast<uint32_t>(pairs.size());
  for (const RoceOffer::Rail& rail : theirs.rails)
    flow.peer_key_count = std::max(flow.peer_key_count, rail.device + 1u);
  if (flow.peer_key_count != 1)
    for (const auto& [mine, other] : pairs) flow.key_of_rail.push_back(theirs.rails[other].device);
  flow.eager_slot_count = ours.eager_slot_count;
  flow.ends = {ours.rank, peer};
  flow.counter_page = send.counter_page;
  flow.window_bytes = static_cast<uint32_t>(std::clamp<uint64_t>(
      theirs.receive_window_bytes, WINDOW_MIN_PACKETS * flow.payload_max_bytes, send.window_bytes));
  // Several acknowledgements for each window, but not too many, because each is a packet to send and to receive.
  flow.ack_every_packets =
      std::clamp(flow.window_bytes / flow.payload_max_bytes / ACKS_PER_WINDOW, 1u, ACK_MAX_PACKETS);
  flow.peer_timeout_us = send.peer_timeout_us;
  flow.seed = send.seed + peer;
  flow.path_policy = send.path_policy;
  flow.congestion = send.congestion;
  return out;
}

}  // namespace sennit
