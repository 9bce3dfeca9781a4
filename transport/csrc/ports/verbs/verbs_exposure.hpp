// SPDX-License-Identifier: Apache-2.0
// A key for each message, which ends before the message is handed over (docs/decisions/0030).
//
// If the device has memory windows (type 1), opening and closing are one bind each, on a queue pair made for that and
// over one registration of the whole buffer. Otherwise each message is registered and deregistered. With several
// devices, each device has its own key to the same memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "flow/sequence_ring.hpp"
#include "ports/exposure.hpp"
#include "ports/verbs/verbs_registrations.hpp"

namespace sennit {

struct VerbsExposureCounters {
  uint64_t binds = 0;
  uint64_t windows = 0;                // made so far
  uint64_t message_registrations = 0;  // without windows
  uint64_t keys_reused_early = 0;      // the device had no more windows: a key came back within PACKET_LIFE_US
};

class VerbsExposure final : public Exposure {
 public:
  // No packet stays in a network longer than this (RFC 9293, 3.4.1: the maximum segment lifetime).
  static constexpr uint64_t PACKET_LIFE_US = 120'000'000;

  // `binder`: a queue pair in state RTS whose sends are all binds, up to `binder_depth` at a time. Null: no windows.
  VerbsExposure(const VerbsDevice& device, VerbsRegistrations& registrations, ibv_qp* binder, uint32_t binder_depth);
  ~VerbsExposure() override;

  uint64_t open(std::byte* address, size_t size_bytes) override;
  bool is_open(uint64_t region, flow::Keys& keys) override;
  void close(uint64_t region) override;
  bool is_closed(uint64_t region) override;
  bool keep(std::byte* address, size_t size_bytes) override {
    registrations_.borrow(address, size_bytes);
    return true;
  }
  uint64_t open_source(const std::byte* address, size_t size_bytes) override;
  bool is_source_closed(uint64_t source) override;

  void set_now(uint64_t now_us) { now_us_ = now_us; }
  // The oldest bind is done or has failed.
  void on_bound(ibv_wc_status status);
  // A packet from an open source goes out. Gives its local key, and the source that it uses until end_reading: the
  // given one, if that has the packet. False: nobody opened that memory as a source.
  bool begin_reading(const std::byte* address, size_t size_bytes, uint64_t& source, uint32_t& key);
  void end_reading(uint64_t source) { --sources_[source].readers; }

  // The group has ended: takes back every key and opens nothing more. True when the last key is gone and nothing is
  // read any more.
  bool close_all();
  // A permanent failure. Empty while all is well.
  const std::string& failure() const { return failure_; }
  const VerbsExposureCounters& counters() const { return counters_; }
  bool uses_windows() const { return binder_ != nullptr; }

 private:
  struct MemoryWindow {
    VerbsHandle<ibv_mw> handle;
    uint32_t messages = 0;  // time when its keys began anew
    uint64_t rests_until_us = 0;
  };
  enum class RegionState : uint8_t { opening, open, closing, closed, forgotten };
  struct Region {
    RegionState state;
    MemoryWindow* window;
    ibv_mr* registration;
    uint64_t bind;  // the newest one of it
    uint32_t key;
  };
  struct Source {
    uintptr_t begin, end;
    ibv_mr* registration;
    uint32_t readers;
    bool is_forgotten;
  };
  struct Bind {
    MemoryWindow* window;
    ibv_mr* registration;
    std::byte* address;
    size_t size_bytes;
    uint64_t region;
  };

  MemoryWindow* take_window();
  void put_back(MemoryWindow* window);
  uint64_t post(const Bind& bind);
  void post_now(const Bind& bind);
  void retire(Region& region);
  void note(trace::Memory memory, trace::Registration what, uint32_t key, const std::byte* address,
            size_t size_bytes) const;

  const VerbsDevice& device_;
  VerbsRegistrations& registrations_;
  ibv_qp* const binder_;
  const uint32_t binder_depth_;
  uint64_t now_us_ = 0;
  std::vector<std::unique_ptr<MemoryWindow>> windows_;
  std::deque<MemoryWindow*> free_, resting_;  // least recently used first
  std::deque<Bind> waiting_;                  // no room on the binder
  uint64_t binds_called_ = 0, binds_posted_ = 0, binds_done_ = 0;
  flow::SequenceRing<Region> regions_;
  flow::SequenceRing<Source> sources_;
  std::string failure_;
  VerbsExposureCounters counters_;
};

// Memory that several devices may write and read at a time. It is open once all have opened it, and closed once all
// have closed it. Every device gets all regions and sources in one order, so their numbers are equal on all devices.
class VerbsJointExposure final : public Exposure {
 public:
  // Outlives this object. At most flow::Keys::MAX_COUNT.
  void add(VerbsExposure& device) { devices_.push_back(&device); }

  uint64_t open(std::byte* address, size_t size_bytes) override {
    for (VerbsExposure* device : devices_) device->open(address, size_bytes);
    return regions_.push(0);
  }
  bool is_open(uint64_t region, flow::Keys& keys) override;
  void close(uint64_t region) override {
    for (VerbsExposure* device : devices_) device->close(region);
  }
  bool is_closed(uint64_t region) override {
    return is_done(regions_, region, [](VerbsExposure& device, uint64_t number) { return device.is_closed(number); });
  }
  bool keep(std::byte* address, size_t size_bytes) override {
    for (VerbsExposure* device : devices_) device->keep(address, size_bytes);
    return true;
  }
  uint64_t open_source(const std::byte* address, size_t size_bytes) override {
    for (VerbsExposure* device : devices_) device->open_source(address, size_bytes);
    return sources_.push(0);
  }
  bool is_source_closed(uint64_t source) override {
    return is_done(sources_, source,
                   [](VerbsExposure& device, uint64_t number) { return device.is_source_closed(number); });
  }

  void set_now(uint64_t now_us) {
    for (VerbsExposure* device : devices_) device->set_now(now_us);
  }
  // VerbsExposure::close_all of every device.
  bool close_all();
  // The failure of the first device that has one.
  std::string_view failure() const;

 private:
  using Done = uint32_t;  // one bit for each device that has released it
  uint32_t all() const { return (1u << devices_.size()) - 1; }
  // A device forgets a number once it says that it is done. So each device is asked until then, and not again.
  template <class Ask>
  bool is_done(flow::SequenceRing<Done>& ring, uint64_t number, Ask ask) {
    for (size_t index = 0; index < devices_.size(); ++index)
      if ((ring[number] >> index & 1) == 0 && ask(*devices_[index], number)) ring[number] |= 1u << index;
    if (ring[number] != all()) return false;
    while (!ring.empty() && ring.front() == all()) ring.pop();
    return true;
  }

  std::vector<VerbsExposure*> devices_;
  flow::SequenceRing<Done> regions_, sources_;
};

}  // namespace sennit
