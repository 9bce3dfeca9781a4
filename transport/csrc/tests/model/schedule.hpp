// SPDX-License-Identifier: Apache-2.0
// A schedule: two ranks, the links between them, what they send each other and what goes wrong. Everything is drawn
// from one number, so that the number replays it.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "flow/flow.hpp"
#include "flow/receive_budget.hpp"

namespace sennit::model {

inline constexpr uint32_t PATHS_MAX = 8;
inline constexpr uint32_t MESSAGES_MAX = 64;  // from each rank
inline constexpr uint32_t FAULTS_MAX = 3;
inline constexpr uint32_t MESSAGE_MAX_PACKETS = 256;
inline constexpr uint32_t PAYLOAD_MAX_BYTES = 128;
inline constexpr uint64_t NEVER = UINT64_MAX;

struct MessageDraw {
  uint32_t size_bytes;
  bool is_eager;
  uint32_t send_us, receive_us;  // when each side's program gets to it
};

// One direction of one path. Chances are of 65,536.
struct LinkDraw {
  uint32_t delay_us;
  uint32_t jitter_us;      // uniform: reorders within the path
  uint32_t packet_ns;      // 0: no limit of rate
  uint32_t queue_packets;  // with a rate: packets that do not fit are dropped ...
  uint32_t mark_packets;   // ... and beyond this many the congestion mark is set
  uint32_t loss, corruption, duplication;
  uint32_t burst_packets;  // lost in a row
};

struct RankDraw {
  uint64_t clock_us;            // what its clock shows when the schedule begins
  uint32_t tick_us;             // how often its port looks at the socket and the clock
  uint32_t batch_packets;       // most packets of one poll_data
  uint32_t open_receives;       // most receives advertised at a time
  uint32_t deferral, scribble;  // chances of 65,536
  bool waits;                   // in a call until its work is done: it looks for its peer
  std::string_view path_policy, congestion;
  bool has_budget;  // limits what its sender may have in flight
  flow::ReceiveBudgetConfig budget;
  bool is_restless;  // calls on_timeout in every round
  bool closes;       // says goodbye when its own work is done
  uint32_t message_count;
  std::array<MessageDraw, MESSAGES_MAX> messages;  // what it sends
  std::array<LinkDraw, PATHS_MAX> links;           // by path, from it to the other
};

struct Fault {
  enum class Kind : uint8_t {
    black_hole,  // some paths lose everything, one way or both
    freeze,      // the process is stopped and goes on later
    death,       // the process is gone
    abort,       // the rank's program fails and says so
    close,       // the rank says goodbye in the middle
  } kind;
  uint32_t rank;        // freeze, death, abort, close
  uint32_t paths;       // black_hole: a bit a path
  uint32_t directions;  // black_hole: bit 0 from rank 0, bit 1 from rank 1
  uint64_t from_us;
  uint64_t until_us;    // black_hole, freeze; NEVER: for ever
  uint64_t noticed_us;  // death: when the survivor's port notices; NEVER: it does not
};

struct Schedule {
  uint64_t seed;
  flow::FlowConfig config;  // the same for both ranks, except for what each chooses itself
  std::array<RankDraw, 2> ranks;
  uint32_t fault_count;
  std::array<Fault, FAULTS_MAX> faults;
  uint64_t deadline_us;  // of the operation that all messages belong to
  bool must_complete;    // nothing in this schedule excuses a message that does not arrive
  bool loses_nothing;    // only threads pause, so nothing but probes may be sent again
};

void draw(uint64_t seed, Schedule& out);
std::string describe(const Schedule& schedule);

}  // namespace sennit::model
