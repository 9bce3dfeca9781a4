// SPDX-License-Identifier: Apache-2.0
// One device and everything of the port on it except the paths: queues, registrations, keys, events.
//
// All paths of the device share one completion queue and one queue of receive buffers.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ports/verbs/verbs_device.hpp"
#include "ports/verbs/verbs_exposure.hpp"
#include "ports/verbs/verbs_queue_pair.hpp"
#include "ports/verbs/verbs_registrations.hpp"

namespace sennit {

class VerbsAdapter {
 public:
  struct Need {
    uint32_t rank;  // for tracepoints
    uint32_t peer_count;
    size_t path_count;  // of all peers, over all its rails
    VerbsService service;
  };

  // `rail`: any address of the device. `number`: its number among the port's devices. Throws std::runtime_error or
  // std::invalid_argument with what to do.
  VerbsAdapter(const VerbsLibrary& library, const VerbsAddress& rail, uint32_t number, const Need& need);
  ~VerbsAdapter();
  VerbsAdapter(const VerbsAdapter&) = delete;

  const std::string& name() const { return device_.name(); }
  uint32_t number() const { return number_; }
  VerbsRegistrations& registrations() { return registrations_; }
  const VerbsRegistrations& registrations() const { return registrations_; }
  VerbsExposure& exposure() { return *exposure_; }
  const VerbsExposure& exposure() const { return *exposure_; }
  // For a path. Throws std::system_error.
  VerbsQueuePair make_queue_pair();
  // How much one peer may have in flight to this device.
  uint64_t receive_window_bytes() const;

  // Negative: the queue cannot be read any more.
  int poll(std::span<ibv_wc> out) { return ibv_poll_cq(completions_.get(), static_cast<int>(out.size()), out.data()); }
  std::span<std::byte> received(uint32_t buffer) const { return (*receive_buffers_)[buffer]; }
  // When what was received in it is used. Then call post_receives() once for all.
  void give_back(uint32_t buffer) { unposted_.push_back(buffer); }
  [[nodiscard]] bool post_receives();

  // Call it before a sleep. Later completions make the descriptor readable.
  enum class Armed : uint8_t { before, now, failed };  // now: look once more; something may have come in between
  Armed arm();
  void append_poll_fds(std::vector<pollfd>& out) const;
  // False: there is no event. Each event must be acknowledged.
  bool next_event(ibv_async_event& event) { return library().get_async_event(device_.context(), &event) == 0; }
  void acknowledge(ibv_async_event& event) { library().ack_async_event(&event); }

 private:
  const VerbsLibrary& library() const { return device_.library(); }
  void open_queues(const Need& need);
  void open_binder(const VerbsAddress& rail);

  const uint32_t number_, peer_count_;
  const VerbsService service_;
  // In the order in which verbs objects depend on each other. They are destroyed in reverse.
  VerbsDevice device_;
  VerbsRegistrations registrations_;
  VerbsHandle<ibv_comp_channel> channel_;
  VerbsHandle<ibv_cq> completions_;
  VerbsHandle<ibv_srq> receives_;
  std::unique_ptr<VerbsBuffers> receive_buffers_;
  std::unique_ptr<VerbsQueuePair> binder_;
  std::unique_ptr<VerbsExposure> exposure_;
  std::vector<uint32_t> unposted_;  // of receive_buffers_
  uint32_t depth_ = 0;              // of each queue pair
  uint32_t unacknowledged_events_ = 0;
  bool is_armed_ = false;
};

}  // namespace sennit
