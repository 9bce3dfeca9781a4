// SPDX-License-Identifier: Apache-2.0
// Two ranks over shared memory, in one process, and what they hear.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ports/shm/shm_port.hpp"

namespace sennit::test {

class ShmSink final : public LaneSink {
 public:
  bool on_eager(uint32_t, const MessageHeader& header, uint32_t, const std::byte* data) override {
    if (refuse_eager) return false;
    eager.emplace_back(header.key, std::vector<std::byte>(data, data + header.size_bytes));
    return true;
  }
  void on_advert(uint32_t, const MessageHeader& header, uint64_t advert_id) override {
    adverts[header.key] = advert_id;
  }
  void on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) override {
    received[receive_id] = {data, loan_id};
  }
  void on_sent(uint64_t send_id) override { sent.push_back(send_id); }
  void on_peer_lost(uint32_t, std::string reason) override { lost.push_back(std::move(reason)); }

  bool refuse_eager = false;
  std::vector<std::pair<uint64_t, std::vector<std::byte>>> eager;
  std::map<uint64_t, uint64_t> adverts;
  std::map<uint64_t, std::pair<const std::byte*, uint64_t>> received;
  std::vector<uint64_t> sent;
  std::vector<std::string> lost;
};

struct ShmPair {
  ShmPort a, b;
  ShmSink sink_a, sink_b;
  // `world`: more ranks make the inboxes smaller.
  explicit ShmPair(uint32_t world = 2) : a(0, world), b(1, world) {
    REQUIRE(a.accept(1, b.offer()));
    REQUIRE(b.accept(0, a.offer()));
    a.connect(1, sink_a);
    b.connect(0, sink_b);
  }
  void pump() {
    while (a.progress(1) | b.progress(1)) {
    }
  }
};

}  // namespace sennit::test
