// SPDX-License-Identifier: Apache-2.0
// How a rank finds over shared memory that another one died, or does not run.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ports/shm/shm_port.hpp"
#include "tests/shm_pair.hpp"

using namespace sennit;
using Sink = test::ShmSink;

namespace {

// The segment of a rank in another process.
class OtherProcess {
 public:
  OtherProcess(uint32_t rank, uint32_t world, bool is_named = true) : offer_(is_named ? 8 : 24) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    child_ = fork();
    REQUIRE(child_ >= 0);
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const uint64_t nonce = 0xABCD'0000'0000u + static_cast<uint64_t>(getpid());
      const ShmSegment segment = is_named ? ShmSegment::create(rank, rank, world, nonce)
                                          : ShmSegment::create_unnamed(rank, rank, world, nonce);
      const auto offer = segment.offer();
      if (write(ends[1], offer.data(), offer.size()) != static_cast<ssize_t>(offer.size())) _exit(1);
      for (;;) pause();
    }
    REQUIRE(read(ends[0], offer_.data(), offer_.size()) == static_cast<ssize_t>(offer_.size()));
    for (const int end : ends) close(end);
  }
  OtherProcess(const OtherProcess&) = delete;
  ~OtherProcess() {
    kill();
    // It ended without clean-up. In a group every rank removes its name once all are connected.
    if (offer_.size() != 8) return;
    uint64_t nonce = 0;
    std::memcpy(&nonce, offer_.data(), 8);
    char path[64];
    std::snprintf(path, sizeof path, "/dev/shm/sennit-%016llx", static_cast<unsigned long long>(nonce));
    unlink(path);
    unlink((std::string(path) + ".bell").c_str());
  }

  const std::vector<std::byte>& offer() const { return offer_; }
  void kill() {
    if (child_ == 0) return;
    ::kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = 0;
  }

 private:
  std::vector<std::byte> offer_;
  pid_t child_ = 0;
};

// Rank 0 of four, with rank 1 in this process, which lives, and ranks 2 and 3 in others.
struct Waiting {
  Waiting() {
    REQUIRE(port.accept(1, living.offer()));
    REQUIRE(living.accept(0, port.offer()));
    REQUIRE(port.accept(2, two.offer()));
    REQUIRE(port.accept(3, three.offer()));
    living.connect(0, other_sink);
    for (const uint32_t peer : {1u, 2u, 3u}) port.connect(peer, sink);
  }
  // Waits until a peer is lost. Rounds come as often as those of a thread that spins, yields or sleeps.
  void wait_for(uint32_t peer, uint64_t duration_us) {
    for (const uint64_t until_us = now_us + duration_us; now_us < until_us && sink.lost.empty(); now_us += 5'000) {
      living.beat();
      port.progress(now_us);
      if (now_us % 50'000 == 0) port.lane(peer).expect(now_us);
    }
  }

  OtherProcess two{2, 4}, three{3, 4};
  ShmPort port{0, 4}, living{1, 4};
  Sink sink, other_sink;
  uint64_t now_us = 1'000'000;
};

}  // namespace

TEST_CASE("a process that dies is noticed, a process that lives is not") {
  bool is_named = true;
  SUBCASE("with a segment in /dev/shm") {}
  SUBCASE("with one without a name") { is_named = false; }
  OtherProcess other(1, 2, is_named);
  const ShmSegment segment = ShmSegment::open(other.offer(), 1, 2);
  REQUIRE(static_cast<bool>(segment));
  CHECK(segment.owner_alive());
  other.kill();
  CHECK_FALSE(segment.owner_alive());
}

TEST_CASE("a rank notices the death of one that it waits for at the next check, and names all that are gone then") {
  Waiting rank;
  rank.wait_for(2, 1'000'000);
  CHECK(rank.sink.lost.empty());
  rank.two.kill();
  rank.three.kill();
  rank.wait_for(2, 60'000);
  CHECK(rank.sink.lost == std::vector<std::string>{"process ended", "process ended"});
  rank.sink.lost.clear();
  rank.wait_for(1, 1'000'000);
  CHECK(rank.sink.lost.empty());  // once each
}

TEST_CASE("a rank that waits for others does not ask about a dead one, until it waits for it or is asked to look") {
  Waiting rank;
  rank.two.kill();
  rank.wait_for(1, 2'000'000);
  rank.wait_for(3, 2'000'000);
  CHECK(rank.sink.lost.empty());
  CHECK(rank.port.find_gone(rank.now_us) == std::vector<uint32_t>{2});
  CHECK(rank.sink.lost.empty());
  rank.wait_for(2, 60'000);
  CHECK(rank.sink.lost == std::vector<std::string>{"process ended"});
}

TEST_CASE("a process that lives but does not run is given up, one that beats is not") {
  ShmPort frozen(1, 2), waiting(0, 2, nullptr, 1'000'000);
  Sink frozen_sink, sink;
  REQUIRE(frozen.accept(0, waiting.offer()));
  REQUIRE(waiting.accept(1, frozen.offer()));
  frozen.connect(0, frozen_sink);
  waiting.connect(1, sink);
  uint64_t now_us = 1'000'000;
  const auto wait = [&](uint64_t duration_us, bool beats) {
    for (const uint64_t until_us = now_us + duration_us; now_us < until_us && sink.lost.empty(); now_us += 50'000) {
      if (beats) frozen.beat();
      waiting.progress(now_us);
      waiting.lane(1).expect(now_us);
    }
  };
  wait(100'000'000, true);
  CHECK(sink.lost.empty());
  wait(100'000'000, false);
  REQUIRE(sink.lost.size() == 1);
  CHECK(sink.lost[0].starts_with("gave no sign of life for "));
}

TEST_CASE("a peer's last word is heard however much another peer sends, and behind what it sent itself") {
  ShmPort port(0, 3), quiet(1, 3), busy(2, 3);
  Sink sink, quiet_sink, busy_sink;
  for (ShmPort* const peer : {&quiet, &busy}) {
    const uint32_t rank = peer == &quiet ? 1 : 2;
    REQUIRE(port.accept(rank, peer->offer()));
    REQUIRE(peer->accept(0, port.offer()));
    port.connect(rank, sink);
    peer->connect(0, rank == 1 ? quiet_sink : busy_sink);
  }
  constexpr uint64_t QUIET_KEY = 1'000;
  const std::vector<std::byte> data(8);
  uint64_t sent = 0;
  REQUIRE(quiet.lane(0).send_eager({QUIET_KEY, 0, data.size()}, EAGER_DATA, data.data()));
  quiet.abort("it is over");
  for (int round = 0; round < 100 && sink.lost.empty(); ++round) {
    REQUIRE(busy.lane(0).send_eager({++sent, 0, data.size()}, EAGER_DATA, data.data()));
    REQUIRE(port.progress(1));
  }
  CHECK(sink.lost == std::vector<std::string>{"aborted: it is over"});
  CHECK(std::ranges::count(sink.eager, std::pair{QUIET_KEY, data}) == 1);
}
