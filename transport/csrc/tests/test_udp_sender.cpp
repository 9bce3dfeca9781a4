// SPDX-License-Identifier: Apache-2.0
// How the sender copes with a device without segmentation offload, and with a device whose queue is full.
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "ports/udp/udp_sender.hpp"

using namespace sennit;

namespace {

// Linux refuses UDP_SEGMENT on a socket that sends no checksum, as on a device that computes none.
void forbid_checksums(const UdpSocket& socket, bool is_ipv6) {
  const int on = 1;
  constexpr int NO_CHECK6_TX = 101;  // linux/udp.h
  REQUIRE((is_ipv6 ? setsockopt(socket.fd(), IPPROTO_UDP, NO_CHECK6_TX, &on, sizeof on)
                   : setsockopt(socket.fd(), SOL_SOCKET, SO_NO_CHECK, &on, sizeof on)) == 0);
}

struct Received {
  std::vector<std::vector<std::byte>> payloads;
  std::vector<uint32_t> psns;
  uint32_t wrong_icrcs = 0;
};

Received drain(const UdpSocket& socket, const wire::NetworkCrc& network) {
  Received out;
  std::vector<std::byte> buffer(RECEIVE_MAX_BYTES);
  for (;;) {
    pollfd readable{socket.fd(), POLLIN, 0};
    if (poll(&readable, 1, 20) == 0) return out;
    iovec place{buffer.data(), buffer.size()};
    const ReceivedBatch batch = receive_segments(socket.fd(), std::span(&place, 1));
    if (batch.error != 0) return out;
    uint32_t index = 0;
    for (size_t offset = 0; offset < batch.size_bytes; offset += batch.segment_bytes, ++index) {
      const auto bytes = std::span(buffer).subspan(offset, std::min(batch.segment_bytes, batch.size_bytes - offset));
      wire::Packet packet;
      REQUIRE(wire::parse(bytes, bytes.size(), packet) == wire::Refusal::none);
      uint32_t crc = wire::extend_with_header(network.of(bytes.size(), index), bytes.first(packet.header_bytes()));
      crc = wire::extend(crc, bytes.subspan(packet.payload_offset, packet.payload_bytes + packet.pad_bytes));
      out.wrong_icrcs += std::memcmp(&crc, bytes.data() + packet.icrc_offset(), sizeof crc) != 0;
      const auto payload = bytes.subspan(packet.payload_offset, packet.payload_bytes);
      out.payloads.emplace_back(payload.begin(), payload.end());
      out.psns.push_back(packet.psn);
    }
  }
}

}  // namespace

