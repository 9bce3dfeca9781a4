// SPDX-License-Identifier: Apache-2.0
// Memory that several devices may write and read at a time: open when all have opened it, closed when all have.
//
// Every device hears of every region and loan, in one order, so that the numbers are the same with all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "flow/sequence_ring.hpp"
#include "ports/verbs_exposure.hpp"

namespace sennit {

class VerbsJointExposure final : public Exposure {
 public:
  // Outlives this object; at most flow::Keys::MAX_COUNT.
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
  void keep(std::byte* address, size_t size_bytes) override {
    for (VerbsExposure* device : devices_) device->keep(address, size_bytes);
  }
  uint64_t lend(const std::byte* address, size_t size_bytes) override {
    for (VerbsExposure* device : devices_) device->lend(address, size_bytes);
    return loans_.push(0);
  }
  bool is_returned(uint64_t loan) override {
    return is_done(loans_, loan, [](VerbsExposure& device, uint64_t number) { return device.is_returned(number); });
  }

  void set_now(uint64_t now_us) {
    for (VerbsExposure* device : devices_) device->set_now(now_us);
  }
  // VerbsExposure::close_all of every device.
  bool close_all();
  // Of the first device that has one.
  std::string_view failure() const;

 private:
  using Done = uint32_t;  // a bit for each device that has let go of it
  uint32_t all() const { return (1u << devices_.size()) - 1; }
  // A device forgets a number when it says that it is done, so each is asked until then and not again.
  template <class Ask>
  bool is_done(flow::SequenceRing<Done>& ring, uint64_t number, Ask ask) {
    for (size_t index = 0; index < devices_.size(); ++index)
      if ((ring[number] >> index & 1) == 0 && ask(*devices_[index], number)) ring[number] |= 1u << index;
    if (ring[number] != all()) return false;
    while (!ring.empty() && ring.front() == all()) ring.pop();
    return true;
  }

  std::vector<VerbsExposure*> devices_;
  flow::SequenceRing<Done> regions_, loans_;
};

}  // namespace sennit
