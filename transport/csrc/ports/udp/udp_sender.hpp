// SPDX-License-Identifier: Apache-2.0
// Sends a group's packets from one source port. Headers and ICRCs are made here, payloads are gathered from their
// place. The socket may have other users (udp_send_socket.hpp). What waits for room, and what is lost, is this group's
// alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "flow/flow.hpp"
#include "ports/udp/udp_path.hpp"
#include "ports/udp/udp_send_socket.hpp"

namespace sennit {

struct UdpSendCounters {
  uint64_t send_calls = 0;
  uint64_t send_blocked = 0;          // the device's queue was full, and the batch was kept
  uint64_t send_errors = 0;           // batches given up and counted as lost: refused by the kernel, or stuck
  uint64_t send_over_mtu = 0;         // of these: larger than the path takes now (EMSGSIZE)
  uint64_t segmentation_refused = 0;  // the device has no UDP_SEGMENT, so packets go one by one

  static constexpr const char* GROUP = "udp_send";
  static std::vector<std::string> names() {
    return {"send_calls", "send_blocked", "send_errors", "send_over_mtu", "segmentation_refused"};
  }
};

class UdpSender {
 public:
  // Segments of one send: Linux's limit before 6.9, and the identifications that a receiver tries.
  static constexpr size_t BATCH_MAX_PACKETS = 64;

  UdpSender(std::shared_ptr<UdpSendSocket> socket, UdpSendCounters& counters);
  ~UdpSender();
  UdpSender(const UdpSender&) = delete;
  UdpSender& operator=(const UdpSender&) = delete;

  const wire::Endpoint& local() const { return socket_->socket().local(); }
  // Packets may go there from now on.
  void add_destination(const wire::Endpoint& to) { socket_->add_destination(to, reports_); }
  // How many packets of this payload one send takes.
  static size_t batch_packets(size_t payload_bytes);
  // All but the last of `packets` have one size. The payloads are read before the call returns. `control` is the
  // payload of a control packet that goes behind them, if takes_along says so.
  void send_data(UdpPath& path, std::span<const flow::DataOut> packets, std::span<const std::byte> control = {});
  // Whether one send takes these packets and a control packet behind them. Only its last segment may be shorter.
  static bool takes_along(const UdpPath& path, std::span<const flow::DataOut> packets, size_t control_bytes);
  void send_control(UdpPath& path, std::span<const std::byte> payload);
  // A batch waits for room in the device's queue. Nothing else may be sent before flush() is true.
  bool is_blocked() const { return !kept_.bytes.empty(); }
  // A queue that stays full for STUCK_US (a paused or broken device) must not hold up the other rails. Its batch is
  // lost, and so is everything after it until the kernel accepts something again. The flow finds another path.
  static constexpr uint64_t STUCK_US = 5'000;
  bool flush(uint64_t now_us);
  bool has_refused() const { return reports_.has_refused.load(std::memory_order_relaxed); }
  // Asks the kernel for reports now. Otherwise the next send returns them.
  bool look_for_refusals() {
    socket_->read_reports();
    return has_refused();
  }
  // Why the kernel refused the last refused packet since the last call (errno). 0: it refused none.
  int take_error() { return std::exchange(last_error_, 0); }
  // Whether a packet since the last call was larger than its path takes now (EMSGSIZE).
  bool take_over_mtu() { return std::exchange(is_over_mtu_, false); }
  // The path's MTU by the newest report of the network. 0: there was no report.
  uint32_t path_mtu_bytes() const { return socket_->path_mtu_bytes(reports_); }
  // Where packets came back from since the last call. Nobody listens there.
  std::vector<RefusedPacket> take_refused() { return socket_->take_refused(reports_); }

 private:
  // A batch for which the device had no room. Its payloads are copied, because an acknowledgement may free them.
  struct Kept {
    std::vector<std::byte> bytes;
    size_t segment_bytes = 0;
    const UdpPath* path = nullptr;
    uint64_t since_us = 0;  // time of the first flush() that found it; 0: none yet
  };

  // How many of `packets` are of one kind on this path, and so have one header.
  static size_t same_kind(const UdpPath& path, std::span<const flow::DataOut> packets);
  // Returns the size of the first packet.
  size_t lay_out(UdpPath& path, std::span<const flow::DataOut> packets, uint32_t first_psn);
  // Adds a control packet behind `place` packets that are laid out. Returns its size.
  size_t lay_out_control(UdpPath& path, std::span<const std::byte> payload, uint32_t place);
  void transmit(const UdpPath& path, std::span<const iovec> pieces, size_t segment_bytes);
  int send_one_by_one(const SocketAddress& to, std::span<const std::byte> bytes, size_t segment_bytes, size_t& done);
  void keep(const UdpPath& path, std::span<const iovec> pieces, size_t segment_bytes);
  // True when nothing is kept any more: it was sent, or the kernel will never accept it.
  bool send_kept();
  void lose(const UdpPath& path, int error);

  const std::shared_ptr<UdpSendSocket> socket_;
  UdpSendSocket::Reports reports_;
  UdpSendCounters& counters_;
  bool can_segment_;
  bool is_stuck_ = false;
  int last_error_ = 0;
  bool is_over_mtu_ = false;
  Kept kept_;
  std::array<std::byte, BATCH_MAX_PACKETS*(wire::DATA_HEADER_BYTES + 7)> frame_bytes_;
  std::array<std::byte, wire::CONTROL_HEADER_BYTES + flow::CONTROL_MAX_BYTES + 7> control_bytes_;
  std::array<iovec, 2 * BATCH_MAX_PACKETS + 2> pieces_;
  size_t piece_count_ = 0;
};

}  // namespace sennit
