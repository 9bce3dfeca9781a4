// SPDX-License-Identifier: Apache-2.0
// Packs encoded records into packets (docs/reference/records.md) and sends them on a connected UDP socket.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "checksum.hpp"

namespace sennit::offload {

// The largest payload of a UDP datagram over IPv6.
constexpr std::size_t BODY_MAX_BYTES = 65'535 - 48 - HEADER_BYTES;

// Records one after another, as encode_records() wrote them.
struct RecordStore {
  std::span<const std::byte> bytes;
  std::span<const std::uint64_t> starts;  // [records + 1], or empty if all have `record_bytes`
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
    std::uint32_t next_row;  // the first row not sent
    std::uint32_t packets;
    int error;  // the socket's errno, or 0
  };

  // Sends rows `first`, `first` + 1, ... of a batch. `batch_records` gives their record numbers in the store
  // (each below store.count). Stops when all are sent, after `packets_max` packets, or when the socket is full.
  Progress send(int fd, std::span<const std::int64_t> batch_records, std::uint32_t batch, std::uint32_t first,
                std::uint32_t packets_max);

  // Bytes of a packet with the largest body.
  std::size_t packet_max_bytes() const { return HEADER_BYTES + body_max_bytes_; }

  struct Packet {
    std::uint32_t next_row;  // the first row not in it
    std::size_t size_bytes;
  };

  // Writes a header and as many records from row `first` on as fit; `out` has packet_max_bytes().
  Packet pack(std::span<const std::int64_t> batch_records, std::uint32_t batch, std::uint32_t first,
              std::byte* out) const;

  // Passes several packets of one size to the kernel as one (UDP_SEGMENT), unless it has refused that.
  bool is_segmenting() const { return is_segmenting_; }

  // Passes each packet alone from now on: several in one reach some receivers as one.
  void send_apart() { is_segmenting_ = false; }

 private:
  // One message to the kernel: packets of one size, the last may be shorter.
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
