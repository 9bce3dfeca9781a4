// SPDX-License-Identifier: Apache-2.0
// Which memory of this rank packets may be written into, and which of it a device still reads.
//
// A port that looks at every packet itself (udp, sim) needs a fresh key and nothing more: KeysOnly. A device writes by
// itself, and a copy of a packet may come long after its message is complete; so there a key is really taken back,
// which takes time, before the memory is the user's again (docs/decisions/0030).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "flow/message.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {

class Exposure {
 public:
  virtual ~Exposure() = default;

  // Begins to open memory to the peers' writes; returns the region's number. `address` may be null for size 0.
  virtual uint64_t open(std::byte* address, size_t size_bytes) = 0;
  // True once packets under `keys` are taken: not before may a peer be told of them.
  virtual bool is_open(uint64_t region, flow::Keys& keys) = 0;
  // Begins to take the key back.
  virtual void close(uint64_t region) = 0;
  // True once no packet of any age can be written there; the number is forgotten then.
  virtual bool is_closed(uint64_t region) = 0;

  // Memory of the lane's own that stays mapped as long as this object lives.
  virtual void keep(std::byte* /*address*/, size_t /*size_bytes*/) {}

  // Memory is on its way out, from transfer to `sent`.
  virtual uint64_t lend(const std::byte* address, size_t size_bytes) = 0;
  // The peer has it all. True once nothing reads the memory any more; the number is forgotten then.
  virtual bool is_returned(uint64_t loan) = 0;
};

// Nothing but keys: for ports that judge each packet before they place it.
class KeysOnly final : public Exposure {
 public:
  KeysOnly(uint32_t rank, std::function<uint32_t()> next_key) : rank_(rank), next_key_(std::move(next_key)) {}
  uint64_t open(std::byte* address, size_t size_bytes) override {
    const uint32_t key = next_key_();
    trace::registration(rank_, trace::Memory::key, trace::Registration::made, key, address, size_bytes);
    return key;
  }
  bool is_open(uint64_t region, flow::Keys& keys) override {
    keys = static_cast<uint32_t>(region);
    return true;
  }
  void close(uint64_t region) override {
    trace::registration(rank_, trace::Memory::key, trace::Registration::released, static_cast<uint32_t>(region),
                        nullptr, 0);
  }
  bool is_closed(uint64_t) override { return true; }
  uint64_t lend(const std::byte*, size_t) override { return 0; }
  bool is_returned(uint64_t) override { return true; }

 private:
  const uint32_t rank_;
  std::function<uint32_t()> next_key_;
};

}  // namespace sennit