TEST_CASE("packets go one by one where the device cannot segment") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    UdpSocket receiver(wire::parse_endpoint(address, 0));
    UdpSocket socket(wire::parse_endpoint(address, 0));
    const bool is_ipv6 = socket.local().is_ipv6;
    forbid_checksums(socket, is_ipv6);
    const wire::NetworkCrc network(socket.local(), receiver.local(), wire::data_packet_bytes(1'024));
    UdpSendCounters counters;
    UdpSender sender(std::make_shared<UdpSendSocket>(std::move(socket)), counters);
    UdpPath path(receiver.local());
    path.remote_qpn = 77;
    path.outgoing = network;
    std::vector<std::byte> payload(1'024 * 20 + 13);
    for (size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<std::byte>(i * 7 >> 3);
    std::vector<flow::DataOut> packets;
    for (size_t offset = 0; offset < payload.size(); offset += 1'024)
      packets.push_back({offset, 5, static_cast<uint32_t>(offset), payload.data() + offset,
                         static_cast<uint32_t>(std::min<size_t>(1'024, payload.size() - offset))});

    sender.send_data(path, packets);
    CHECK(counters.segmentation_refused == 1);
    // The IPv4 identifications were those of a batch, so the batch counts as lost. The flow would send it again.
    const Received first = drain(receiver, network);
    CHECK(first.payloads.size() == (is_ipv6 ? packets.size() : 0));
    CHECK(first.wrong_icrcs == 0);

    sender.send_data(path, packets);
    CHECK(counters.segmentation_refused == 1);
    const Received second = drain(receiver, network);
    CHECK(second.wrong_icrcs == 0);
    REQUIRE(second.payloads.size() == packets.size());
    for (size_t i = 0; i < packets.size(); ++i)
      CHECK(std::memcmp(second.payloads[i].data(), packets[i].payload, packets[i].size_bytes) == 0);
    CHECK(path.next_psn == 2 * packets.size());
    CHECK(counters.send_errors == 0);
    CHECK_FALSE(sender.is_blocked());
  }
}

TEST_CASE("packet numbers of a path go on at 0 after 2^24 - 1, within a batch and between controls") {
  UdpSocket receiver(wire::parse_endpoint("::1", 0)), socket(wire::parse_endpoint("::1", 0));
  const wire::NetworkCrc network(socket.local(), receiver.local(), wire::data_packet_bytes(64));
  UdpSendCounters counters;
  UdpSender sender(std::make_shared<UdpSendSocket>(std::move(socket)), counters);
  UdpPath path(receiver.local());
  path.outgoing = network;
  const std::array<std::byte, 64> payload{};
  const std::array<flow::DataOut, 5> packets = [&] {
    std::array<flow::DataOut, 5> out;
    out.fill({0, 1, 2, payload.data(), 64});
    return out;
  }();
  for (const uint32_t first : {0xFF'FFFBu, 0xFF'FFFDu, 0xFF'FFFFu}) {
    CAPTURE(first);
    path.next_psn = first;
    sender.send_data(path, packets);
    sender.send_control(path, payload);
    const Received received = drain(receiver, network);
    CHECK(received.wrong_icrcs == 0);
    REQUIRE(received.psns.size() == packets.size() + 1);
    for (uint32_t i = 0; i < received.psns.size(); ++i) CHECK(received.psns[i] == ((first + i) & wire::PSN_MASK));
    CHECK(path.next_psn == ((first + packets.size() + 1) & wire::PSN_MASK));
  }
}

TEST_CASE("a control packet goes behind data in the same send, if it fits there") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    UdpSocket receiver(wire::parse_endpoint(address, 0)), socket(wire::parse_endpoint(address, 0));
    REQUIRE(receiver.enable_receive_offload());
    const wire::NetworkCrc network(socket.local(), receiver.local(), wire::data_packet_bytes(4'096));
    UdpSendCounters counters;
    UdpSender sender(std::make_shared<UdpSendSocket>(std::move(socket)), counters);
    UdpPath path(receiver.local());
    path.remote_qpn = 77;
    path.outgoing = network;
    const std::vector<std::byte> payload(4'096, std::byte{7}), control(101, std::byte{9});
    const auto packets_of = [&](size_t count, uint32_t last_bytes) {
      std::vector<flow::DataOut> packets(count, {0, 5, 1, payload.data(), 4'096});
      packets.back().size_bytes = last_bytes;
      return packets;
    };
    for (const size_t count : {size_t{1}, size_t{7}, UdpSender::batch_packets(4'096)}) {
      CAPTURE(count);
      const std::vector<flow::DataOut> packets = packets_of(count, 4'096);
      REQUIRE(UdpSender::takes_along(path, packets, control.size()));
      const uint64_t calls = counters.send_calls;
      const uint32_t psn = path.next_psn;
      sender.send_data(path, packets, control);
      CHECK(counters.send_calls == calls + 1);
      const Received received = drain(receiver, network);
      CHECK(received.wrong_icrcs == 0);
      REQUIRE(received.payloads.size() == count + 1);
      for (size_t i = 0; i < count; ++i) CHECK(received.payloads[i] == payload);
      CHECK(received.payloads.back() == control);
      for (uint32_t i = 0; i <= count; ++i) CHECK(received.psns[i] == psn + i);
    }
    CHECK(UdpSender::takes_along(path, packets_of(1, 128), control.size()));
    CHECK_FALSE(UdpSender::takes_along(path, packets_of(1, 64), control.size()));           // larger than the data
    CHECK_FALSE(UdpSender::takes_along(path, packets_of(2, 2'048), control.size()));        // behind a shorter packet
    CHECK_FALSE(UdpSender::takes_along(path, packets_of(15, 4'096), size_t{4'000}));        // more than a send takes
    CHECK_FALSE(UdpSender::takes_along(path, std::vector(64, packets_of(1, 256)[0]), 20));  // segments are counted too
    path.is_to_device = true;
    CHECK_FALSE(UdpSender::takes_along(path, packets_of(7, 4'096), control.size()));
  }
}

TEST_CASE("a control packet behind data arrives where the device cannot segment") {
  UdpSocket receiver(wire::parse_endpoint("::1", 0)), socket(wire::parse_endpoint("::1", 0));
  forbid_checksums(socket, true);
  const wire::NetworkCrc network(socket.local(), receiver.local(), wire::data_packet_bytes(1'024));
  UdpSendCounters counters;
  UdpSender sender(std::make_shared<UdpSendSocket>(std::move(socket)), counters);
  UdpPath path(receiver.local());
  path.outgoing = network;
  const std::vector<std::byte> payload(1'024, std::byte{7}), control(100, std::byte{9});
  const std::vector<flow::DataOut> packets(3, {0, 5, 1, payload.data(), 1'024});
  for (int time = 0; time < 2; ++time) {
    sender.send_data(path, packets, control);
    const Received received = drain(receiver, network);
    CHECK(received.wrong_icrcs == 0);
    CHECK(received.payloads == std::vector{payload, payload, payload, control});
  }
}

TEST_CASE("a packet that came back is known by its destination and queue pair") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    const wire::Endpoint closed = UdpSocket(wire::parse_endpoint(address, 0)).local();
    UdpSocket socket(wire::parse_endpoint(address, 0));
    socket.report_refusals();
    UdpSendCounters counters;
    UdpSender sender(std::make_shared<UdpSendSocket>(std::move(socket)), counters);
    UdpPath path(closed);
    path.remote_qpn = 0xABCDE;
    sender.add_destination(closed);
    path.outgoing = wire::NetworkCrc(sender.local(), closed, wire::data_packet_bytes(1'024));
    const std::array<std::byte, 40> payload{};
    sender.send_control(path, payload);
    REQUIRE(sender.look_for_refusals());
    const std::vector<RefusedPacket> refused = sender.take_refused();
    REQUIRE(refused.size() == 1);
    CHECK(refused[0].destination == closed);
    CHECK(refused[0].qpn == 0xABCDE);
    CHECK_FALSE(sender.look_for_refusals());

    // A report that quotes too little of a packet to identify it is ignored.
    const std::array<std::byte, 4> stub{};
    iovec piece{const_cast<std::byte*>(stub.data()), stub.size()};
    UdpSocket other(wire::parse_endpoint(address, 0));
    other.report_refusals();
    REQUIRE(send_segments(other.fd(), &path.remote, std::span(&piece, 1), 0) == 0);
    CHECK(take_network_reports(other.fd()).refused.empty());
  }
}

TEST_CASE("a batch fits one send, whatever the payload") {
  CHECK(UdpSender::batch_packets(4'096) == 15);
  CHECK(UdpSender::batch_packets(1'024) == 61);
  CHECK(UdpSender::batch_packets(256) == UdpSender::BATCH_MAX_PACKETS);
}

TEST_CASE("The receiver sees a router's congestion mark, and how long a packet waited in the host") {
  for (const bool is_ipv6 : {true, false}) {
    CAPTURE(is_ipv6);
    const std::string address = is_ipv6 ? "::1" : "127.0.0.1";
    UdpSocket receiver(wire::parse_endpoint(address, 0)), sender(wire::parse_endpoint(address, 0));
    receiver.report_arrivals();
    REQUIRE(receiver.enable_receive_offload());
    sender.announce_ecn();
    const auto exchange = [&] {
      std::array<std::byte, 64> bytes{};
      iovec piece{bytes.data(), bytes.size()};
      const SocketAddress to(receiver.local());
      REQUIRE(send_segments(sender.fd(), &to, std::span(&piece, 1), 0) == 0);
      pollfd readable{receiver.fd(), POLLIN, 0};
      REQUIRE(poll(&readable, 1, 5'000) == 1);
      const ReceivedBatch batch = receive_segments(receiver.fd(), std::span(&piece, 1));
      REQUIRE(batch.error == 0);
      REQUIRE(batch.size_bytes == bytes.size());
      return batch;
    };
    CHECK_FALSE(exchange().is_ecn_marked);
    // What a router does to a packet of the socket above: ECT(0) becomes CE.
    const int experienced = 3;
    REQUIRE((is_ipv6 ? setsockopt(sender.fd(), IPPROTO_IPV6, IPV6_TCLASS, &experienced, sizeof experienced)
                     : setsockopt(sender.fd(), IPPROTO_IP, IP_TOS, &experienced, sizeof experienced)) == 0);
    const ReceivedBatch marked = exchange();
    CHECK(marked.is_ecn_marked);
    CHECK(marked.waited_us < 5'000'000);
  }
}
