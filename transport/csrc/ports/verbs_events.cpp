// SPDX-License-Identifier: Apache-2.0
// What the device reports beside completions, as what the flows understand: paths that fail, and paths to try again.
#include <algorithm>
#include <string>

#include "ports/verbs_path.hpp"
#include "ports/verbs_port.hpp"

namespace sennit {
namespace {

// A queue pair in error is brought up again, over and over while its cause lasts: from the first pause up to the last.
constexpr uint64_t REVIVE_FIRST_US = 1'000, REVIVE_MAX_US = 1'000'000;

}  // namespace

void VerbsPort::poll_events(uint64_t now_us) {
  ibv_async_event event;
  while (device_->library().get_async_event(device_->context(), &event) == 0) {
    on_event(event, now_us);
    device_->library().ack_async_event(&event);
  }
}

void VerbsPort::on_event(const ibv_async_event& event, uint64_t now_us) {
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR: {
      const auto known = paths_by_qpn_.find(event.element.qp->qp_num);
      if (known != paths_by_qpn_.end()) {
        on_path_error(*known->second, now_us);
      } else {
        fail("verbs: " + device_->name() + ": the queue pair for memory windows failed");
      }
      return;
    }
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE: {
      ++counters_.port_events;
      const bool is_up = event.event_type == IBV_EVENT_PORT_ACTIVE;
      for (size_t rail = 0; rail < rails_.size(); ++rail)
        if (rails_[rail].port == event.element.port_num) is_rail_up_[rail] = is_up;
      if (is_up) {
        revive_pause_us_ = REVIVE_FIRST_US;
        revive_at_us_ = std::min(revive_at_us_, now_us);
        return;
      }
      for (const auto& path : paths_)
        if (path->flow != nullptr && !is_rail_up_[path->rail]) path->flow->on_path_failed(now_us, path->index);
      return;
    }
    case IBV_EVENT_DEVICE_FATAL:
      fail("verbs: " + device_->name() + " failed or was removed");
      return;
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_SRQ_ERR:
      fail("verbs: " + device_->name() + ": a queue of completions or receives failed");
      return;
    default:
      return;
  }
}

void VerbsPort::on_path_error(Path& path, uint64_t now_us) {
  if (path.flow == nullptr) return;
  // (Reported once for each request that was in its queue.)
  if (path.is_broken) return;
  path.is_broken = true;
  path.queue.on_error();
  ++counters_.path_errors;
  path.flow->on_path_failed(now_us, path.index);
  if (revive_at_us_ != UINT64_MAX) return;
  revive_pause_us_ = std::clamp(revive_pause_us_, REVIVE_FIRST_US, REVIVE_MAX_US);
  revive_at_us_ = now_us + revive_pause_us_;
}

void VerbsPort::revive_paths(uint64_t now_us) {
  revive_at_us_ = UINT64_MAX;
  bool is_left = false;
  for (const auto& path : paths_) {
    if (!path->is_broken) continue;
    // While the port is down there is nothing to try; its event starts this again.
    if (!is_rail_up_[path->rail]) continue;
    ++path->generation;
    if (path->queue.revive(release_)) {
      path->is_broken = false;
      ++counters_.path_revivals;
      continue;
    }
    // Connecting may wait for the neighbour's address, so not more than one failure at a time.
    is_left = true;
    break;
  }
  revive_pause_us_ = is_left ? std::min(2 * revive_pause_us_, REVIVE_MAX_US) : REVIVE_FIRST_US;
  if (is_left) revive_at_us_ = now_us + revive_pause_us_;
}

}  // namespace sennit
