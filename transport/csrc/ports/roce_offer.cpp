// SPDX-License-Identifier: Apache-2.0
#include "ports/roce_offer.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "flow/control.hpp"
#include "ports/agreement.hpp"
#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr uint32_t MAGIC = 0x31554E53;  // "SNU1"
constexpr uint32_t FLAG_DEVICE = 1, FLAG_RELIABLE = 2, FLAG_LOCAL_PACKETS = 4;
// A flag of the first queue pair number: a list of the others follows. Without the flag, the others are the next
// numbers.
constexpr uint32_t QPNS_LISTED = uint32_t{1} << 31;
constexpr uint32_t RAIL_MAX_COUNT = 64, RANK_MAX_COUNT = 65'536;

class Writer {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof value);
  }
  void put_bytes(std::span<const std::byte> value) { bytes_.insert(bytes_.end(), value.begin(), value.end()); }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <class T>
  T get() {
    T value;
    get_bytes(std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }
  void get_bytes(std::span<std::byte> out) {
    if (out.size() > rest_.size()) throw std::invalid_argument("roce: the peer's offer is cut short");
    std::memcpy(out.data(), rest_.data(), out.size());
    rest_ = rest_.subspan(out.size());
  }
  uint32_t get_count(uint32_t max, const char* what) {
    const auto count = get<uint32_t>();
    if (count < 1 || count > max)
      throw std::invalid_argument("roce: the peer's offer has " + std::to_string(count) + " " + what +
                                  ", allowed are 1 to " + std::to_string(max));
    return count;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

[[noreturn]] void refuse(const std::string& thing, const std::string& what, uint32_t theirs, uint32_t ours) {
  throw std::invalid_argument("roce: the peer's " + thing + " has " + what + " " + std::to_string(theirs) +
                              ", this rank has " + what + " " + std::to_string(ours) +
                              "; install the same sennit on all hosts");
}

bool share_subnet(const RoceOffer::Rail& one, const RoceOffer::Rail& other) {
  if (one.prefix_bits == 0 || one.prefix_bits != other.prefix_bits) return false;
  const size_t whole_bytes = one.prefix_bits / 8;
  const auto& a = one.listen.address;
  const auto& b = other.listen.address;
  if (!std::equal(a.begin(), a.begin() + static_cast<ptrdiff_t>(whole_bytes), b.begin())) return false;
  const unsigned rest_bits = one.prefix_bits % 8;
  return rest_bits == 0 || ((a[whole_bytes] ^ b[whole_bytes]) >> (8 - rest_bits)) == std::byte{};
}

}  // namespace

std::vector<std::byte> RoceOffer::encode() const {
  Writer out;
  out.put(MAGIC);
  out.put(VERSION);
  out.put(uint32_t{flow::CONTROL_VERSION});
  out.put((is_device ? FLAG_DEVICE : 0) | (is_reliable ? FLAG_RELIABLE : 0) |
          (takes_local_packets ? FLAG_LOCAL_PACKETS : 0));
  out.put(rank);
  out.put(size);
  out.put(path_count);
  out.put(eager_slot_count);
  out.put(receive_window_bytes);
  out.put(eager_base);
  out.put(static_cast<uint32_t>(rails.size()));
  for (const Rail& rail : rails) {
    out.put(static_cast<uint8_t>(rail.listen.is_ipv6 ? 6 : 4));
    out.put(rail.prefix_bits);
    out.put(rail.device);
    out.put(rail.interface);
    out.put(rail.listen.port);
    out.put(rail.payload_max_bytes);
    out.put_bytes(rail.listen.address);
    for (uint16_t entropy : rail.entropies) out.put(entropy);
  }
  if (!for_reader.qpns.empty()) out.put_bytes(for_reader.encode());
  return out.take();
}

std::vector<std::byte> RoceOffer::Peer::encode() const {
  bool is_run = true;
  for (size_t i = 1; i < qpns.size(); ++i) is_run &= qpns[i] == qpns[0] + i;
  Writer out;
  out.put(eager_rkey);
  out.put(qpns[0] | (is_run ? 0 : QPNS_LISTED));
  for (size_t i = 1; !is_run && i < qpns.size(); ++i) out.put(qpns[i]);
  return out.take();
}

uint64_t RoceOffer::eager_address(uint32_t reader) const {
  return eager_base == 0 ? 0 : eager_base + uint64_t{reader} * EAGER_RING_BYTES;
}

RoceOffer RoceOffer::decode(std::span<const std::byte> bytes) {
  Reader in(bytes);
  if (in.get<uint32_t>() != MAGIC)
    throw std::invalid_argument("roce: the peer's offer is not one of the udp or verbs port");
  if (const auto version = in.get<uint32_t>(); version != VERSION) refuse("offer", "version", version, VERSION);
  if (const auto revision = in.get<uint32_t>(); revision != flow::CONTROL_VERSION)
    refuse("packets", "wire revision", revision, flow::CONTROL_VERSION);
  RoceOffer offer;
  const auto flags = in.get<uint32_t>();
  offer.is_device = (flags & FLAG_DEVICE) != 0;
  offer.is_reliable = (flags & FLAG_RELIABLE) != 0;
  offer.takes_local_packets = (flags & FLAG_LOCAL_PACKETS) != 0;
  offer.rank = in.get<uint32_t>();
  offer.size = in.get_count(RANK_MAX_COUNT, "ranks");
  offer.path_count = in.get_count(PATH_MAX_COUNT, "paths");
  offer.eager_slot_count = in.get<uint32_t>();
  offer.receive_window_bytes = in.get<uint64_t>();
  offer.eager_base = in.get<uint64_t>();
  offer.rails.resize(in.get_count(RAIL_MAX_COUNT, "rails"));
  for (Rail& rail : offer.rails) {
    const auto ip_version = in.get<uint8_t>();
    if (ip_version != 4 && ip_version != 6)
      throw std::invalid_argument("roce: the peer's offer has a rail of IP version " + std::to_string(ip_version) +
                                  "; 4 and 6 are allowed");
    rail.listen.is_ipv6 = ip_version == 6;
    rail.prefix_bits = in.get<uint8_t>();
    if (rail.prefix_bits > (rail.listen.is_ipv6 ? 128 : 32))
      throw std::invalid_argument("roce: the peer's offer has a subnet prefix of " + std::to_string(rail.prefix_bits) +
                                  " bits");
    rail.device = in.get<uint8_t>();
    if (rail.device > (offer.is_device ? flow::Keys::MAX_COUNT - 1 : 0))
      throw std::invalid_argument(
          "roce: the peer's offer has a rail with device number " + std::to_string(rail.device) + "; allowed: " +
          (offer.is_device ? "0 to " + std::to_string(flow::Keys::MAX_COUNT - 1) : std::string("0, for sockets")));
    rail.interface = in.get<uint8_t>();
    rail.listen.port = in.get<uint16_t>();
    rail.payload_max_bytes = in.get<uint32_t>();
    in.get_bytes(rail.listen.address);
    rail.entropies.resize(offer.path_count);
    for (uint16_t& entropy : rail.entropies) entropy = in.get<uint16_t>();
  }
  const size_t qpn_count = offer.rails.size() * offer.path_count;
  offer.for_reader.eager_rkey = in.get<uint32_t>();
  const auto first = in.get<uint32_t>();
  for (size_t i = 0; i < qpn_count; ++i) {
    const bool is_listed = i != 0 && (first & QPNS_LISTED) != 0;
    const uint32_t qpn = is_listed ? in.get<uint32_t>() : (first & ~QPNS_LISTED) + static_cast<uint32_t>(i);
    if (qpn > wire::QPN_MASK)
      throw std::invalid_argument("roce: the peer's offer has the queue pair number " + std::to_string(qpn) +
                                  "; 24 bits are allowed");
    offer.for_reader.qpns.push_back(qpn);
  }
  if (!in.empty()) throw std::invalid_argument("roce: the peer's offer goes on after its last field");
  return offer;
}

RailPairs pair_rails(const RoceOffer& ours, const RoceOffer& theirs) {
  // The lower rank's order decides at both ends.
  const bool is_ours_first = ours.rank < theirs.rank;
  const std::vector<RoceOffer::Rail>& first = is_ours_first ? ours.rails : theirs.rails;
  const std::vector<RoceOffer::Rail>& second = is_ours_first ? theirs.rails : ours.rails;
  RailPairs out;
  std::vector<RailPairs::Pair> of_ipv6;  // the lower rank's rail first
  for (const bool is_ipv6 : {true, false}) {
    constexpr size_t NONE = SIZE_MAX;
    std::vector<size_t> partner(first.size(), NONE);
    std::vector<bool> is_taken(second.size());
    for (const bool by_subnet : {true, false}) {
      for (size_t one = 0; one < first.size(); ++one) {
        if (first[one].listen.is_ipv6 != is_ipv6 || partner[one] != NONE) continue;
        for (size_t other = 0; other < second.size() && partner[one] == NONE; ++other) {
          if (second[other].listen.is_ipv6 != is_ipv6 || is_taken[other]) continue;
          if (by_subnet && !share_subnet(first[one], second[other])) continue;
          partner[one] = other;
          is_taken[other] = true;
        }
      }
    }
    for (size_t one = 0; one < first.size(); ++one) {
      if (partner[one] == NONE) continue;
      const auto pair = is_ours_first ? RailPairs::Pair(one, partner[one]) : RailPairs::Pair(partner[one], one);
      if (is_ipv6) {
        of_ipv6.emplace_back(one, partner[one]);
        out.first.push_back(pair);
        continue;
      }
      // The lower rank's interface decides, where the two ends' interfaces belong to different pairs.
      auto its = std::find_if(of_ipv6.begin(), of_ipv6.end(), [&](const RailPairs::Pair& other) {
        return first[other.first].interface == first[one].interface;
      });
      if (its == of_ipv6.end())
        its = std::find_if(of_ipv6.begin(), of_ipv6.end(), [&](const RailPairs::Pair& other) {
          return second[other.second].interface == second[partner[one]].interface;
        });
      if (its == of_ipv6.end()) {
        out.first.push_back(pair);
      } else {
        out.reserves.push_back(pair);
        out.reserve_of.push_back(static_cast<uint32_t>(its - of_ipv6.begin()));
      }
    }
  }
  return out;
}

}  // namespace sennit
