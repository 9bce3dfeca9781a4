// SPDX-License-Identifier: Apache-2.0
// The verbs port's completions: sends that left, packets that arrived, binds that are done.
#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "flow/immediate.hpp"
#include "ports/verbs_path.hpp"
#include "ports/verbs_port.hpp"
#include "ports/verbs_queue_pair.hpp"

namespace sennit {
namespace {

constexpr int COMPLETIONS_PER_POLL = 64, POLL_MAX_COUNT = 4;

}  // namespace

bool VerbsPort::poll_completions(uint64_t now_us) {
  bool found = false;
  for (const auto& adapter : adapters_) found |= poll_completions(*adapter, now_us);
  return found;
}

bool VerbsPort::poll_completions(VerbsAdapter& adapter, uint64_t now_us) {
  std::array<ibv_wc, COMPLETIONS_PER_POLL> completions;
  bool found = false;
  for (int turn = 0; turn < POLL_MAX_COUNT; ++turn) {
    const int count = adapter.poll(completions);
    if (count < 0) fail("verbs: " + adapter.name() + ": its completion queue cannot be read");
    for (int index = 0; index < count; ++index) on_completion(adapter, completions[static_cast<size_t>(index)], now_us);
    found |= count > 0;
    if (count < COMPLETIONS_PER_POLL) break;
  }
  if (!adapter.post_receives()) fail("verbs: " + adapter.name() + " takes no receive buffers any more");
  return found;
}

void VerbsPort::on_completion(VerbsAdapter& adapter, const ibv_wc& completion, uint64_t now_us) {
  switch (request_kind(completion.wr_id)) {
    case VerbsRequest::send: {
      Path& path = *paths_[request_path(completion.wr_id)];
      if (request_generation(completion.wr_id) != path.generation) return;
      if (completion.status == IBV_WC_SUCCESS) {
        path.queue.on_sent(request_number(completion.wr_id), releases_[adapter.number()]);
      } else {
        on_path_error(path, trace::PortError::completion, completion.status, now_us);
      }
      return;
    }
    case VerbsRequest::bind:
      adapter.exposure().on_bound(completion.status);
      return;
    case VerbsRequest::receive:
      adapter.give_back(request_number(completion.wr_id));
      on_receive(adapter, completion, now_us);
      return;
  }
}

void VerbsPort::on_receive(VerbsAdapter& adapter, const ibv_wc& completion, uint64_t now_us) {
  Path* const known = find_path(adapter, completion.qp_num);
  if (known == nullptr || known->peer == nullptr) {
    ++counters_->unknown_qpn;
    return;
  }
  Path& path = *known;
  if (completion.status != IBV_WC_SUCCESS) {
    // With UC the device drops only this message and goes on (IBTA, class D fault).
    completion.status == IBV_WC_REM_ACCESS_ERR ? ++counters_->remote_access_errors : ++counters_->receive_errors;
    trace::port_error(rank_, path.peer->rank, path.index, trace::PortError::receive, completion.status);
    if (completion.status == IBV_WC_WR_FLUSH_ERR || config_.service == VerbsService::rc)
      on_path_error(path, trace::PortError::completion, completion.status, now_us);
    return;
  }
  const uint32_t immediate = ntohl(completion.imm_data);
  const auto buffer = adapter.received(request_number(completion.wr_id));
  const auto payload = buffer.first(std::min<size_t>(completion.byte_len, buffer.size()));
  const bool is_bulk = completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
  const bool has_immediate = (completion.wc_flags & IBV_WC_WITH_IMM) != 0;
  if (!is_bulk && has_immediate && immediate == flow::PROBE_IMMEDIATE) {
    if (path.peer->trial) path.peer->trial->on_probe(now_us, path.index, payload);
    if (path.flow != nullptr) path.flow->on_heard(now_us);  // and the answer is due
    return;
  }
  if (path.flow == nullptr) {  // the peer is ahead of this rank
    ++counters_->unknown_qpn;
    return;
  }
  if (is_bulk) {
    // The device has checked key and range. An immediate that names an eager packet does not belong in bulk memory.
    if (flow::slot_of(immediate) == flow::EAGER_SLOT) {
      ++counters_->bad_slot;
    } else {
      path.flow->on_data(now_us, path.index, immediate, completion.byte_len);
    }
    return;
  }
  if (has_immediate) {
    on_eager(path, immediate, payload, now_us);
  } else {
    path.flow->on_control(now_us, path.index, payload);
  }
}

// The packet is in memory that the device chose. It is placed into the flow's ring as in the udp port, so a late copy
// finds nothing to overwrite.
void VerbsPort::on_eager(Path& path, uint32_t immediate, std::span<const std::byte> payload, uint64_t now_us) {
  if (flow::slot_of(immediate) != flow::EAGER_SLOT) {
    ++counters_->bad_slot;
    return;
  }
  const uint32_t slot = flow::index_of(immediate) % EAGER_SLOT_COUNT;
  const uint64_t address = path.peer->eager_address + uint64_t{slot} * path.peer->payload_max_bytes;
  const auto size_bytes = static_cast<uint32_t>(payload.size());
  flow::Placement place{};
  const flow::Verdict verdict = path.flow->locate(immediate, address, 0, size_bytes, place);
  if (verdict != flow::Verdict::place && verdict != flow::Verdict::duplicate) return;  // the flow has counted it
  if (place.destination != nullptr) std::memcpy(place.destination, payload.data(), payload.size());
  path.flow->on_data(now_us, path.index, immediate, size_bytes);
}

// Call it before a sleep. True if something came in between.
bool VerbsPort::arm() {
  bool found = false;
  for (const auto& adapter : adapters_) {
    switch (adapter->arm()) {
      case VerbsAdapter::Armed::before:
        break;
      case VerbsAdapter::Armed::now:
        found |= poll_completions(*adapter, last_now_us_);
        break;
      case VerbsAdapter::Armed::failed:
        fail("verbs: " + adapter->name() + " announces no completions any more");
        break;
    }
  }
  return found;
}

}  // namespace sennit
