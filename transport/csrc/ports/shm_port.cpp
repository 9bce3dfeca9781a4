// SPDX-License-Identifier: Apache-2.0
#include "ports/shm_port.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <stdexcept>

namespace sennit {
namespace {

// A rank that waits for a process notices its death within this time.
constexpr uint64_t PEER_CHECK_US = 50'000;

// Not FUTEX_PRIVATE: the word is shared between processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, uint64_t timeout_us) {
  timespec timeout{static_cast<time_t>(timeout_us / 1'000'000), static_cast<long>(timeout_us % 1'000'000 * 1'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

uint64_t fresh_nonce() {
  uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) throw std::runtime_error("getrandom failed");
  return nonce;
}

}  // namespace

ShmPort::ShmPort(uint32_t rank, uint32_t world, CounterPage* counter_page, uint64_t peer_timeout_us)
    : rank_(rank),
      world_(world),
      peer_timeout_us_(peer_timeout_us),
      counter_page_(counter_page),
      segment_(ShmSegment::create(rank, world, fresh_nonce())),
      peers_(world),
      lanes_(world),
      lost_(world, false) {}

ShmPort::~ShmPort() = default;

bool ShmPort::accept(uint32_t peer, std::span<const std::byte> offer) {
  if (peer >= world_ || peer == rank_) throw std::out_of_range("no such peer");
  peers_[peer] = ShmSegment::open(offer, peer, world_);
  return static_cast<bool>(peers_[peer]);
}

void ShmPort::connect(uint32_t peer, LaneSink& sink) {
  if (peer >= world_ || !peers_[peer]) throw std::runtime_error("the peer's shared memory was not opened");
  sink_ = &sink;
  lanes_[peer] = std::make_unique<ShmLane>(peer, segment_.inbox(peer), peers_[peer].inbox(rank_), sink, counter_page_,
                                           peer_timeout_us_);
  connected_.push_back(peer);
}

bool ShmPort::progress(uint64_t now_us) {
  bool moved = false;
  for (const uint32_t peer : connected_) {
    if (!lost_[peer]) moved |= lanes_[peer]->progress(now_us);
  }
  ring_where_dirty();
  // The rings are read first: the end of a peer does not overtake what the peer sent.
  if (!moved) {
    for (const uint32_t peer : connected_) lanes_[peer]->look_for_last_word();
  }
  if (now_us >= next_beat_us_) {
    next_beat_us_ = now_us + PEER_CHECK_US;
    beat();
    look_at_beats(now_us);
  }
  if (!moved && now_us >= next_check_us_) check_peers(now_us);
  return moved;
}

// One fence for all doorbells: our publications come before it, the peers' announcement of sleep after it.
void ShmPort::ring_where_dirty() {
  bool fenced = false;
  for (const uint32_t peer : connected_) {
    if (!lanes_[peer]->take_dirty()) continue;
    if (!fenced) std::atomic_thread_fence(std::memory_order_seq_cst);
    fenced = true;
    peers_[peer].wake_owner();
  }
}

void ShmPort::beat() { segment_.header().beats.fetch_add(1, std::memory_order_relaxed); }

void ShmPort::look_at_beats(uint64_t now_us) {
  for (const uint32_t peer : connected_)
    lanes_[peer]->note_beats(peers_[peer].header().beats.load(std::memory_order_relaxed), now_us);
}

void ShmPort::check_peers(uint64_t now_us) {
  if (next_check_us_ != 0) {
    for (const uint32_t peer : connected_) {
      if (lost_[peer]) continue;
      const bool left = lanes_[peer]->peer_said_goodbye();
      if (!left && peers_[peer].owner_alive()) continue;
      lanes_[peer]->drain();  // what it wrote between our look and its end
      lanes_[peer]->look_for_last_word();
      lost_[peer] = true;
      if (lanes_[peer]->is_dead()) continue;
      sink_->on_peer_lost(peer, left || lanes_[peer]->peer_said_goodbye() ? "left the group" : "process ended");
    }
  }
  next_check_us_ = now_us + PEER_CHECK_US;
}

void ShmPort::append_poll_fds(std::vector<pollfd>& out) const { out.push_back({segment_.bell_fd(), POLLIN, 0}); }

uint32_t ShmPort::prepare_sleep(Sleep how) {
  ShmSegmentHeader& header = segment_.header();
  const uint32_t ticket = header.doorbell.load(std::memory_order_seq_cst);
  header.sleeping.store(static_cast<uint32_t>(how), std::memory_order_relaxed);
  // Pairs with the fence in progress(): either the peer sees the announcement, or the caller's next look at the rings
  // sees what the peer published. (A sequentially consistent store alone does not order the loads after it.)
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return ticket;
}

void ShmPort::sleep(uint32_t ticket, uint64_t timeout_us) {
  ShmSegmentHeader& header = segment_.header();
  futex_wait(header.doorbell, ticket, timeout_us);
  header.sleeping.store(0, std::memory_order_seq_cst);
}

void ShmPort::cancel_sleep() { segment_.header().sleeping.store(0, std::memory_order_seq_cst); }

bool ShmPort::idle() const {
  for (const auto& lane : lanes_) {
    if (lane && !lane->idle()) return false;
  }
  return true;
}

std::vector<uint32_t> ShmPort::find_gone(uint64_t) {
  std::vector<uint32_t> gone;
  for (const uint32_t peer : connected_) {
    if (!peers_[peer].owner_alive()) gone.push_back(peer);
  }
  return gone;
}

void ShmPort::abort(std::string_view reason) {
  for (auto& lane : lanes_) {
    if (lane) lane->say_last_word(reason);
  }
  ring_where_dirty();
}

void ShmPort::close() {
  for (auto& lane : lanes_) {
    if (lane) lane->say_goodbye();
  }
  ring_where_dirty();
}

void ShmPort::revoke() noexcept {
  for (auto& lane : lanes_) {
    if (lane) lane->forget_user_memory();
  }
}

CounterList ShmPort::counters() const {
  ShmLane::Counters sum{};
  for (const auto& lane : lanes_)
    if (lane) add_counters(sum, lane->counters());
  CounterList out;
  append_counters(out, sum);
  return out;
}

}  // namespace sennit
