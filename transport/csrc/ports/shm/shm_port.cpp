// SPDX-License-Identifier: Apache-2.0
#include "ports/shm/shm_port.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

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

std::vector<uint32_t> or_all(std::span<const uint32_t> ranks_here, uint32_t world) {
  std::vector<uint32_t> ranks(ranks_here.begin(), ranks_here.end());
  if (ranks.empty()) {
    ranks.resize(world);
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  if (!std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) || ranks.back() >= world)
    throw std::invalid_argument("the ranks of this host must ascend and be below the world");
  return ranks;
}

}  // namespace

ShmPort::ShmPort(uint32_t rank, uint32_t world, CounterPage* counter_page, uint64_t peer_timeout_us,
                 std::span<const uint32_t> ranks_here)
    : rank_(rank),
      world_(world),
      ranks_here_(or_all(ranks_here, world)),
      peer_timeout_us_(peer_timeout_us),
      counter_page_(counter_page),
      segment_(ShmSegment::create(rank, inbox_of(rank), static_cast<uint32_t>(ranks_here_.size()), fresh_nonce())),
      peers_(world),
      lanes_(world),
      lost_(world, false),
      member_of_(world) {}

ShmPort::~ShmPort() = default;

uint32_t ShmPort::inbox_of(uint32_t rank) const {
  const auto at = std::lower_bound(ranks_here_.begin(), ranks_here_.end(), rank);
  if (at == ranks_here_.end() || *at != rank)
    throw std::out_of_range("rank " + std::to_string(rank) + " is not among the ranks of this host");
  return static_cast<uint32_t>(at - ranks_here_.begin());
}

bool ShmPort::accept(uint32_t peer, std::span<const std::byte> offer, std::string* why) {
  if (peer == rank_) throw std::out_of_range("peer " + std::to_string(peer) + " is this rank; allowed: another");
  static_cast<void>(inbox_of(peer));  // throws unless it is on this host
  peers_[peer] = ShmSegment::open(offer, peer, static_cast<uint32_t>(ranks_here_.size()), why);
  return static_cast<bool>(peers_[peer]);
}

void ShmPort::connect(uint32_t peer, LaneSink& sink) {
  if (peer >= world_ || !peers_[peer])
    throw std::runtime_error("the shared memory of rank " + std::to_string(peer) + " was not opened");
  sink_ = &sink;
  lanes_[peer] =
      std::make_unique<ShmLane>(peer, segment_.inbox(inbox_of(peer)), peers_[peer].inbox(inbox_of(rank_)), sink,
                                counter_page_, peer_timeout_us_, &agenda_, static_cast<uint32_t>(connected_.size()));
  connected_.push_back(peer);
  idle_rounds_.push_back(0);
  member_of_[peer] = agenda_.join();
}

bool ShmPort::progress(uint64_t now_us) {
  look_at_bells();
  bool moved = false;
  for (size_t turn = 0; turn < agenda_.ready().size(); ++turn) {
    const uint32_t member = agenda_.ready()[turn], peer = connected_[member];
    const bool its = !lost_[peer] && lanes_[peer]->progress(now_us);
    if (its) {
      idle_rounds_[member] = 0;
    } else if (lanes_[peer]->has_last_word()) {
      // The end of a peer does not overtake what the peer sent: some may have come since the round's look.
      lanes_[peer]->drain();
      lanes_[peer]->look_for_last_word();
    }
    moved |= its;
    if (!lanes_[peer]->failure().empty()) failure_ = lanes_[peer]->failure();
  }
  ring_where_dirty();
  if (now_us >= next_beat_us_) {
    next_beat_us_ = now_us + PEER_CHECK_US;
    beat();
  }
  if (!moved && now_us >= next_check_us_) check_peers(now_us);
  agenda_.settle(now_us, [&](uint32_t member) -> uint64_t {
    const uint32_t peer = connected_[member];
    if (!lanes_[peer]->idle()) idle_rounds_[member] = 0;
    if (!lost_[peer] && ++idle_rounds_[member] <= WATCH_ROUNDS) return 0;
    idle_rounds_[member] = 0;
    if (stop_watching(peer) || lost_[peer]) return flow::Agenda::NEVER_US;
    moved = true;
    return 0;
  });
  return moved;
}

void ShmPort::look_at_bells() {
  ShmSegmentHeader& header = segment_.header();
  for (uint32_t word = 0; word < WATCH_WORDS && 64 * word < world_; ++word) {
    uint64_t fresh = header.watched[word].load(std::memory_order_acquire) & ~watched_[word];
    watched_[word] |= fresh;
    for (; fresh != 0; fresh &= fresh - 1)
      for (uint32_t peer = 64 * word + std::countr_zero(fresh); peer < world_; peer += WATCH_BITS)
        if (lanes_[peer]) agenda_.wake(member_of_[peer]);
  }
}

// Stops looking into the peer's inbox. True if the inbox is empty, and the peer will set its bit with its next news.
bool ShmPort::stop_watching(uint32_t peer) {
  const uint32_t bit = peer % WATCH_BITS;
  const uint64_t mask = uint64_t{1} << bit % 64;
  watched_[bit / 64] &= ~mask;
  segment_.header().watched[bit / 64].fetch_and(~mask, std::memory_order_seq_cst);
  // Pairs with the first fence in ring_where_dirty(): either the peer sees that its bit is clear, or the look below
  // sees what the peer published.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return !lanes_[peer]->has_news();
}

// One fence for all doorbells: our publications come before it, what the peers announce (that they do not watch, that
// they sleep) after it. A lane becomes dirty only by a call that also makes it ready.
void ShmPort::ring_where_dirty() {
  bool fenced = false;
  for (const uint32_t member : agenda_.ready()) {
    const uint32_t peer = connected_[member];
    if (!lanes_[peer]->take_dirty()) continue;
    idle_rounds_[member] = 0;
    if (!fenced) std::atomic_thread_fence(std::memory_order_seq_cst);
    fenced = true;
    // Where the bit was clear, a peer that sleeps after its last look at the bits must be seen asleep now.
    if (peers_[peer].ask_to_watch(rank_)) std::atomic_thread_fence(std::memory_order_seq_cst);
    peers_[peer].wake_owner();
  }
}

void ShmPort::beat() { segment_.header().beats.fetch_add(1, std::memory_order_relaxed); }

bool ShmPort::is_gone(uint32_t peer) const { return lanes_[peer]->peer_said_goodbye() || !peers_[peer].owner_alive(); }

// The kernel is asked about those that something here waits for, because each question is a system call. Whoever waits
// for another one tells all others. Once one is gone, all are looked up, so that the error names all.
void ShmPort::check_peers(uint64_t now_us) {
  const bool has_lost_one = std::any_of(connected_.begin(), connected_.end(), [&](uint32_t peer) {
    const ShmLane& lane = *lanes_[peer];
    return !lost_[peer] && (lane.peer_said_goodbye() || (lane.is_expected(now_us) && is_gone(peer)));
  });
  if (next_check_us_ != 0 && has_lost_one) {
    for (const uint32_t peer : connected_) {
      if (lost_[peer] || !is_gone(peer)) continue;
      const bool left = lanes_[peer]->peer_said_goodbye();
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

bool ShmPort::has_last_word() const {
  return std::any_of(connected_.begin(), connected_.end(),
                     [&](uint32_t peer) { return lanes_[peer]->has_last_word(); });
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
