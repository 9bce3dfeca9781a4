// SPDX-License-Identifier: Apache-2.0
// A rank's side of an aggregator (docs/decisions/0076-the-network-stores.md): it cuts messages into blocks, sends this
// rank's leaf of each, and puts the sums in their place. Sans-IO: no clock, no socket.
//
// Blocks are numbered over the whole life of the group, in the order in which operations begin, which is the same on
// all ranks. A rank sends block n only when it has block n - window, so the aggregator needs no word of what it may
// forget. A block that is given up counts as had.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "aggregation/wire.hpp"

namespace sennit::aggregation {

using Datagram = std::span<std::byte, PACKET_MAX_BYTES>;

struct ClientConfig {
  uint64_t key = 0;  // of the job
  uint16_t leaf = 0;
  uint16_t leaves = 1;
  uint16_t window = 256;          // asked for, in blocks: a power of two
  uint64_t give_up_us = 500'000;  // without an answer, while something is asked
  uint64_t join_again_us = 20'000;
};

struct ClientCounters {
  uint64_t blocks_summed = 0;      // sums that came
  uint64_t blocks_given_up = 0;    // left to the host algorithm
  uint64_t leaves_sent = 0;        // with those that were repeated
  uint64_t leaves_repeated = 0;    // because an answer was late, or later ones had come
  uint64_t packets_dropped = 0;    // broken, of another job, or for a block that is not awaited
  uint64_t aggregator_failed = 0;  // how often operations were left to the host algorithm

  static constexpr const char* GROUP = "aggregation";
  static std::vector<std::string> names() {
    return {"blocks_summed",   "blocks_given_up", "leaves_sent",
            "leaves_repeated", "packets_dropped", "aggregator_failed"};
  }
};

class Client {
 public:
  // A message has ended: all of its sums are in place, or it was given up with blocks missing.
  struct Ended {
    uint64_t message;
    uint64_t blocks_missing;
  };

  Client(const ClientConfig& config, ClientCounters& counters);

  bool is_joined() const { return is_joined_; }
  // Why the aggregator does not take the job. Empty: it has not refused.
  const std::string& refusal() const { return refusal_; }

  // The next message in the group's order, of operation `operation`. Returns its number. All ranks must give the same
  // `mark` and `arithmetic`, or the aggregator refuses theirs.
  uint64_t foresee(uint64_t operation, uint64_t size_bytes, uint8_t arithmetic, uint32_t mark);
  // Where this rank's leaves are, and where the sums go, until the message has ended. A message without either is not
  // sent, and holds up those behind it.
  void set_source(uint64_t message, const std::byte* data);
  void set_destination(uint64_t message, std::byte* data);
  // Some rank has given the operation up.
  void give_up(uint64_t operation);
  // Forgets all messages. Their memory is not touched any more.
  void drop();
  // The messages that have ended since the last call.
  std::vector<Ended> take_ended();

  // Writes the next datagram that may leave now. Returns its size; 0 if there is none.
  size_t next_datagram(uint64_t now_us, Datagram out);
  void take_datagram(uint64_t now_us, std::span<const std::byte> datagram);
  // Asks again where no answer came. Call it after take_datagram.
  void look(uint64_t now_us);
  // Its host says that nobody listens at its address.
  void refused_by_host(uint64_t now_us) {
    if (is_joined_) stand_aside(now_us);
  }
  // When to look. While no aggregator has taken the job: when next_datagram asks again.
  uint64_t next_timeout_us() const;
  // The last datagram, of a group that ends.
  size_t leave(Datagram out) const;
  std::string describe() const;

 private:
  struct Message {
    uint64_t operation;
    uint64_t first_block, end_block;
    uint64_t size_bytes;
    uint8_t arithmetic;
    uint32_t mark;
    uint64_t blocks_left;
    const std::byte* source = nullptr;
    std::byte* destination = nullptr;
    bool is_over = false;
    bool is_ready() const { return source != nullptr && destination != nullptr; }
  };
  enum class State : uint8_t {
    sent,
    stored,  // the aggregator waits for leaves of others
    lost,    // to be sent again
    had,
  };
  struct Flight {
    uint64_t block = UINT64_MAX;
    uint64_t sent_us = 0;
    uint64_t serial = 0;  // of the last packet with this leaf
    State state = State::sent;
    bool is_repeated = false;
  };

  Flight& flight(uint64_t block) { return flights_[block % flights_.size()]; }
  size_t place_of(uint64_t block) const;
  Message& message_of(uint64_t block) { return messages_[place_of(block)]; }
  bool is_awaited(uint64_t block);
  bool take(uint64_t now_us, const Header& header, const std::byte* stripes);
  bool take_joined(uint64_t now_us, const Header& header, const std::byte* stripe);
  bool take_refusal(uint64_t now_us, const Header& header, const std::byte* stripe);
  void heard(uint64_t now_us);
  void have(uint64_t block);
  void find_lost(uint64_t serial);
  void lose(uint64_t block);
  void adapt(uint64_t now_us, double rtt_us);
  void settle(size_t at);
  void advance();
  void fail(uint64_t operation);
  void stand_aside(uint64_t now_us);
  size_t write_leaf(uint64_t block, uint64_t now_us, Datagram out);

  const ClientConfig config_;
  ClientCounters& counters_;
  bool is_joined_ = false;
  uint32_t job_ = 0;
  uint16_t window_;
  uint64_t join_us_ = 0;    // when to ask next,
  uint64_t join_pause_us_;  // and how long after that
  std::string refusal_;
  // Operations before this one are left to the host algorithm: as many after a failure on all ranks.
  uint64_t resume_at_ = 0;
  uint64_t penalty_;
  std::deque<Message> messages_;  // in the group's order
  uint64_t first_message_ = 0;    // the number of messages_.front()
  std::vector<Ended> ended_;
  // Blocks [base, next) have been sent, or their messages were given up. Blocks [next, end) are foreseen.
  uint64_t base_ = 0, next_ = 0, end_ = 0;
  std::vector<Flight> flights_;
  std::deque<uint64_t> lost_;
  uint64_t under_way_ = 0;  // blocks that are sent or stored
  double allowed_;          // blocks that may be under way
  double threshold_;        // until then it grows fast
  uint64_t serial_ = 0;
  double rtt_us_ = 0, deviation_us_ = 0, least_rtt_us_ = std::numeric_limits<double>::infinity();
  uint64_t slowed_us_ = 0;
  uint64_t repeat_us_ = UINT64_MAX;  // when to ask again for the first block that is under way
  uint64_t pause_us_ = 0;            // between two such questions
  uint32_t questions_ = 0;           // without an answer
  uint64_t heard_us_ = 0;            // when the last answer came, or the first question left
};

}  // namespace sennit::aggregation
