// SPDX-License-Identifier: Apache-2.0
#include "ports/udp/udp_sender.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "flow/immediate.hpp"

namespace sennit {
namespace {

constexpr size_t PAGE_BYTES = 4'096;

// The processor's prefetching stops at each page. Prefetching here saves a fifth of the ICRC's time for memory that is
// not in the cache.
void prefetch(const std::byte* at, size_t size_bytes) {
  constexpr size_t CACHE_LINE_BYTES = 64;
  for (size_t offset = 0; offset < std::min(size_bytes, PAGE_BYTES); offset += CACHE_LINE_BYTES)
    __builtin_prefetch(at + offset);
}

uint32_t extend_by_pages(uint32_t crc, std::span<const std::byte> payload) {
  while (payload.size() > PAGE_BYTES) {
    prefetch(payload.data() + PAGE_BYTES, payload.size() - PAGE_BYTES);
    crc = wire::extend(crc, payload.first(PAGE_BYTES));
    payload = payload.subspan(PAGE_BYTES);
  }
  return wire::extend(crc, payload);
}

// A device puts eager packets, and probes of a trial, into memory that it chooses, not into a ring that a late copy
// could reach.
bool is_for_device_buffer(const UdpPath& path, const flow::DataOut& packet) {
  return path.is_to_device &&
         (flow::slot_of(packet.immediate) == flow::EAGER_SLOT || packet.immediate == flow::PROBE_IMMEDIATE);
}

}  // namespace

UdpSender::UdpSender(std::shared_ptr<UdpSendSocket> socket, UdpSendCounters& counters)
    : socket_(std::move(socket)), counters_(counters), can_segment_(socket_->socket().can_segment()) {}

UdpSender::~UdpSender() { socket_->leave(reports_); }

size_t UdpSender::batch_packets(size_t payload_bytes) {
  return std::clamp<size_t>(SEND_MAX_BYTES / wire::data_packet_bytes(payload_bytes), 1, BATCH_MAX_PACKETS);
}

size_t UdpSender::same_kind(const UdpPath& path, std::span<const flow::DataOut> packets) {
  if (!path.is_to_device) return packets.size();
  size_t count = 1;
  const bool first = is_for_device_buffer(path, packets[0]);
  while (count < packets.size() && is_for_device_buffer(path, packets[count]) == first) ++count;
  return count;
}

bool UdpSender::takes_along(const UdpPath& path, std::span<const flow::DataOut> packets, size_t control_bytes) {
  const size_t packet_bytes = wire::data_packet_bytes(packets.front().size_bytes);
  const size_t behind_bytes = wire::control_packet_bytes(control_bytes);
  return !path.is_to_device && packets.back().size_bytes == packets.front().size_bytes &&
         behind_bytes <= packet_bytes && packets.size() < BATCH_MAX_PACKETS &&
         packets.size() * packet_bytes + behind_bytes <= SEND_MAX_BYTES;
}

void UdpSender::send_data(UdpPath& path, std::span<const flow::DataOut> packets, std::span<const std::byte> control) {
  while (!packets.empty()) {
    const auto batch = packets.first(same_kind(path, packets));
    const uint32_t first_psn = path.next_psn;
    path.next_psn = (first_psn + static_cast<uint32_t>(batch.size())) & wire::PSN_MASK;
    const size_t packet_bytes = lay_out(path, batch, first_psn);
    if (!control.empty()) lay_out_control(path, control, static_cast<uint32_t>(batch.size()));
    transmit(path, std::span(pieces_).first(piece_count_), packet_bytes);
    packets = packets.subspan(batch.size());
  }
}

void UdpSender::send_control(UdpPath& path, std::span<const std::byte> payload) {
  piece_count_ = 0;
  const size_t packet_bytes = lay_out_control(path, payload, 0);
  transmit(path, std::span(pieces_).first(piece_count_), packet_bytes);
}

size_t UdpSender::lay_out_control(UdpPath& path, std::span<const std::byte> payload, uint32_t place) {
  std::byte* const header = control_bytes_.data();
  const auto payload_bytes = static_cast<uint32_t>(payload.size());
  const size_t packet_bytes = wire::control_packet_bytes(payload_bytes);
  wire::write_control_header(std::span<std::byte, wire::CONTROL_HEADER_BYTES>(header, wire::CONTROL_HEADER_BYTES),
                             path.remote_qpn, path.next_psn, payload_bytes);
  path.next_psn = (path.next_psn + 1) & wire::PSN_MASK;
  // Copied, because it is short: a piece of its own would cost the kernel more.
  std::byte* const end = std::copy(payload.begin(), payload.end(), header + wire::CONTROL_HEADER_BYTES);
  const uint32_t identification = can_segment_ ? place : 0;
  uint32_t crc =
      wire::extend_with_header(path.outgoing.of(packet_bytes, identification), {header, wire::CONTROL_HEADER_BYTES});
  crc = wire::extend(crc, payload);
  wire::write_trailer(std::span<std::byte, 7>(end, 7), crc, wire::pad_of(payload_bytes));
  pieces_[piece_count_++] = {header, packet_bytes};
  return packet_bytes;
}

// The trailer and the next header are adjacent, so that a packet costs two pieces: this frame and its payload.
size_t UdpSender::lay_out(UdpPath& path, std::span<const flow::DataOut> packets, uint32_t first_psn) {
  const bool is_eager = is_for_device_buffer(path, packets[0]);
  const size_t header_bytes = is_eager ? wire::SEND_IMMEDIATE_HEADER_BYTES : wire::DATA_HEADER_BYTES;
  const auto packet_bytes = [&](const flow::DataOut& packet) {
    return is_eager ? wire::send_immediate_packet_bytes(packet.size_bytes) : wire::data_packet_bytes(packet.size_bytes);
  };
  std::byte* frame = frame_bytes_.data();
  std::byte* piece_start = frame;
  piece_count_ = 0;
  for (size_t i = 0; i < packets.size(); ++i) {
    const flow::DataOut& packet = packets[i];
    if (i + 1 < packets.size()) prefetch(packets[i + 1].payload, packets[i + 1].size_bytes);
    const uint32_t psn = first_psn + static_cast<uint32_t>(i);
    if (is_eager) {
      wire::write_send_immediate_header(
          std::span<std::byte, wire::SEND_IMMEDIATE_HEADER_BYTES>(frame, wire::SEND_IMMEDIATE_HEADER_BYTES),
          path.remote_qpn, psn, packet.immediate, packet.size_bytes);
    } else {
      wire::write_data_header(std::span<std::byte, wire::DATA_HEADER_BYTES>(frame, wire::DATA_HEADER_BYTES),
                              path.remote_qpn, psn, packet.remote_address, packet.rkey, packet.immediate,
                              packet.size_bytes);
    }
    // When packets are sent one by one, each is the first of its send.
    const uint32_t identification = can_segment_ ? static_cast<uint32_t>(i) : 0;
    uint32_t crc = path.outgoing.of(packet_bytes(packet), identification);
    crc = extend_by_pages(wire::extend_with_header(crc, {frame, header_bytes}), {packet.payload, packet.size_bytes});
    frame += header_bytes;
    pieces_[piece_count_++] = {piece_start, static_cast<size_t>(frame - piece_start)};
    pieces_[piece_count_++] = {const_cast<std::byte*>(packet.payload), packet.size_bytes};
    piece_start = frame;
    frame += wire::write_trailer(std::span<std::byte, 7>(frame, 7), crc, wire::pad_of(packet.size_bytes));
  }
  pieces_[piece_count_++] = {piece_start, static_cast<size_t>(frame - piece_start)};
  return packet_bytes(packets[0]);
}

void UdpSender::transmit(const UdpPath& path, std::span<const iovec> pieces, size_t segment_bytes) {
  size_t size_bytes = 0;
  for (const iovec& piece : pieces) size_bytes += piece.iov_len;
  const bool is_batch = size_bytes > segment_bytes;
  if (is_blocked()) {  // a caller that ignores is_blocked() loses the packet, as with a full queue
    lose(path, EAGAIN);
    return;
  }
  if (is_batch && !can_segment_) {
    keep(path, pieces, segment_bytes);
    send_kept();
    return;
  }
  const int error = socket_->send(path.remote, pieces, is_batch ? segment_bytes : 0, counters_.send_calls);
  if (error == 0) {
    is_stuck_ = false;
  } else if (error == EAGAIN || error == ENOBUFS) {
    ++counters_.send_blocked;
    if (is_stuck_)
      lose(path, error);
    else
      keep(path, pieces, segment_bytes);
  } else if (is_batch && (error == EIO || error == EINVAL)) {
    // No checksum offload on this device (EIO), or a kernel that knows the option but not this use of it.
    // The ICRCs of an IPv4 batch hold identifications 0, 1, 2, …, so this batch is lost. The next ones are right.
    ++counters_.segmentation_refused;
    can_segment_ = false;
    if (path.remote.storage.ss_family == AF_INET6) {
      keep(path, pieces, segment_bytes);
      send_kept();
    }
  } else {
    lose(path, error);
  }
}

void UdpSender::lose(const UdpPath& path, int error) {
  ++counters_.send_errors;
  last_error_ = error;
  if (error == EMSGSIZE) {
    ++counters_.send_over_mtu;
    is_over_mtu_ = true;
  }
  trace::port_error(path.ends.rank, path.ends.peer, path.index, trace::PortError::send, static_cast<uint32_t>(error));
}

void UdpSender::keep(const UdpPath& path, std::span<const iovec> pieces, size_t segment_bytes) {
  kept_.path = &path;
  kept_.segment_bytes = segment_bytes;
  kept_.since_us = 0;
  for (const iovec& piece : pieces) {
    const auto* from = static_cast<const std::byte*>(piece.iov_base);
    kept_.bytes.insert(kept_.bytes.end(), from, from + piece.iov_len);
  }
}

bool UdpSender::flush(uint64_t now_us) {
  if (!is_blocked() || send_kept()) return true;
  if (kept_.since_us == 0) kept_.since_us = now_us;
  if (now_us - kept_.since_us < STUCK_US) return false;
  is_stuck_ = true;
  lose(*kept_.path, EAGAIN);
  kept_.bytes.clear();
  return true;
}

bool UdpSender::send_kept() {
  size_t done_bytes = 0;
  int error = 0;
  if (can_segment_ && kept_.bytes.size() > kept_.segment_bytes) {
    iovec piece{kept_.bytes.data(), kept_.bytes.size()};
    error = socket_->send(kept_.path->remote, std::span(&piece, 1), kept_.segment_bytes, counters_.send_calls);
    if (error == 0) done_bytes = kept_.bytes.size();
  } else {
    error = send_one_by_one(kept_.path->remote, kept_.bytes, kept_.segment_bytes, done_bytes);
  }
  if (error == EAGAIN || error == ENOBUFS) {
    if (done_bytes != 0) kept_.since_us = 0;  // slow, not stuck
    kept_.bytes.erase(kept_.bytes.begin(), kept_.bytes.begin() + static_cast<std::ptrdiff_t>(done_bytes));
    return false;
  }
  if (error != 0) lose(*kept_.path, error);
  kept_.bytes.clear();
  return true;
}

int UdpSender::send_one_by_one(const SocketAddress& to, std::span<const std::byte> bytes, size_t segment_bytes,
                               size_t& done_bytes) {
  // One call for all of them.
  std::array<mmsghdr, BATCH_MAX_PACKETS> messages{};
  std::array<iovec, BATCH_MAX_PACKETS> pieces;
  size_t count = 0;
  for (size_t offset = 0; offset < bytes.size() && count < messages.size(); offset += segment_bytes, ++count) {
    pieces[count] = {const_cast<std::byte*>(bytes.data()) + offset, std::min(segment_bytes, bytes.size() - offset)};
    msghdr& message = messages[count].msg_hdr;
    message.msg_name = const_cast<sockaddr_storage*>(&to.storage);
    message.msg_namelen = to.size_bytes;
    message.msg_iov = &pieces[count];
    message.msg_iovlen = 1;
  }
  int error = 0;
  const size_t sent = socket_->send_each(std::span(messages).first(count), error, counters_.send_calls);
  done_bytes = error == 0 ? bytes.size() : sent * segment_bytes;
  return error;
}

}  // namespace sennit
