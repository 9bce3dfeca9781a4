// SPDX-License-Identifier: Apache-2.0
#include "messages/mailbox.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "messages/budgets.hpp"
#include "messages/signature.hpp"
#include "sennit/core.h"

namespace sennit {
namespace {

// How often the mailbox looks at what waits, and the lanes hear for whom. Rounds may have long pauses, so what waits is
// as old as the looks that have found it.
constexpr uint64_t LOOK_US = 50'000;
// A send that waits for its advert shows its header to the receiver each time after so many looks (200 ms): the advert
// may wait behind others. A small receive, which has no advert, shows its signature to the sender once. A rank that
// runs another operation, or expects another size, then reports that instead of waiting for its deadline.
constexpr uint32_t PROBE_AFTER_LOOKS = 5;

// Loans come from lanes (their id, tagged with the peer) or from the mailbox's buffers.
constexpr uint64_t OWN_LOAN = uint64_t{1} << 63;
constexpr uint32_t LOAN_PEER_SHIFT = 40;

uint32_t peer_of(uint64_t loan) { return static_cast<uint32_t>(loan >> LOAN_PEER_SHIFT) - 1; }
uint64_t id_of(uint64_t loan) { return loan & ((uint64_t{1} << LOAN_PEER_SHIFT) - 1); }

bool is_p2p(uint64_t key) { return (key & P2P_KEY) != 0; }

std::string differing(uint32_t rank, uint64_t signature, uint32_t other, uint64_t signature_of_other) {
  return "rank " + std::to_string(rank) + " runs " + describe_signature(signature) + ", but rank " +
         std::to_string(other) + " runs " + describe_signature(signature_of_other);
}

}  // namespace

Mailbox::Mailbox(uint32_t rank, uint32_t world)
    : rank_(rank),
      world_(world),
      lanes_(world + 1, nullptr),
      lost_(world + 1),
      waiting_eager_(world + 1),
      peers_(world + 1),
      arrival_share_bytes_(std::max(ARRIVALS_BYTES / (std::max(world, 2u) - 1), ARRIVAL_SHARE_MIN_BYTES)) {}

Mailbox::~Mailbox() = default;

void Mailbox::send(MailboxClient& client, uint32_t step, uint32_t peer, const MessageHeader& header, const void* data,
                   Lane::Use use) {
  if (lost(peer)) {
    fail({MailboxFailure::Kind::peer_lost, peer, lost_[peer]});
    return;
  }
  Lane& lane = *lanes_[peer];
  if (header.size_bytes <= lane.eager_max_bytes() && use != Lane::Use::round_trip) {
    if (waiting_eager_[peer].empty() && lane.send_eager(header, EAGER_DATA, data)) {
      client.on_message_sent(step);
      return;
    }
    waiting_eager_[peer].push_back(sends_.add({&client, header, data, step, peer, false, true}));
    ++waiting_eager_count_;
    return;
  }
  const uint32_t send = sends_.add({&client, header, data, step, peer, false, false, use});
  ++peers_[peer].waits;
  const uint32_t advert = advertised_.pop(peer, header.key);
  if (advert != KeyIndex::NONE) {
    const Advert found = adverts_[advert];
    adverts_.remove(advert);
    if (check(peer, found.header, header, false)) start_transfer(send, found.id);
    return;
  }
  pending_.push(peer, header.key, send);
  ++pending_count_;
  if (is_p2p(header.key)) {
    waiting_eager_[peer].push_back(send);
    ++waiting_eager_count_;
    push_eager(peer);
  }
}

uint32_t Mailbox::add_receive(Receive receive) {
  ++waits_for(receive.peer);
  return receives_.add(std::move(receive));
}

Mailbox::Receive Mailbox::remove_receive(uint32_t receive) {
  const Receive removed = receives_[receive];
  receives_.remove(receive);
  --waits_for(removed.peer);
  return removed;
}

void Mailbox::set_peer(uint32_t receive, uint32_t peer) {
  --waits_for(receives_[receive].peer);
  receives_[receive].peer = peer;
  ++waits_for(peer);
}

bool Mailbox::has_room(uint32_t peer, uint64_t size_bytes) const {
  const bool is_awaited = peers_[peer].waits != 0 || waits_for_any_ != 0;
  return is_awaited || peers_[peer].arrival_bytes + size_bytes <= arrival_share_bytes_;
}

void Mailbox::start_transfer(uint32_t send, uint64_t advert_id) {
  Send& record = sends_[send];
  record.is_bound = true;
  lanes_[record.peer]->transfer(send, advert_id, record.data, record.header.size_bytes, record.use);
}

// Sends the messages that wait for room in the lane, oldest first.
bool Mailbox::push_eager(uint32_t peer) {
  std::vector<uint32_t>& waiting = waiting_eager_[peer];
  size_t done = 0;
  for (; done < waiting.size(); ++done) {
    const Send record = sends_[waiting[done]];
    if (!lanes_[peer]->send_eager(record.header, record.eager ? EAGER_DATA : EAGER_REQUEST, record.data)) break;
    if (record.eager) {
      sends_.remove(waiting[done]);
      record.client->on_message_sent(record.step);
    }
  }
  waiting.erase(waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(done));
  waiting_eager_count_ -= done;
  return done != 0;
}

void Mailbox::receive(MailboxClient& client, uint32_t step, uint32_t peer, const MessageHeader& header,
                      void* destination, bool comes_back) {
  const uint32_t receive = add_receive({&client, header, destination, step, peer, order_++, false});
  uint32_t from = peer;
  if (peer == SENNIT_ANY_PEER) {
    for (from = 0; from < world_ && arrived_.front(from, header.key) == KeyIndex::NONE; ++from) {
    }
  }
  const uint32_t arrival = from < world_ ? arrived_.pop(from, header.key) : KeyIndex::NONE;
  if (arrival != KeyIndex::NONE) {
    const Arrival found = std::move(arrivals_[arrival]);
    arrivals_.remove(arrival);
    peers_[from].arrival_bytes -= sizeof(Arrival) + found.data.size();
    if (!check(from, found.header, header, true)) return;
    if (comes_back) {
      fail({MailboxFailure::Kind::peer_lost, from, "sent a message eagerly that must make a round trip"});
      return;
    }
    set_peer(receive, from);
    if (found.flags == EAGER_REQUEST) {
      advertise(receive);
    } else {
      deliver(receive, from, found.data.data());
    }
    return;
  }
  if (peer != SENNIT_ANY_PEER && lost(peer)) {
    fail({MailboxFailure::Kind::peer_lost, peer, lost_[peer]});
    return;
  }
  if (peer == SENNIT_ANY_PEER && world_ > 1 && is_alone()) {
    const uint32_t last = rank_ == 0 ? 1 : 0;
    fail({MailboxFailure::Kind::peer_lost, last, lost_[last]});
    return;
  }
  posted_.push(peer, header.key, receive);
  if (peer != SENNIT_ANY_PEER && !is_p2p(header.key) &&
      (comes_back || header.size_bytes > lanes_[peer]->eager_max_bytes())) {
    advertise(receive);
  }
}

void Mailbox::advertise(uint32_t receive) {
  Receive& record = receives_[receive];
  // What it sent whole before its end is there. Of a large message there is only the request.
  if (lost(record.peer)) return fail({MailboxFailure::Kind::peer_lost, record.peer, lost_[record.peer]});
  record.advertised = true;
  lanes_[record.peer]->advertise(receive, record.header, record.destination);
}

void Mailbox::deliver(uint32_t receive, uint32_t peer, const std::byte* data) {
  const Receive record = remove_receive(receive);
  const uint64_t size_bytes = record.header.size_bytes;
  if (record.destination != nullptr || size_bytes == 0) {
    if (size_bytes != 0) std::memcpy(record.destination, data, size_bytes);
    record.client->on_message_received(record.step, peer, static_cast<std::byte*>(record.destination), 0);
    return;
  }
  uint32_t buffer;
  if (free_loan_buffers_.empty()) {
    buffer = static_cast<uint32_t>(loan_buffers_.size());
    loan_buffers_.emplace_back();
  } else {
    buffer = free_loan_buffers_.back();
    free_loan_buffers_.pop_back();
  }
  std::vector<std::byte>& bytes = loan_buffers_[buffer];
  if (bytes.size() < size_bytes) bytes.resize(size_bytes);
  std::memcpy(bytes.data(), data, size_bytes);
  record.client->on_message_received(record.step, peer, bytes.data(), OWN_LOAN | (buffer + 1));
}

bool Mailbox::release(uint64_t loan) {
  if (loan == 0) return true;
  if ((loan & OWN_LOAN) != 0) {
    free_loan_buffers_.push_back(static_cast<uint32_t>(loan & ~OWN_LOAN) - 1);
    return true;
  }
  const uint32_t peer = peer_of(loan);
  return lanes_[peer]->release(id_of(loan)) || fail_by_revocation(peer);
}

bool Mailbox::open(uint64_t loan) {
  const uint32_t peer = peer_of(loan);
  return lanes_[peer]->open(id_of(loan)) || fail_by_revocation(peer);
}

void Mailbox::close(uint64_t loan) { lanes_[peer_of(loan)]->close(id_of(loan)); }

void Mailbox::send_back(uint64_t loan) {
  if (loan != 0) lanes_[peer_of(loan)]->send_back(id_of(loan));
}

// The peer's own reason is in its last word, which may come later.
bool Mailbox::fail_by_revocation(uint32_t peer) {
  fail({MailboxFailure::Kind::peer_lost, peer, lost(peer) ? lost_[peer] : "ended the group"});
  return false;
}

void Mailbox::refuse(uint32_t peer, const std::string& what) {
  fail({MailboxFailure::Kind::mismatch, peer, "rank " + std::to_string(peer) + " " + what});
}

uint32_t Mailbox::match_receive(uint32_t peer, uint64_t key) {
  const uint32_t exact = posted_.front(peer, key);
  const uint32_t any = is_p2p(key) ? posted_.front(SENNIT_ANY_PEER, key) : KeyIndex::NONE;
  if (exact == KeyIndex::NONE && any == KeyIndex::NONE) return KeyIndex::NONE;
  if (any == KeyIndex::NONE || (exact != KeyIndex::NONE && receives_[exact].order < receives_[any].order)) {
    return posted_.pop(peer, key);
  }
  return posted_.pop(SENNIT_ANY_PEER, key);
}

bool Mailbox::on_eager(uint32_t peer, const MessageHeader& header, uint32_t flags, const std::byte* data) {
  const uint32_t waiting = posted_.front(peer, header.key);
  if (flags == EAGER_REQUEST && !is_p2p(header.key)) {
    // A probe for a collective: the message or the advert is on its way, unless the two sides disagree.
    if (waiting == KeyIndex::NONE) {
      meet(peer, header);
    } else if (check(peer, header, receives_[waiting].header, true) && receives_[waiting].advertised) {
      lanes_[peer]->ask(waiting);
    }
    return true;
  }
  if (waiting != KeyIndex::NONE && receives_[waiting].advertised) {
    // The receive was advertised as large, but the message came as small: the sizes differ, or the peer's limit does.
    if (check(peer, header, receives_[waiting].header, true))
      on_peer_lost(peer, "sent a message eagerly although memory was advertised for it");
    return true;
  }
  const uint32_t receive = match_receive(peer, header.key);
  if (receive == KeyIndex::NONE) {
    const uint64_t size_bytes = flags == EAGER_DATA ? header.size_bytes : 0;
    if (!has_room(peer, sizeof(Arrival) + size_bytes)) return false;
    meet(peer, header);
    arrived_.push(peer, header.key,
                  arrivals_.add({header, peer, flags, std::vector<std::byte>(data, data + size_bytes)}));
    peers_[peer].arrival_bytes += sizeof(Arrival) + size_bytes;
    return true;
  }
  if (!check(peer, header, receives_[receive].header, true)) return true;
  set_peer(receive, peer);
  if (flags == EAGER_REQUEST) {
    advertise(receive);
  } else {
    deliver(receive, peer, data);
  }
  return true;
}

void Mailbox::on_advert(uint32_t peer, const MessageHeader& header, uint64_t advert_id) {
  const uint32_t send = pending_.pop(peer, header.key);
  if (send == KeyIndex::NONE) {
    meet(peer, header);
    advertised_.push(peer, header.key, adverts_.add({header, peer, advert_id}));
    return;
  }
  --pending_count_;
  if (check(peer, header, sends_[send].header, false)) start_transfer(send, advert_id);
}

void Mailbox::on_advert_withdrawn(uint32_t peer, const MessageHeader& header) {
  if (const uint32_t advert = advertised_.pop(peer, header.key); advert != KeyIndex::NONE) adverts_.remove(advert);
}

void Mailbox::on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) {
  const uint32_t receive = static_cast<uint32_t>(receive_id);
  const Receive record = remove_receive(receive);
  if (!is_p2p(record.header.key)) posted_.pop(record.peer, record.header.key);
  const uint64_t loan = record.destination == nullptr ? (uint64_t{record.peer} + 1) << LOAN_PEER_SHIFT | loan_id : 0;
  record.client->on_message_received(record.step, record.peer, data, loan);
}

