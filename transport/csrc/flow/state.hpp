// SPDX-License-Identifier: Apache-2.0
// The parts of a flow, and what they need of each other: control payloads, timers, the end.
//
// flow.cpp maps the public calls to this. Each part knows only its own half of the protocol.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "flow/ack_pacing.hpp"
#include "flow/agenda.hpp"
#include "flow/control.hpp"
#include "flow/eager.hpp"
#include "flow/flow.hpp"
#include "flow/receive_budget.hpp"
#include "flow/receiver.hpp"
#include "flow/recovery.hpp"
#include "flow/sender.hpp"
#include "flow/sequence_ring.hpp"
#include "flow/silence.hpp"

namespace sennit::flow {

inline constexpr uint64_t NEVER = UINT64_MAX;
// Goodbye and abort are not acknowledged. Three copies arrive where one may not.
inline constexpr uint32_t LAST_WORD_COPIES = 3;
// Adverts and questions are repeated after the retransmission timeout, which doubles at most this often.
inline constexpr uint32_t BACKOFF_MAX = 8;
// Starts from the probe timeout, which is shorter.
inline constexpr uint32_t ADVERT_BACKOFF_MAX = 12;
inline constexpr uint32_t PATH_NUMBERS = 256;

struct Flow::State {
  // Throws std::invalid_argument for a configuration out of range.
  State(const FlowConfig& config, std::span<std::byte> eager_memory, uint32_t eager_rkey);

  void wake() noexcept {
    if (config.agenda != nullptr) config.agenda->wake(config.agenda_member);
  }
  void request_control(uint64_t at_us) { control_due_us = std::min(control_due_us, at_us); }
  void note_arrival(uint64_t now_us, uint32_t path, uint32_t immediate, bool ecn_marked, uint64_t waited_us);
  uint32_t control_path(uint64_t now_us);
  void count_refusal(Verdict verdict);
  bool can_send() const;
  // Chooses, from the peer's keys, that of the device to which the path leads.
  void choose_key(uint32_t path, DataOut& packet) const;
  // Eager packets are not acknowledged at once, bulk messages are.
  bool is_tail() const { return eager_sender.all_received() && !sender.has_backlog(); }
  bool idle() const;
  bool has_outstanding() const { return !idle() || receiver.has_open(); }
  uint64_t advert_retry_us() const;
  uint64_t look_at_us() const;
  void look_for_life(uint64_t now_us);
  std::string describe_silence() const;
  void forget() noexcept;
  void lose_peer(std::string_view why);
  void repeat_last_word(uint64_t now_us);
  size_t write_control(uint64_t now_us, std::span<std::byte> out);
  size_t write_last_word(std::span<std::byte> out) const;
  size_t write_probe(uint64_t now_us, std::span<std::byte> out);
  void write_cumulative(uint64_t now_us, ControlWriter& writer, uint8_t flags);
  void apply_control(uint64_t now_us, uint64_t waited_us, const ControlReader& control);

  const FlowConfig config;
  FlowCounters own_counters{};
  FlowCounters& counters;  // where other processes can read them, or own_counters
  const size_t control_max_bytes;
  Recovery recovery;
  EagerSender eager_sender;
  EagerReceiver eager_receiver;
  Sender sender;
  Receiver receiver;
  Grants grants;
  AckPacing ack_pacing;
  SequenceRing<Event> events;
  std::string reason;

  bool dead = false;            // aborted here, or the peer is lost
  bool lost_pending = false;    // the peer_lost or peer_aborted event is still to come
  bool peer_aborted = false;    // which of these
  bool closing = false;         // close() was called
  bool peer_closed = false;     // the peer said goodbye
  bool is_goodbye_old = false;  // somebody has waited for it since
  bool eager_deferred = false;
  bool ask = false;
  uint32_t last_words = 0;  // copies of goodbye or abort still to send

  uint64_t control_due_us = NEVER;
  uint64_t consumed_told = 0;
  uint64_t advert_sent_us = 0;
  uint32_t advert_retries = 0;
  uint64_t ask_at_us = NEVER;
  uint32_t asks = 0;
  Silence silence;
  uint32_t life_probes = 0;       // questions still to send that ask whether the peer lives
  uint32_t life_path = 0;         // path of the next one
  uint64_t repeat_at_us = NEVER;  // when to send the state once more if nothing comes before
  uint32_t repeats = 0;
  uint64_t queue_reported_us = 0;
  bool credit_stalled = false;
  bool is_peer_short = false;  // of credits

  struct Heard {
    uint64_t at_us;
    uint32_t immediate;
    uint16_t received, marked, waited_us;
    bool listed;
  };
  std::array<Heard, PATH_NUMBERS> heard{};
  std::array<uint8_t, PATH_NUMBERS> heard_paths{};
  uint32_t heard_count = 0;
  uint32_t newest_heard_path = 0;
  bool repeats_itself = false;  // the next control follows duplicates, or is a repeat itself
  uint32_t repetitions = 0, other_path = 0;
  // The peer asked by a probe. An answer went out after the newest data. The next control repeats the last answer.
  bool is_asked = false, answered_since_data = false, is_second_answer = false;
};

}  // namespace sennit::flow
