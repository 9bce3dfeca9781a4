// SPDX-License-Identifier: Apache-2.0
// recovery_ablation: random networks, each with all of loss recovery and then without each of its mechanisms.
//
//   recovery_ablation --networks 100000 --first 1
//   recovery_ablation --networks 300 --times 32      messages 32 times as long, through windows of 2 MiB
//
// A line of JSON for each mechanism that is off, "nothing" first: times in microseconds, and what went over the
// network. It fails if a network is not done with all of them.
#include <algorithm>
#include <atomic>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "flow/mechanisms.hpp"
#include "networks/stream.hpp"

using namespace sennit;
using namespace sennit::networks;

namespace {

constexpr uint64_t DEADLINE_US = 30'000'000;
constexpr uint32_t PAYLOAD_BYTES = 1'024;
constexpr size_t VARIANTS = flow::MECHANISMS.size() + 1;  // the first has them all

struct Link {
  SimLinkConfig there, back;
};

struct Network {
  uint32_t rails, paths;
  std::vector<Link> links;  // by rail
  std::vector<SimPause> pauses;
  uint32_t paused;
  uint32_t window_bytes;
  Work work;
};

// Half of the links lose nothing. Where there are several rails, one may go dark, one way or both, for a while or for
// good. Threads pause in one network of five.
Network random_network(uint64_t seed, uint64_t times) {
  SimRandom random(seed);
  Network network{};
  network.rails = 1u << random.below(3);
  network.paths = network.rails << random.below(3);
  const uint64_t delay_us = 5 + random.below(200);
  const uint64_t rate_bytes_per_s = 200'000'000 + random.below(2'000'000'000);
  const double loss_fraction = random.chance(0.5) ? 0 : static_cast<double>(1 + random.below(100)) / 1'000;
  const uint64_t jitter_us = random.chance(0.25) ? random.below(100) : 0;
  const uint64_t mark_bytes = random.chance(0.3) ? 30'000 : 0;
  for (uint32_t rail = 0; rail < network.rails; ++rail) {
    SimLinkConfig link{.delay_us = delay_us + random.below(delay_us),
                       .jitter_us = jitter_us,
                       .rate_bytes_per_s = rate_bytes_per_s,
                       .queue_limit_bytes = 100'000 + random.below(400'000),
                       .ecn_threshold_bytes = mark_bytes,
                       .loss_fraction = loss_fraction};
    network.links.push_back({link, link});
  }
  if (network.rails > 1 && random.chance(0.4)) {
    Link& dark = network.links[random.below(network.rails)];
    const uint64_t from_us = random.below(3'000);
    const SimWindow window{from_us, random.chance(0.5) ? UINT64_MAX : from_us + 1'000 + random.below(50'000)};
    const uint64_t ways = random.below(3);
    if (ways != 1) dark.there.black_holes.push_back(window);
    if (ways != 0) dark.back.black_holes.push_back(window);
  }
  if (random.chance(0.2)) {
    const uint64_t from_us = random.below(3'000);
    network.pauses.push_back({from_us, from_us + 1'000 + random.below(10'000),
                              static_cast<SimPause::Where>(random.below(3)),
                              static_cast<uint32_t>(random.below(network.rails))});
  }
  network.paused = static_cast<uint32_t>(random.below(2));
  network.window_bytes = times == 1 ? 256 << 10 : 2 << 20;
  network.work = {.messages = 1 + random.below(12),
                  .message_bytes = times * (1 + random.below(uint64_t{4'096} << random.below(6))),
                  .open_receives = 1 + static_cast<uint32_t>(random.below(4))};
  return network;
}

struct Outcome {
  uint32_t time_us = 0;  // 0: it failed
  uint64_t sent = 0, again = 0, controls = 0;
};

Outcome run(const Network& wanted, uint64_t seed) {
  SimNetwork network(seed);
  std::vector<uint32_t> there, back;
  for (const Link& link : wanted.links) {
    there.push_back(network.add_link(link.there));
    back.push_back(network.add_link(link.back));
  }
  const flow::FlowConfig config{.path_count = wanted.paths,
                                .payload_max_bytes = PAYLOAD_BYTES,
                                .eager_slot_count = 8,
                                .window_bytes = wanted.window_bytes,
                                .seed = seed,
                                .rail_count = wanted.rails};
  Stream stream(network, config, config, there, back, wanted.work);
  if (!wanted.pauses.empty()) network.set_pauses(wanted.paused, wanted.rails, wanted.pauses);
  stream.start(0);
  network.run(DEADLINE_US, [&] { return stream.is_done() || !stream.lost().empty(); });
  Outcome outcome{stream.is_done() ? static_cast<uint32_t>(std::max<uint64_t>(stream.finished_us(), 1)) : 0};
  for (const flow::FlowCounters* counters : {&stream.sender(), &stream.receiver()}) {
    outcome.sent += counters->data_packets_sent;
    outcome.again += counters->retransmitted_packets;
    outcome.controls += counters->control_packets_sent;
  }
  return outcome;
}

struct Tally {
  std::vector<float> times_us, slower;  // slower: the time / that with all mechanisms
  uint64_t failed = 0, sent = 0, again = 0, controls = 0;
  void add(const Outcome& outcome, const Outcome& all) {
    sent += outcome.sent;
    again += outcome.again;
    controls += outcome.controls;
    failed += outcome.time_us == 0;
    // What never ends is later than everything else.
    const auto time_us = static_cast<float>(outcome.time_us != 0 ? outcome.time_us : DEADLINE_US);
    times_us.push_back(time_us);
    slower.push_back(all.time_us != 0 ? time_us / static_cast<float>(all.time_us) : 1);
  }
  void add(const Tally& other) {
    times_us.insert(times_us.end(), other.times_us.begin(), other.times_us.end());
    slower.insert(slower.end(), other.slower.begin(), other.slower.end());
    failed += other.failed;
    sent += other.sent;
    again += other.again;
    controls += other.controls;
  }
};

float quantile(std::vector<float>& values, double fraction) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(fraction * static_cast<double>(values.size() - 1));
  std::ranges::nth_element(values, at);
  return *at;
}

void print(std::string_view name, Tally& tally) {
  double sum_us = 0;
  for (const float time_us : tally.times_us) sum_us += time_us;
  std::cout << R"({"off":")" << name << R"(","networks":)" << tally.times_us.size() << R"(,"failed":)" << tally.failed
            << R"(,"sent":)" << tally.sent << R"(,"again":)" << tally.again << R"(,"controls":)" << tally.controls
            << R"(,"mean_us":)" << sum_us / static_cast<double>(tally.times_us.size()) << R"(,"p50_us":)"
            << quantile(tally.times_us, 0.5) << R"(,"p99_us":)" << quantile(tally.times_us, 0.99) << R"(,"p999_us":)"
            << quantile(tally.times_us, 0.999) << R"(,"slower_p1":)" << quantile(tally.slower, 0.01)
            << R"(,"slower_p99":)" << quantile(tally.slower, 0.99) << "}\n";
}

}  // namespace

int main(int count, char** arguments) {
  uint64_t networks = 1'000, first = 1, times = 1;
  for (int at = 1; at + 1 < count; at += 2) {
    const std::string_view name = arguments[at];
    (name == "--networks" ? networks : name == "--first" ? first : times) = std::stoull(arguments[at + 1]);
  }
  std::vector<Tally> total(VARIANTS);
  std::atomic<uint64_t> next = first;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (unsigned number = 0; number < std::max(1u, std::thread::hardware_concurrency()); ++number)
      threads.emplace_back([&] {
        std::vector<Tally> own(VARIANTS);
        for (uint64_t seed; (seed = next++) < first + networks;) {
          const Network network = random_network(seed, times);
          Outcome all;
          for (size_t variant = 0; variant < VARIANTS; ++variant) {
            flow::switched_off.reset();
            if (variant != 0) flow::switched_off = static_cast<flow::Mechanism>(variant - 1);
            const Outcome outcome = run(network, seed);
            if (variant == 0) all = outcome;
            own[variant].add(outcome, all);
          }
        }
        const std::lock_guard lock(mutex);
        for (size_t variant = 0; variant < VARIANTS; ++variant) total[variant].add(own[variant]);
      });
  }
  for (size_t variant = 0; variant < VARIANTS; ++variant)
    print(variant == 0 ? "nothing" : flow::MECHANISMS[variant - 1], total[variant]);
  return total[0].failed == 0 ? 0 : 1;
}
