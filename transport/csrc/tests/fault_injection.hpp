// SPDX-License-Identifier: Apache-2.0
// Lets one request for memory, a thread or a descriptor fail: the n-th, once. The test's executable defines the
// symbols, which come before those of libraries: operator new, pthread_create, and the calls that make descriptors.
#pragma once

#include <cstdint>

namespace sennit::test {

enum class Scarce : uint8_t { memory, thread, descriptor };

// While it lives, request number `n` (from 0) fails. Only one at a time in a process.
class FaultAt {
 public:
  // Which requests count: those of Exposed threads, or those of threads neither Exposed nor Spared (the engine's own).
  enum class Where : uint8_t { here, elsewhere };
  FaultAt(Scarce what, uint64_t n, Where where = Where::here);
  ~FaultAt();
  FaultAt(const FaultAt&) = delete;
  bool has_fired() const;
};

// Marks this thread's requests while it lives: the test's own requests are spared, calls under test are exposed.
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
