// SPDX-License-Identifier: Apache-2.0
// A rank for flow tests: sends and receives a list of messages and checks every byte and every event.
//
// It is a small mailbox: eager messages in order, bulk messages through adverts. A source buffer is overwritten as soon
// as it is reported sent.
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "flow/flow.hpp"
#include "sim.hpp"

namespace sennit::test {

struct TestMessage {
  uint64_t key;
  uint64_t size_bytes;
  bool is_eager;
};

inline constexpr uint64_t SECOND_US = 1'000'000;

inline std::vector<TestMessage> bulk(size_t count, uint64_t size_bytes) {
  std::vector<TestMessage> messages;
  for (size_t i = 0; i < count; ++i) messages.push_back({1'000 + i, size_bytes, false});
  return messages;
}

inline std::vector<std::byte> contents(uint64_t key, uint64_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  SimRandom random(key);
  for (uint64_t at = 0; at < size_bytes; at += 8) {
    const uint64_t word = random.next();
    std::memcpy(bytes.data() + at, &word, std::min<uint64_t>(8, size_bytes - at));
  }
  return bytes;
}

class SimPeer {
 public:
  static constexpr uint32_t EAGER_RKEY = 0xEA6E'0001;

  explicit SimPeer(const flow::FlowConfig& config)
      : eager_memory_(size_t{config.eager_slot_count} * config.payload_max_bytes),
        flow_(std::make_unique<flow::Flow>(config, eager_memory_, EAGER_RKEY)) {}

  flow::Flow& flow() { return *flow_; }
  uint64_t eager_address() const { return reinterpret_cast<uint64_t>(eager_memory_.data()); }
  static void introduce(SimPeer& a, SimPeer& b) {
    a.flow_->set_remote_eager(b.eager_address(), EAGER_RKEY);
    b.flow_->set_remote_eager(a.eager_address(), EAGER_RKEY);
  }

  void will_send(const std::vector<TestMessage>& messages) {
    for (const TestMessage& message : messages) (message.is_eager ? eager_out_ : bulk_out_).push_back(Out{message, {}});
  }
  void will_receive(const std::vector<TestMessage>& messages) {
    for (const TestMessage& message : messages) (message.is_eager ? eager_in_ : bulk_in_).push_back(In{message, {}});
  }

  uint32_t max_open_receives = 16;
  bool is_computing = false;  // transfers nothing
  double defer_fraction = 0;  // of the eager events
  uint64_t deferred = 0;
  std::string lost;

  bool done() const {
    return eager_sent_ == eager_out_.size() && eager_received_ == eager_in_.size() && bulk_sent_ == bulk_out_.size() &&
           bulk_received_ == bulk_in_.size() && flow_->idle();
  }

  void progress(uint64_t now_us) {
    flow::Event event;
    while (flow_->poll_event(event)) on_event(event);
    while (!is_computing && transferred_ < advert_ids_.size()) {
      Out& out = bulk_out_[transferred_];
      out.buffer = contents(out.message.key, out.message.size_bytes);
      flow_->transfer(transferred_, advert_ids_[transferred_], out.buffer.data(), out.buffer.size());
      ++transferred_;
    }
    while (eager_sent_ < eager_out_.size()) {
      const TestMessage& message = eager_out_[eager_sent_].message;
      const auto data = contents(message.key, message.size_bytes);
      if (!flow_->send_eager({message.key, ~message.key, message.size_bytes}, 0, data.data(), now_us)) break;
      ++eager_sent_;
    }
    while (advertised_ < bulk_in_.size() && advertised_ - bulk_received_ < max_open_receives) {
      In& in = bulk_in_[advertised_];
      in.buffer.resize(in.message.size_bytes);
      const auto rkey = static_cast<uint32_t>(random_.next());
      flow_->advertise(advertised_++, {in.message.key, ~in.message.key, in.message.size_bytes}, in.buffer.data(), rkey,
                       now_us);
    }
  }

 private:
  struct Out {
    TestMessage message;
    std::vector<std::byte> buffer;
  };
  struct In {
    TestMessage message;
    std::vector<std::byte> buffer;
  };

  void on_event(const flow::Event& event) {
    using Kind = flow::Event::Kind;
    switch (event.kind) {
      case Kind::eager: {
        if (random_.chance(defer_fraction)) {
          ++deferred;
          flow_->defer_eager();
          return;
        }
        REQUIRE(eager_received_ < eager_in_.size());
        const TestMessage& message = eager_in_[eager_received_++].message;
        REQUIRE(event.header.key == message.key);
        REQUIRE(event.header.signature == ~message.key);
        REQUIRE(event.header.size_bytes == message.size_bytes);
        const auto expected = contents(message.key, message.size_bytes);
        REQUIRE(std::equal(expected.begin(), expected.end(), event.data));
        return;
      }
      case Kind::advert: {
        REQUIRE(advert_ids_.size() < bulk_out_.size());
        const TestMessage& message = bulk_out_[advert_ids_.size()].message;
        REQUIRE(event.header.key == message.key);
        REQUIRE(event.header.signature == ~message.key);
        REQUIRE(event.header.size_bytes == message.size_bytes);
        advert_ids_.push_back(event.id);
        return;
      }
      case Kind::received: {
        REQUIRE(event.id < advertised_);
        In& in = bulk_in_[event.id];
        REQUIRE(event.data == in.buffer.data());
        REQUIRE(in.buffer == contents(in.message.key, in.message.size_bytes));
        in.message.key = 0;  // a second event of this id would fail
        in.buffer = {};
        ++bulk_received_;
        return;
      }
      case Kind::returned:
        FAIL("an advert came back that nobody had asked for");
        return;
      case Kind::sent: {
        REQUIRE(event.id < transferred_);
        Out& out = bulk_out_[event.id];
        REQUIRE(out.buffer.size() == out.message.size_bytes);
        out.message.size_bytes = UINT64_MAX;  // likewise
        out.buffer = {};
        ++bulk_sent_;
        return;
      }
      case Kind::peer_lost:
        lost = event.reason;
        return;
      case Kind::peer_aborted:
        lost = std::string("aborted: ") + event.reason;
        return;
    }
  }

  std::vector<std::byte> eager_memory_;
  std::unique_ptr<flow::Flow> flow_;
  SimRandom random_{0x5EED};
  std::vector<Out> eager_out_, bulk_out_;
  std::vector<In> eager_in_, bulk_in_;
  std::vector<uint64_t> advert_ids_;  // of the bulk messages that may be sent
  size_t eager_sent_ = 0, eager_received_ = 0;
  size_t advertised_ = 0, transferred_ = 0, bulk_sent_ = 0, bulk_received_ = 0;
};

// Two ranks and what lies between them.
struct SimPair {
  SimPair(uint64_t seed, const flow::FlowConfig& config, const SimLinkConfig& there, const SimLinkConfig& back)
      : SimPair(seed, config, std::vector<SimLinkConfig>{there}, std::vector<SimLinkConfig>{back}) {}
  SimPair(uint64_t seed, const flow::FlowConfig& config, const std::vector<SimLinkConfig>& there,
          const std::vector<SimLinkConfig>& back)
      : network(seed), a(config), b(config) {
    SimPeer::introduce(a, b);
    std::vector<uint32_t> links_there, links_back;
    for (const SimLinkConfig& link : there) links_there.push_back(network.add_link(link));
    for (const SimLinkConfig& link : back) links_back.push_back(network.add_link(link));
    network.set_scribbling(true);
    network.connect(
        a.flow(), b.flow(), links_there, links_back, [this](uint64_t now_us) { a.progress(now_us); },
        [this](uint64_t now_us) { b.progress(now_us); });
  }
  void exchange(const std::vector<TestMessage>& from_a, const std::vector<TestMessage>& from_b) {
    a.will_send(from_a);
    b.will_receive(from_a);
    b.will_send(from_b);
    a.will_receive(from_b);
  }
  // Whether everything arrived and is acknowledged before `deadline_us` of virtual time.
  bool run(uint64_t deadline_us) {
    const auto done = [this] { return a.done() && b.done(); };
    // A deferred eager message is offered again at the next progress, which nothing may cause in an idle network. This
    // stands for the engine's next round.
    for (uint64_t deferred = UINT64_MAX; deferred != a.deferred + b.deferred;) {
      deferred = a.deferred + b.deferred;
      if (network.run(deadline_us, done)) return true;
    }
    return network.run(deadline_us, done);
  }

  SimNetwork network;
  SimPeer a, b;
};

// Messages of mixed kinds and sizes; sizes around packet borders are frequent.
inline std::vector<TestMessage> random_messages(SimRandom& random, size_t count, uint32_t payload_max_bytes,
                                                uint64_t bulk_max_bytes) {
  std::vector<TestMessage> messages;
  for (size_t i = 0; i < count; ++i) {
    TestMessage message{random.next(), 0, random.chance(0.5)};
    const uint64_t limit = message.is_eager ? payload_max_bytes - flow::EAGER_HEADER_BYTES : bulk_max_bytes;
    message.size_bytes = random.chance(0.1) ? 0 : random.below(limit + 1);
    if (!message.is_eager && random.chance(0.3)) message.size_bytes -= message.size_bytes % payload_max_bytes;
    messages.push_back(message);
  }
  return messages;
}

}  // namespace sennit::test
