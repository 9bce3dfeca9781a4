// SPDX-License-Identifier: Apache-2.0
// A schedule of exchanges: what the threads of two to five ranks post and wait for, and which rank ends how. Everything
// is drawn from one number.
//
// Such a program cannot wait for itself. All calls of all threads have one order, and each thread makes its own in that
// order. A thread waits for a message only after both its send and its receive in that order. So of the threads that
// wait, the one that is first in the order waits for what others have posted: only the transport can keep it waiting.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "messages/lane.hpp"

namespace sennit::model::exchange {

inline constexpr uint32_t RANKS_MAX = 5, THREADS_MAX = 3;  // threads of a rank
inline constexpr uint32_t PATHS_MAX = 3, EAGER_SLOTS = 8;
inline constexpr uint64_t PEER_TIMEOUT_US = 1'000'000;
inline constexpr uint32_t NONE = UINT32_MAX;
inline constexpr uint32_t NUMBER_BYTES = 4;  // a message of a channel begins with its number

// One message. Those of a collective have keys of their own. Point-to-point messages of a channel share one: they are
// taken in the order in which they were sent.
struct Message {
  uint32_t from, to;
  uint32_t size_bytes;
  uint32_t channel;  // NONE: of a collective
  bool is_any;       // its receive takes the channel's next message of any rank
  bool is_from_heap, is_to_heap;
  Lane::Use use;         // of a collective
  bool is_loan;          // it is received without destination ...
  uint32_t hold_rounds;  // ... and held for so many rounds of its receiver ...
  uint32_t hold_until;   // ... and until this message is complete there; NONE: no other
};

struct Channel {
  uint32_t to, tag;
  bool has_senders;  // several: all its receives are from any rank
  uint32_t to_thread;
  uint32_t from_threads[RANKS_MAX];
  uint32_t size_bytes;
};

struct Call {
  enum class Kind : uint8_t { send, receive, await_send, await_receive } kind;
  uint32_t rank, thread;
  uint32_t message;
};

struct Fault {
  enum class Kind : uint8_t {
    none,
    pause,   // the rank does nothing for a while
    freeze,  // nor ever again: its process is stopped
    abort,   // it ends the group, and says so
    leave,   // it says goodbye in the middle
  } kind;
  uint32_t rank;
  uint32_t at_turn;
  uint32_t turns;  // pause
};

struct NetworkSettings {
  uint32_t path_count, payload_bytes, window_packets;
  uint32_t delay_us, jitter_us;
  uint32_t loss_of_1000, losses_max;
};

struct Schedule {
  uint64_t seed;
  uint32_t world;
  uint32_t hosts[RANKS_MAX];  // of the ranks
  NetworkSettings network;
  std::vector<Message> messages;
  std::vector<Channel> channels;
  std::vector<Call> calls;  // in the one order
  Fault fault;

  bool share_memory(uint32_t rank, uint32_t other) const { return hosts[rank] == hosts[other]; }
};

void draw(uint64_t seed, Schedule& out);
std::string describe(const Schedule& schedule);

}  // namespace sennit::model::exchange
