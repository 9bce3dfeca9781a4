// SPDX-License-Identifier: Apache-2.0
#include "networks/congestion.hpp"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>

#include "flow/congestion.hpp"
#include "flow/receive_budget.hpp"
#include "networks/stream.hpp"
#include "networks/tcp.hpp"

namespace sennit::networks {
namespace {

// A port of 10 Gbit/s with the buffer of a data centre's switch, 40 us away and back.
constexpr uint64_t RATE_BYTES_PER_S = 1'250'000'000, DELAY_US = 20, QUEUE_BYTES = 512 << 10;
constexpr uint64_t MARK_BYTES = 100'000;
constexpr uint64_t SAMPLE_US = 500, DEADLINE_US = 10'000'000;
constexpr uint64_t BEGIN_US = 20'000, END_US = 220'000, LAST_US = 260'000;  // of whoever comes later
constexpr uint64_t ENDLESS = 1'000'000;

struct Way {
  std::string_view congestion;
  bool marks;
};

void print_list(const std::vector<uint64_t>& numbers) {
  std::cout << '[';
  for (const uint64_t& number : numbers) std::cout << (&number == &numbers.front() ? "" : ",") << number;
  std::cout << ']';
}

// Everything on one link.
class Bottleneck {
 public:
  Bottleneck(const Way& way, uint64_t seed, uint32_t planes = 1, double loss_fraction = 0) : way_(way), network_(seed) {
    for (uint32_t plane = 0; plane < planes; ++plane) {
      links_.push_back(network_.add_link({.delay_us = DELAY_US,
                                          .rate_bytes_per_s = RATE_BYTES_PER_S,
                                          .queue_limit_bytes = QUEUE_BYTES,
                                          .ecn_threshold_bytes = way.marks ? MARK_BYTES : 0,
                                          .loss_fraction = loss_fraction}));
      back_.push_back(network_.add_link({.delay_us = DELAY_US, .loss_fraction = loss_fraction}));
    }
  }