void Mailbox::on_sent(uint64_t send_id) {
  const Send record = sends_[static_cast<uint32_t>(send_id)];
  sends_.remove(static_cast<uint32_t>(send_id));
  --peers_[record.peer].waits;
  record.client->on_message_sent(record.step);
}

void Mailbox::on_peer_lost(uint32_t peer, std::string reason) {
  if (lost(peer)) return;
  lost_[peer] = reason.empty() ? "was lost" : std::move(reason);
  bool awaited = false;
  const bool alone = is_alone();
  receives_.for_each(
      [&](const Receive& receive) { awaited |= receive.peer == peer || (alone && receive.peer == SENNIT_ANY_PEER); });
  sends_.for_each([&](const Send& send) { awaited |= send.peer == peer; });
  if (awaited) fail({MailboxFailure::Kind::peer_lost, peer, lost_[peer]});
}

// The whole group has ended, whether or not anything here waits for that peer.
void Mailbox::on_peer_aborted(uint32_t peer, std::string reason) {
  fail({MailboxFailure::Kind::peer_aborted, peer, std::move(reason)});
}

bool Mailbox::progress(uint64_t now_us) {
  bool moved = false;
  if (waiting_eager_count_ != 0) {
    for (uint32_t peer = 0; peer < world_; ++peer) {
      if (!waiting_eager_[peer].empty()) moved |= push_eager(peer);
    }
  }
  if (now_us >= next_look_us_) {
    next_look_us_ = now_us + LOOK_US;
    // First: a lane whose peer has left takes no question.
    expect_peers(now_us);
    ask_peers();
  }
  return moved;
}

