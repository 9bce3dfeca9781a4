// SPDX-License-Identifier: Apache-2.0
// One rank's shared-memory segment: its doorbell and one inbox for every peer of this host.
//
// A segment is a file in /dev/shm that only this user can open. Its name and nonce go to the peers through rendezvous.
// It is unlinked once every peer has opened it, so that a crash leaves none behind. Opening it and finding the nonce
// proves that two ranks share memory. Containers with the same host name or boot id, but another /dev/shm, fail this
// test and use a network port.
//
// If /dev/shm has no room, the segment is a memfd and its bell a pipe. Peers open both as /proc/PID/fd/FD. That needs
// the same pid namespace, which a file does not, so a file comes first.
//
// The owner sleeps on a futex word of the segment. A futex cannot be polled. So an owner that also waits for sockets
// sleeps in poll(2), and the bell is among the descriptors: a FIFO beside the segment, with the same lifetime. Peers
// keep the bell alone open.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/shared_heap.hpp"
#include "messages/budgets.hpp"
#include "messages/lane.hpp"

namespace sennit {

inline constexpr size_t LAST_WORD_MAX_BYTES = 1'020;
inline constexpr uint32_t WATCH_WORDS = 16, WATCH_BITS = 64 * WATCH_WORDS;

// Two processes write here. Every field that both use is on its own cache line.
struct ShmSegmentHeader {
  uint64_t magic;
  uint64_t nonce;
  uint64_t process_id;  // random for each process, also to tell the ranks of one process apart
  uint32_t rank;
  uint32_t inbox_count;
  uint64_t bulk_blocks;
  uint64_t inbox_stride;
  alignas(64) std::atomic<uint32_t> doorbell;  // futex word: who wakes the owner adds one
  std::atomic<uint32_t> sleeping;              // a Sleep: the owner is about to wait. Who clears it wakes the owner
  // A bit for each peer (rank % WATCH_BITS): the owner looks into that inbox in every round. A peer with news sets the
  // bit where it is clear. The owner clears it when the inbox was empty for long, and then looks once more.
  alignas(64) std::atomic<uint64_t> watched[WATCH_WORDS];
  alignas(64) std::atomic<uint32_t> beats;  // grows as long as any thread of the owner runs
  // The owner's shared heap, once a message of it lay there.
  alignas(64) std::atomic<uint32_t> has_heap;
  SharedHeapName heap;
};

// One producer (the peer), one consumer (the owner). Positions in the ring only grow; the offset is position % size.
struct ShmInboxHeader {
  alignas(64) std::atomic<uint64_t> control_head;  // producer
  alignas(64) std::atomic<uint64_t> control_tail;  // consumer
  alignas(64) std::atomic<uint32_t> blocks_back;   // bit n: the consumer gives block n back, and the producer clears it
  // The producer has taken its memory back: the consumer may not write there any more, and what it reads there may be
  // anything.
  alignas(64) std::atomic<uint32_t> is_revoked;
  // The producer writes into the consumer's shared heap just now. The consumer that takes its memory back waits for it.
  alignas(64) std::atomic<uint32_t> is_writing;
  // Why the producer ended the group. Not in the rings, which may be full. Written once.
  alignas(64) std::atomic<uint32_t> last_word_bytes;
  char last_word[LAST_WORD_MAX_BYTES];
};

// How the owner of a segment waits.
enum class Sleep : uint32_t { awake = 0, futex = 1, poll = 2 };

struct ShmInbox {
  // For the owner, before a peer may use the first `each_bytes`, 1 or more, of all blocks. Returns 0 or an errno
  // (ENOSPC).
  int reserve_blocks(uint64_t each_bytes) const;
  // Whether the process of the inbox's owner still lives.
  bool owner_alive() const;

  ShmSegmentHeader* segment = nullptr;  // null: none
  ShmInboxHeader* header = nullptr;
  std::byte* control = nullptr;
  std::byte* bulk = nullptr;
  uint32_t bulk_blocks = 0;
  int fd = -1;  // of an own segment, where the blocks begin at `bulk_offset`; -1: of a peer, or this is no file
  int bell_fd = -1;
  uint64_t bulk_offset = 0;
};

class ShmSegment {
 public:
  // Makes this rank's segment with an inbox for each rank of this host. This rank's own, number `own`, stays without
  // memory, and so do the blocks until ShmInbox::reserve_blocks. If /dev/shm has no room for all that the ranks of this
  // host will need, it has no name there. Throws std::system_error.
  static ShmSegment create(uint32_t rank, uint32_t own, uint32_t inbox_count, uint64_t nonce);
  static ShmSegment create_unnamed(uint32_t rank, uint32_t own, uint32_t inbox_count, uint64_t nonce);
  // Opens a peer's segment from its offer. Returns an empty object, and the reason in `why`, if it cannot be reached.
  // Throws std::system_error if this process lacks descriptors or memory.
  static ShmSegment open(std::span<const std::byte> offer, uint32_t rank, uint32_t inbox_count,
                         std::string* why = nullptr);

  ShmSegment() = default;
  ShmSegment(ShmSegment&& other) noexcept;
  ShmSegment& operator=(ShmSegment&& other) noexcept;
  ~ShmSegment();

  explicit operator bool() const { return base_ != nullptr; }
  ShmSegmentHeader& header() const { return *reinterpret_cast<ShmSegmentHeader*>(base_); }
  ShmInbox inbox(uint32_t number) const;
  std::vector<std::byte> offer() const;  // what peers need to open it
  void unlink();
  // Why the segment has no name in /dev/shm. Empty if it has one.
  const std::string& why_unnamed() const { return why_unnamed_; }
  // Makes the owner look into the inbox of `from_rank`. True if it did not already. The caller publishes its news, then
  // makes a sequentially consistent fence.
  bool ask_to_watch(uint32_t from_rank) const;
  // Ends the owner's sleep, if it sleeps. The caller publishes its news first.
  void wake_owner() const;
  // The descriptor of the bell, for the owner. It is readable after the bell has rung.
  int bell_fd() const { return bell_fd_; }
  void silence_bell() const;
  // Whether the owning process still lives. Works across pid namespaces, because the owner keeps a POSIX record lock on
  // the bell (fcntl(2): gone when the process ends, not inherited by fork).
  bool owner_alive() const;

 private:
  static ShmSegment make(uint32_t rank, uint32_t own, uint32_t inbox_count, uint64_t nonce, bool is_named);
  void make_bell();
  void reset() noexcept;

  std::byte* base_ = nullptr;
  size_t size_bytes_ = 0;
  int fd_ = -1;
  int bell_fd_ = -1;
  bool is_named_ = false;
  std::string path_;  // not empty while the name exists and is ours
  std::string why_unnamed_;
  bool mine_ = false;
};

// Random for each process, and fixed after the first call.
uint64_t this_process_id();

}  // namespace sennit
