// SPDX-License-Identifier: Apache-2.0
#include "ports/udp/udp_receiver.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "flow/immediate.hpp"
#include "ports/trial.hpp"

namespace sennit {

std::vector<std::string> UdpReceiveCounters::names() {
  std::vector<std::string> out{"receive_calls", "receive_peeks", "receive_errors", "placed_in_place", "placed_by_copy"};
  for (size_t i = 0; i < static_cast<size_t>(wire::Refusal::count); ++i)
    out.emplace_back(wire::name(static_cast<wire::Refusal>(i)));
  return out;
}

UdpReceiver::UdpReceiver(uint32_t rank, UdpSocket socket, const UdpPathByQpn& paths, UdpReceiveCounters& counters)
    : rank_(rank),
      socket_(std::move(socket)),
      paths_(paths),
      counters_(counters),
      rest_(std::make_unique<std::byte[]>(RECEIVE_MAX_BYTES)),
      bounce_(std::make_unique<std::byte[]>(RECEIVE_MAX_BYTES)) {
  pieces_.reserve(2 * PLACE_MAX_COUNT + 2);
  arrivals_.reserve(PLACE_MAX_COUNT);
}

UdpReceiver::Received UdpReceiver::receive(const flow::CallClock& clock) {
  const uint64_t before_us = clock.now_us();
  received_until_us_ = before_us;
  if (!predict()) return Received::nothing;
  lay_out();
  ++counters_.receive_calls;
  const ReceivedBatch batch = receive_segments(socket_.fd(), pieces_);
  // The kernel knows when the batch arrived. Later packets may be queued behind it, or come while this thread is
  // interrupted: they count as not received, so the earlier clock is the safe one here.
  received_until_us_ = before_us - std::min(batch.waited_us, before_us);
  // For round trips it is the later one. With the earlier, packets that come during an interruption would seem to have
  // come before it, and one round trip that looks too short makes all others look like queues for seconds.
  const uint64_t now_us = clock.now_us();
  if (batch.error != 0) {
    fail(batch.error);
    return Received::nothing;
  }
  sort(batch);
  // Places are filled only now. Until here every packet stayed where recvmsg had put it.
  uint32_t identification = 0;
  Received received = Received::control;
  uint32_t data_bytes = 0;
  for (Arrival& arrival : arrivals_) {
    judge(arrival, batch, now_us, identification);
    if (arrival.packet.opcode != wire::Opcode::uc_write_only_immediate) continue;
    if (received == Received::control && !has_looked_ && !arrival.is_in_place &&
        flow::slot_of(arrival.packet.immediate) != flow::EAGER_SLOT)
      right_guesses_ = 0;
    received = Received::data;
    data_bytes += arrival.packet.payload_bytes;
    expected_ = arrival.path->flow;
  }
  if (data_bytes > SMALL_BYTES)
    looks_left_ = LOOKS_AFTER_BATCH;
  else if (received == Received::data && looks_left_ != 0)
    --looks_left_;
  return received;
}

// Finds where the next batch belongs. False if there is certainly no next batch.
bool UdpReceiver::predict() {
  has_looked_ = right_guesses_ < TRUSTED_GUESSES && looks_left_ != 0;
  if (has_looked_) return look();
  place_count_ = expected_ != nullptr ? expected_->predict(std::span(places_).first(place_limit_)) : 0;
  return true;
}

void UdpReceiver::fail(int error) {
  if (error == EAGAIN || error == EWOULDBLOCK) return;
  ++counters_.receive_errors;
  trace::port_error(rank_, trace::NO_PEER, trace::NO_PATH, trace::PortError::receive, static_cast<uint32_t>(error));
}

bool UdpReceiver::look() {
  place_count_ = 0;
  std::array<std::byte, wire::DATA_HEADER_BYTES> head;
  size_t head_bytes = 0;
  ++counters_.receive_peeks;
  const int error = peek_segments(socket_.fd(), head, head_bytes);
  if (error != 0) {
    fail(error);
    return false;
  }
  const auto target = wire::peek_target(std::span(head).first(head_bytes));
  const UdpPath* path = target ? find_path(target->qpn) : nullptr;
  if (path == nullptr || path->flow == nullptr) return true;
  flow::Placement guess{};
  const bool is_right =
      path->flow == expected_ && path->flow->predict(std::span(&guess, 1)) == 1 && guess.immediate == target->immediate;
  expected_ = path->flow;
  place_count_ = expected_->predict_from(target->immediate, std::span(places_).first(place_limit_));
  // Eager messages have no place, so looking gains nothing.
  right_guesses_ = is_right || place_count_ == 0 ? right_guesses_ + 1 : 0;
  return true;
}

UdpPath* UdpReceiver::find_path(uint32_t qpn) const {
  const auto known = paths_.find(qpn);
  return known != paths_.end() ? known->second : nullptr;  // null also if the peer is not connected
}

void UdpReceiver::lay_out() {
  pieces_.clear();
  std::byte* frame = frame_bytes_.data();
  std::byte* piece_start = frame;
  size_t offset = 0;
  for (size_t i = 0; i < place_count_; ++i) {
    const flow::Placement& place = places_[i];
    const size_t packet_bytes = wire::data_packet_bytes(place.size_bytes);
    // A shorter packet ends a batch. What follows it comes with another recvmsg.
    if (offset + packet_bytes > RECEIVE_MAX_BYTES || (i > 0 && place.size_bytes > places_[i - 1].size_bytes)) {
      place_count_ = i;
      break;
    }
    place_offsets_[i] = offset;
    frames_[i] = frame;
    offset += packet_bytes;
    frame += wire::DATA_HEADER_BYTES;
    pieces_.push_back({piece_start, static_cast<size_t>(frame - piece_start)});
    pieces_.push_back({place.destination, place.size_bytes});
    piece_start = frame;
    frame += wire::pad_of(place.size_bytes) + wire::ICRC_BYTES;
    if (i > 0 && place.size_bytes < places_[i - 1].size_bytes) place_count_ = i + 1;
  }
  if (frame != piece_start) pieces_.push_back({piece_start, static_cast<size_t>(frame - piece_start)});
  rest_offset_ = offset;
  pieces_.push_back({rest_.get(), RECEIVE_MAX_BYTES});
}

// Finds out what each packet is. Moves it out of the predicted places unless it belongs there.
void UdpReceiver::sort(const ReceivedBatch& batch) {
  arrivals_.clear();
  bounced_bytes_ = 0;
  if (batch.is_truncated || batch.segment_bytes == 0) {
    refuse(wire::Refusal::truncated);
    return;
  }
  size_t index = 0;
  uint32_t qpn = 0;  // InfiniBand's management queue pairs: never a path's
  UdpPath* path = nullptr;
  for (size_t offset = 0; offset < batch.size_bytes; offset += batch.segment_bytes, ++index) {
    const size_t packet_bytes = std::min(batch.segment_bytes, batch.size_bytes - offset);
    Arrival arrival{};
    arrival.packet_bytes = packet_bytes;
    const bool is_aligned = index < place_count_ && place_offsets_[index] == offset &&
                            wire::data_packet_bytes(places_[index].size_bytes) == packet_bytes;
    std::array<std::byte, wire::DATA_HEADER_BYTES> head;
    std::span<const std::byte> header(head);
    if (is_aligned) {
      header = {frames_[index], wire::DATA_HEADER_BYTES};
    } else {
      gather(offset, std::span(head).first(std::min(head.size(), packet_bytes)));
    }
    wire::Refusal refusal = wire::parse(header, packet_bytes, arrival.packet);
    if (refusal == wire::Refusal::none) {
      // Mostly the path of the packet before.
      if (arrival.packet.qpn != qpn) path = find_path(qpn = arrival.packet.qpn);
      arrival.path = path;
      if (path == nullptr)
        refusal = wire::Refusal::unknown_qpn;
      else if (arrival.packet.payload_bytes > path->payload_limit_bytes)
        refusal = wire::Refusal::oversized;
    }
    if (refusal != wire::Refusal::none) {
      refuse(refusal);
      continue;
    }
    const wire::Packet& packet = arrival.packet;
    arrival.is_in_place = is_aligned && packet.opcode == wire::Opcode::uc_write_only_immediate &&
                          arrival.path->flow == expected_ && packet.immediate == places_[index].immediate &&
                          packet.remote_address == places_[index].address &&
                          packet.payload_bytes == places_[index].size_bytes;
    if (arrival.is_in_place) {
      arrival.header = frames_[index];
      arrival.payload = places_[index].destination;
      arrival.trailer = frames_[index] + wire::DATA_HEADER_BYTES;
    } else {
      arrival.header = contiguous(offset, packet_bytes);
      arrival.payload = arrival.header + packet.payload_offset;
      arrival.trailer = arrival.payload + packet.payload_bytes;
    }
    arrivals_.push_back(arrival);
  }
}

const std::byte* UdpReceiver::contiguous(size_t offset, size_t size_bytes) {
  if (offset >= rest_offset_) return rest_.get() + (offset - rest_offset_);
  std::byte* copy = bounce_.get() + bounced_bytes_;  // a batch is never longer than the bounce buffer
  gather(offset, {copy, size_bytes});
  bounced_bytes_ += size_bytes;
  return copy;
}

void UdpReceiver::gather(size_t offset, std::span<std::byte> out) const {
  for (const iovec& piece : pieces_) {
    if (out.empty()) return;
    if (offset >= piece.iov_len) {
      offset -= piece.iov_len;
      continue;
    }
    const size_t part_bytes = std::min(out.size(), piece.iov_len - offset);
    std::memcpy(out.data(), static_cast<const std::byte*>(piece.iov_base) + offset, part_bytes);
    out = out.subspan(part_bytes);
    offset = 0;
  }
}

void UdpReceiver::judge(Arrival& arrival, const ReceivedBatch& batch, uint64_t now_us, uint32_t& identification) {
  const wire::Packet& packet = arrival.packet;
  const UdpPath& path = *arrival.path;
  // No region has this address, so no other memory can be meant.
  if (path.trial != nullptr && packet.opcode == wire::Opcode::uc_write_only_immediate && packet.remote_address == 0 &&
      packet.rkey == path.trial_rkey) {
    if (!has_right_icrc(arrival, identification)) return refuse(wire::Refusal::bad_icrc);
    path.trial->on_probe(now_us, path.number, {arrival.payload, packet.payload_bytes});
    if (path.flow != nullptr) path.flow->on_heard(now_us);  // and the answer is due
    return;
  }
  if (path.flow == nullptr) {
    // The peer's trial ended first: it sends again, as to a device that is not ready. Or damage has made this queue
    // pair of another one.
    if (!has_right_icrc(arrival, identification)) refuse(wire::Refusal::bad_icrc);
    return;
  }
  flow::Flow& flow = *path.flow;
  if (packet.opcode == wire::Opcode::uc_send_only) {
    if (!has_right_icrc(arrival, identification)) return refuse(wire::Refusal::bad_icrc);
    flow.on_control(now_us, arrival.path->index, {arrival.payload, packet.payload_bytes}, batch.waited_us);
    return;
  }
  flow::Placement place{};
  const flow::Verdict verdict =
      flow.locate(packet.immediate, packet.remote_address, packet.rkey, packet.payload_bytes, place);
  if (verdict != flow::Verdict::place && verdict != flow::Verdict::duplicate) return;  // the flow has counted it
  if (!has_right_icrc(arrival, identification)) return refuse(wire::Refusal::bad_icrc);
  if (verdict == flow::Verdict::place && place.destination != nullptr) {
    if (arrival.is_in_place) {
      ++counters_.placed_in_place;
    } else {
      ++counters_.placed_by_copy;
      std::memcpy(place.destination, arrival.payload, packet.payload_bytes);
    }
  }
  flow.on_data(now_us, arrival.path->index, packet.immediate, packet.payload_bytes, batch.is_ecn_marked,
               batch.waited_us);
}

bool UdpReceiver::has_right_icrc(const Arrival& arrival, uint32_t& identification) const {
  const wire::Packet& packet = arrival.packet;
  uint32_t found;
  std::memcpy(&found, arrival.trailer + packet.pad_bytes, sizeof found);
  const auto matches = [&](uint32_t id) {
    uint32_t crc = arrival.path->incoming.of(arrival.packet_bytes, id);
    crc = wire::extend_with_header(crc, {arrival.header, packet.header_bytes()});
    crc = wire::extend(crc, {arrival.payload, packet.payload_bytes});
    return wire::extend(crc, {arrival.trailer, packet.pad_bytes}) == found;
  };
  if (arrival.path->incoming.is_ipv6()) return matches(0);
  // The number is part of the IPv4 ICRC but not visible here. Most likely it follows the last one.
  constexpr uint32_t COUNT = wire::NetworkCrc::IDENTIFICATION_COUNT;
  for (uint32_t tried = 0; tried < COUNT; ++tried) {
    const uint32_t id = (identification + tried) % COUNT;
    if (!matches(id)) continue;
    identification = id + 1;
    return true;
  }
  return false;
}

}  // namespace sennit
