// SPDX-License-Identifier: Apache-2.0
// Receives on a rail's listening socket: scatters into the predicted places, checks the packets, places the rest.
//
// One recvmsg takes up to 64 KiB of packets that one send made. The scatter list contains the places where the flow
// expects its next payloads. So a packet that comes as predicted is in place when the call returns. All others are
// copied once. The prediction is that the last flow continues. If that fails, as it does with several peers, the
// receiver first looks at the next batch's header. That costs a short system call and saves the copy. No packet reaches
// the flow or is copied into place before its ICRC is verified. A wrong packet in a predicted place is overwritten
// later, because only places without valid bytes are predicted.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "flow/agenda.hpp"
#include "flow/flow.hpp"
#include "ports/udp/udp_path.hpp"
#include "ports/udp/udp_socket.hpp"

namespace sennit {

using UdpPathByQpn = std::unordered_map<uint32_t, UdpPath*>;

struct UdpReceiveCounters {
  uint64_t receive_calls = 0;
  uint64_t receive_peeks = 0;  // looks at the next batch's header
  uint64_t receive_errors = 0;
  uint64_t placed_in_place = 0;  // packets received straight into their place
  uint64_t placed_by_copy = 0;
  std::array<uint64_t, static_cast<size_t>(wire::Refusal::count)> refused{};  // without those that the flow counts

  static constexpr const char* GROUP = "udp_receive";
  static std::vector<std::string> names();
};

class UdpReceiver {
 public:
  // `rank`: for tracepoints.
  UdpReceiver(uint32_t rank, UdpSocket socket, const UdpPathByQpn& paths, UdpReceiveCounters& counters);

  const UdpSocket& socket() const { return socket_; }
  // The most packets that a peer sends in one call. More places are not worth asking for.
  void expect_batches_of(size_t packet_count) {
    place_limit_ = std::clamp(packet_count, place_limit_, PLACE_MAX_COUNT);
  }
  enum class Received { nothing, control, data };
  // Receives one batch. The clock is read when the batch is there.
  Received receive(const flow::CallClock& clock);
  // Everything that arrived before this time has been received.
  uint64_t received_until_us() const { return received_until_us_; }

 private:
  static constexpr size_t PLACE_MAX_COUNT = 64;
  // After this many right guesses in a row, stop looking. With a second peer, guesses are right half the time.
  static constexpr uint32_t TRUSTED_GUESSES = 8;
  // Looking costs a system call, as much as copying 4 KiB. After this many small receives in a row, do not look.
  static constexpr uint32_t LOOKS_AFTER_BATCH = 16, SMALL_BYTES = 4'096;

  struct Arrival {
    wire::Packet packet;
    UdpPath* path;
    const std::byte* header;
    const std::byte* payload;
    const std::byte* trailer;  // pad and ICRC
    size_t packet_bytes;
    bool is_in_place;
  };

  bool predict();
  bool look();
  void lay_out();
  void sort(const ReceivedBatch& batch);
  UdpPath* find_path(uint32_t qpn) const;
  const std::byte* contiguous(size_t offset, size_t size_bytes);
  void gather(size_t offset, std::span<std::byte> out) const;
  void judge(Arrival& arrival, const ReceivedBatch& batch, uint64_t now_us, uint32_t& identification);
  bool has_right_icrc(const Arrival& arrival, uint32_t& identification) const;
  void fail(int error);
  void refuse(wire::Refusal refusal) { ++counters_.refused[static_cast<size_t>(refusal)]; }

  const uint32_t rank_;
  UdpSocket socket_;
  const UdpPathByQpn& paths_;
  UdpReceiveCounters& counters_;
  flow::Flow* expected_ = nullptr;  // whose data came last, or comes next
  uint32_t right_guesses_ = TRUSTED_GUESSES;
  bool has_looked_ = false;
  uint32_t looks_left_ = LOOKS_AFTER_BATCH;
  // What one recvmsg fills, in stream order: alternating frame bytes and predicted places, then `rest_`.
  std::vector<iovec> pieces_;
  std::array<flow::Placement, PLACE_MAX_COUNT> places_;
  std::array<size_t, PLACE_MAX_COUNT> place_offsets_;     // place of each predicted packet in the stream
  std::array<const std::byte*, PLACE_MAX_COUNT> frames_;  // its header, with the trailer right behind
  size_t place_count_ = 0, place_limit_ = 1;
  size_t rest_offset_ = 0;  // where `rest_` begins in the stream
  std::array<std::byte, PLACE_MAX_COUNT*(wire::DATA_HEADER_BYTES + 7)> frame_bytes_;
  std::unique_ptr<std::byte[]> rest_, bounce_;
  size_t bounced_bytes_ = 0;
  uint64_t received_until_us_ = 0;
  std::vector<Arrival> arrivals_;
};

}  // namespace sennit
