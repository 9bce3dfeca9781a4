// SPDX-License-Identifier: Apache-2.0
// A lane to one rank of the same host: in each direction a ring of records and a few blocks for bulk data.
//
// The ring carries eager messages, adverts and the records of fragments. A block carries one fragment of a transfer.
// The sender copies it in, and the receiver copies it out, or folds straight from the block: a loan. Two user-space
// copies through memory that stays in the cache are faster than one process_vm_readv, which must pin every page
// (docs/decisions/0002).
//
// Blocks come back in any order, because a loan may wait for other peers for long. All but one may be lent, so that
// other fragments always find a block.
//
// A transfer whose data is in the sender's shared heap needs no block: a reference. The receiver copies the bytes
// straight from the heap, or folds them there, and then gives the reference back. The sender's buffer is its own again
// only then. So both sides agree on it: the sender shows where its heap is, and an advert says that the receiver has
// mapped it. A sender that must take its memory back at once, because the group ends, says so first (is_revoked). A
// receiver looks for that after it has read, and drops what it read.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flow/agenda.hpp"
#include "flow/flow.hpp"
#include "flow/silence.hpp"
#include "memory/shared_heap.hpp"
#include "messages/lane.hpp"
#include "ports/shm_segment.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

class ShmLane final : public Lane {
 public:
  // `agenda`: woken, as member `member`, when this side has something to do or to tell; null: progress() is called
  // anyway.
  ShmLane(uint32_t peer, ShmInbox in, ShmInbox out, LaneSink& sink, CounterPage* counter_page = nullptr,
          uint64_t peer_timeout_us = flow::FlowConfig{}.peer_timeout_us, flow::Agenda* agenda = nullptr,
          uint32_t member = 0);