// This is rare, so it walks the pools. Further lists would cost time on the fast path.
void Mailbox::ask_peers() {
  const auto is_old = [](auto& record) {
    return record.looks == PROBE_AFTER_LOOKS || ++record.looks == PROBE_AFTER_LOOKS;
  };
  if (pending_count_ != 0) {
    sends_.for_each([&](Send& send) {
      if (send.eager || send.is_bound || is_p2p(send.header.key) || !is_old(send)) return;
      if (lanes_[send.peer]->send_eager(send.header, EAGER_REQUEST, nullptr)) send.looks = 0;
    });
  }
  // One question for each peer: of the oldest collective that waits for it.
  std::vector<MessageHeader> oldest(lanes_.size(), {P2P_KEY, 0, 0});
  receives_.for_each([&](Receive& receive) {
    if (is_p2p(receive.header.key) || receive.advertised || !is_old(receive)) return;
    if (receive.header.key < oldest[receive.peer].key) oldest[receive.peer] = receive.header;
  });
  for (uint32_t peer = 0; peer < world_; ++peer) {
    const MessageHeader& header = oldest[peer];
    const uint64_t sequence = header.key >> KEY_SLOT_BITS;
    if (is_p2p(header.key) || sequence == peers_[peer].asked) continue;
    if (lanes_[peer]->send_eager({header.key | NO_SLOT, header.signature, 0}, EAGER_REQUEST, nullptr))
      peers_[peer].asked = sequence;
  }
}

