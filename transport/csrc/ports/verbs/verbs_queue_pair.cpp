// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs/verbs_queue_pair.hpp"

#include <bit>
#include <cerrno>
#include <string>
#include <system_error>

#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr uint8_t HOP_LIMIT = 64;
// RC only: 4.096 us * 2^14 = 67 ms, six times. flow takes the path as dead long before. Not seven: rxe takes seven as
// infinite. A request to an end that was brought up again would then never complete, and never release its memory.
constexpr uint8_t ACK_TIMEOUT = 14, RETRY_COUNT = 6, RNR_RETRY_FOREVER = 7;
constexpr uint8_t RNR_TIMER = 1;  // 10 us
// RC only: how far packet numbers move between two lives of a queue pair. They go down. So to the end that was brought
// up again, the other end's packets look like packets from the future, and are refused until the other end starts anew
// too. If numbers went up, they would look like repeated packets, which are acknowledged and dropped. So both ends
// always restart.
constexpr uint32_t PSNS_PER_LIFE = 1 << 20;

ibv_mtu mtu_of(uint32_t bytes) { return static_cast<ibv_mtu>(std::countr_zero(bytes) - 7); }

}  // namespace

uint32_t flow_label_for(uint16_t source_port) {
  const uint32_t low = source_port & 0x3FFFu;
  // A label of 0 means that the device chooses. The bits above are added to the lower ones without carry.
  return low != 0 ? low : 0x4000u | 0x1u;
}

VerbsQueuePair::VerbsQueuePair(const VerbsDevice& device, ibv_cq* completions, ibv_srq* receives, uint32_t depth,
                               VerbsService service)
    : device_(device), depth_(depth), service_(service), handle_(nullptr, device.library().destroy_qp) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = completions;
  attributes.srq = receives;
  attributes.cap.max_send_wr = depth;
  attributes.cap.max_send_sge = 1;
  attributes.qp_type = service == VerbsService::uc ? IBV_QPT_UC : IBV_QPT_RC;
  handle_.reset(device.library().create_qp(device.domain(), &attributes));
  if (handle_) return;
  const int error = errno;
  const bool is_unknown = error == EINVAL || error == EOPNOTSUPP || error == ENOSYS;
  raise_verbs_error(error, device.name() + ": no queue pair" +
                               (is_unknown && service == VerbsService::uc
                                    ? " of the unreliable connected service; with SENNIT_VERBS_SERVICE=rc on all ranks "
                                      "the reliable one is used"
                                    : ""));
}

void VerbsQueuePair::connect(const VerbsRoute& route) {
  route_ = route;
  to_init();
  to_ready_to_receive();
  to_ready_to_send();
  is_ready_ = true;
}

void VerbsQueuePair::modify(ibv_qp_attr& attributes, int mask, const char* what) {
  if (const int error = device_.library().modify_qp(get(), &attributes, mask | IBV_QP_STATE))
    raise_verbs_error(error, describe(route_.local) + ": queue pair to " + text_of(route_.remote) + ": " + what);
}

void VerbsQueuePair::to_init() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = route_.local.partition_index;
  attributes.port_num = route_.local.port;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  modify(attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "cannot be initialised");
}

void VerbsQueuePair::to_ready_to_receive() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = mtu_of(route_.mtu_bytes);
  attributes.dest_qp_num = route_.remote_qpn;
  attributes.rq_psn = route_.expected_psn;
  attributes.ah_attr.is_global = 1;
  attributes.ah_attr.port_num = route_.local.port;
  attributes.ah_attr.grh.dgid = gid_of(route_.remote);
  attributes.ah_attr.grh.sgid_index = route_.local.gid_index;
  attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
  attributes.ah_attr.grh.flow_label = route_.entropy != 0 ? flow_label_for(route_.entropy) : 0;
  int mask = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  if (service_ == VerbsService::rc) {
    attributes.min_rnr_timer = RNR_TIMER;
    mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  }
  modify(attributes, mask, "cannot be connected; is the address reachable from this one?");
}

void VerbsQueuePair::to_ready_to_send() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = route_.first_psn;
  int mask = IBV_QP_SQ_PSN;
  if (service_ == VerbsService::rc) {
    attributes.timeout = ACK_TIMEOUT;
    attributes.retry_cnt = RETRY_COUNT;
    attributes.rnr_retry = RNR_RETRY_FOREVER;
    mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  }
  modify(attributes, mask, "cannot be made ready to send");
}

bool VerbsQueuePair::revive(const Release& release) {
  stop(release);
  route_.first_psn = (route_.first_psn - PSNS_PER_LIFE) & wire::PSN_MASK;
  route_.expected_psn = (route_.expected_psn - PSNS_PER_LIFE) & wire::PSN_MASK;
  try {
    connect(route_);
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

void VerbsQueuePair::stop(const Release& release) {
  is_ready_ = false;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RESET;
  device_.library().modify_qp(get(), &attributes, IBV_QP_STATE);
  release_all(release);
}

void VerbsQueuePair::release_all(const Release& release) {
  for (; !held_.empty(); held_.pop()) release(held_.front());
}

void VerbsQueuePair::post(ibv_send_wr* first, std::span<const Held> held) {
  for (const Held& one : held) held_.push(one);
  ibv_send_wr* last = first;
  while (last->next != nullptr) last = last->next;
  last->send_flags |= IBV_SEND_SIGNALED;
  last->wr_id |= static_cast<uint32_t>(held_.end());
  ibv_send_wr* refused = nullptr;
  // Requests before the refused one are not signalled, so the queue pair must start anew.
  if (ibv_post_send(get(), first, &refused) != 0) is_ready_ = false;
}

void VerbsQueuePair::on_sent(uint32_t number, const Release& release) {
  while (!held_.empty() && static_cast<int32_t>(number - static_cast<uint32_t>(held_.first())) > 0) {
    release(held_.front());
    held_.pop();
  }
}

}  // namespace sennit
