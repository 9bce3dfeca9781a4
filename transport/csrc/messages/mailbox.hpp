// SPDX-License-Identifier: Apache-2.0
// The mailbox pairs what this rank sends and receives with what the peers do, over lanes of any port.
//
// A small message travels eagerly and, if need be, waits here for its receive. A large message waits at the sender
// until the receiver has advertised memory. For collectives, the receiver advertises as soon as the receive is posted.
// A point-to-point receive first needs the sender's request, because only that says which peer and how large.
//
// A small message without a receive is unexpected and is kept. Each peer has a share of memory for such messages. The
// lane holds up a peer beyond its share, and thus in the end its sender, but only while nothing here waits for that
// peer. Once something waits, what it needs may be behind others in the same lane, so all are let in, as many as there
// are.
//
// Why no ranks can wait for each other by this: a record in a lane can end something at its receiver in two ways only.
// It is for a receive that is posted there, or it is the advert or the end of a send that is posted there. Both count
// as waiting for the peer (`waits`) from the call until they are complete, whichever way their bytes go. So whoever
// needs a record reads its lane, and a lane that is held up has nothing that its receiver needs.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "messages/key_index.hpp"
#include "messages/lane.hpp"
#include "sennit/core.h"

namespace sennit {

// The slot in the key of a collective's message. Above it is the operation.
inline constexpr uint32_t KEY_SLOT_BITS = 20;
// No message has this slot: a request with it is a question, whether the ranks run the same collective.
inline constexpr uint64_t NO_SLOT = (uint64_t{1} << KEY_SLOT_BITS) - 1;

// The poster of a message, told when it is complete. Called during progress or during the posting call.
class MailboxClient {
 public:
  virtual ~MailboxClient() = default;
  virtual void on_message_sent(uint32_t step) = 0;
  // `data` is where the bytes are. `loan` is 0 if this is no loan; otherwise the mailbox must get it back.
  virtual void on_message_received(uint32_t step, uint32_t peer, const std::byte* data, uint64_t loan) = 0;
};

struct MailboxFailure {
  enum class Kind { mismatch, peer_lost, peer_aborted } kind;
  uint32_t peer;
  std::string reason;  // with peer_aborted: a FailureNotice
};

class Mailbox final : public LaneSink {
 public:
  Mailbox(uint32_t rank, uint32_t world);
  ~Mailbox() override;

  // Lane number `world` leads to an aggregator, which is no rank.
  void set_lane(uint32_t peer, Lane* lane) { lanes_[peer] = lane; }

  // On a round trip `data` is overwritten.
  void send(MailboxClient& client, uint32_t step, uint32_t peer, const MessageHeader& header, const void* data,
            Lane::Use use = Lane::Use::copy);
  // `destination` null: a loan. `peer` may be SENNIT_ANY_PEER for a point-to-point key.
  void receive(MailboxClient& client, uint32_t step, uint32_t peer, const MessageHeader& header, void* destination,
               bool comes_back = false);
  // For loans on a round trip: open before the loan is overwritten (false: the group fails), send_back when it has the
  // result.
  [[nodiscard]] bool open(uint64_t loan);
  void close(uint64_t loan);      // after open, where the group fails
  void send_back(uint64_t loan);  // 0: nothing happens
  // False: what was read from the loan may be anything. The group fails.
  [[nodiscard]] bool release(uint64_t loan);

  // Fails the group, because `peer` sent what a correct rank cannot send. `what` follows the rank's name in the error.
  void refuse(uint32_t peer, const std::string& what);

  // `rank` runs collective `sequence` with this signature: this rank as it begins, a peer by a message that nothing
  // here waits for. All ranks run it with one signature, so another one fails the group, also if the collective has
  // ended here or has not begun.
  void meet(uint32_t rank, uint64_t sequence, uint64_t signature);

  // Offers again the eager messages that found no room. True when anything moved.
  bool progress(uint64_t now_us);
  // The first failure, if any. The engine fails all operations with it.
  const MailboxFailure* failure() const { return failure_.get(); }
  bool idle() const { return waiting_eager_count_ == 0; }
  bool lost(uint32_t peer) const { return !lost_[peer].empty(); }
  // Drops everything posted. The mailbox touches no user memory afterwards.
  void abandon() noexcept;
  // The peers that something posted here waits for, ascending. A receive from any rank waits for no particular peer.
  std::vector<uint32_t> awaited();
  const Lane* lane(uint32_t peer) const { return lanes_[peer]; }
  // "rank 2: 3 receives, 1 send" for peers with anything outstanding.
  std::string describe_outstanding();

  bool on_eager(uint32_t peer, const MessageHeader& header, uint32_t flags, const std::byte* data) override;
  void on_advert(uint32_t peer, const MessageHeader& header, uint64_t advert_id) override;
  void on_advert_withdrawn(uint32_t peer, const MessageHeader& header) override;
  void on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) override;
  void on_sent(uint64_t send_id) override;
  void on_peer_lost(uint32_t peer, std::string reason) override;
  void on_peer_aborted(uint32_t peer, std::string reason) override;

