// SPDX-License-Identifier: Apache-2.0
// Memory, threads and descriptors that a test refuses: the n-th request, once. By symbols of the test's own executable,
// which come before those of libraries: operator new, pthread_create, and the calls that make descriptors.
#pragma once

#include <cstdint>

namespace sennit::test {

enum class Scarce : uint8_t { memory, thread, descriptor };

// As long as it lives, request number `n` (from 0) fails. One at a time in a process.
class FaultAt {
 public:
  // Of threads that are Exposed, or of those that are neither Exposed nor Spared: the engine's own.
  enum class Where : uint8_t { here, elsewhere };
  FaultAt(Scarce what, uint64_t n, Where where = Where::here);
  ~FaultAt();
  FaultAt(const FaultAt&) = delete;
  bool has_fired() const;
};

// What this thread asks for as long as one of these lives: the test's own needs are spared, calls under test exposed.
class Spared {
 public:
  Spared();
  ~Spared();
  Spared(const Spared&) = delete;
};
class Exposed {
 public:
  Exposed();
  ~Exposed();
  Exposed(const Exposed&) = delete;
};

}  // namespace sennit::test