  uint64_t eager_max_bytes() const override;
  bool send_eager(const MessageHeader& header, uint32_t flags, const void* data) override;
  void advertise(uint64_t receive_id, const MessageHeader& header, void* destination) override;
  void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes) override;
  bool release(uint64_t loan_id) override;
  void expect(uint64_t now_us) override;
  uint64_t heard_us() const override { return silence_.heard_us(); }
  uint64_t silent_us() const override { return silence_.silent_us(); }
  std::string describe() const override;

  // Runs one bounded round: reads what the peer published, then copies pending transfers in.
  bool progress(uint64_t now_us);
  // Reads without writing, as the last look before a dead peer is reported.
  bool drain();
  // Whether the peer has published something that was not read yet, and may still be.
  bool has_news() const;
  bool idle() const { return transfers_.empty() && waiting_records_.empty() && reads_.empty(); }
  void forget_user_memory() noexcept;
  void say_goodbye();
  // Ends the lane, with a reason that the peer finds even if the rings are full.
  void say_last_word(std::string_view reason);
  // Takes the peer's reason, if there is one. What the rings hold comes first.
  void look_for_last_word();
  // Compares the peer's beats with those of the last call.
  void note_beats(uint32_t beats, uint64_t now_us);
  bool is_dead() const { return dead_; }
  // Why this rank cannot receive from the peer. Empty while it can.
  const std::string& failure() const { return failure_; }
  // Whether the peer must be told of something since the last call.
  bool take_dirty();
  bool peer_said_goodbye() const { return peer_left_; }

  struct Counters {
    uint64_t eager_sent, eager_received, fragments_sent, fragments_received, references_sent, references_received,
        bytes_sent, bytes_received, ring_full;

    static constexpr const char* GROUP = "shm";
    static std::vector<std::string> names() {
      return {"shm_eager_sent",      "shm_eager_received",      "shm_fragments_sent", "shm_fragments_received",
              "shm_references_sent", "shm_references_received", "shm_bytes_sent",     "shm_bytes_received",
              "shm_ring_full"};
    }
  };
  const Counters& counters() const { return *counters_; }

 private:
  // One cache line; the data of an eager message follows it.
  struct alignas(64) Record {
    enum Type : uint32_t { skip = 1, eager = 2, advert = 3, fragment = 4, goodbye = 5, reference = 6, returned = 7 };
    uint32_t type;
    uint32_t flags;        // eager: EagerFlags; advert: 1 if the receiver reads the sender's shared heap
    uint64_t total_bytes;  // record and data in the ring, a multiple of the line
    MessageHeader header;  // eager, advert; reference: the size
    uint32_t slot;         // advert, fragment, reference: the receiver's slot
    uint32_t size_bytes;   // fragment
    uint32_t block;        // fragment
    uint32_t number;       // reference, returned: the sender's number of it
    uint64_t offset;       // reference: in the sender's shared heap
  };
  struct Receive {
    uint64_t receive_id;
    std::byte* destination;
    uint64_t size_bytes;
    uint64_t received_bytes;
    bool is_open;  // advertised, and not complete
  };
  struct Transfer {
    uint64_t send_id;
    uint32_t slot;
    const std::byte* data;
    uint64_t size_bytes;
    uint64_t sent_bytes;
  };
  struct Read {  // a reference that is copied, piece by piece
    uint32_t slot;
    uint32_t number;
    const std::byte* source;
  };
  struct Reference {
    uint64_t send_id;
    bool is_out;
  };
  struct WaitingLoan {
    uint64_t receive_id;
    MessageHeader header;
  };

  // In the id of a loan: it is the reference of this number, else the block.
  static constexpr uint64_t REFERENCE_LOAN = uint64_t{1} << 32;
  // Results of at least this size leave the cache before anyone reads them, so writes bypass it.
  static constexpr uint64_t STREAM_FROM_BYTES = 2'097'152;

  static uint64_t data_bytes_of(const Record& eager);
  bool fits(const Record& fragment) const;
  bool reserve_blocks();
  bool publish(const Record& record, const void* data, uint64_t data_bytes);
  void publish_or_queue(const Record& record);
  void grant(uint64_t receive_id, const MessageHeader& header, std::byte* destination);
  bool consume(uint32_t record_limit);
  void take_fragment(const Record& record);
  bool push_fragment();
  bool reads_peers_heap();
  void show_heap();
  void refer(uint64_t send_id, uint32_t slot, const std::byte* data, uint64_t size_bytes);
  void take_reference(const Record& record);
  bool read_piece();
  bool give_reference_back(uint32_t number);
  bool is_revoked_by_peer() const;
  void take_reference_back(uint32_t number);
  void complete(uint32_t slot);
  void grant_waiting_loan();
  bool find_free_block();
  void give_back(uint32_t block);
  void lose(std::string reason);

  void wake() noexcept {
    if (agenda_ != nullptr) agenda_->wake(member_);
  }

  const uint32_t peer_;
  ShmInbox in_, out_;
  LaneSink& sink_;
  uint64_t control_head_ = 0, control_tail_ = 0;  // our progress: written out, read in
  uint64_t control_tail_seen_ = 0;                // the peer's progress in reading ours
  uint32_t free_blocks_;                          // of the peer's inbox: a bit for each
  uint32_t lent_blocks_ = 0;                      // of our inbox
  std::deque<Record> waiting_records_;
  std::deque<Transfer> transfers_;
  std::vector<Receive> receives_;
  std::vector<uint32_t> free_slots_;
  std::deque<Read> reads_;
  std::vector<Reference> references_;
  std::vector<uint32_t> free_references_;
  std::shared_ptr<const PeerHeap> peer_heap_;
  bool is_peer_heap_refused_ = false;
  std::deque<WaitingLoan> waiting_loans_;
  uint32_t loans_out_ = 0;            // advertised, or lent in a block
  bool are_blocks_reserved_ = false;  // of our inbox
  std::string failure_;
  bool dirty_ = false;
  bool peer_left_ = false;
  bool dead_ = false;
  bool memory_forgotten_ = false;
  uint32_t beats_seen_ = 0;
  flow::Silence silence_;
  const Counted<Counters> counters_;
  flow::Agenda* const agenda_;
  const uint32_t member_;
};

}  // namespace sennit