 private:
  struct Receive {
    MailboxClient* client;
    MessageHeader header;
    void* destination;
    uint32_t step;
    uint32_t peer;  // as posted; SENNIT_ANY_PEER until matched
    uint64_t order;
    bool advertised;
    uint32_t looks = 0;  // that have found it waiting
  };
  struct Send {
    MailboxClient* client;
    MessageHeader header;
    const void* data;
    uint32_t step;
    uint32_t peer;
    bool is_bound;  // its transfer has begun
    bool eager;
    Lane::Use use = Lane::Use::copy;
    uint32_t looks = 0;  // that have found it waiting
  };
  struct Arrival {  // an eager message without a receive yet
    MessageHeader header;
    uint32_t peer, flags;
    std::vector<std::byte> data;
  };
  struct Advert {
    MessageHeader header;
    uint32_t peer;
    uint64_t id;
  };
  // Records by number. The number of a removed record is used again.
  template <class Record>
  class Pool {
   public:
    uint32_t add(Record record) {
      uint32_t at = static_cast<uint32_t>(records_.size());
      if (free_.empty()) {
        records_.push_back(std::move(record));
        used_.push_back(true);
      } else {
        at = free_.back();
        free_.pop_back();
        records_[at] = std::move(record);
        used_[at] = true;
      }
      return at;
    }
    void remove(uint32_t at) {
      used_[at] = false;
      free_.push_back(at);
    }
    Record& operator[](uint32_t at) { return records_[at]; }
    template <class Visit>
    void for_each(Visit visit) {
      for (uint32_t at = 0; at < records_.size(); ++at) {
        if (used_[at]) visit(records_[at]);
      }
    }
    void clear() {
      records_.clear();
      used_.clear();
      free_.clear();
    }

   private:
    std::vector<Record> records_;
    std::vector<bool> used_;
    std::vector<uint32_t> free_;
  };

  uint32_t add_receive(Receive receive);
  Receive remove_receive(uint32_t receive);
  void set_peer(uint32_t receive, uint32_t peer);
  uint64_t& waits_for(uint32_t peer) { return peer == SENNIT_ANY_PEER ? waits_for_any_ : peers_[peer].waits; }
  bool has_room(uint32_t peer, uint64_t size_bytes) const;
  void start_transfer(uint32_t send, uint64_t advert_id);
  bool push_eager(uint32_t peer);
  void advertise(uint32_t receive);
  void deliver(uint32_t receive, uint32_t peer, const std::byte* data);
  uint32_t match_receive(uint32_t peer, uint64_t key);
  bool check(uint32_t peer, const MessageHeader& theirs, const MessageHeader& ours, bool ours_is_receive);
  void fail(MailboxFailure failure);
  bool fail_by_revocation(uint32_t peer);
  void meet(uint32_t peer, const MessageHeader& header);
  void ask_peers();
  void expect_peers(uint64_t now_us);
  bool is_alone() const;

  const uint32_t rank_;
  const uint32_t world_;
  std::vector<Lane*> lanes_;
  std::vector<std::string> lost_;
  Pool<Receive> receives_;
  Pool<Send> sends_;
  Pool<Arrival> arrivals_;
  Pool<Advert> adverts_;
  KeyIndex posted_;                                   // receives by (peer, key)
  KeyIndex arrived_;                                  // arrivals by (peer, key)
  KeyIndex advertised_;                               // adverts by (peer, key)
  KeyIndex pending_;                                  // sends that wait for an advert
  std::vector<std::vector<uint32_t>> waiting_eager_;  // sends by peer, in order
  uint64_t waiting_eager_count_ = 0;
  struct PeerState {
    uint64_t arrival_bytes = 0;  // unexpected messages, with the overhead of each
    uint64_t waits = 0;          // receives, and sends that need an advert, posted here and not complete
    uint64_t asked = 0;          // the collective that it was asked about last
  };
  std::vector<PeerState> peers_;
  uint64_t waits_for_any_ = 0;
  struct Met {
    uint64_t sequence = 0;
    uint64_t signature = 0;
    uint32_t rank = 0;  // whose signature it is
  };
  std::array<Met, 256> met_;  // by sequence: the latest collectives that began here, and those that peers have begun
  uint64_t begun_ = 0;        // the last collective that began here
  const uint64_t arrival_share_bytes_;
  uint64_t order_ = 0;
  uint64_t pending_count_ = 0;
  uint64_t next_look_us_ = 0;
  std::vector<std::vector<std::byte>> loan_buffers_;
  std::vector<uint32_t> free_loan_buffers_;
  std::unique_ptr<MailboxFailure> failure_;
};

}  // namespace sennit