void Mailbox::meet(uint32_t peer, const MessageHeader& header) {
  if (!is_p2p(header.key)) meet(peer, header.key >> KEY_SLOT_BITS, header.signature);
}

void Mailbox::meet(uint32_t rank, uint64_t sequence, uint64_t signature) {
  if (rank == rank_) begun_ = sequence;
  Met& met = met_[sequence % met_.size()];
  if (met.sequence != sequence) {
    // Of collectives that have ended, those that are too old are forgotten; of those to come, the next ones are kept.
    const bool is_to_come = sequence > begun_ && sequence - begun_ <= met_.size();
    if (rank == rank_ || is_to_come) met = {sequence, signature, rank};
  } else if (met.signature != signature) {
    fail({MailboxFailure::Kind::mismatch, rank == rank_ ? met.rank : rank,
          differing(rank, signature, met.rank, met.signature)});
  }
}

void Mailbox::expect_peers(uint64_t now_us) {
  bool is_any_awaited = false;
  receives_.for_each([&](const Receive& receive) { is_any_awaited |= receive.peer == SENNIT_ANY_PEER; });
  std::vector<uint32_t> peers = awaited();
  if (is_any_awaited) {
    peers.resize(world_);
    std::iota(peers.begin(), peers.end(), 0u);
  }
  for (const uint32_t peer : peers)
    if (lanes_[peer] != nullptr && !lost(peer)) lanes_[peer]->expect(now_us);
}

