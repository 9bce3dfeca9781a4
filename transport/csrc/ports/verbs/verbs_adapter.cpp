// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs/verbs_adapter.hpp"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>

#include "ports/verbs/verbs_queue_pair.hpp"
#include "wire/packet.hpp"

namespace sennit {
namespace {

// Receive buffers: this many for each peer, within these bounds. Each packet takes one, if only for its completion.
constexpr size_t RECEIVES_PER_PEER = 512, RECEIVE_MIN_COUNT = 1'024, RECEIVE_MAX_COUNT = 8'192;
constexpr size_t POST_MAX_COUNT = 64;
constexpr uint32_t QUEUE_MIN_DEPTH = 64, QUEUE_MAX_DEPTH = 128, BINDER_DEPTH = 64;

}  // namespace

VerbsAdapter::VerbsAdapter(const VerbsLibrary& library, const VerbsAddress& rail, uint32_t number, const Need& need)
    : number_(number),
      peer_count_(need.peer_count),
      service_(need.service),
      device_(library, rail.device),
      registrations_(need.rank, device_, IBV_ACCESS_LOCAL_WRITE | (device_.has_windows() ? IBV_ACCESS_MW_BIND : 0)),
      channel_(nullptr, nullptr),
      completions_(nullptr, nullptr),
      receives_(nullptr, nullptr) {
  open_queues(need);
  open_binder(rail);
}

VerbsAdapter::~VerbsAdapter() {
  if (unacknowledged_events_ != 0) library().ack_cq_events(completions_.get(), unacknowledged_events_);
}

void VerbsAdapter::open_queues(const Need& need) {
  const ibv_device_attr& limits = device_.limits();
  if (need.path_count + 1 > static_cast<size_t>(limits.max_qp))
    throw std::invalid_argument("verbs: " + std::to_string(need.path_count) + " queue pairs are needed for " +
                                std::to_string(need.peer_count) + " peers, " + name() + " has " +
                                std::to_string(limits.max_qp) + "; choose fewer paths (SENNIT_PATHS)");
  const auto completion_max_count = static_cast<size_t>(limits.max_cqe);
  size_t receive_count = std::clamp(RECEIVES_PER_PEER * need.peer_count, RECEIVE_MIN_COUNT, RECEIVE_MAX_COUNT);
  receive_count = std::min(receive_count, static_cast<size_t>(limits.max_srq_wr));
  const size_t for_sends = completion_max_count - std::min(receive_count + BINDER_DEPTH, completion_max_count);
  depth_ = static_cast<uint32_t>(std::clamp<size_t>(for_sends / need.path_count, QUEUE_MIN_DEPTH, QUEUE_MAX_DEPTH));
  const size_t completion_count =
      std::min(receive_count + BINDER_DEPTH + need.path_count * depth_, completion_max_count);

  const auto made = [this](auto* object, const char* what) {
    if (object == nullptr) raise_verbs_error(errno, name() + ": no " + what);
    return object;
  };
  channel_ = {made(library().create_comp_channel(device_.context()), "completion channel"),
              library().destroy_comp_channel};
  if (fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK) != 0)
    raise_verbs_error(errno, name() + ": the completion channel cannot be read without waiting");
  completions_ = {
      made(library().create_cq(device_.context(), static_cast<int>(completion_count), nullptr, channel_.get(), 0),
           "completion queue"),
      library().destroy_cq};
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = static_cast<uint32_t>(receive_count);
  attributes.attr.max_sge = 1;
  receives_ = {made(library().create_srq(device_.domain(), &attributes), "shared receive queue"),
               library().destroy_srq};
  receive_buffers_ = std::make_unique<VerbsBuffers>(receive_count, wire::PAYLOAD_MAX_BYTES);
  receive_buffers_->register_with(registrations_);
  for (size_t buffer = 0; buffer < receive_count; ++buffer) unposted_.push_back(static_cast<uint32_t>(buffer));
  if (!post_receives()) throw std::runtime_error("verbs: " + name() + " takes no receive buffers");
}

// Binds need a queue pair that can send. It leads back to itself and carries nothing.
void VerbsAdapter::open_binder(const VerbsAddress& rail) {
  if (device_.has_windows()) {
    binder_ = std::make_unique<VerbsQueuePair>(device_, completions_.get(), receives_.get(), BINDER_DEPTH, service_);
    VerbsRoute route;
    route.local = rail;
    route.remote = rail.endpoint;
    route.remote_qpn = binder_->number();
    route.mtu_bytes = rail.mtu_bytes;
    binder_->connect(route);
  }
  exposure_ =
      std::make_unique<VerbsExposure>(device_, registrations_, binder_ ? binder_->get() : nullptr, BINDER_DEPTH);
}

VerbsQueuePair VerbsAdapter::make_queue_pair() {
  return VerbsQueuePair(device_, completions_.get(), receives_.get(), depth_, service_);
}

// Half of the buffers, because controls and eager packets take receives too.
uint64_t VerbsAdapter::receive_window_bytes() const {
  return receive_buffers_->count() / 2 / peer_count_ * wire::PAYLOAD_MAX_BYTES;
}

bool VerbsAdapter::post_receives() {
  std::array<ibv_recv_wr, POST_MAX_COUNT> requests;
  std::array<ibv_sge, POST_MAX_COUNT> entries;
  while (!unposted_.empty()) {
    const size_t count = std::min(unposted_.size(), POST_MAX_COUNT);
    for (size_t index = 0; index < count; ++index) {
      const uint32_t buffer = unposted_[unposted_.size() - 1 - index];
      entries[index] = receive_buffers_->entry(buffer, wire::PAYLOAD_MAX_BYTES);
      requests[index] = {request_name(VerbsRequest::receive, 0, 0, buffer),
                         index + 1 < count ? &requests[index + 1] : nullptr, &entries[index], 1};
    }
    ibv_recv_wr* refused = nullptr;
    if (ibv_post_srq_recv(receives_.get(), requests.data(), &refused) != 0) return false;
    unposted_.resize(unposted_.size() - count);
  }
  return true;
}

VerbsAdapter::Armed VerbsAdapter::arm() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (library().get_cq_event(channel_.get(), &queue, &context) == 0) {
    is_armed_ = false;
    ++unacknowledged_events_;
  }
  if (is_armed_) return Armed::before;
  if (ibv_req_notify_cq(completions_.get(), 0) != 0) return Armed::failed;
  is_armed_ = true;
  return Armed::now;
}

void VerbsAdapter::append_poll_fds(std::vector<pollfd>& out) const {
  out.push_back({channel_->fd, POLLIN, 0});
  out.push_back({device_.context()->async_fd, POLLIN, 0});
}

}  // namespace sennit
