// SPDX-License-Identifier: Apache-2.0
// The port to an aggregator, and its only lane: the aggregator is one more peer (docs/decisions/0076). A plan sends
// vectors to it and receives sums from it, as messages of the same slots. Two kinds of messages say which sums are
// missing:
//   AGGREGATOR_MISSING  received from it: how many blocks of the operation have no sum here, as u32
//   AGGREGATOR_FAILED + rank  sent to it: the same number of that rank. If it is not 0, the operation is given up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "aggregation/client.hpp"
#include "messages/lane.hpp"
#include "messages/mailbox.hpp"
#include "ports/udp/udp_socket.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

inline constexpr uint32_t AGGREGATOR_MISSING = 0x80000;
inline constexpr uint32_t AGGREGATOR_FAILED = 0x80001;

class AggregatorPort final : public Port, public Lane {
 public:
  // Opens a socket. `peer`: the lane's number in the mailbox. Throws std::system_error or std::invalid_argument.
  AggregatorPort(uint32_t peer, const wire::Endpoint& aggregator, const aggregation::ClientConfig& config,
                 CounterPage* counter_page);
  ~AggregatorPort() override;
  AggregatorPort(const AggregatorPort&) = delete;

  // Before connect(): asks the aggregator to take the group, again and again. True once there is an answer.
  bool join(uint64_t now_us);
  bool is_joined() const { return client_.is_joined(); }
  void connect(LaneSink& sink) { sink_ = &sink; }
  // Before its operation begins, in the group's order: a message to or from the aggregator.
  void foresee(const MessageHeader& header, bool is_send);
  const aggregation::ClientCounters& counters() const { return *counters_; }

  std::string_view name() const override { return "aggregator"; }
  bool progress(uint64_t now_us) override;
  void tell_peers(bool has_ended, uint64_t now_us) override;
  std::vector<uint32_t> find_gone(uint64_t) override { return {}; }
  uint64_t next_timeout_us() const override;
  void append_poll_fds(std::vector<pollfd>& out) const override;
  bool idle() const override { return messages_.empty(); }
  void abort(std::string_view) override { close(); }
  void close() override;
  void revoke() noexcept override;

  // No message is eager: the slots say what it is.
  uint64_t eager_max_bytes() const override { return 0; }
  bool send_eager(const MessageHeader&, uint32_t, const void*) override { return true; }
  void advertise(uint64_t receive_id, const MessageHeader& header, void* destination) override;
  void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use use) override;
  bool release(uint64_t) override { return true; }
  // The group does not end with the aggregator.
  void expect(uint64_t) override {}
  uint64_t heard_us() const override { return UINT64_MAX / 2; }
  uint64_t silent_us() const override { return 0; }
  std::string describe() const override;

 private:
  static constexpr size_t BATCH = 32;
  static constexpr uint64_t NO_ID = UINT64_MAX;
  struct Message {
    uint64_t key;
    uint64_t send_id = NO_ID, receive_id = NO_ID;
    std::byte* destination = nullptr;
    bool is_over = false;
  };
  struct Operation {
    uint64_t messages_left = 0;
    uint64_t blocks_missing = 0;
    uint64_t receive_id = NO_ID;
    std::byte* destination = nullptr;
  };

  bool receive(uint64_t now_us);
  bool send(uint64_t now_us);
  bool deliver();
  void hand_over(uint64_t number, Message& message);
  void report(uint64_t sequence);

  const uint32_t peer_;
  const SocketAddress address_;
  const std::string address_text_;
  UdpSocket socket_;
  const Counted<aggregation::ClientCounters> counters_;
  aggregation::Client client_;
  LaneSink* sink_ = nullptr;
  std::unordered_map<uint64_t, Message> messages_;      // by the client's number
  std::unordered_map<uint64_t, uint64_t> numbers_;      // the client's number by key
  std::unordered_map<uint64_t, Operation> operations_;  // by sequence
  // Datagrams that the socket did not take yet: [first, count).
  std::vector<std::array<std::byte, aggregation::PACKET_MAX_BYTES>> out_, in_;
  std::array<size_t, BATCH> out_bytes_{};
  size_t out_first_ = 0, out_count_ = 0;
};

}  // namespace sennit
