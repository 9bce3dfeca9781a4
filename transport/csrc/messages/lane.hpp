// SPDX-License-Identifier: Apache-2.0
// What the message layer (mailbox) asks of a port, and what a port tells it.
//
// A port serves some peers (shared memory: the ranks of this host; udp: the others) and has a lane to each of them. A
// message goes through a lane in one of two ways:
//   eager     a small message is copied and sent at once; it may arrive before its receive is posted
//   transfer  the receiver advertises memory (its credit); the sender puts the bytes straight into it
// Everything runs under the engine's lock, in the thread that drives progress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flow/message.hpp"
#include "messages/budgets.hpp"

struct pollfd;

namespace sennit {

class LaneSink {
 public:
  virtual ~LaneSink() = default;
  // A whole eager message. `flags` is one of EagerFlags. `data` is valid only during the call. False: no room to keep
  // it now; the lane must hold it (and everything behind it) and offer it again at the next progress.
  virtual bool on_eager(uint32_t peer, const MessageHeader& header, uint32_t flags, const std::byte* data) = 0;
  // The peer can take the message `header`. `advert_id` goes into Lane::transfer.
  virtual void on_advert(uint32_t peer, const MessageHeader& header, uint64_t advert_id) = 0;
  // The peer's advert for this message is void, and the peer will advertise the message anew.
  virtual void on_advert_withdrawn(uint32_t /*peer*/, const MessageHeader& /*header*/) {}
  // An advertised message is complete. For a loan, `data` is where the bytes are until Lane::release.
  virtual void on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) = 0;
  // A transfer is complete: the sender's buffer may be overwritten.
  virtual void on_sent(uint64_t send_id) = 0;
  // The peer is gone or broke the protocol. Called once. The lane is dead then.
  virtual void on_peer_lost(uint32_t peer, std::string reason) = 0;
  // The peer ended the group and says why (FailureNotice, messages/failure.hpp). Called once. The lane is dead then.
  virtual void on_peer_aborted(uint32_t peer, std::string reason) {
    on_peer_lost(peer, "aborted: " + std::move(reason));
  }
};

class Lane {
 public:
  virtual ~Lane() = default;
  virtual uint64_t eager_max_bytes() const = 0;
  // Copies the message. False: no room now, so try again at the next progress. Also false once the lane is dead or the
  // peer has left: the sink hears of it, and what waits for room fails.
  [[nodiscard]] virtual bool send_eager(const MessageHeader& header, uint32_t flags, const void* data) = 0;
  // `destination` null: a loan (size_bytes <= MAX_LOAN_BYTES). The lane may delay a loan's advert until it has memory.
  // It grants in call order.
  virtual void advertise(uint64_t receive_id, const MessageHeader& header, void* destination) = 0;
  // The peer waits to send the message of this receive, so it should not wait for an advert behind those that nobody
  // uses yet. A point-to-point message is asked for before it is advertised.
  virtual void ask(uint64_t /*receive_id*/) {}
  // How the receiver may use the sender's memory. A lane may do less than it is allowed.
  enum class Use : uint8_t {
    copy,        // the transfer ends as soon as the bytes have left, whatever the receiver waits for
    lend,        // it may end only when the receiver has folded: nothing here waits for its end but the operation's
    round_trip,  // it ends when `data` has the receiver's result; at most MAX_LOAN_BYTES, and only if has_round_trips()
  };
  virtual void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use use) = 0;
  void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes) {
    transfer(send_id, advert_id, data, size_bytes, Use::copy);
  }
  // False: the peer took the memory back while it was lent, so what was read there may be anything.
  [[nodiscard]] virtual bool release(uint64_t loan_id) = 0;
  // Whether loans may be overwritten with a result, which the sender gets in place of what it sent. Lanes of one host
  // have this.
  virtual bool has_round_trips() const { return false; }
  // Before a loan is overwritten. False: the peer takes its memory back, so nothing may be written there.
  [[nodiscard]] virtual bool open(uint64_t /*loan_id*/) { return false; }
  // After open: nothing more is written there, and the peer does not get it back.
  virtual void close(uint64_t /*loan_id*/) {}
  // In place of release: with the result.
  virtual void send_back(uint64_t /*loan_id*/) {}
  // Something posted here waits for the peer. Called repeatedly meanwhile. The lane asks a silent peer for a sign of
  // life. A peer that gives none within the port's peer timeout is lost (LaneSink::on_peer_lost).
  virtual void expect(uint64_t now_us) = 0;
  // When the peer last gave a sign of life, on the port's clock. 0: never.
  virtual uint64_t heard_us() const = 0;
  // How long the peer has been silent while something waited for it.
  virtual uint64_t silent_us() const = 0;
  // One line for error messages: paths, states, outstanding messages.
  virtual std::string describe() const = 0;
};

class Port {
 public:
  virtual ~Port() = default;
  virtual std::string_view name() const = 0;
  // One bounded round (tens of microseconds to a few hundred). True when anything moved.
  virtual bool progress(uint64_t now_us) = 0;
  // Tells the peers what was sent since progress(). It ends a round, because the next one may come late. `has_ended`:
  // so has an operation, and its waiter leaves.
  virtual void tell_peers(bool /*has_ended*/, uint64_t /*now_us*/) {}
  // Operations wait and nothing arrives: asks the host whether a peer is gone. Called from time to time.
  virtual void check_on_peers(uint64_t /*now_us*/) {}
  // Whether a peer has ended the group and the port can tell without a round: that round reports it. Asked with each
  // operation, so it must be cheap. A network knows only what a round has read.
  virtual bool has_last_word() const { return false; }
  // Looks up the peers that have ended: their process, or their end of this group. Later calls may find more.
  virtual std::vector<uint32_t> find_gone(uint64_t now_us) = 0;
  // The earliest time at which progress must be called even if nothing arrived. UINT64_MAX: never.
  virtual uint64_t next_timeout_us() const = 0;
  // File descriptors that are readable when there is work (udp sockets).
  virtual void append_poll_fds(std::vector<pollfd>& out) const = 0;
  // Why the port itself cannot go on (its device is gone, memory cannot be registered). Empty while it can.
  virtual std::string_view failure() const { return {}; }
  // Whether all eager messages and transfers are acknowledged.
  virtual bool idle() const = 0;
  // Tells the peers, best effort, why this rank ends the group, or says goodbye. Either may throw.
  virtual void abort(std::string_view reason) = 0;
  virtual void close() = 0;
  // Gives up all user memory. Afterwards neither the port nor its device reads or writes it, however late a packet
  // comes, and the sink gets none of it. Idempotent, and cannot fail.
  virtual void revoke() noexcept = 0;
};

}  // namespace sennit
