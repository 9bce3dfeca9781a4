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
// A direct transfer needs no block. If the data is in the sender's shared heap, the sender refers to
// it: the receiver copies it from there, or folds it there, and gives the reference back. The sender's buffer is its
// own again only then. If the destination is in the receiver's shared heap, the sender can place the bytes there. Each
// side shows where its heap is once it is in use, and an advert says that the receiver has mapped the sender's.
//
// A group may end while the peer reads or writes this rank's memory. The rank first says that it takes its memory back
// (is_revoked). A peer looks for that after each read, and drops what it read. It looks before each write as well, and
// says that it writes (is_writing), so that the rank can wait for it.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "flow/agenda.hpp"
#include "flow/flow.hpp"
#include "flow/silence.hpp"
#include "memory/shared_heap.hpp"
#include "messages/lane.hpp"
#include "ports/shm/shm_segment.hpp"
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
  using Lane::transfer;
  void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use use) override;
  bool release(uint64_t loan_id) override;
  bool has_round_trips() const override { return true; }
  bool open(uint64_t loan_id) override;
  void close(uint64_t) override { end_writing(); }
  void send_back(uint64_t loan_id) override;
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
  bool idle() const { return transfers_.empty() && waiting_records_.empty() && reads_.empty() && placements_.empty(); }
  void forget_user_memory() noexcept;
  void say_goodbye();
  // Ends the lane, with a reason that the peer finds even if the rings are full.
  void say_last_word(std::string_view reason);
  // Whether the peer has given a reason that was not taken yet. It has a cache line of its own, so that asking is
  // cheap.
  bool has_last_word() const { return !dead_ && in_.header->last_word_bytes.load(std::memory_order_acquire) != 0; }
  // Takes the peer's reason, if there is one. What the rings hold comes first.
  void look_for_last_word();
  // Whether something here has waited for the peer lately.
  bool is_expected(uint64_t now_us) const { return expected_us_ != 0 && now_us < expected_us_ + EXPECTED_US; }
  bool is_dead() const { return dead_; }
  // Whether the lane has ended, so that the peer reads nothing that is sent from now on.
  bool is_ending() const { return dead_ || peer_left_; }
  // Why this rank cannot receive from the peer. Empty while it can.
  const std::string& failure() const { return failure_; }
  // Whether the peer must be told of something since the last call.
  bool take_dirty();
  bool peer_said_goodbye() const { return peer_left_; }

  struct Counters {
    uint64_t eager_sent, eager_received, fragments_sent, fragments_received, references_sent, references_received,
        placements_sent, placements_received, bytes_sent, bytes_received, ring_full;

    static constexpr const char* GROUP = "shm";
    static std::vector<std::string> names() {
      return {"shm_eager_sent",      "shm_eager_received",      "shm_fragments_sent",  "shm_fragments_received",
              "shm_references_sent", "shm_references_received", "shm_placements_sent", "shm_placements_received",
              "shm_bytes_sent",      "shm_bytes_received",      "shm_ring_full"};
    }
  };
  const Counters& counters() const { return *counters_; }

  // What is still to come, whichever way the bytes of a message go. Once all messages of both sides are complete and
  // all loans are back, nothing is.
  struct Debts {
    size_t receives;       // advertised, and not complete or lent
    size_t sends;          // whose memory is not the sender's own again
    size_t records;        // of this side, for which the ring has no room
    size_t loans;          // advertised, or lent in a block
    size_t waiting_loans;  // receives that are advertised when a loan is back
    bool operator==(const Debts&) const = default;
  };
  Debts debts() const;

 private:
  // One cache line; the data of an eager message follows it.
  struct alignas(64) Record {
    enum Type : uint32_t { skip = 1, eager, advert, fragment, goodbye, reference, returned, placed };
    uint32_t type;
    uint32_t flags;        // eager: EagerFlags; advert: AdvertFlags; returned: 1 if it is a block
    uint64_t total_bytes;  // record and data in the ring, a multiple of the line
    MessageHeader header;  // eager, advert; reference, placed: the size
    uint32_t slot;         // advert, fragment, reference, placed: the receiver's slot
    uint32_t size_bytes;   // fragment
    uint32_t block;        // fragment; returned
    uint32_t number;       // reference, returned: the sender's number of it
    uint64_t offset;       // in a shared heap: the sender's (reference) or the receiver's (advert with HAS_PLACE)
  };
  enum AdvertFlags : uint32_t {
    READS_HEAP = 1,  // the receiver has mapped the sender's shared heap
    HAS_PLACE = 2,   // the destination is in the receiver's shared heap
    IS_LOAN = 4,     // there is no destination
  };
  struct Receive {
    uint64_t receive_id;
    std::byte* destination;
    uint64_t size_bytes;
    uint64_t received_bytes;
    bool is_open;    // advertised, and not complete
    bool has_place;  // advertised as one
  };
  struct Placement {
    uint64_t send_id;
    uint32_t slot;
    const std::byte* data;
    std::byte* place;
    uint64_t size_bytes;
    uint64_t placed_bytes;
  };
  struct Transfer {
    uint64_t send_id;
    uint32_t slot;
    const std::byte* data;
    uint64_t size_bytes;
    uint64_t sent_bytes;
    bool comes_back;
  };
  struct Read {  // a reference that is copied, piece by piece
    uint32_t slot;
    uint32_t number;
    const std::byte* source;
  };
  struct Reference {
    uint64_t send_id;
    std::byte* written;  // by the peer, on a round trip; else null
    uint64_t size_bytes;
    bool is_out;
  };
  struct BlockOut {  // a block that comes back with a result
    uint64_t send_id;
    std::byte* data;
    uint64_t size_bytes;  // 0: there is none
  };
  struct WaitingLoan {
    uint64_t receive_id;
    MessageHeader header;
  };

  // A rank that waits calls expect() at least this often, unless it does not run.
  static constexpr uint64_t EXPECTED_US = 2 * flow::LOOK_MAX_US;
  // Set in the id of a loan that is a reference. The other bits are the number of the reference, else of the block.
  static constexpr uint64_t REFERENCE_LOAN = uint64_t{1} << 32;
  // Results of at least this size leave the cache before anyone reads them, so writes bypass it.
  static constexpr uint64_t STREAM_FROM_BYTES = 2'097'152;

  static uint64_t data_bytes_of(const Record& eager);
  bool fits(const Record& fragment) const;
  bool reserve_blocks(uint64_t size_bytes);
  bool publish(const Record& record, const void* data, uint64_t data_bytes);
  void publish_or_queue(const Record& record);
  void grant(uint64_t receive_id, const MessageHeader& header, std::byte* destination);
  bool consume(uint32_t record_limit);
  void take_fragment(const Record& record);
  bool push_fragment();
  bool maps_peers_heap();
  void show_heap();
  void refer(uint64_t send_id, uint32_t slot, const std::byte* data, uint64_t size_bytes, bool comes_back);
  void take_reference(const Record& record);
  bool read_piece();
  bool give_reference_back(uint32_t number);
  void return_reference(uint32_t number);
  bool fits_untouched(const Record& record) const;
  bool is_revoked_by_peer() const;
  void end_by_peer();
  bool begin_writing();
  void end_writing();
  void take_back(const Record& record);
  std::byte* take_place(uint32_t slot, uint64_t size_bytes);
  bool place_piece();
  void take_placement(const Record& record);
  void take_memory_back() noexcept;
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
  std::deque<Placement> placements_;
  std::unordered_map<uint32_t, uint64_t> places_;  // offsets in the peer's shared heap, by the peer's slot
  std::vector<Reference> references_;
  std::vector<uint32_t> free_references_;
  std::array<BlockOut, BULK_BLOCKS_MAX> blocks_out_{};
  std::shared_ptr<const PeerHeap> peer_heap_;
  bool is_peer_heap_refused_ = false;
  std::deque<WaitingLoan> waiting_loans_;
  uint32_t loans_out_ = 0;       // advertised, or lent in a block
  uint64_t reserved_bytes_ = 0;  // of each block of our inbox
  std::string failure_;
  bool dirty_ = false;
  bool peer_left_ = false;
  bool dead_ = false;
  bool memory_forgotten_ = false;
  uint32_t beats_seen_ = 0;
  uint64_t expected_us_ = 0;  // time of the last expect(); 0: never
  flow::Silence silence_;
  const Counted<Counters> counters_;
  flow::Agenda* const agenda_;
  const uint32_t member_;
};

}  // namespace sennit