  SimNetwork& network() { return network_; }
  // One receiver's port: its flows share a budget, with the numbers of the udp port.
  flow::ReceiveBudget* add_receiver() {
    return budgets_
        .emplace_back(std::make_unique<flow::ReceiveBudget>(
            flow::ReceiveBudgetConfig{.min_bytes = 65'536, .target_queue_us = 250}))
        .get();
  }
  Stream& add_stream(flow::ReceiveBudget* budget, const Work& work) {
    const flow::FlowConfig sender{.congestion = way_.congestion};
    flow::FlowConfig receiver = sender;
    receiver.receive_budget = budget;
    return *streams_.emplace_back(std::make_unique<Stream>(network_, sender, receiver, links_, back_, work));
  }
  TcpFlow& add_tcp() { return *tcp_.emplace_back(std::make_unique<TcpFlow>(network_, links_.front(), DELAY_US)); }

  // Until `is_over`. Prints what there is to say of it, as one JSON object in a line.
  void run(const std::string& name, const std::function<bool()>& is_over) {
    sample();
    network_.run(DEADLINE_US, is_over);
    print(name);
  }

 private:
  void sample() {
    std::vector<uint64_t> now;
    for (const auto& stream : streams_) now.push_back(stream->receiver().data_bytes_received);
    for (const auto& tcp : tcp_) now.push_back(tcp->arrived_bytes());
    samples_.push_back(std::move(now));
    queued_.push_back(network_.queued_bytes(links_.front()));
    network_.call_at(network_.now_us() + SAMPLE_US, [this] { sample(); });
  }
  void print(const std::string& name) const {
    uint64_t again = 0, sent = 0;
    std::vector<uint64_t> finished_us;
    for (const auto& stream : streams_) {
      again += stream->sender().retransmitted_packets;
      sent += stream->sender().data_packets_sent;
      finished_us.push_back(stream->finished_us());
    }
    std::cout << std::boolalpha << R"({"name":")" << name << R"(","congestion":")" << way_.congestion << R"(","marks":)"
              << way_.marks << R"(,"sample_us":)" << SAMPLE_US << R"(,"rate":)" << RATE_BYTES_PER_S << R"(,"drops":)"
              << network_.counters().queue_drops << R"(,"again":)" << again << R"(,"sent":)" << sent
              << R"(,"finished_us":)";
    print_list(finished_us);
    std::cout << R"(,"queued":)";
    print_list(queued_);
    std::cout << R"(,"bytes":)";
    for (const auto& row : samples_) {
      std::cout << (&row == &samples_.front() ? '[' : ',');
      print_list(row);
    }
    std::cout << "]}\n";
  }

  const Way way_;
  SimNetwork network_;
  std::vector<uint32_t> links_, back_;
  std::vector<std::unique_ptr<flow::ReceiveBudget>> budgets_;  // before the flows, which return their grants
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<TcpFlow>> tcp_;
  std::vector<std::vector<uint64_t>> samples_;
  std::vector<uint64_t> queued_;
};

void incast(const Way& way, uint32_t senders) {
  Bottleneck bottleneck(way, senders);
  flow::ReceiveBudget* const budget = bottleneck.add_receiver();
  std::vector<Stream*> streams;
  for (uint32_t number = 0; number < senders; ++number)
    streams.push_back(&bottleneck.add_stream(budget, {.messages = 4, .message_bytes = 1 << 20}));
  for (Stream* stream : streams) stream->start(0);
  bottleneck.run("incast " + std::to_string(senders),
                 [&] { return std::ranges::all_of(streams, [](const Stream* stream) { return stream->is_done(); }); });
}

// Alone, beside one of its kind, and alone again.
void two_jobs(const Way& way) {
  Bottleneck bottleneck(way, 1);
  Stream& first = bottleneck.add_stream(bottleneck.add_receiver(), {.messages = ENDLESS});
  Stream& second = bottleneck.add_stream(bottleneck.add_receiver(), {.messages = ENDLESS});
  first.start(0);
  second.start(BEGIN_US);
  bottleneck.network().call_at(END_US, [&] { second.stop(); });
  bottleneck.run("two jobs", [&] { return bottleneck.network().now_us() >= LAST_US; });
}

void beside_tcp(const Way& way) {
  Bottleneck bottleneck(way, 1);
  Stream& ours = bottleneck.add_stream(bottleneck.add_receiver(), {.messages = ENDLESS});
  TcpFlow& tcp = bottleneck.add_tcp();
  ours.start(0);
  tcp.start(BEGIN_US);
  bottleneck.network().call_at(END_US, [&] { tcp.stop(); });
  bottleneck.run("beside TCP", [&] { return bottleneck.network().now_us() >= LAST_US; });
}

// A leaf's uplink: every pair has a sender and a receiver of its own, and they share no end that could divide it.
void pairs(const Way& way, uint32_t count) {
  Bottleneck bottleneck(way, count);
  std::vector<Stream*> streams;
  for (uint32_t number = 0; number < count; ++number)
    streams.push_back(&bottleneck.add_stream(bottleneck.add_receiver(), {.messages = 4, .message_bytes = 1 << 20}));
  for (Stream* stream : streams) stream->start(0);
  bottleneck.run("pairs " + std::to_string(count),
                 [&] { return std::ranges::all_of(streams, [](const Stream* stream) { return stream->is_done(); }); });
}

// Two hosts and a link of their own: what a control costs where there is nobody to yield to.
void alone(const Way& way) {
  Bottleneck bottleneck(way, 1);
  Stream& stream = bottleneck.add_stream(bottleneck.add_receiver(), {.messages = 64});
  stream.start(0);
  bottleneck.run("alone", [&] { return stream.is_done(); });
}

// Four links of their own between two hosts, which lose packets at random.
void planes(const Way& way, double loss_fraction) {
  Bottleneck bottleneck(way, 1, 4, loss_fraction);
  Stream& stream = bottleneck.add_stream(bottleneck.add_receiver(), {.messages = 64});
  stream.start(0);
  bottleneck.run("planes, loss " + std::to_string(loss_fraction).substr(0, 5), [&] { return stream.is_done(); });
}

}  // namespace

void print_congestion() {
  for (const bool marks : {false, true})
    for (const std::string_view congestion : flow::congestion_controls()) {
      const Way way{congestion, marks};
      alone(way);
      for (const double loss_fraction : {0.0, 0.001, 0.01, 0.05}) planes(way, loss_fraction);
      for (const uint32_t senders : {8, 16, 32, 64}) incast(way, senders);
      for (const uint32_t count : {8, 32, 64}) pairs(way, count);
      two_jobs(way);
      beside_tcp(way);
    }
}

}  // namespace sennit::networks
