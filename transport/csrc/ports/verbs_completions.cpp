// SPDX-License-Identifier: Apache-2.0
// The verbs port's completions: what has left, what has arrived, what was bound.
#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "flow/immediate.hpp"
#include "ports/verbs_path.hpp"
#include "ports/verbs_port.hpp"
#include "ports/verbs_request.hpp"

namespace sennit {
namespace {

constexpr int COMPLETIONS_PER_POLL = 64, POLL_MAX_COUNT = 4;
constexpr size_t REPOST_PER_CALL = 64;

}  // namespace

bool VerbsPort::poll_completions(uint64_t now_us) {
  std::array<ibv_wc, COMPLETIONS_PER_POLL> completions;
  bool found = false;
  for (int turn = 0; turn < POLL_MAX_COUNT; ++turn) {
    const int count = ibv_poll_cq(completions_.get(), COMPLETIONS_PER_POLL, completions.data());
    if (count < 0) fail("verbs: " + device_->name() + ": its completion queue cannot be read");
    for (int index = 0; index < count; ++index) on_completion(completions[static_cast<size_t>(index)], now_us);
    found |= count > 0;
    if (count < COMPLETIONS_PER_POLL) break;
  }
  repost_receives();
  return found;
}

void VerbsPort::on_completion(const ibv_wc& completion, uint64_t now_us) {
  switch (request_kind(completion.wr_id)) {
    case VerbsRequest::send: {
      Path& path = *paths_[request_path(completion.wr_id)];
      if (request_generation(completion.wr_id) != path.generation) return;
      if (completion.status == IBV_WC_SUCCESS) {
        path.queue.on_sent(request_number(completion.wr_id), release_);
      } else {
        on_path_error(path, now_us);
      }
      return;
    }
    case VerbsRequest::bind:
      exposure_->on_bound(completion.status);
      return;
    case VerbsRequest::receive:
      repost_.push_back(request_number(completion.wr_id));
      on_receive(completion, now_us);
      return;
  }
}

void VerbsPort::on_receive(const ibv_wc& completion, uint64_t now_us) {
  const auto known = paths_by_qpn_.find(completion.qp_num);
  if (known == paths_by_qpn_.end() || known->second->flow == nullptr) {
    ++counters_.unknown_qpn;
    return;
  }
  Path& path = *known->second;
  if (completion.status != IBV_WC_SUCCESS) {
    // With UC the device drops the one message and goes on (IBTA, class D fault).
    completion.status == IBV_WC_REM_ACCESS_ERR ? ++counters_.remote_access_errors : ++counters_.receive_errors;
    if (completion.status == IBV_WC_WR_FLUSH_ERR || config_.service == VerbsService::rc) on_path_error(path, now_us);
    return;
  }
  const uint32_t immediate = ntohl(completion.imm_data);
  if (completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
    // The device has checked key and range. (What names an eager packet was not put where that belongs.)
    if (flow::slot_of(immediate) == flow::EAGER_SLOT) {
      ++counters_.bad_slot;
    } else {
      path.flow->on_data(now_us, path.index, immediate, completion.byte_len);
    }
    return;
  }
  const auto buffer = (*receive_buffers_)[request_number(completion.wr_id)];
  const auto payload = buffer.first(std::min<size_t>(completion.byte_len, buffer.size()));
  if ((completion.wc_flags & IBV_WC_WITH_IMM) != 0) {
    on_eager(path, immediate, payload, now_us);
  } else {
    path.flow->on_control(now_us, path.index, payload);
  }
}

// The packet lies in memory that the device chose; it is placed into the flow's ring as the udp port does, so a copy
// that comes late finds nothing to overwrite.
void VerbsPort::on_eager(Path& path, uint32_t immediate, std::span<const std::byte> payload, uint64_t now_us) {
  if (flow::slot_of(immediate) != flow::EAGER_SLOT) {
    ++counters_.bad_slot;
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

void VerbsPort::repost_receives() {
  std::array<ibv_recv_wr, REPOST_PER_CALL> requests;
  std::array<ibv_sge, REPOST_PER_CALL> entries;
  while (!repost_.empty()) {
    const size_t count = std::min(repost_.size(), REPOST_PER_CALL);
    for (size_t index = 0; index < count; ++index) {
      const size_t buffer = repost_[repost_.size() - 1 - index];
      entries[index] = receive_buffers_->entry(buffer, (*receive_buffers_)[buffer].size());
      requests[index] = {request_name(VerbsRequest::receive, 0, 0, static_cast<uint32_t>(buffer)),
                         index + 1 < count ? &requests[index + 1] : nullptr, &entries[index], 1};
    }
    ibv_recv_wr* refused = nullptr;
    if (ibv_post_srq_recv(receives_.get(), requests.data(), &refused) != 0) {
      fail("verbs: " + device_->name() + " takes no receive buffers any more");
      return;
    }
    repost_.resize(repost_.size() - count);
  }
}

// Before a sleep: what comes from now on makes the channel readable. True when something had come in between.
bool VerbsPort::arm() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (device_->library().get_cq_event(channel_.get(), &queue, &context) == 0) {
    is_armed_ = false;
    ++unacknowledged_events_;
  }
  if (is_armed_) return false;
  if (ibv_req_notify_cq(completions_.get(), 0) != 0) {
    fail("verbs: " + device_->name() + " announces no completions any more");
    return false;
  }
  is_armed_ = true;
  return poll_completions(last_now_us_);
}

}  // namespace sennit
