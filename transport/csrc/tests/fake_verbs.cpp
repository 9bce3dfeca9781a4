// SPDX-License-Identifier: Apache-2.0
#include "tests/fake_verbs.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ports/verbs/verbs_device.hpp"

namespace sennit::test {
namespace {

FakeVerbs* current = nullptr;  // the library's functions have no argument for it

template <class To, class From>
To* as(From* object) {
  return reinterpret_cast<To*>(object);
}

int new_eventfd() { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE); }

bool take_event(int fd) {
  eventfd_t count;
  return eventfd_read(fd, &count) == 0;
}

}  // namespace

// The public structure comes first in each, so that one pointer serves for both.
struct FakeVerbs::Context {
  ibv_context base{};
  std::deque<ibv_async_event> events;
};
struct FakeVerbs::Completions {
  ibv_cq base{};
  std::deque<ibv_wc> waiting;
  bool is_armed = false;
};
struct FakeVerbs::Receives {
  ibv_srq base{};
  std::deque<std::pair<uint64_t, ibv_sge>> posted;
};
struct FakeVerbs::Registration {
  ibv_mr base{};
};
struct FakeVerbs::Window {
  ibv_mw base{};
};
struct FakeVerbs::Queue {
  ibv_qp base{};
  std::atomic<ibv_qp_state> state = IBV_QPS_RESET;
  size_t remote_device = 0;
  uint32_t remote_qpn = 0;
};

FakeVerbs& FakeVerbs::self() { return *current; }

void FakeVerbs::complete(ibv_cq* queue, const ibv_wc& completion) {
  auto& completions = *as<Completions>(queue);
  completions.waiting.push_back(completion);
  if (completions.is_armed) eventfd_write(completions.base.channel->fd, 1);
  completions.is_armed = false;
}

size_t FakeVerbs::device_of(const ibv_context* context) const { return context->device == &devices_[1] ? 1 : 0; }

size_t FakeVerbs::device_with(const ibv_gid& gid) const {
  return std::any_of(second_addresses.begin(), second_addresses.end(),
                     [&](const std::string& address) {
                       const ibv_gid own = gid_of(wire::parse_endpoint(address, 0));
                       return std::memcmp(own.raw, gid.raw, sizeof gid.raw) == 0;
                     })
             ? 1
             : 0;
}

uint32_t FakeVerbs::new_key(const ibv_context* context) { return next_key_[device_of(context)] += 0x100; }

