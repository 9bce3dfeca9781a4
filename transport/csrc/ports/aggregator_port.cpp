// SPDX-License-Identifier: Apache-2.0
#include "ports/aggregator_port.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

namespace sennit {
namespace {

// A window of blocks, with the kernel's own bytes of each.
constexpr size_t SOCKET_BYTES = 1 << 20;
// The type and the operation in a signature (docs/reference/plans.md).
constexpr uint32_t TYPE_SHIFT = 48;

constexpr uint64_t sequence_of(uint64_t key) { return key >> KEY_SLOT_BITS; }
constexpr uint32_t slot_of(uint64_t key) { return static_cast<uint32_t>(key & NO_SLOT); }

wire::Endpoint any_address(bool is_ipv6) {
  wire::Endpoint any;
  any.is_ipv6 = is_ipv6;
  return any;
}

uint8_t arithmetic_of(uint64_t signature) {
  switch (signature >> TYPE_SHIFT & 0xFF) {
    case SENNIT_I32:
      return AGGREGATION_SUM_I32;
    case SENNIT_BF16:
      return AGGREGATION_SUM_BF16;
    default:
      return AGGREGATION_SUM_F32;
  }
}

// Ranks that run other operations, or number them in another way, have other marks.
uint32_t mark_of(const MessageHeader& header) {
  uint64_t mix = checksum_word(header.key, header.signature);
  mix = checksum_end(checksum_word(mix, header.size_bytes));
  return static_cast<uint32_t>(mix);
}

}  // namespace

AggregatorPort::AggregatorPort(uint32_t peer, const wire::Endpoint& aggregator, const aggregation::ClientConfig& config,
                               CounterPage* counter_page)
    : peer_(peer),
      address_(aggregator),
      address_text_(wire::text_of(aggregator)),
      socket_(any_address(aggregator.is_ipv6)),
      counters_(counter_page),
      client_(config, *counters_),
      out_(BATCH),
      in_(BATCH) {
  socket_.set_receive_buffer(SOCKET_BYTES);
  socket_.set_send_buffer(SOCKET_BYTES);
  socket_.connect(address_);
}

AggregatorPort::~AggregatorPort() = default;

bool AggregatorPort::join(uint64_t now_us) {
  receive(now_us);
  if (client_.is_joined() || !client_.refusal().empty()) return true;
  send(now_us);
  return false;
}

void AggregatorPort::foresee(const MessageHeader& header, bool is_send) {
  const uint64_t sequence = sequence_of(header.key);
  if (is_send) {
    sink_->on_advert(peer_, header, header.key);
  } else if (slot_of(header.key) == AGGREGATOR_MISSING) {
    operations_.try_emplace(sequence);
  } else {
    const uint64_t number =
        client_.foresee(sequence, header.size_bytes, arithmetic_of(header.signature), mark_of(header));
    numbers_[header.key] = number;
    messages_[number].key = header.key;
    ++operations_[sequence].messages_left;
  }
}

void AggregatorPort::transfer(uint64_t send_id, uint64_t key, const void* data, uint64_t, Use) {
  const uint32_t slot = slot_of(key);
  if (slot >= AGGREGATOR_FAILED) {
    uint32_t missing;
    std::memcpy(&missing, data, sizeof missing);
    if (missing != 0) client_.give_up(sequence_of(key));
    return sink_->on_sent(send_id);
  }
  const uint64_t number = numbers_.at(key);
  Message& message = messages_.at(number);
  message.send_id = send_id;
  if (message.is_over) return hand_over(number, message);
  client_.set_source(number, static_cast<const std::byte*>(data));
}

void AggregatorPort::advertise(uint64_t receive_id, const MessageHeader& header, void* destination) {
  const uint64_t sequence = sequence_of(header.key);
  if (slot_of(header.key) == AGGREGATOR_MISSING) {
    Operation& operation = operations_[sequence];
    operation.receive_id = receive_id;
    operation.destination = static_cast<std::byte*>(destination);
    return report(sequence);
  }
  const uint64_t number = numbers_.at(header.key);
  Message& message = messages_.at(number);
  message.receive_id = receive_id;
  message.destination = static_cast<std::byte*>(destination);
  if (message.is_over) return hand_over(number, message);
  client_.set_destination(number, message.destination);
}

// Both steps of a message end together, once both have begun.
void AggregatorPort::hand_over(uint64_t number, Message& message) {
  if (message.send_id == NO_ID || message.receive_id == NO_ID) return;
  const Message ended = message;
  numbers_.erase(ended.key);
  messages_.erase(number);
  sink_->on_sent(ended.send_id);
  sink_->on_received(ended.receive_id, ended.destination, 0);
}

void AggregatorPort::report(uint64_t sequence) {
  const auto found = operations_.find(sequence);
  if (found == operations_.end() || found->second.messages_left != 0 || found->second.receive_id == NO_ID) return;
  const Operation ended = found->second;
  operations_.erase(found);
  const auto missing =
      static_cast<uint32_t>(std::min<uint64_t>(ended.blocks_missing, std::numeric_limits<uint32_t>::max()));
  std::memcpy(ended.destination, &missing, sizeof missing);
  sink_->on_received(ended.receive_id, ended.destination, 0);
}

bool AggregatorPort::deliver() {
  const std::vector<aggregation::Client::Ended> all = client_.take_ended();
  for (const auto& [number, blocks_missing] : all) {
    Message& message = messages_.at(number);
    const uint64_t sequence = sequence_of(message.key);
    Operation& operation = operations_[sequence];
    operation.blocks_missing += blocks_missing;
    --operation.messages_left;
    message.is_over = true;
    hand_over(number, message);
    report(sequence);
  }
  return !all.empty();
}

bool AggregatorPort::progress(uint64_t now_us) {
  bool moved = receive(now_us);
  client_.look(now_us);
  moved |= deliver();
  return send(now_us) || moved;
}

void AggregatorPort::tell_peers(bool, uint64_t now_us) { send(now_us); }

bool AggregatorPort::receive(uint64_t now_us) {
  std::array<mmsghdr, BATCH> headers{};
  std::array<iovec, BATCH> places;
  for (size_t i = 0; i < BATCH; ++i) {
    places[i] = {in_[i].data(), in_[i].size()};
    headers[i].msg_hdr.msg_iov = &places[i];
    headers[i].msg_hdr.msg_iovlen = 1;
  }
  const int count = recvmmsg(socket_.fd(), headers.data(), BATCH, MSG_DONTWAIT, nullptr);
  if (count < 0) {
    // Nobody listens there. Other errors are of single packets, and come and go.
    if (errno == ECONNREFUSED) client_.refused_by_host(now_us);
    return false;
  }
  for (size_t i = 0; i < static_cast<size_t>(count); ++i)
    client_.take_datagram(now_us, {in_[i].data(), headers[i].msg_len});
  return count != 0;
}

bool AggregatorPort::send(uint64_t now_us) {
  bool sent = false;
  for (;;) {
    if (out_first_ == out_count_) {
      out_first_ = 0;
      for (out_count_ = 0; out_count_ < BATCH; ++out_count_) {
        out_bytes_[out_count_] = client_.next_datagram(now_us, out_[out_count_]);
        if (out_bytes_[out_count_] == 0) break;
      }
      if (out_count_ == 0) return sent;
    }
    std::array<mmsghdr, BATCH> headers{};
    std::array<iovec, BATCH> places;
    for (size_t i = out_first_; i < out_count_; ++i) {
      places[i] = {out_[i].data(), out_bytes_[i]};
      headers[i].msg_hdr.msg_iov = &places[i];
      headers[i].msg_hdr.msg_iovlen = 1;
    }
    const int count = sendmmsg(socket_.fd(), &headers[out_first_], static_cast<unsigned>(out_count_ - out_first_),
                               MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EAGAIN || errno == ENOBUFS || errno == EINTR) return sent;
      if (errno == ECONNREFUSED) client_.refused_by_host(now_us);
      out_first_ = out_count_;  // lost, as on any network
      return sent;
    }
    out_first_ += static_cast<size_t>(count);
    sent = true;
  }
}

uint64_t AggregatorPort::next_timeout_us() const {
  // What the socket did not take: it has no other sign when it has room again.
  if (out_first_ != out_count_) return 0;
  return is_joined() && messages_.empty() ? UINT64_MAX : client_.next_timeout_us();
}

void AggregatorPort::append_poll_fds(std::vector<pollfd>& out) const { out.push_back({socket_.fd(), POLLIN, 0}); }

void AggregatorPort::close() {
  std::array<std::byte, aggregation::PACKET_MAX_BYTES> last;
  if (client_.is_joined()) ::send(socket_.fd(), last.data(), client_.leave(last), MSG_DONTWAIT | MSG_NOSIGNAL);
}

void AggregatorPort::revoke() noexcept {
  client_.drop();
  messages_.clear();
  numbers_.clear();
  operations_.clear();
  out_first_ = out_count_ = 0;
}

std::string AggregatorPort::describe() const { return "aggregator " + address_text_ + ": " + client_.describe(); }

}  // namespace sennit
