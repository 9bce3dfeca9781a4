// SPDX-License-Identifier: Apache-2.0
// The trial of the network (ports/trial.hpp), before connect(): no other thread drives the port yet.
#include <poll.h>

#include <algorithm>
#include <stdexcept>

#include "executor/engine.hpp"

namespace sennit {

std::vector<TriedPort*> Engine::networks() const {
  std::vector<TriedPort*> out;
  if (udp_) out.push_back(udp_.get());
  if (verbs_) out.push_back(verbs_.get());
  return out;
}

void Engine::begin_trial(const std::vector<Route>& routes) {
  for (uint32_t peer = 0; peer < routes.size(); ++peer) {
    const Route::Kind kind = routes[peer].kind;
    if (kind != Route::Kind::udp && kind != Route::Kind::verbs) continue;
    TriedPort* const port = kind == Route::Kind::udp ? static_cast<TriedPort*>(udp_.get()) : verbs_.get();
    if (port == nullptr) throw std::logic_error("the trial needs udp_open or verbs_open before it");
    port->begin_trial(peer, routes[peer].info, mailbox_);
  }
}

bool Engine::try_network(uint64_t limit_us) {
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

Trial* Engine::trial(uint32_t peer) {
  for (TriedPort* port : networks())
    if (Trial* const found = port->trial(peer)) return found;
  return nullptr;
}

std::vector<TriedPath> Engine::tried_paths(uint32_t peer) const {
  for (const TriedPort* port : networks())
    if (std::vector<TriedPath> paths = port->tried_paths(peer); !paths.empty()) return paths;
  return {};
}

void Engine::give_up(const std::string& reason) {
  for (TriedPort* port : networks()) port->abort(FailureNotice{{}, reason}.encode());
}

}  // namespace sennit
