// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sennit {

// Copies part of a large result that nobody reads soon. Ranges must not overlap.
//
// Streaming stores neither read the destination's cache lines nor fill the cache. On an AMD EPYC they took 2.5 ms for
// 32 MiB where plain ones took 3.2. On a Xeon with a large third-level cache they took 2.7 times as long. So the first
// pieces that a process copies are measured (CopyTrial), and later ones are copied in the faster way.
// Each kind of source is measured on its own.
enum class CopySource : uint32_t { memory, cache };
void large_copy(CopySource kind, void* destination, const void* source, size_t size_bytes);

// Streaming stores, whatever was measured.
void stream_copy(void* destination, const void* source, size_t size_bytes);

// Which of two ways to copy is faster, from pieces that are copied anyway. They are copied in one way and the other in
// turn. Each pair has a winner, and the way that wins most pairs is kept: a rank that loses its core spoils a pair, not
// the choice. Any thread may call it.
class CopyTrial {
 public:
  static constexpr uint32_t PAIRS = 31;
  enum class Way : uint32_t { undecided, plain, streaming };

  Way way() const { return way_.load(std::memory_order_relaxed); }
  // The way for the next piece, and its time in nanoseconds a MiB once it was copied. Pieces of two threads may get
  // mixed up in a pair, which spoils that pair at most.
  Way next() const { return (turns_.load(std::memory_order_relaxed) & 1) == 0 ? Way::plain : Way::streaming; }
  void note(Way way, uint64_t ns_a_mib);

 private:
  std::atomic<Way> way_{Way::undecided};
  std::atomic<uint32_t> turns_{0};
  std::atomic<uint32_t> streaming_wins_{0};
  std::atomic<uint64_t> plain_ns_{0};
};

}  // namespace sennit
