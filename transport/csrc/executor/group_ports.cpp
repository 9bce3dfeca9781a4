// SPDX-License-Identifier: Apache-2.0
#include "executor/group_ports.hpp"

#include <poll.h>

#include <algorithm>
#include <stdexcept>

#include "executor/clock.hpp"

namespace sennit {

std::vector<std::byte> GroupPorts::shm_offer(std::span<const uint32_t> ranks_here) {
  if (!shm_) shm_ = std::make_unique<ShmPort>(rank_, world_, &counter_page_, peer_timeout_us_, ranks_here);
  return shm_->offer();
}

bool GroupPorts::shm_accept(uint32_t peer, std::span<const std::byte> offer, std::string* why) {
  return shm_ && shm_->accept(peer, offer, why);
}

std::vector<std::byte> GroupPorts::udp_open(const UdpConfig& config) {
  UdpConfig counting = config;
  counting.counter_page = &counter_page_;
  counting.peer_timeout_us = peer_timeout_us_;
  udp_ = std::make_unique<UdpPort>(rank_, world_, counting);
  return udp_->local_info();
}

std::vector<std::byte> GroupPorts::verbs_open(const VerbsConfig& config) {
  VerbsConfig counting = config;
  counting.counter_page = &counter_page_;
  counting.peer_timeout_us = peer_timeout_us_;
  verbs_ = open_verbs(rank_, world_, counting);
  return verbs_->local_info();
}

std::string GroupPorts::aggregator_open(const wire::Endpoint& aggregator, const aggregation::ClientConfig& config,
                                        uint64_t limit_us) {
  aggregator_ = std::make_unique<AggregatorPort>(world_, aggregator, config, &counter_page_);
  const uint64_t until_us = clock_us() + limit_us;
  for (uint64_t now_us = clock_us(); !aggregator_->join(now_us) && now_us < until_us; now_us = clock_us()) {
    std::vector<pollfd> readable;
    aggregator_->append_poll_fds(readable);
    const uint64_t next_us = std::clamp(aggregator_->next_timeout_us(), now_us, until_us);
    poll(readable.data(), readable.size(), static_cast<int>((next_us - now_us + 999) / 1'000));
  }
  return aggregator_->is_joined() ? "" : aggregator_->describe();
}

void GroupPorts::aggregator_drop() {
  if (aggregator_) aggregator_->close();
  aggregator_.reset();
}

std::vector<std::byte> GroupPorts::offer_for(uint32_t peer) const {
  if (peer >= world_ || peer == rank_)
    throw std::out_of_range("peer " + std::to_string(peer) + "; allowed: another rank of the " +
                            std::to_string(world_));
  if (!udp_ && !verbs_) throw std::logic_error("offer_for needs udp_open or verbs_open before it");
  return verbs_ ? verbs_->info_for(peer) : udp_->info_for(peer);
}

std::vector<TriedPort*> GroupPorts::networks() const {
  std::vector<TriedPort*> out;
  if (udp_) out.push_back(udp_.get());
  if (verbs_) out.push_back(verbs_.get());
  return out;
}

void GroupPorts::begin_trial(const std::vector<Route>& routes) {
  for (uint32_t peer = 0; peer < routes.size(); ++peer) {
    const Route::Kind kind = routes[peer].kind;
    if (kind != Route::Kind::udp && kind != Route::Kind::verbs) continue;
    TriedPort* const port = kind == Route::Kind::udp ? static_cast<TriedPort*>(udp_.get()) : verbs_.get();
    if (port == nullptr) throw std::logic_error("the trial needs udp_open or verbs_open before it");
    port->begin_trial(peer, routes[peer].info, mailbox_);
  }
}

// Before connect(): no other thread drives the ports yet.
bool GroupPorts::try_network(uint64_t limit_us) {
  const std::vector<TriedPort*> ports = networks();
  const uint64_t until_us = clock_us() + limit_us;
  std::vector<pollfd> readable;
  for (;;) {
    uint64_t now_us = clock_us();
    bool is_over = true;
    for (TriedPort* port : ports) is_over &= port->try_network(now_us);
    if (is_over) return true;
    now_us = clock_us();
    if (now_us >= until_us) return false;
    readable.clear();
    uint64_t next_us = until_us;
    for (TriedPort* port : ports) {
      port->append_poll_fds(readable);
      next_us = std::min(next_us, port->next_trial_us());
    }
    const uint64_t wait_us = next_us > now_us ? next_us - now_us : 0;
    poll(readable.data(), readable.size(), static_cast<int>((wait_us + 999) / 1'000));
  }
}

void GroupPorts::give_up(const std::string& reason) {
  for (TriedPort* port : networks()) port->abort(FailureNotice{{}, reason}.encode());
}

Trial* GroupPorts::trial(uint32_t peer) {
  for (TriedPort* port : networks())
    if (Trial* const found = port->trial(peer)) return found;
  return nullptr;
}

std::vector<TriedPath> GroupPorts::tried_paths(uint32_t peer) const {
  for (const TriedPort* port : networks())
    if (std::vector<TriedPath> paths = port->tried_paths(peer); !paths.empty()) return paths;
  return {};
}

void GroupPorts::connect(const std::vector<Route>& routes) {
  if (routes.size() != world_)
    throw std::invalid_argument(std::to_string(routes.size()) + " routes; allowed: " + std::to_string(world_) +
                                ", one for each rank");
  if (!empty()) throw std::logic_error("already connected");
  for (uint32_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    switch (routes[peer].kind) {
      case Route::Kind::shm:
        if (!shm_) throw std::logic_error("a route over shm needs shm_offer and shm_accept before connect");
        shm_->connect(peer, mailbox_);
        mailbox_.set_lane(peer, &shm_->lane(peer));
        break;
      case Route::Kind::udp:
        if (!udp_) throw std::logic_error("a route over udp needs udp_open before connect");
        udp_->connect(peer, routes[peer].info, mailbox_);
        mailbox_.set_lane(peer, &udp_->lane(peer));
        break;
      case Route::Kind::verbs:
        if (!verbs_) throw std::logic_error("a route over verbs needs verbs_open before connect");
        verbs_->connect(peer, routes[peer].info, mailbox_);
        mailbox_.set_lane(peer, &verbs_->lane(peer));
        break;
      case Route::Kind::self:
        throw std::invalid_argument("the route to rank " + std::to_string(peer) +
                                    " is `self`, which only the own rank's may be");
    }
  }
  if (shm_) {
    shm_->unlink();
    if (shm_->lane_count() != 0) {
      connected_.push_back(shm_.get());
    } else {
      shm_.reset();
    }
  }
  if (udp_) {
    udp_->close_unused_rails();
    connected_.push_back(udp_.get());
  }
  if (verbs_) connected_.push_back(verbs_.get());
  if (aggregator_) {
    aggregator_->connect(mailbox_);
    mailbox_.set_lane(world_, aggregator_.get());
    connected_.push_back(aggregator_.get());
  }
}

void GroupPorts::borrow(const void* data, uint64_t size_bytes) {
  if (verbs_) verbs_->borrow(data, size_bytes);
}

void GroupPorts::give_back(const void* data, uint64_t size_bytes) {
  if (verbs_) verbs_->give_back(data, size_bytes);
}

bool GroupPorts::idle() const {
  return std::all_of(begin(), end(), [](const Port* port) { return port->idle(); });
}

void GroupPorts::say_farewell(const FailureNotice* notice) noexcept {
  for (Port* port : connected_) {
    try {
      notice == nullptr ? port->close() : port->abort(notice->encode());
    } catch (...) {
    }
  }
}

std::vector<uint32_t> GroupPorts::find_gone(uint64_t now_us) {
  std::vector<uint32_t> gone;
  for (Port* port : connected_) {
    for (const uint32_t peer : port->find_gone(now_us)) gone.push_back(peer);
  }
  std::sort(gone.begin(), gone.end());
  return gone;
}

CounterList GroupPorts::counters() const {
  CounterList all;
  if (shm_) all = shm_->counters();
  if (udp_) {
    for (auto& counter : udp_->counters()) all.push_back(std::move(counter));
  }
  if (verbs_) {
    for (auto& counter : verbs_->counters()) all.push_back(std::move(counter));
  }
  if (aggregator_) append_counters(all, aggregator_->counters());
  return all;
}

std::string GroupPorts::describe() const {
  std::string text;
  if (udp_) text = udp_->describe();
  if (verbs_) text.append(text.empty() ? "" : "; ").append(verbs_->describe());
  if (aggregator_) text.append(text.empty() ? "" : "; ").append(aggregator_->describe());
  return text;
}

}  // namespace sennit
