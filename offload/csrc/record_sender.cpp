// SPDX-License-Identifier: Apache-2.0
#include "record_sender.hpp"

#include <netinet/in.h>
#include <netinet/udp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tracepoints.hpp"

// Linux's uapi number, for C libraries that lack it.
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

namespace sennit::offload {
namespace {

// docs/reference/records.md
constexpr std::uint16_t MAGIC = 0x5e17;
constexpr std::uint8_t VERSION = 2;
// Bytes per system call: they stay in the second-level cache between packing and the kernel's copy.
constexpr std::size_t WINDOW_BYTES = 256 << 10;
constexpr std::size_t MESSAGES_MAX = 64;
// UDP_MAX_SEGMENTS of Linux before 6.9. IP's length field bounds what the kernel takes as one message.
constexpr std::uint32_t SEGMENTS_MAX = 64;
constexpr std::size_t MESSAGE_MAX_BYTES = 65'535 - 48;
// Records are scattered in memory, so their lines are prefetched this far ahead.
constexpr std::size_t PREFETCH_RECORDS = 8;
constexpr std::size_t CACHE_LINE_BYTES = 64;

template <typename Number>
void put_network(std::byte*& at, Number number) {
  for (std::size_t i = 0; i < sizeof number; i++)
    *at++ = static_cast<std::byte>(number >> (8 * (sizeof number - 1 - i)));
}

// Prefetches the lines of one record, and the offset of one further ahead.
void prefetch(const RecordStore& store, std::span<const std::int64_t> records) {
  if (!store.starts.empty() && records.size() > 2 * PREFETCH_RECORDS)
    __builtin_prefetch(&store.starts[static_cast<std::size_t>(records[2 * PREFETCH_RECORDS])]);
  const auto record = store.record(static_cast<std::size_t>(records[PREFETCH_RECORDS]));
  for (std::size_t at = 0; at < record.size(); at += CACHE_LINE_BYTES) __builtin_prefetch(record.data() + at);
}

}  // namespace

RecordSender::RecordSender(const RecordStore& store, std::uint32_t schema_id, std::uint32_t session,
                           std::size_t body_max_bytes)
    : store_(store), schema_id_(schema_id), session_(session), body_max_bytes_(body_max_bytes) {
  if (body_max_bytes < 1 || body_max_bytes > BODY_MAX_BYTES)
    throw std::invalid_argument("a body of " + std::to_string(body_max_bytes) + " bytes; allowed: 1 to " +
                                std::to_string(BODY_MAX_BYTES));
  if (store.starts.empty()) {
    if (store.record_bytes == 0 || store.bytes.size() / store.record_bytes != store.count ||
        store.bytes.size() % store.record_bytes != 0)
      throw std::invalid_argument(std::to_string(store.bytes.size()) + " bytes are not " + std::to_string(store.count) +
                                  " records of " + std::to_string(store.record_bytes));
  } else if (store.starts.size() != store.count + 1 || store.starts.front() != 0 ||
             store.starts.back() != store.bytes.size()) {
    throw std::invalid_argument("starts that are not those of the records");
  }
  for (std::size_t number = 0; number < (store.starts.empty() ? std::min<std::size_t>(store.count, 1) : store.count);
       number++) {
    if (!store.starts.empty() && store.starts[number] >= store.starts[number + 1])
      throw std::invalid_argument("record " + std::to_string(number) + " ends before it begins");
    const std::size_t size = store.record(number).size();
    if (size > body_max_bytes)
      throw std::invalid_argument("record " + std::to_string(number) + " has " + std::to_string(size) +
                                  " bytes; allowed: " + std::to_string(body_max_bytes));
  }
  window_ = std::make_unique_for_overwrite<std::byte[]>(WINDOW_BYTES);
}

RecordSender::Packet RecordSender::pack(std::span<const std::int64_t> batch_records, std::uint32_t batch,
                                        std::uint32_t first, std::byte* out) const {
  std::byte* const body = out + HEADER_BYTES;
  std::size_t body_bytes = 0;
  std::size_t row = first;
  for (; row < batch_records.size(); row++) {
    if (row + PREFETCH_RECORDS < batch_records.size()) prefetch(store_, batch_records.subspan(row));
    const auto record = store_.record(static_cast<std::size_t>(batch_records[row]));
    if (body_bytes + record.size() > body_max_bytes_) break;
    std::memcpy(body + body_bytes, record.data(), record.size());
    body_bytes += record.size();
  }
  const std::span packet(reinterpret_cast<const std::uint8_t*>(out), HEADER_BYTES + body_bytes);
  put_network(out, MAGIC);
  put_network(out, VERSION);
  put_network(out, std::uint8_t{0});
  put_network(out, schema_id_);
  put_network(out, session_);
  put_network(out, batch);
  put_network(out, first);
  put_network(out, static_cast<std::uint16_t>(row - first));
  put_network(out, static_cast<std::uint16_t>(body_bytes));
  put_network(out, checksum_of(packet));
  return {static_cast<std::uint32_t>(row), packet.size()};
}

// A message ends with its first shorter packet.
bool RecordSender::Message::takes(std::size_t size_bytes) const {
  return packets < SEGMENTS_MAX && end - begin == packets * packet_bytes && size_bytes <= packet_bytes &&
         end - begin + size_bytes <= MESSAGE_MAX_BYTES;
}

void RecordSender::fill_window(std::span<const std::int64_t> batch_records, std::uint32_t batch, std::uint32_t first,
                               std::uint32_t packets_max) {
  messages_.clear();
  std::size_t used = 0;
  std::uint32_t row = first;
  for (std::uint32_t packets = 0; row < batch_records.size() && packets < packets_max; packets++) {
    if (used + packet_max_bytes() > WINDOW_BYTES || messages_.size() == MESSAGES_MAX) return;
    const Packet packet = pack(batch_records, batch, row, window_.get() + used);
    row = packet.next_row;
    if (!is_segmenting_ || messages_.empty() || !messages_.back().takes(packet.size_bytes))
      messages_.push_back({used, used, packet.size_bytes, 0, row});
    Message& message = messages_.back();
    used += packet.size_bytes;
    message.end = used;
    message.packets++;
    message.next_row = row;
  }
}

int RecordSender::send_window(int fd, Progress& progress) {
  std::array<mmsghdr, MESSAGES_MAX> headers{};
  std::array<iovec, MESSAGES_MAX> pieces;
  struct alignas(cmsghdr) Control {
    std::array<std::byte, CMSG_SPACE(sizeof(std::uint16_t))> bytes;
  };
  std::array<Control, MESSAGES_MAX> controls;
  for (std::size_t number = 0; number < messages_.size(); number++) {
    const Message& message = messages_[number];
    pieces[number] = {window_.get() + message.begin, message.end - message.begin};
    msghdr& header = headers[number].msg_hdr;
    header.msg_iov = &pieces[number];
    header.msg_iovlen = 1;
    if (message.packets == 1) continue;
    header.msg_control = controls[number].bytes.data();
    header.msg_controllen = sizeof(Control::bytes);
    cmsghdr* option = CMSG_FIRSTHDR(&header);
    option->cmsg_level = IPPROTO_UDP;
    option->cmsg_type = UDP_SEGMENT;
    option->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
    const auto value = static_cast<std::uint16_t>(message.packet_bytes);
    std::memcpy(CMSG_DATA(option), &value, sizeof value);
  }
  int sent;
  do {
    sent = sendmmsg(fd, headers.data(), static_cast<unsigned>(messages_.size()), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  const int error = sent < 0 ? errno : 0;
  for (int number = 0; number < sent; number++) {
    progress.packets += messages_[static_cast<std::size_t>(number)].packets;
    progress.next_row = messages_[static_cast<std::size_t>(number)].next_row;
  }
  return error;
}

RecordSender::Progress RecordSender::send(int fd, std::span<const std::int64_t> batch_records, std::uint32_t batch,
                                          std::uint32_t first, std::uint32_t packets_max) {
  Progress progress{first, 0, 0};
  while (progress.next_row < batch_records.size() && progress.packets < packets_max) {
    fill_window(batch_records, batch, progress.next_row, packets_max - progress.packets);
    const bool was_segmenting = messages_.front().packets > 1;
    const Progress before = progress;
    progress.error = send_window(fd, progress);
    trace::packets_sent(session_, batch, before.next_row, progress.next_row, progress.packets - before.packets,
                        static_cast<std::uint32_t>(progress.error));
    // A device without checksum offload returns EIO, an old kernel EINVAL or ENOPROTOOPT.
    if (was_segmenting && (progress.error == EIO || progress.error == EINVAL || progress.error == ENOPROTOOPT)) {
      is_segmenting_ = false;
      progress.error = 0;
      continue;
    }
    if (progress.error != 0) break;
  }
  return progress;
}

}  // namespace sennit::offload