// No other rank is left that could send anything.
bool Mailbox::is_alone() const {
  for (uint32_t peer = 0; peer < world_; ++peer)
    if (peer != rank_ && !lost(peer)) return false;
  return true;
}

bool Mailbox::check(uint32_t peer, const MessageHeader& theirs, const MessageHeader& ours, bool ours_is_receive) {
  if (theirs.signature == ours.signature && theirs.size_bytes == ours.size_bytes) return true;
  std::string reason;
  if (theirs.signature != ours.signature) {
    reason = differing(peer, theirs.signature, rank_, ours.signature);
  } else {
    reason = describe_signature(ours.signature) + ": rank " + std::to_string(ours_is_receive ? peer : rank_) +
             " sends " + std::to_string(ours_is_receive ? theirs.size_bytes : ours.size_bytes) + " bytes to rank " +
             std::to_string(ours_is_receive ? rank_ : peer) + ", which expects exactly " +
             std::to_string(ours_is_receive ? ours.size_bytes : theirs.size_bytes);
  }
  fail({MailboxFailure::Kind::mismatch, peer, std::move(reason)});
  return false;
}

void Mailbox::fail(MailboxFailure failure) {
  if (!failure_) failure_ = std::make_unique<MailboxFailure>(std::move(failure));
}

void Mailbox::abandon() noexcept {
  posted_.clear();
  arrived_.clear();
  advertised_.clear();
  pending_.clear();
  pending_count_ = 0;
  for (auto& waiting : waiting_eager_) waiting.clear();
  waiting_eager_count_ = 0;
  receives_.clear();
  sends_.clear();
  arrivals_.clear();
  adverts_.clear();
  for (PeerState& peer : peers_) peer = {};
  waits_for_any_ = 0;
}

std::vector<uint32_t> Mailbox::awaited() {
  std::vector<bool> is_awaited(lanes_.size(), false);
  receives_.for_each([&](const Receive& receive) {
    if (receive.peer != SENNIT_ANY_PEER) is_awaited[receive.peer] = true;
  });
  sends_.for_each([&](const Send& send) { is_awaited[send.peer] = true; });
  std::vector<uint32_t> ranks;
  for (uint32_t peer = 0; peer < world_; ++peer) {
    if (is_awaited[peer]) ranks.push_back(peer);
  }
  return ranks;
}

std::string Mailbox::describe_outstanding() {
  std::vector<uint64_t> receive_counts(lanes_.size(), 0), send_counts(lanes_.size(), 0);
  uint64_t any_count = 0;
  receives_.for_each(
      [&](const Receive& receive) { receive.peer == SENNIT_ANY_PEER ? ++any_count : ++receive_counts[receive.peer]; });
  sends_.for_each([&](const Send& send) { ++send_counts[send.peer]; });
  std::string text;
  for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
    if (receive_counts[peer] == 0 && send_counts[peer] == 0) continue;
    if (!text.empty()) text += "; ";
    text += (peer < world_ ? "rank " + std::to_string(peer) : "the aggregator") + ": " +
            std::to_string(receive_counts[peer]) + " messages awaited, " + std::to_string(send_counts[peer]) +
            " not taken";
    if (const uint64_t kept_bytes = peers_[peer].arrival_bytes; kept_bytes != 0)
      text += ", " + std::to_string(kept_bytes) + " bytes of unexpected messages kept";
    if (lanes_[peer] != nullptr) text += " (" + lanes_[peer]->describe() + ")";
  }
  if (any_count != 0)
    text += (text.empty() ? "" : "; ") + std::string("any rank: ") + std::to_string(any_count) + " messages awaited";
  return text;
}

}  // namespace sennit
