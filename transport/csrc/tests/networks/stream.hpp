// SPDX-License-Identifier: Apache-2.0
// Two real flows with bulk messages from one to the other, for networks of many: it looks at no byte of them.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flow/flow.hpp"
#include "sim.hpp"

namespace sennit::networks {

struct Work {
  uint64_t messages = 1, message_bytes = 1 << 20;
  uint32_t open_receives = 4;  // receives that are posted at a time
};

class Stream {
 public:
  // `receiver` differs from `sender` in what only its side has: the budget. Begins with start(). It lives as long as
  // the network steps.
  Stream(SimNetwork& network, const flow::FlowConfig& sender, const flow::FlowConfig& receiver,
         std::span<const uint32_t> there, std::span<const uint32_t> back, const Work& work);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void start(uint64_t at_us);
  // No more messages than those that are posted.
  void stop() { is_stopped_ = true; }

  bool is_done() const { return received_ == work_.messages && sent_ == work_.messages; }
  uint64_t finished_us() const { return finished_us_; }  // 0: not yet
  const std::string& lost() const { return lost_; }
  const flow::FlowCounters& sender() const { return sender_.counters(); }
  const flow::FlowCounters& receiver() const { return receiver_.counters(); }

 private:
  void progress_sender(uint64_t now_us);
  void progress_receiver(uint64_t now_us);

  SimNetwork& network_;
  const Work work_;
  std::vector<std::byte> source_, destination_;  // of every message
  std::vector<std::byte> sender_eager_, receiver_eager_;
  flow::Flow sender_, receiver_;
  uint64_t advertised_ = 0, received_ = 0, sent_ = 0, transfers_ = 0;
  uint64_t finished_us_ = 0;
  bool is_started_ = false, is_stopped_ = false;
  std::string lost_;
};

}  // namespace sennit::networks
