// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: the bytes are a program for two flows and a liar between them.
//
// Each step is one call: messages are posted, and packets pass, are lost or doubled, or are made up or changed in any
// field before they arrive. No program may cause a crash, or a write outside of what the receiver advertised. As long
// as the liar forged only data (which the receiver checks against what it advertised), both flows must finish all
// messages with the right bytes once the lies stop. A forged control may also end a flow, with a reason.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "flow/flow.hpp"
#include "flow/immediate.hpp"

namespace {

using namespace sennit;

constexpr uint32_t PAYLOAD_BYTES = 64, EAGER_SLOTS = 8, REGION_BYTES = 2'048, GUARD_BYTES = 256;
constexpr size_t MESSAGES_MAX = 24, IN_FLIGHT_MAX = 512;
constexpr uint64_t TRUCE_US = 60'000'000;
// After a lie a flow may wait for something that never comes.
constexpr uint64_t TRUCE_AFTER_LIES_US = 50'000, ROUND_US = 50;

void require(bool holds) {
  if (!holds) std::abort();
}

// The fuzzer's bytes; zeros when they are used up.
class Script {
 public:
  Script(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  uint8_t byte() { return empty() ? uint8_t{0} : *at_++; }
  uint64_t number(int bytes) {
    uint64_t value = 0;
    while (bytes-- > 0) value = value << 8 | byte();
    return value;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

std::byte content(uint64_t key, size_t at) { return static_cast<std::byte>(key * 131 + at * 7 + 1); }

struct Packet {
  bool is_control;
  uint32_t path;
  flow::DataOut data;
  std::vector<std::byte> body;
};

struct Side {
  Side() : eager(EAGER_SLOTS * PAYLOAD_BYTES) {
    const flow::FlowConfig config{.path_count = 3,
                                  .payload_max_bytes = PAYLOAD_BYTES,
                                  .eager_slot_count = EAGER_SLOTS,
                                  .window_bytes = 16 * PAYLOAD_BYTES,
                                  .ack_every_packets = 4};
    flow = std::make_unique<flow::Flow>(config, eager, RKEY);
  }
  static constexpr uint32_t RKEY = 0xEA6E'0001;
  struct Bulk {
    uint64_t size_bytes;
    std::vector<std::byte> source, region;  // the region has guards around it
    bool received = false, sent = false;
  };
  std::byte* destination(size_t index) { return in[index].region.data() + GUARD_BYTES; }

  std::vector<std::byte> eager;
  std::unique_ptr<flow::Flow> flow;
  std::vector<Bulk> in;  // the bytes that it receives; `source` is the sender's copy
  std::vector<uint64_t> eager_in;
  size_t eager_taken = 0, adverts = 0;
  std::deque<Packet> to_it;
  bool ended = false;
  int immediate_rounds = 0;
  Side* peer = nullptr;
  bool was_told_lies = false;  // it received a control that its peer did not write
};

class Duel {
 public:
  Duel() {
    for (int side = 0; side < 2; ++side) {
      sides_[side].peer = &sides_[1 - side];
      sides_[side].flow->set_remote_eager(reinterpret_cast<uint64_t>(sides_[1 - side].eager.data()), Side::RKEY);
    }
  }

  void step(Script& script) {
    const uint8_t op = script.byte();
    Side& side = sides_[op >> 7];
    switch (op & 0x0F) {
      case 0:
        return post_eager(side, script.number(1));
      case 1:
        return post_bulk(side, script.number(2) % (REGION_BYTES + 1));
      case 2:
        now_us_ += script.number(1);
        return round(side);
      case 3:
        now_us_ += script.number(2) * 16;
        return round(side);
      case 4:
      case 5:
        return deliver_next(side);
      case 6:
        if (!side.to_it.empty()) side.to_it.pop_front();
        return;
      case 7:  // again, or out of turn
        if (side.to_it.empty()) return;
        side.to_it.push_back(side.to_it[script.byte() % side.to_it.size()]);
        return;
      case 8: {  // a bit of the next one
        if (side.to_it.empty() || side.to_it.front().body.empty()) return;
        Packet& packet = side.to_it.front();
        if (!packet.is_control) return deliver_next(side);  // its ICRC keeps the payload
        packet.body[script.number(2) % packet.body.size()] ^= std::byte{1} << (script.byte() & 7);
        side.was_told_lies = true;
        return deliver_next(side);
      }
      case 9: {  // a control of any bytes
        std::vector<std::byte> lie(script.byte());
        for (std::byte& byte : lie) byte = static_cast<std::byte>(script.byte());
        side.was_told_lies = true;
        return side.flow->on_control(now_us_, script.byte(), lie);
      }
      case 10:  // A data packet with any header. Placed only if it names an advertised packet exactly.
        return deliver(side,
                       {false,
                        script.byte(),
                        {script.number(8), static_cast<uint32_t>(script.number(4)),
                         static_cast<uint32_t>(script.number(4)), nullptr, script.byte()},
                        {}},
                       true);
      case 11: {  // a real header with one field changed
        if (side.to_it.empty() || side.to_it.front().is_control) return;
        Packet packet = side.to_it.front();
        const uint8_t field = script.byte();
        const uint64_t change = script.number(2) + 1;
        if (field % 4 == 0) packet.data.remote_address ^= change;
        if (field % 4 == 1) packet.data.rkey ^= static_cast<uint32_t>(change);
        if (field % 4 == 2) packet.data.immediate ^= static_cast<uint32_t>(change << (field >> 4));
        if (field % 4 == 3) packet.data.size_bytes ^= static_cast<uint32_t>(change);
        return deliver(side, packet, true);
      }
      case 12: {
        std::array<flow::Placement, 16> places;
        const size_t count = side.flow->predict(places);
        for (size_t at = 0; at < count; ++at) {
          check_place(side, places[at].destination, places[at].size_bytes);
          std::memset(places[at].destination, 0xEE, places[at].size_bytes);
        }
        return;
      }
      case 13:
        script.number(2);  // as in the corpus
        return side.flow->expect(now_us_);
      case 14:
        if (script.byte() < 32) end_with(side, script.byte());
        return;
      default:
        return round(side);
    }
  }

  // The lies stop. What was posted must arrive, unless a rank was told that it will not.
  void truce() {
    const bool is_honest = !sides_[0].was_told_lies && !sides_[1].was_told_lies && !was_ended_;
    const uint64_t until_us = now_us_ + (is_honest ? TRUCE_US : TRUCE_AFTER_LIES_US);
    while (now_us_ < until_us && !is_over()) {
      for (Side& side : sides_) round(side);
      bool moved = false;
      for (Side& side : sides_)
        for (; !side.to_it.empty(); moved = true) deliver_next(side);
      if (moved) {
        now_us_ += ROUND_US;
        continue;
      }
      const uint64_t next_us = std::min(sides_[0].flow->next_timeout_us(), sides_[1].flow->next_timeout_us());
      if (next_us == UINT64_MAX) break;
      now_us_ = std::max(next_us, now_us_ + 1);
    }
    for (Side& side : sides_) {
      check_guards(side);
      if (!is_honest || was_ended_) continue;
      require(!side.ended && side.flow->idle() && side.eager_taken == side.eager_in.size());
      for (const Side::Bulk& bulk : side.in) require(bulk.received && bulk.sent);
    }
  }

 private:
  bool is_over() const {
    for (const Side& side : sides_) {
      if (side.ended) continue;
      if (!side.flow->idle() || side.eager_taken != side.eager_in.size()) return false;
      for (const Side::Bulk& bulk : side.in)
        if (!bulk.received || !bulk.sent) return false;
    }
    return true;
  }

  void post_eager(Side& side, uint64_t key) {
    if (side.peer->eager_in.size() == MESSAGES_MAX) return;
    const uint64_t size_bytes = key % (side.flow->eager_max_bytes() + 1);
    std::array<std::byte, PAYLOAD_BYTES> data;
    for (size_t at = 0; at < size_bytes; ++at) data[at] = content(key, at);
    if (side.flow->send_eager({key, ~key, size_bytes}, EAGER_DATA, data.data(), now_us_))
      side.peer->eager_in.push_back(key);
  }

  void post_bulk(Side& side, uint64_t size_bytes) {
    if (side.in.size() == MESSAGES_MAX) return;
    const uint64_t key = side.in.size();
    Side::Bulk& bulk = side.in.emplace_back();
    bulk.size_bytes = size_bytes;
    bulk.source.resize(size_bytes);
    for (size_t at = 0; at < size_bytes; ++at) bulk.source[at] = content(key, at);
    bulk.region.assign(size_bytes + 2 * GUARD_BYTES, std::byte{0xC5});
    side.flow->advertise(key, {key, ~key, size_bytes}, side.destination(key), static_cast<uint32_t>(key * 77 + 5),
                         now_us_);
  }

  void end_with(Side& side, uint8_t how) {
    was_ended_ = true;
    if (how % 3 == 0) side.flow->abort("the program failed");
    if (how % 3 == 0) side.ended = true;
    if (how % 3 == 1) side.flow->close();
    if (how % 3 == 2) side.flow->on_peer_failed("connection refused");
  }

  void check_place(Side& side, const std::byte* at, uint32_t size_bytes) {
    if (at >= side.eager.data() && at + size_bytes <= side.eager.data() + side.eager.size()) return;
    for (size_t index = 0; index < side.in.size(); ++index) {
      const std::byte* const start = side.destination(index);
      if (at >= start && at + size_bytes <= start + side.in[index].size_bytes) return require(!side.in[index].received);
    }
    require(size_bytes == 0);
  }

  static void check_guards(const Side& side) {
    for (const Side::Bulk& bulk : side.in)
      for (size_t at = 0; at < GUARD_BYTES; ++at)
        require(bulk.region[at] == std::byte{0xC5} && bulk.region[bulk.region.size() - 1 - at] == std::byte{0xC5});
  }

  void deliver_next(Side& side) {
    if (side.to_it.empty()) return;
    const Packet packet = std::move(side.to_it.front());
    side.to_it.pop_front();
    deliver(side, packet, false);
  }

  void deliver(Side& side, const Packet& packet, bool is_made_up) {
    if (packet.is_control) return side.flow->on_control(now_us_, packet.path, packet.body);
    flow::Placement place{};
    const flow::DataOut& data = packet.data;
    const auto verdict = side.flow->locate(data.immediate, data.remote_address, data.rkey, data.size_bytes, place);
    if (verdict != flow::Verdict::place && verdict != flow::Verdict::duplicate) {
      require(place.destination == nullptr);
      return;
    }
    if (verdict == flow::Verdict::place) {
      check_place(side, place.destination, data.size_bytes);
      // A forged packet that passes carries something that only its sender can know. The flow need not check its bytes.
      if (is_made_up) return;
      if (data.size_bytes != 0) std::memcpy(place.destination, packet.body.data(), data.size_bytes);
    }
    side.flow->on_data(now_us_, packet.path, data.immediate, data.size_bytes, (packet.path & 1) != 0);
  }

  void round(Side& side) {
    flow::Flow& flow = *side.flow;
    if (flow.next_timeout_us() <= now_us_) flow.on_timeout(now_us_);
    flow::Event event;
    while (flow.poll_event(event)) on_event(side, event);
    uint32_t path = 0;
    std::array<flow::DataOut, 5> batch;
    for (int rounds = 0; const size_t count = flow.poll_data(now_us_, batch, path); ++rounds) {
      require(rounds < 10'000);
      for (size_t at = 0; at < count; ++at) {
        Packet packet{false, path, batch[at], {batch[at].payload, batch[at].payload + batch[at].size_bytes}};
        if (side.peer->to_it.size() < IN_FLIGHT_MAX) side.peer->to_it.push_back(std::move(packet));
      }
    }
    std::array<std::byte, flow::CONTROL_MAX_BYTES> control;
    for (int rounds = 0; const size_t size_bytes = flow.poll_control(now_us_, control, path); ++rounds) {
      require(rounds < 10'000 && size_bytes <= control.size());
      Packet packet{true, path, {}, {control.begin(), control.begin() + static_cast<std::ptrdiff_t>(size_bytes)}};
      if (side.peer->to_it.size() < IN_FLIGHT_MAX) side.peer->to_it.push_back(std::move(packet));
    }
    side.immediate_rounds = flow.next_timeout_us() > now_us_ ? 0 : side.immediate_rounds + 1;
    require(side.immediate_rounds < 8);
  }

  void on_event(Side& side, const flow::Event& event) {
    using Kind = flow::Event::Kind;
    switch (event.kind) {
      case Kind::eager: {
        require(side.eager_taken < side.eager_in.size());
        const uint64_t key = side.eager_in[side.eager_taken++];
        require(event.header.key == key && event.header.signature == ~key &&
                event.data_bytes == event.header.size_bytes);
        for (size_t at = 0; at < event.data_bytes; ++at) require(event.data[at] == content(key, at));
        return;
      }
      case Kind::advert: {
        // A lie may offer memory that belongs to nobody. True offers come in order. The program binds what fits.
        std::vector<Side::Bulk>& bulks = side.peer->in;
        const size_t index = side.adverts++;
        if (!side.was_told_lies) require(index < bulks.size() && event.header.key == index);
        if (index >= bulks.size() || event.header.size_bytes != bulks[index].size_bytes) return;
        return side.flow->transfer(index, event.id, bulks[index].source.data(), bulks[index].size_bytes);
      }
      case Kind::received: {
        require(event.id < side.in.size() && !side.in[event.id].received);
        Side::Bulk& bulk = side.in[event.id];
        bulk.received = true;
        if (!side.peer->was_told_lies)
          for (size_t at = 0; at < bulk.size_bytes; ++at)
            require(side.destination(event.id)[at] == content(event.id, at));
        return;
      }
      case Kind::returned:
        require(false);  // no sender has asked for a message, so no receiver is short of credits
        return;
      case Kind::sent: {
        require(event.id < side.peer->in.size() && !side.peer->in[event.id].sent);
        if (!side.was_told_lies) require(side.peer->in[event.id].received || side.peer->flow->last_heard_us() != 0);
        side.peer->in[event.id].sent = true;
        return;
      }
      case Kind::peer_lost:
      case Kind::peer_aborted:
        require(!side.ended && event.reason != nullptr);
        // The program let more time pass than a peer may be silent.
        was_ended_ |= std::string_view(event.reason).starts_with("gave no sign of life ");
        side.ended = true;
        return;
    }
  }

  std::array<Side, 2> sides_;
  uint64_t now_us_ = 1;
  bool was_ended_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  Duel duel;
  while (!script.empty()) duel.step(script);
  duel.truce();
  return 0;
}
