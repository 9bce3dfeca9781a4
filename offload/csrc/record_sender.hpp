// SPDX-License-Identifier: Apache-2.0
// Encoded records -> packets of docs/reference/records.md -> a connected UDP socket.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace sennit::offload {

constexpr std::size_t HEADER_BYTES = 24;
// What a UDP datagram over IPv6 can hold at most, less the header.
constexpr std::size_t BODY_MAX_BYTES = 65'535 - 48 - HEADER_BYTES;

// Records one behind the other, as encode_records() wrote them.
struct RecordStore {
  std::span<const std::byte> bytes;
  std::span<const std::uint64_t> starts;  // [records + 1], or empty: all have `record_bytes`
  std::size_t record_bytes = 0;
  std::size_t count = 0;

  std::span<const std::byte> record(std::size_t number) const {
    if (starts.empty()) return bytes.subspan(number * record_bytes, record_bytes);
    return bytes.subspan(starts[number], starts[number + 1] - starts[number]);
  }
};

class RecordSender {
 public:
  // Throws std::invalid_argument if the store's numbers contradict each other, or a record is longer than a body.
  RecordSender(const RecordStore& store, std::uint32_t schema_id, std::uint32_t session, std::size_t body_max_bytes);

  struct Progress {
    std::uint32_t next_row;  // the first that was not sent
    std::uint32_t packets;
    int error;  // of the socket, or 0
  };

  // The rows `first`, `first` + 1, ... of a batch, whose records are those of the store that `batch_records` names
  // (each below store.count), until all are sent, or `packets_max` packets, or the socket takes no more.
  Progress send(int fd, std::span<const std::int64_t> batch_records, std::uint32_t batch, std::uint32_t first,
                std::uint32_t packets_max);

  // Of a packet with a body of the greatest size.
  std::size_t packet_max_bytes() const { return HEADER_BYTES + body_max_bytes_; }

  struct Packet {
    std::uint32_t next_row;  // the first that is not in it
    std::size_t size_bytes;
  };

  // Header and as many records from row `first` on as fit; `out` has packet_max_bytes().
  Packet pack(std::span<const std::int64_t> batch_records, std::uint32_t batch, std::uint32_t first,
              std::byte* out) const;

  // Several packets of one size are given to the kernel as one (UDP_SEGMENT), unless it refused that once.
  bool is_segmenting() const { return is_segmenting_; }

 private:
  // What the kernel gets at once: packets of one size, of which the last may be shorter.
  struct Message {
    std::size_t begin, end;  // in window_
    std::size_t packet_bytes;
    std::uint32_t packets, next_row;

    bool takes(std::size_t size_bytes) const;
  };

  void fill_window(std::span<const std::int64_t> batch_records, std::uint32_t batch, std::uint32_t first,
                   std::uint32_t packets_max);
  int send_window(int fd, Progress& progress);

  RecordStore store_;
  std::uint32_t schema_id_, session_;
  std::size_t body_max_bytes_;
  bool is_segmenting_ = true;
  std::unique_ptr<std::byte[]> window_;
  std::vector<Message> messages_;
};

}  // namespace sennit::offload
