// SPDX-License-Identifier: Apache-2.0
// Which memory of this rank peers' packets may write to, and which of it a device still reads.
//
// A port that looks at every packet itself (udp, sim) needs only a fresh key: KeysOnly. A device writes on its own, and
// a copy of a packet may come long after its message is complete. So with a device the key must be taken back before
// the user gets the memory again, and that takes time (docs/decisions/0030).
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

  // Begins to open memory to the peers' writes. Returns the region's number. `address` may be null for size 0.
  virtual uint64_t open(std::byte* address, size_t size_bytes) = 0;
  // True once packets under `keys` are accepted. Only then may a peer learn the keys.
  virtual bool is_open(uint64_t region, flow::Keys& keys) = 0;
  // Begins to take the key back.
  virtual void close(uint64_t region) = 0;
  // True once no packet of any age can be written there. The number is then invalid.
  virtual bool is_closed(uint64_t region) = 0;

  // The lane's own memory. True: devices know it now, and it stays mapped until this object has ended.
  virtual bool keep(std::byte* /*address*/, size_t /*size_bytes*/) { return false; }

  // Memory that is being sent, from transfer to `sent`. Returns the source's number.
  virtual uint64_t open_source(const std::byte* address, size_t size_bytes) = 0;
  // The peer has everything. True once nothing reads the memory any more. The number is then invalid.
  virtual bool is_source_closed(uint64_t source) = 0;
};

// Only keys: for ports that check each packet before they place it.
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
  uint64_t open_source(const std::byte*, size_t) override { return 0; }
  bool is_source_closed(uint64_t) override { return true; }

 private:
  const uint32_t rank_;
  std::function<uint32_t()> next_key_;
};

}  // namespace sennit
