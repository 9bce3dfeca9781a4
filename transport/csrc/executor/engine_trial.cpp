// SPDX-License-Identifier: Apache-2.0
// The trial of the network (ports/trial.hpp), before connect(): no other thread drives the port yet.
#include <poll.h>

#include <algorithm>
#include <stdexcept>

#include "executor/engine.hpp"

namespace sennit {

void Engine::begin_trial(const std::vector<Route>& routes) {
  if (!udp_) throw std::logic_error("the trial needs udp_open before it");
  for (uint32_t peer = 0; peer < routes.size(); ++peer)
    if (routes[peer].kind == Route::Kind::udp) udp_->begin_trial(peer, routes[peer].info, mailbox_);
}

bool Engine::try_network(uint64_t limit_us) {
  if (!udp_) throw std::logic_error("the trial needs udp_open before it");
  const uint64_t until_us = clock_us() + limit_us;
  std::vector<pollfd> readable;
  for (;;) {
    uint64_t now_us = clock_us();
    if (udp_->try_network(now_us)) return true;
    now_us = clock_us();
    if (now_us >= until_us) return false;
    readable.clear();
    udp_->append_poll_fds(readable);
    const uint64_t next_us = std::min(udp_->next_trial_us(), until_us);
    const uint64_t wait_us = next_us > now_us ? next_us - now_us : 0;
    poll(readable.data(), readable.size(), static_cast<int>((wait_us + 999) / 1'000));
  }
}

void Engine::give_up(const std::string& reason) {
  if (udp_) udp_->abort(FailureNotice{{}, reason}.encode());
}

}  // namespace sennit