FakeVerbs::FakeVerbs() {
  current = this;
  std::strcpy(devices_[0].name, "fake0");
  std::strcpy(devices_[1].name, "fake1");
  library_.get_device_list = [](int* count) {
    FakeVerbs& fake = self();
    *count = 0;
    if (fake.has_device) fake.device_list_[(*count)++] = &fake.devices_[0];
    if (!fake.second_addresses.empty()) fake.device_list_[(*count)++] = &fake.devices_[1];
    fake.device_list_[*count] = nullptr;
    return fake.device_list_;
  };
  library_.free_device_list = [](ibv_device**) {};
  library_.get_device_name = [](ibv_device* device) -> const char* { return device->name; };
  library_.open_device = [](ibv_device* device) -> ibv_context* {
    if (!self().can_be_opened) {
      errno = EACCES;
      return nullptr;
    }
    auto* context = new Context;
    context->base.device = device;
    context->base.async_fd = new_eventfd();
    ibv_context_ops& ops = context->base.ops;
    ops.poll_cq = [](ibv_cq* queue, int max, ibv_wc* out) {
      auto& waiting = as<Completions>(queue)->waiting;
      int count = 0;
      for (; count < max && !waiting.empty(); ++count, waiting.pop_front()) out[count] = waiting.front();
      return count;
    };
    ops.req_notify_cq = [](ibv_cq* queue, int) {
      as<Completions>(queue)->is_armed = true;
      return 0;
    };
    ops.post_srq_recv = [](ibv_srq* srq, ibv_recv_wr* request, ibv_recv_wr**) {
      for (; request != nullptr; request = request->next)
        as<Receives>(srq)->posted.emplace_back(request->wr_id, request->sg_list[0]);
      return 0;
    };
    ops.post_send = [](ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** refused) {
      auto& queue = *as<Queue>(qp);
      *refused = request;
      if (queue.state != IBV_QPS_RTS && queue.state != IBV_QPS_ERR) return EINVAL;
      if (self().is_stuck && self().device_of(qp->context) == 1) return 0;
      for (; request != nullptr; request = request->next) {
        ibv_wc done{};
        done.wr_id = request->wr_id;
        done.qp_num = qp->qp_num;
        if (queue.state == IBV_QPS_ERR) {
          done.status = IBV_WC_WR_FLUSH_ERR;
          complete(qp->send_cq, done);
          continue;
        }
        FakePacket packet{queue.remote_device,
                          queue.remote_qpn,
                          request->opcode,
                          request->imm_data,
                          request->wr.rdma.remote_addr,
                          request->wr.rdma.rkey,
                          {}};
        for (int index = 0; index < request->num_sge; ++index) {
          const auto* from = reinterpret_cast<const std::byte*>(request->sg_list[index].addr);
          packet.payload.insert(packet.payload.end(), from, from + request->sg_list[index].length);
        }
        if ((request->send_flags & IBV_SEND_SIGNALED) != 0) complete(qp->send_cq, done);
        for (uint32_t copies = self().network(packet); copies > 0; --copies) self().arrive(packet);
      }
      return 0;
    };
    ops.alloc_mw = [](ibv_pd* pd, ibv_mw_type type) -> ibv_mw* {
      FakeVerbs& fake = self();
      if (fake.windows_ == fake.window_max_count) {
        errno = ENOMEM;
        return nullptr;
      }
      ++fake.windows_;
      auto* window = new Window;
      window->base.context = pd->context;
      window->base.pd = pd;
      window->base.type = type;
      window->base.rkey = fake.new_key(pd->context);
      return &window->base;
    };
    ops.dealloc_mw = [](ibv_mw* window) {
      FakeVerbs& fake = self();
      fake.keys_.erase(window->rkey);
      delete as<Window>(window);
      return 0;
    };
    ops.bind_mw = [](ibv_qp* qp, ibv_mw* base, ibv_mw_bind* bind) {
      FakeVerbs& fake = self();
      const uint32_t key = ibv_inc_rkey(base->rkey);
      const auto act = [&fake, qp, key, old_key = base->rkey, bind = *bind] {
        fake.keys_.erase(old_key);
        fake.open_key(key, {fake.device_of(qp->context), bind.bind_info.addr, bind.bind_info.length});
        ibv_wc done{};
        done.wr_id = bind.wr_id;
        done.qp_num = qp->qp_num;
        done.opcode = IBV_WC_BIND_MW;
        complete(qp->send_cq, done);
      };
      base->rkey = key;
      fake.binds_are_slow ? fake.slow_binds_.push_back(act) : act();
      return 0;
    };
    self().contexts_.push_back(context);
    return &context->base;
  };
  library_.close_device = [](ibv_context* context) {
    ::close(context->async_fd);
    std::erase(self().contexts_, as<Context>(context));
    delete as<Context>(context);
    return 0;
  };
  library_.query_device = [](ibv_context*, ibv_device_attr* out) {
    *out = {};
    out->max_qp = 4'096;
    out->phys_port_cnt = 1;
    out->max_cqe = 32'767;
    out->max_srq_wr = 8'192;
    out->device_cap_flags = self().has_windows ? IBV_DEVICE_MEM_WINDOW : 0;
    return 0;
  };
  library_.query_port = [](ibv_context*, uint8_t, _compat_ibv_port_attr* out) {
    auto* port = reinterpret_cast<ibv_port_attr*>(out);
    port->state = self().port_state;
    port->active_mtu = self().mtu;
    port->link_layer = IBV_LINK_LAYER_ETHERNET;
    port->pkey_tbl_len = static_cast<uint16_t>(self().partitions.size());
    return 0;
  };
  library_.query_pkey = [](ibv_context*, uint8_t, int index, __be16* out) {
    *out = htons(self().partitions[static_cast<size_t>(index)]);
    return 0;
  };
  library_.query_gid_table = [](ibv_context* context, ibv_gid_entry* out, size_t, uint32_t, size_t) -> ssize_t {
    const auto& addresses = self().device_of(context) == 0 ? self().addresses : self().second_addresses;
    for (size_t index = 0; index < addresses.size(); ++index) {
      out[index] = {};
      out[index].gid = gid_of(wire::parse_endpoint(addresses[index], 0));
      out[index].gid_index = static_cast<uint32_t>(index);
      out[index].port_num = 1;
      out[index].gid_type = IBV_GID_TYPE_ROCE_V2;
    }
    return static_cast<ssize_t>(addresses.size());
  };
  library_.alloc_pd = [](ibv_context* context) { return new ibv_pd{context, 0}; };
  library_.dealloc_pd = [](ibv_pd* pd) {
    delete pd;
    return 0;
  };
  library_.reg_mr = [](ibv_pd* pd, void* address, size_t size_bytes, int access) -> ibv_mr* {
    FakeVerbs& fake = self();
    if (size_bytes > fake.registration_max_bytes || fake.locked_bytes + size_bytes > fake.locked_max_bytes) {
      errno = ENOMEM;
      return nullptr;
    }
    ++fake.live_registrations;
    fake.locked_bytes += size_bytes;
    auto* region = new Registration;
    region->base.context = pd->context;
    region->base.pd = pd;
    region->base.addr = address;
    region->base.length = size_bytes;
    region->base.lkey = region->base.rkey = fake.new_key(pd->context);
    if ((access & IBV_ACCESS_REMOTE_WRITE) != 0) {
      fake.opened_keys.push_back(region->base.rkey);
      fake.keys_[region->base.rkey] = {fake.device_of(pd->context), reinterpret_cast<uint64_t>(address), size_bytes};
    }
    return &region->base;
  };
  library_.dereg_mr = [](ibv_mr* region) {
    self().keys_.erase(region->rkey);
    --self().live_registrations;
    self().locked_bytes -= region->length;
    delete as<Registration>(region);
    return 0;
  };
  library_.create_comp_channel = [](ibv_context* context) { return new ibv_comp_channel{context, new_eventfd(), 0}; };
  library_.destroy_comp_channel = [](ibv_comp_channel* channel) {
    ::close(channel->fd);
    delete channel;
    return 0;
  };
  library_.create_cq = [](ibv_context* context, int, void*, ibv_comp_channel* channel, int) {
    auto* queue = new Completions;
    queue->base.context = context;
    queue->base.channel = channel;
    return &queue->base;
  };
  library_.destroy_cq = [](ibv_cq* queue) {
    delete as<Completions>(queue);
    return 0;
  };
  library_.get_cq_event = [](ibv_comp_channel* channel, ibv_cq**, void**) { return take_event(channel->fd) ? 0 : -1; };
  library_.ack_cq_events = [](ibv_cq*, unsigned int) {};
  library_.create_srq = [](ibv_pd* pd, ibv_srq_init_attr*) {
    auto* receives = new Receives;
    receives->base.context = pd->context;
    return &receives->base;
  };
  library_.destroy_srq = [](ibv_srq* receives) {
    delete as<Receives>(receives);
    return 0;
  };
  library_.create_qp = [](ibv_pd* pd, ibv_qp_init_attr* attributes) -> ibv_qp* {
    FakeVerbs& fake = self();
    if (attributes->qp_type == IBV_QPT_UC && !fake.has_unreliable_service) {
      errno = EOPNOTSUPP;
      return nullptr;
    }
    auto* queue = new Queue;
    queue->base.context = pd->context;
    queue->base.send_cq = attributes->send_cq;
    queue->base.recv_cq = attributes->recv_cq;
    queue->base.srq = attributes->srq;
    const size_t device = fake.device_of(pd->context);
    queue->base.qp_num = fake.next_qpn_[device]++;
    fake.queues_[{device, queue->base.qp_num}] = queue;
    return &queue->base;
  };
  library_.modify_qp = [](ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
    if (attributes->qp_state == IBV_QPS_RTR && !self().can_connect) return ETIMEDOUT;
    auto& queue = *as<Queue>(qp);
    queue.state = attributes->qp_state;
    if ((mask & IBV_QP_DEST_QPN) != 0) queue.remote_qpn = attributes->dest_qp_num;
    if ((mask & IBV_QP_AV) != 0) queue.remote_device = self().device_with(attributes->ah_attr.grh.dgid);
    return 0;
  };
  library_.destroy_qp = [](ibv_qp* qp) {
    self().queues_.erase({self().device_of(qp->context), qp->qp_num});
    delete as<Queue>(qp);
    return 0;
  };
  library_.get_async_event = [](ibv_context* context, ibv_async_event* out) {
    const std::lock_guard lock(self().events_mutex_);
    auto& events = as<Context>(context)->events;
    if (!take_event(context->async_fd) || events.empty()) return -1;
    *out = events.front();
    events.pop_front();
    return 0;
  };
  library_.ack_async_event = [](ibv_async_event*) {};
  library_.wc_status_str = [](ibv_wc_status) -> const char* { return "some status"; };
}

