// SPDX-License-Identifier: Apache-2.0
#include "model/direction.hpp"

#include <algorithm>
#include <cstring>

#include "flow/immediate.hpp"
#include "model/violation.hpp"

namespace sennit::model {
namespace {

constexpr uint32_t GUARD_BYTES = 64;
constexpr int GUARD = 0xC5, EMPTY = 0xA5, OVERWRITTEN = 0xDD;
// The largest schedule: MESSAGES_MAX messages of two packets, or a single long one.
constexpr size_t ARENA_BYTES =
    MESSAGES_MAX * (12 * size_t{PAYLOAD_MAX_BYTES} + GUARD_BYTES) + MESSAGE_MAX_PACKETS * size_t{PAYLOAD_MAX_BYTES};
constexpr uint64_t KEY_TAG = 0x5E44'1700'0000'0000;

std::string name(uint32_t sender, uint64_t message) {
  return "message " + std::to_string(message) + " of rank " + std::to_string(sender);
}

}  // namespace

Direction::Direction() : source_(ARENA_BYTES), destination_(ARENA_BYTES) {}

void Direction::begin(const Schedule& schedule, uint32_t sender, std::byte* eager_memory, uint32_t eager_rkey) {
  draw_ = &schedule.ranks[sender];
  sender_ = sender;
  content_seed_ = (schedule.seed * 2 + sender) * 0x9E37'79B9'7F4A'7C15;
  payload_max_bytes_ = schedule.config.payload_max_bytes;
  eager_slot_count_ = schedule.config.eager_slot_count;
  eager_memory_ = eager_memory;
  eager_rkey_ = eager_rkey;
  eager_pushed_ = distinct_packets_out_ = distinct_packets_delivered_ = 0;
  sources_closed_ = destinations_closed_ = false;
  uint32_t at = GUARD_BYTES;
  for (uint32_t message = 0; message < count(); ++message) {
    const uint32_t bytes = size_bytes(message);
    const uint32_t packets = std::max(1u, (bytes + payload_max_bytes_ - 1) / payload_max_bytes_);
    states_[message] =
        State{at, draw(message).is_eager ? 1 : packets, 0, false, false, false, false, false, false, {}, {}};
    put_guard(at - GUARD_BYTES);
    at += (bytes + 7) / 8 * 8 + GUARD_BYTES;
  }
  put_guard(at - GUARD_BYTES);
  used_bytes_ = at;
}

void Direction::put_guard(uint32_t at) { std::memset(destination_.data() + at, GUARD, GUARD_BYTES); }

void Direction::check_guards() const {
  const auto check = [&](uint32_t from, uint32_t until) {
    for (uint32_t at = from; at < until; ++at)
      require(destination_[at] == std::byte{GUARD},
              [&] { return "a byte outside of every receive was written, of rank " + std::to_string(1 - sender_); });
  };
  check(0, GUARD_BYTES);
  for (uint32_t message = 0; message < count(); ++message) {
    const uint32_t end = states_[message].start + (size_bytes(message) + 7) / 8 * 8;
    check(end, end + GUARD_BYTES);
  }
}

MessageHeader Direction::header(uint32_t message) const {
  const uint64_t key = KEY_TAG | uint64_t{sender_} << 16 | message;
  return {key, ~key, size_bytes(message)};
}

uint32_t Direction::rkey(uint32_t message) const { return static_cast<uint32_t>(word(message, ~0u) | 1); }

uint64_t Direction::word(uint32_t message, uint32_t index) const {
  uint64_t mixed = content_seed_ + (uint64_t{message} << 32 | index) * 0xBF58'476D'1CE4'E5B9;
  mixed ^= mixed >> 29;
  return mixed * 0x94D0'49BB'1331'11EB;
}

const std::byte* Direction::fill_source(uint32_t message) {
  std::byte* const start = source_.data() + states_[message].start;
  for (uint32_t at = 0; at < size_bytes(message); at += 8) {
    const uint64_t value = word(message, at / 8);
    std::memcpy(start + at, &value, 8);
  }
  return start;
}

bool Direction::has_right_bytes(uint32_t message, const std::byte* data) const {
  const uint32_t size = size_bytes(message);
  for (uint32_t at = 0; at < size; at += 8) {
    const uint64_t value = word(message, at / 8);
    if (std::memcmp(data + at, &value, std::min(8u, size - at)) != 0) return false;
  }
  return true;
}

std::byte* Direction::prepare_destination(uint32_t message) {
  State& state = states_[message];
  state.advertised = true;
  std::byte* const start = destination_.data() + state.start;
  std::memset(start, EMPTY, size_bytes(message));
  return start;
}

void Direction::on_eager_pushed(uint32_t message) {
  states_[message].eager_number = eager_pushed_++;
  states_[message].pushed = true;
  // The flow has its own copy.
  std::memset(source_.data() + states_[message].start, OVERWRITTEN, size_bytes(message));
}

void Direction::on_advert(uint32_t message, const MessageHeader& header) {
  require(message < count(), "an advert of a message that does not exist");
  State& state = states_[message];
  const MessageHeader expected = this->header(message);
  require(state.advertised && !state.advert_seen, "an advert of what was not advertised, or a second one");
  require(
      header.key == expected.key && header.signature == expected.signature && header.size_bytes == expected.size_bytes,
      [&] { return "the advert of " + name(sender_, message) + " is another one"; });
  state.advert_seen = true;
}

void Direction::on_sent(uint64_t message) {
  require(message < count() && states_[message].transferred, "sent: a message that was not transferred");
  State& state = states_[message];
  require(!state.sent, [&] { return name(sender_, message) + " was sent twice"; });
  require(state.delivered.count() == state.packet_count,
          [&] { return name(sender_, message) + " was reported sent before all of it arrived"; });
  state.sent = true;
  // The buffer is the program's again.
  std::memset(source_.data() + state.start, OVERWRITTEN, size_bytes(static_cast<uint32_t>(message)));
}

uint32_t Direction::message_at(const std::byte* base, const std::byte* at) const {
  const auto offset = static_cast<uint32_t>(at - base);
  const auto* after = std::upper_bound(states_.begin(), states_.begin() + count(), offset,
                                       [](uint32_t value, const State& state) { return value < state.start; });
  return after == states_.begin() ? UINT32_MAX : static_cast<uint32_t>(after - states_.begin() - 1);
}

void Direction::on_packet_out(const flow::DataOut& data, Packet& packet) {
  require(!sources_closed_, "a data packet was given out after the end");
  uint32_t message, part = 0;
  if (flow::slot_of(data.immediate) == flow::EAGER_SLOT) {
    uint64_t key;
    require(data.size_bytes >= flow::EAGER_HEADER_BYTES, "an eager packet without its header was given out");
    std::memcpy(&key, data.payload, sizeof key);
    message = static_cast<uint32_t>(key & 0xFFFF);
    require(message < count() && key == header(message).key && states_[message].pushed,
            "an eager packet of no message was given out");
    const uint64_t number = states_[message].eager_number;
    require(flow::index_of(data.immediate) == (number & flow::INDEX_MASK) && data.rkey == eager_rkey_ &&
                data.size_bytes == flow::EAGER_HEADER_BYTES + size_bytes(message) &&
                data.remote_address ==
                    reinterpret_cast<uint64_t>(eager_memory_) + number % eager_slot_count_ * payload_max_bytes_,
            [&] { return "eager " + name(sender_, message) + " was given out for a wrong place"; });
  } else {
    message = message_at(source_.data(), data.payload);
    require(message < count() && states_[message].transferred, "a packet from no open transfer was given out");
    const State& state = states_[message];
    require(!state.sent, [&] { return name(sender_, message) + " was given out again after it was reported sent"; });
    const auto offset = static_cast<uint32_t>(data.payload - source_.data()) - state.start;
    part = offset / payload_max_bytes_;
    const bool is_whole = offset % payload_max_bytes_ == 0 && part < state.packet_count &&
                          data.size_bytes == std::min(payload_max_bytes_, size_bytes(message) - offset);
    require(is_whole && data.rkey == rkey(message) &&
                data.remote_address == reinterpret_cast<uint64_t>(destination_.data() + state.start + offset),
            [&] { return name(sender_, message) + " was given out for a wrong place"; });
  }
  if (!states_[message].out[part]) {
    states_[message].out.set(part);
    ++distinct_packets_out_;
  }
  packet.message = static_cast<uint16_t>(message);
  packet.part = static_cast<uint16_t>(part);
}

void Direction::check_all_delivered() const {
  for (uint32_t message = 0; message < count(); ++message)
    require(states_[message].delivered.count() == states_[message].packet_count,
            [&] { return name(sender_, message) + " did not arrive, though its sender is idle"; });
}

void Direction::check_destination(const std::byte* at, uint32_t size_bytes) const {
  if (at >= eager_memory_ && at < eager_memory_ + size_t{eager_slot_count_} * payload_max_bytes_) {
    require(static_cast<size_t>(at - eager_memory_) % payload_max_bytes_ == 0 && size_bytes <= payload_max_bytes_,
            "a packet would be placed across eager slots");
    return;
  }
  require(!destinations_closed_, "a packet would be placed after the end");
  require(at >= destination_.data() && at < destination_.data() + used_bytes_, "a packet would be placed nowhere");
  const uint32_t message = message_at(destination_.data(), at);
  require(message < count() && states_[message].advertised && !states_[message].received,
          "a packet would be placed where no receive is open");
  const auto offset = static_cast<uint32_t>(at - destination_.data()) - states_[message].start;
  require(offset + size_bytes <= this->size_bytes(message),
          [&] { return "a packet would be placed past the end of " + name(sender_, message); });
}

void Direction::on_delivered(const Packet& packet) {
  states_[packet.message].delivered.set(packet.part);
  ++distinct_packets_delivered_;
}

void Direction::on_received(uint64_t message, const std::byte* data) {
  require(message < count() && states_[message].advertised, "received: a message that was not advertised");
  State& state = states_[message];
  require(!state.received, [&] { return name(sender_, message) + " was received twice"; });
  require(data == destination_.data() + state.start, "received: another destination than the advertised one");
  require(has_right_bytes(static_cast<uint32_t>(message), data),
          [&] { return name(sender_, message) + " was received with wrong bytes"; });
  state.received = true;
  std::memset(destination_.data() + state.start, OVERWRITTEN, size_bytes(static_cast<uint32_t>(message)));
}

void Direction::on_eager(uint32_t message, const flow::Event& event) const {
  require(message < count(), "an eager message that does not exist");
  const MessageHeader expected = header(message);
  require(event.header.key == expected.key && event.header.signature == expected.signature &&
              event.header.size_bytes == expected.size_bytes && event.data_bytes == expected.size_bytes,
          [&] { return "eager " + name(sender_, message) + " came out of turn, or a second time"; });
  require(has_right_bytes(message, event.data), [&] { return "eager " + name(sender_, message) + " has wrong bytes"; });
}

void Direction::close_destinations() { destinations_closed_ = true; }

void Direction::close_sources() { sources_closed_ = true; }

bool Direction::is_sending() const {
  return std::any_of(states_.begin(), states_.begin() + count(), [](const State& state) {
    return state.transferred && !state.sent && state.out.any() && state.packet_count <= flow::CREDIT_MAX_PACKETS;
  });
}

bool Direction::is_receiving() const {
  return std::any_of(states_.begin(), states_.begin() + count(), [](const State& state) {
    return state.advertised && !state.received && state.delivered.any() &&
           state.delivered.count() < state.packet_count && state.packet_count <= flow::CREDIT_MAX_PACKETS;
  });
}

}  // namespace sennit::model
