// SPDX-License-Identifier: Apache-2.0
// Translates the device's events into what the flows understand: paths that fail, and paths to try again.
#include <algorithm>
#include <cerrno>
#include <string>

#include "ports/verbs_path.hpp"
#include "ports/verbs_port.hpp"

namespace sennit {
namespace {

// A queue pair in error is brought up again, repeatedly while the cause lasts. The pause grows between these limits.
constexpr uint64_t REVIVE_FIRST_US = 1'000, REVIVE_MAX_US = 1'000'000;

}  // namespace

void VerbsPort::poll_events(uint64_t now_us) {
  ibv_async_event event;
  for (const auto& adapter : adapters_) {
    while (adapter->next_event(event)) {
      on_event(*adapter, event, now_us);
      adapter->acknowledge(event);
    }
  }
}

void VerbsPort::on_event(VerbsAdapter& adapter, const ibv_async_event& event, uint64_t now_us) {
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      if (Path* const path = find_path(adapter, event.element.qp->qp_num)) {
        on_path_error(*path, trace::PortError::queue_pair, event.event_type, now_us);
      } else {
        fail("verbs: " + adapter.name() + ": the queue pair for memory windows failed", event.event_type);
      }
      return;
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE:
      on_port(adapter, static_cast<uint8_t>(event.element.port_num), event.event_type == IBV_EVENT_PORT_ACTIVE, now_us);
      return;
    case IBV_EVENT_DEVICE_FATAL:
      fail("verbs: " + adapter.name() + " failed or was removed", event.event_type);
      return;
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_SRQ_ERR:
      fail("verbs: " + adapter.name() + ": a queue of completions or receives failed", event.event_type);
      return;
    default:
      return;
  }
}

void VerbsPort::on_port(VerbsAdapter& adapter, uint8_t port, bool is_up, uint64_t now_us) {
  ++counters_->port_events;
  const auto is_its = [&](const Rail& rail) { return rail.adapter == &adapter && rail.address.port == port; };
  for (Rail& rail : rails_)
    if (is_its(rail)) rail.is_up = is_up;
  if (is_up) {
    revive_pause_us_ = REVIVE_FIRST_US;
    revive_at_us_ = std::min(revive_at_us_, now_us);
    return;
  }
  trace::port_error(rank_, trace::NO_PEER, trace::NO_PATH, trace::PortError::port_down, IBV_EVENT_PORT_ERR);
  for (const auto& path : paths_)
    if (path->flow != nullptr && is_its(rails_[path->rail])) {
      path->flow->on_path_failed(now_us, path->index);
      // The packet may never leave, and messages wait for it that arrived long ago over other paths.
      if (path->queue.holds_any()) break_off(*path);
    }
}

// Stops the path until it is brought up again, which may take long. What it was to send from is released at once.
void VerbsPort::break_off(Path& path) {
  path.is_broken = true;
  path.queue.stop(releases_[path.adapter->number()]);
}

void VerbsPort::on_path_error(Path& path, trace::PortError where, uint32_t error, uint64_t now_us) {
  if (path.peer == nullptr) return;
  // The device reports an error once for each request that was in the queue.
  if (path.is_broken) return;
  break_off(path);
  ++counters_->path_errors;
  trace::port_error(rank_, path.peer->rank, path.index, where, error);
  if (path.flow != nullptr) {
    path.flow->on_path_failed(now_us, path.index);
  } else {
    path.error = EIO;
  }
  if (revive_at_us_ != UINT64_MAX) return;
  revive_pause_us_ = std::clamp(revive_pause_us_, REVIVE_FIRST_US, REVIVE_MAX_US);
  revive_at_us_ = now_us + revive_pause_us_;
}

void VerbsPort::revive_paths(uint64_t now_us) {
  revive_at_us_ = UINT64_MAX;
  if (is_cut_off_) return;
  bool is_left = false;
  for (const auto& path : paths_) {
    if (!path->is_broken) continue;
    // While the port is down there is nothing to try. The event of the port starts this again.
    if (!rails_[path->rail].is_up) continue;
    ++path->generation;
    if (path->queue.revive(releases_[path->adapter->number()])) {
      path->is_broken = false;
      ++counters_->path_revivals;
      continue;
    }
    // Connecting may wait for the neighbour's address, so at most one failure in each call.
    is_left = true;
    break;
  }
  revive_pause_us_ = is_left ? std::min(2 * revive_pause_us_, REVIVE_MAX_US) : REVIVE_FIRST_US;
  if (is_left) revive_at_us_ = now_us + revive_pause_us_;
}

}  // namespace sennit
