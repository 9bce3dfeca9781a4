// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs/verbs_exposure.hpp"

#include <cerrno>
#include <cstring>
#include <system_error>

#include "ports/verbs/verbs_queue_pair.hpp"

namespace sennit {

namespace {

// A bind increments the lowest byte of the window's key (IBTA, 10.6.7.2.1), and a message takes two binds.
constexpr uint32_t MESSAGES_PER_LAP = 128;

uintptr_t address_of(const std::byte* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

int dealloc_window(ibv_mw* window) { return ibv_dealloc_mw(window); }

}  // namespace

VerbsExposure::VerbsExposure(const VerbsDevice& device, VerbsRegistrations& registrations, ibv_qp* binder,
                             uint32_t binder_depth)
    : device_(device), registrations_(registrations), binder_(binder), binder_depth_(binder_depth) {}

VerbsExposure::~VerbsExposure() {
  // Windows are destroyed before the memory to which they are bound.
  windows_.clear();
  if (binder_ != nullptr) return;
  for (uint64_t number = regions_.first(); number != regions_.end(); ++number)
    if (regions_[number].registration != nullptr) device_.library().dereg_mr(regions_[number].registration);
}

uint64_t VerbsExposure::open(std::byte* address, size_t size_bytes) {
  const uint64_t number = regions_.push(Region{RegionState::opening, nullptr, nullptr, 0, 0});
  Region& region = regions_[number];
  if (size_bytes == 0) {  // nothing is written, so a device does not check the key (IBTA, C9-88)
    region.state = RegionState::open;
    return number;
  }
  try {
    if (binder_ == nullptr) {
      do {
        region.registration = device_.library().reg_mr(device_.domain(), address, size_bytes,
                                                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
      } while (region.registration == nullptr && errno == ENOMEM && registrations_.evict());
      if (region.registration == nullptr)
        raise_verbs_error(errno, device_.name() + ": cannot register " + std::to_string(size_bytes) + " bytes");
      ++counters_.message_registrations;
      region.key = region.registration->rkey;
      note(trace::Memory::region, trace::Registration::made, region.key, address, size_bytes);
      region.state = RegionState::open;
    } else {
      region.registration = registrations_.acquire(address, size_bytes, true);
      region.window = take_window();
      region.bind = post({region.window, region.registration, address, size_bytes, number});
    }
  } catch (const std::system_error& error) {
    if (failure_.empty()) failure_ = error.what();
  }
  return number;
}

bool VerbsExposure::is_open(uint64_t number, flow::Keys& keys) {
  Region& region = regions_[number];
  if (region.state == RegionState::opening && region.window != nullptr && binds_done_ >= region.bind)
    region.state = RegionState::open;
  keys = region.key;
  return region.state == RegionState::open;
}

void VerbsExposure::close(uint64_t number) {
  Region& region = regions_[number];
  if (region.window == nullptr) {
    if (region.registration != nullptr) {
      note(trace::Memory::region, trace::Registration::released, region.key, nullptr, 0);
      device_.library().dereg_mr(region.registration);
    }
    region.registration = nullptr;
    region.state = RegionState::closed;
    return;
  }
  region.state = RegionState::closing;
  note(trace::Memory::window, trace::Registration::released, region.key, nullptr, 0);
  region.bind = post({region.window, region.registration, nullptr, 0, number});
}

bool VerbsExposure::is_closed(uint64_t number) {
  Region& region = regions_[number];
  if (region.state == RegionState::closing && binds_done_ >= region.bind) {
    retire(region);
    region.state = RegionState::closed;
  }
  if (region.state != RegionState::closed) return false;
  region.state = RegionState::forgotten;
  while (!regions_.empty() && regions_.front().state == RegionState::forgotten) regions_.pop();
  return true;
}

void VerbsExposure::retire(Region& region) {
  registrations_.release(region.registration);
  region.registration = nullptr;
  put_back(region.window);
  region.window = nullptr;
}

void VerbsExposure::note(trace::Memory memory, trace::Registration what, uint32_t key, const std::byte* address,
                         size_t size_bytes) const {
  trace::registration(registrations_.rank(), memory, what, key, address, size_bytes);
}

VerbsExposure::MemoryWindow* VerbsExposure::take_window() {
  MemoryWindow* window = nullptr;
  if (!free_.empty()) {
    window = free_.front();
    free_.pop_front();
    return window;
  }
  if (resting_.empty() || resting_.front()->rests_until_us > now_us_) {
    if (ibv_mw* made = ibv_alloc_mw(device_.domain(), IBV_MW_TYPE_1)) {
      ++counters_.windows;
      windows_.push_back(std::make_unique<MemoryWindow>(MemoryWindow{{made, dealloc_window}}));
      return windows_.back().get();
    }
    if (resting_.empty()) raise_verbs_error(errno, device_.name() + " has no memory window left");
    ++counters_.keys_reused_early;
  }
  window = resting_.front();
  resting_.pop_front();
  window->messages = 0;
  return window;
}

void VerbsExposure::put_back(MemoryWindow* window) {
  if (++window->messages < MESSAGES_PER_LAP) {
    free_.push_back(window);
    return;
  }
  window->rests_until_us = now_us_ + PACKET_LIFE_US;
  resting_.push_back(window);
}

uint64_t VerbsExposure::post(const Bind& bind) {
  if (waiting_.empty() && binds_posted_ - binds_done_ < binder_depth_) {
    post_now(bind);
  } else {
    waiting_.push_back(bind);
  }
  return ++binds_called_;
}

void VerbsExposure::post_now(const Bind& bind) {
  ibv_mw_bind request{};
  request.wr_id = request_name(VerbsRequest::bind);
  request.send_flags = IBV_SEND_SIGNALED;
  request.bind_info.mr = bind.registration;
  request.bind_info.addr = address_of(bind.address);
  request.bind_info.length = bind.size_bytes;
  request.bind_info.mw_access_flags = bind.size_bytes != 0 ? IBV_ACCESS_REMOTE_WRITE : 0;
  ++binds_posted_;
  ++counters_.binds;
  if (const int error = ibv_bind_mw(binder_, bind.window->handle.get(), &request)) {
    if (failure_.empty())
      failure_ = "verbs: " + device_.name() + ": cannot bind a memory window: " + std::strerror(error);
    return;
  }
  if (regions_.holds(bind.region)) regions_[bind.region].key = bind.window->handle->rkey;
  if (bind.size_bytes != 0)
    note(trace::Memory::window, trace::Registration::made, bind.window->handle->rkey, bind.address, bind.size_bytes);
}

void VerbsExposure::on_bound(ibv_wc_status status) {
  ++binds_done_;
  if (status != IBV_WC_SUCCESS && failure_.empty())
    failure_ =
        "verbs: " + device_.name() + ": a memory window could not be bound: " + device_.library().wc_status_str(status);
  while (!waiting_.empty() && binds_posted_ - binds_done_ < binder_depth_) {
    post_now(waiting_.front());
    waiting_.pop_front();
  }
}

uint64_t VerbsExposure::open_source(const std::byte* address, size_t size_bytes) {
  Source source{address_of(address), address_of(address) + size_bytes, nullptr, 0, false};
  if (size_bytes != 0) {
    try {
      source.registration = registrations_.acquire(address, size_bytes, false);
    } catch (const std::system_error& error) {
      if (failure_.empty()) failure_ = error.what();
    }
  }
  return sources_.push(source);
}

bool VerbsExposure::begin_reading(const std::byte* address, size_t size_bytes, uint64_t& source, uint32_t& key) {
  const uintptr_t begin = address_of(address), end = begin + size_bytes;
  const auto covers = [&](uint64_t number) {
    const Source& one = sources_[number];
    return !one.is_forgotten && one.registration != nullptr && one.begin <= begin && end <= one.end;
  };
  if (!sources_.holds(source) || !covers(source)) {
    // Any source of these bytes will do, because nobody changes them while a source exists. Mostly it is a new one.
    source = sources_.end();
    while (source != sources_.first() && !covers(source - 1)) --source;
    if (source == sources_.first()) return false;
    --source;
  }
  ++sources_[source].readers;
  key = sources_[source].registration->lkey;
  return true;
}

bool VerbsExposure::is_source_closed(uint64_t number) {
  Source& source = sources_[number];
  if (source.readers != 0) return false;
  if (source.registration != nullptr) registrations_.release(source.registration);
  source.is_forgotten = true;
  while (!sources_.empty() && sources_.front().is_forgotten) sources_.pop();
  return true;
}

bool VerbsExposure::close_all() {
  for (uint64_t number = regions_.first(); number != regions_.end(); ++number) {
    Region& region = regions_[number];
    flow::Keys keys;
    switch (region.state) {
      case RegionState::opening:
        // A region that could not be registered was never open.
        if (region.window == nullptr && region.registration == nullptr) {
          region.state = RegionState::forgotten;
        } else if (is_open(number, keys)) {
          close(number);
        }
        break;
      case RegionState::open:
        close(number);
        break;
      case RegionState::closing:
      case RegionState::closed:
      case RegionState::forgotten:
        break;
    }
  }
  for (uint64_t number = regions_.first(); number < regions_.end(); ++number)
    if (regions_.holds(number) && regions_[number].state != RegionState::forgotten) is_closed(number);
  while (!regions_.empty() && regions_.front().state == RegionState::forgotten) regions_.pop();
  for (uint64_t number = sources_.first(); number < sources_.end(); ++number)
    if (sources_.holds(number) && !sources_[number].is_forgotten) is_source_closed(number);
  return regions_.empty() && sources_.empty();
}

bool VerbsJointExposure::is_open(uint64_t region, flow::Keys& keys) {
  keys.count = static_cast<uint32_t>(devices_.size());
  bool is_open = true;
  for (uint32_t index = 0; index < keys.count; ++index) {
    flow::Keys own;
    is_open &= devices_[index]->is_open(region, own);
    keys.of[index] = own.of[0];
  }
  return is_open;
}

bool VerbsJointExposure::close_all() {
  bool is_closed = true;
  for (VerbsExposure* device : devices_) is_closed &= device->close_all();
  return is_closed;
}

std::string_view VerbsJointExposure::failure() const {
  for (const VerbsExposure* device : devices_)
    if (!device->failure().empty()) return device->failure();
  return {};
}

}  // namespace sennit