FakeVerbs::~FakeVerbs() { current = nullptr; }

std::vector<uint32_t> FakeVerbs::queue_pairs() const {
  std::vector<uint32_t> out;
  for (const auto& [name, queue] : queues_) out.push_back(name.second);
  return out;
}

void FakeVerbs::open_key(uint32_t key, const Access& access) {
  if (access.size_bytes == 0) return;
  bound_keys.push_back(key);
  opened_keys.push_back(key);
  keys_[key] = access;
}

void FakeVerbs::finish_binds() {
  for (; !slow_binds_.empty(); slow_binds_.pop_front()) slow_binds_.front()();
}

void FakeVerbs::arrive(const FakePacket& packet) {
  const auto found = queues_.find({packet.device, packet.qpn});
  if (found == queues_.end()) return;
  Queue& queue = *found->second;
  if (queue.state != IBV_QPS_RTS && queue.state != IBV_QPS_RTR) return;
  auto& receives = *as<Receives>(queue.base.srq);
  if (receives.posted.empty()) return;
  const auto [name, buffer] = receives.posted.front();
  receives.posted.pop_front();
  ++arrived[packet.device];
  ibv_wc done{};
  done.wr_id = name;
  done.qp_num = packet.qpn;
  done.byte_len = static_cast<uint32_t>(packet.payload.size());
  if (packet.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
    done.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    done.wc_flags = IBV_WC_WITH_IMM;
    done.imm_data = packet.immediate;
    const auto key = keys_.find(packet.rkey);
    const bool is_allowed =
        packet.payload.empty() ||
        (key != keys_.end() && key->second.device == packet.device && packet.address >= key->second.address &&
         packet.address + packet.payload.size() <= key->second.address + key->second.size_bytes);
    if (!is_allowed) {
      ++refused_keys;
      done.status = IBV_WC_REM_ACCESS_ERR;
    } else if (!packet.payload.empty()) {
      std::memcpy(reinterpret_cast<void*>(packet.address), packet.payload.data(), packet.payload.size());
    }
  } else {
    done.opcode = IBV_WC_RECV;
    if (packet.opcode == IBV_WR_SEND_WITH_IMM) {
      done.wc_flags = IBV_WC_WITH_IMM;
      done.imm_data = packet.immediate;
    }
    if (packet.payload.size() > buffer.length) return;
    std::memcpy(reinterpret_cast<void*>(buffer.addr), packet.payload.data(), packet.payload.size());
  }
  complete(queue.base.recv_cq, done);
}

void FakeVerbs::break_queue_pair(uint32_t qpn) {
  Queue& queue = *queues_.at({0, qpn});
  queue.state = IBV_QPS_ERR;
  const std::lock_guard lock(events_mutex_);
  auto& context = *as<Context>(queue.base.context);
  ibv_async_event event{};
  event.event_type = IBV_EVENT_QP_FATAL;
  event.element.qp = &queue.base;
  context.events.push_back(event);
  eventfd_write(context.base.async_fd, 1);
}

void FakeVerbs::raise(ibv_event_type type) {
  for (const size_t device : {0, 1}) raise(type, device);
}

void FakeVerbs::raise(ibv_event_type type, size_t device) {
  const std::lock_guard lock(events_mutex_);
  for (Context* context : contexts_) {
    if (device_of(&context->base) != device) continue;
    ibv_async_event event{};
    event.event_type = type;
    event.element.port_num = 1;
    context->events.push_back(event);
    eventfd_write(context->base.async_fd, 1);
  }
}

}  // namespace sennit::test
