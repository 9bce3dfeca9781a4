// SPDX-License-Identifier: Apache-2.0
// Which ranks a failure blames, and what the errors of it say.
#include <doctest/doctest.h>

#include <new>
#include <stdexcept>

#include "executor/diagnosis.hpp"
#include "tests/triangle.hpp"

using namespace sennit;
using test::Triangle;

namespace {

using Ranks = std::vector<uint32_t>;

constexpr uint64_t PEER_TIMEOUT_US = 2'000'000;
constexpr uint64_t POSTED_US = 10'000'000, TIMEOUT_US = 4'000'000, NOW_US = POSTED_US + TIMEOUT_US;

// Rank 0 of three.
struct Rank0 {
  Triangle net;
  Diagnosis diagnosis{0, 3, PEER_TIMEOUT_US, *net.mailboxes[0]};
  std::vector<char> memory = std::vector<char>(8);

  void await(uint32_t peer) { net.receive(0, peer, peer, uint64_t{7} << KEY_SLOT_BITS, memory); }
  test::MemoryLane& lane(int peer) { return *net.lanes[{0, peer}]; }
  GroupEnd hears(uint32_t reporter, const std::string& notice) const {
    return diagnosis.of_mailbox({MailboxFailure::Kind::peer_aborted, reporter, notice});
  }
};

}  // namespace

TEST_CASE("at a deadline, the awaited peers that gave no sign of life are to blame") {
  Rank0 rank;
  rank.await(1);
  rank.await(2);
  rank.lane(1).heard_at_us = NOW_US - 499'999;
  rank.lane(2).heard_at_us = NOW_US - 500'000;
  const Suspects suspects = rank.diagnosis.find_suspects(POSTED_US, TIMEOUT_US, NOW_US);
  CHECK(suspects.awaited == Ranks{1, 2});
  CHECK(suspects.silent == Ranks{2});
  CHECK(rank.diagnosis.extension_us(suspects, TIMEOUT_US) == 0);

  const GroupEnd end = rank.diagnosis.late("allreduce", TIMEOUT_US, "", suspects);
  CHECK(end.status == SENNIT_TIMEOUT);
  CHECK(end.notice.lost == Ranks{2});
  CHECK(end.notice.reason ==
        "allreduce timed out on rank 0: not finished within its timeout of 4 s; no sign of life from rank 2 for 0.5 s");
  // The peers need not read what is outstanding here.
  CHECK(end.reason == end.notice.reason + "; " + rank.net.mailboxes[0]->describe_outstanding());
}

TEST_CASE("the silence that makes a peer suspect is at most half of the timeout, and begins with the post") {
  Rank0 rank;
  rank.await(1);
  const auto silent = [&](uint64_t timeout_us, uint64_t after_us) {
    return rank.diagnosis.find_suspects(POSTED_US, timeout_us, POSTED_US + after_us).silent;
  };
  CHECK(silent(400'000, 200'000) == Ranks{1});
  CHECK(silent(400'000, 199'999).empty());
  CHECK(silent(TIMEOUT_US, 500'000) == Ranks{1});
  CHECK(silent(TIMEOUT_US, 499'999).empty());
}

TEST_CASE("a late operation has some time more only if a rank that it does not wait for may know who is silent") {
  Rank0 rank;
  const auto find = [&] { return rank.diagnosis.find_suspects(POSTED_US, TIMEOUT_US, NOW_US); };
  CHECK(rank.diagnosis.extension_us(find(), TIMEOUT_US) == 0);
  rank.await(1);
  rank.lane(1).heard_at_us = rank.lane(2).heard_at_us = NOW_US;
  const Suspects suspects = find();
  CHECK(rank.diagnosis.extension_us(suspects, TIMEOUT_US) == 200'000);
  CHECK(rank.diagnosis.extension_us(suspects, 100'000) == 50'000);
  const GroupEnd end = rank.diagnosis.late("reduce", TIMEOUT_US, "2 copies", suspects);
  CHECK(end.notice.lost.empty());
  CHECK(end.notice.reason ==
        "reduce timed out on rank 0: not finished within its timeout of 4 s; it waits for 2 copies; awaited: rank 1");
  rank.await(2);
  CHECK(rank.diagnosis.extension_us(find(), TIMEOUT_US) == 0);
}

TEST_CASE("what a peer reports is told on, with the reporter last") {
  const Rank0 rank;
  const GroupEnd end = rank.hears(1, "lost 2: rank 2 process ended");
  CHECK(end.status == SENNIT_PEER);
  CHECK(end.reason == "rank 2 process ended (reported by rank 1)");
  CHECK(end.notice.lost == Ranks{2});
  CHECK(end.notice.reason == "rank 2 process ended");
  CHECK(rank.hears(1, "rank 1 aborted: enough").reason == "rank 1 aborted: enough");
  CHECK(rank.hears(1, "rank 12 aborted").reason == "rank 12 aborted (reported by rank 1)");
  CHECK(rank.hears(1, "").reason == "rank 1 ended the group");
  CHECK(rank.hears(1, "lost 0: rank 0 process ended").reason ==
        "the others gave up this rank (0): rank 0 process ended (reported by rank 1)");
}

TEST_CASE("ranks that fall silent together are lost together") {
  Rank0 rank;
  rank.net.mailboxes[0]->on_peer_lost(1, "gave no sign of life");
  const MailboxFailure failure{MailboxFailure::Kind::peer_lost, 1, "gave no sign of life"};
  rank.lane(2).silent_for_us = PEER_TIMEOUT_US * 7 / 8 - 1;
  CHECK(rank.diagnosis.of_mailbox(failure).notice.lost == Ranks{1});
  CHECK(rank.diagnosis.of_mailbox(failure).reason == "rank 1 gave no sign of life (memory)");
  rank.lane(2).silent_for_us = PEER_TIMEOUT_US * 7 / 8;
  CHECK(rank.diagnosis.of_mailbox(failure).notice.lost == Ranks{1, 2});
  CHECK(rank.diagnosis.of_mailbox(failure).reason == "rank 1 gave no sign of life; lost in all: ranks 1, 2 (memory)");
}

TEST_CASE("a rank blames itself for its ports and its exceptions, and nobody for an abort or a shutdown") {
  const Rank0 rank;
  const auto in_doubt = [&](auto exception) {
    try {
      throw exception;
    } catch (...) {
      return rank.diagnosis.in_doubt();
    }
  };
  for (const GroupEnd& end : {rank.diagnosis.of_port("no card"), in_doubt(std::runtime_error("no card"))}) {
    CHECK(end.status == SENNIT_DEVICE);
    CHECK(end.reason == "no card");
    CHECK(end.notice.lost == Ranks{0});
    CHECK(end.notice.reason == "rank 0 cannot go on: no card");
  }
  CHECK(in_doubt(std::bad_alloc()).reason == "out of memory");
  CHECK(in_doubt(1).reason == "unknown error");
  const GroupEnd aborted = rank.diagnosis.aborted("enough"), shut_down = rank.diagnosis.shut_down();
  CHECK(aborted.reason == "enough");
  CHECK(aborted.notice.encode() == "rank 0 aborted: enough");
  CHECK_FALSE(aborted.says_goodbye);
  CHECK(shut_down.says_goodbye);
}
