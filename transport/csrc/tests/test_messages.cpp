// SPDX-License-Identifier: Apache-2.0
// The mailbox over lanes of plain memory: sends, receives and adverts in every order.
#include <doctest/doctest.h>

#include <deque>
#include <map>
#include <random>

#include "messages/key_index.hpp"
#include "messages/mailbox.hpp"
#include "sennit/core.h"
#include "tests/triangle.hpp"

using namespace sennit;
using test::pattern;
using test::SIGNATURE;
using test::Triangle;

namespace {

// What waits now is old afterwards.
void look_often(Triangle& net) {
  static uint64_t now_us = 0;
  for (int look = 0; look < 10; ++look) {
    now_us += 50'000;
    for (auto& mailbox : net.mailboxes) mailbox->progress(now_us);
    net.pump();
  }
}

}  // namespace

TEST_CASE("KeyIndex behaves like a map of queues") {
  std::mt19937 random(11);
  KeyIndex index;
  std::map<std::pair<uint32_t, uint64_t>, std::deque<uint32_t>> model;
  std::vector<uint32_t> free(500);
  std::iota(free.begin(), free.end(), 0u);
  for (int round = 0; round < 50'000; ++round) {
    const uint32_t peer = random() % 3;
    const uint64_t key = (random() % 4 == 0 ? P2P_KEY : 0) | (random() % 40) << 20 | random() % 4;
    auto& queue = model[{peer, key}];
    CHECK(index.front(peer, key) == (queue.empty() ? KeyIndex::NONE : queue.front()));
    if (random() % 2 == 0 && !free.empty()) {
      const size_t pick = random() % free.size();
      queue.push_back(free[pick]);
      index.push(peer, key, free[pick]);
      free[pick] = free.back();
      free.pop_back();
    } else {
      const uint32_t got = index.pop(peer, key);
      CHECK(got == (queue.empty() ? KeyIndex::NONE : queue.front()));
      if (!queue.empty()) {
        free.push_back(queue.front());
        queue.pop_front();
      }
    }
  }
}

TEST_CASE("a message arrives whichever side comes first, small or large") {
  for (size_t size : {size_t{0}, size_t{10}, size_t{64}, size_t{65}, size_t{5'000}}) {
    for (uint64_t key : {uint64_t{5} << 20, P2P_KEY | 7}) {
      for (bool send_first : {false, true}) {
        CAPTURE(size);
        CAPTURE(send_first);
        Triangle net;
        const std::vector<char> data = pattern(size, 3);
        std::vector<char> got(size, 0);
        if (send_first) net.send(0, 1, 1, key, data);
        if (send_first) net.pump();
        net.receive(1, 2, 0, key, got);
        if (!send_first) net.pump();
        if (!send_first) net.send(0, 1, 1, key, data);
        net.pump();
        CHECK(got == data);
        REQUIRE(net.clients[1].received.size() == 1);
        CHECK(net.clients[1].received[0].step == 2);
        CHECK(net.clients[0].sent == std::vector<uint32_t>{1});
        CHECK(net.mailboxes[0]->failure() == nullptr);
        CHECK(net.mailboxes[0]->describe_outstanding().empty());
        CHECK(net.mailboxes[1]->describe_outstanding().empty());
      }
    }
  }
}

TEST_CASE("messages of one tag keep their order, small and large mixed") {
  Triangle net;
  std::vector<std::vector<char>> sent, got;
  for (int i = 0; i < 12; ++i) {
    sent.push_back(pattern(i % 3 == 0 ? 500 : 20, i));
    got.emplace_back(sent.back().size());
  }
  for (int i = 0; i < 12; ++i) {
    net.send(0, i, 1, P2P_KEY | 4, sent[i]);
    if (i % 4 == 0) net.pump();
  }
  for (int i = 0; i < 12; ++i) net.receive(1, i, 0, P2P_KEY | 4, got[i]);
  net.pump();
  CHECK(got == sent);
}

TEST_CASE("a receive from any rank takes what comes, and says from whom") {
  for (size_t size : {size_t{8}, size_t{900}}) {
    Triangle net;
    std::vector<char> first(size), second(size);
    net.receive(0, 1, SENNIT_ANY_PEER, P2P_KEY | 1, first);
    net.send(2, 1, 0, P2P_KEY | 1, pattern(size, 22));
    net.pump();
    net.send(1, 1, 0, P2P_KEY | 1, pattern(size, 11));
    net.pump();
    net.receive(0, 2, SENNIT_ANY_PEER, P2P_KEY | 1, second);
    net.pump();
    REQUIRE(net.clients[0].received.size() == 2);
    CHECK(net.clients[0].received[0].peer == 2);
    CHECK(net.clients[0].received[1].peer == 1);
    CHECK(first == pattern(size, 22));
    CHECK(second == pattern(size, 11));
  }
}

TEST_CASE("receives from any rank and from one rank are served in the order in which they were posted") {
  for (const bool is_any_first : {true, false}) {
    CAPTURE(is_any_first);
    Triangle net;
    std::vector<char> first(8), second(8);
    net.receive(0, 1, is_any_first ? SENNIT_ANY_PEER : 1, P2P_KEY | 3, first);
    net.receive(0, 2, is_any_first ? 1 : SENNIT_ANY_PEER, P2P_KEY | 3, second);
    net.send(1, 1, 0, P2P_KEY | 3, pattern(8, 1));
    net.send(1, 2, 0, P2P_KEY | 3, pattern(8, 2));
    net.pump();
    CHECK(first == pattern(8, 1));
    CHECK(second == pattern(8, 2));
  }
}

TEST_CASE("loans keep the bytes until they are released") {
  Triangle net;
  for (size_t size : {size_t{40}, size_t{4'000}}) {
    net.clients[1].received.clear();
    net.mailboxes[1]->receive(net.clients[1], 9, 0, {size, SIGNATURE, size}, nullptr);
    net.send(0, 1, 1, size, pattern(size, 5));
    net.pump();
    REQUIRE(net.clients[1].received.size() == 1);
    const auto loan = net.clients[1].received[0];
    CHECK(std::memcmp(loan.data, pattern(size, 5).data(), size) == 0);
    CHECK(loan.loan != 0);
    CHECK(net.mailboxes[1]->release(loan.loan));
    CHECK(net.lanes[{1, 0}]->loan_count() == 0);
  }
}

TEST_CASE("a full lane delays, and keeps the order") {
  Triangle net;
  net.lanes[{0, 1}]->full = true;
  std::vector<std::vector<char>> got(5, std::vector<char>(6));
  for (int i = 0; i < 5; ++i) net.send(0, i, 1, P2P_KEY | 2, pattern(6, i));
  net.pump();
  CHECK(net.clients[0].sent.empty());
  CHECK_FALSE(net.mailboxes[0]->idle());
  net.lanes[{0, 1}]->full = false;
  for (int i = 0; i < 5; ++i) net.receive(1, i, 0, P2P_KEY | 2, got[i]);
  net.pump();
  for (int i = 0; i < 5; ++i) CHECK(got[i] == pattern(6, i));
  CHECK(net.clients[0].sent == std::vector<uint32_t>{0, 1, 2, 3, 4});
}

TEST_CASE("a message that comes eagerly although memory was advertised for it is an error, not lost") {
  Triangle net;
  std::vector<char> got(1'000);
  net.receive(0, 1, 1, 5, got);
  CHECK(net.mailboxes[0]->on_eager(1, {5, SIGNATURE, 1'000}, EAGER_DATA, nullptr));
  REQUIRE(net.mailboxes[0]->failure() != nullptr);
  CHECK(net.mailboxes[0]->failure()->kind == MailboxFailure::Kind::peer_lost);
  CHECK(net.mailboxes[0]->failure()->reason == "sent a message eagerly although memory was advertised for it");
}

TEST_CASE("ranks that disagree get an error that says how") {
  const uint64_t allreduce_f32 = uint64_t{1} << 56 | uint64_t{SENNIT_F32} << 48 | 10;
  const uint64_t allreduce_i64 = uint64_t{1} << 56 | uint64_t{SENNIT_I64} << 48 | 10;
  for (auto [send_size, receive_size] : {std::pair{40, 48}, {40, 400}, {400, 40}, {400, 480}}) {
    for (bool send_first : {false, true}) {
      CAPTURE(send_size);
      CAPTURE(receive_size);
      Triangle net;
      std::vector<char> got(receive_size);
      const std::vector<char> data = pattern(send_size, 1);
      auto post_send = [&] { net.send(0, 1, 1, 77, data); };
      if (send_first) post_send();
      net.receive(1, 1, 0, 77, got);
      if (!send_first) post_send();
      net.pump();
      look_often(net);  // the sender's probe
      const MailboxFailure* failure =
          net.mailboxes[1]->failure() ? net.mailboxes[1]->failure() : net.mailboxes[0]->failure();
      REQUIRE(failure != nullptr);
      CHECK(failure->kind == MailboxFailure::Kind::mismatch);
      CHECK(failure->reason.find(std::to_string(send_size)) != std::string::npos);
      CHECK(failure->reason.find(std::to_string(receive_size)) != std::string::npos);
    }
  }
  Triangle net;
  std::vector<char> got(40);
  net.mailboxes[1]->receive(net.clients[1], 1, 0, {77, allreduce_f32, 40}, got.data());
  net.send(0, 1, 1, 77, pattern(40, 1), allreduce_i64);
  net.pump();
  REQUIRE(net.mailboxes[1]->failure() != nullptr);
  CHECK(net.mailboxes[1]->failure()->reason.find("rank 0 runs allreduce of int64") != std::string::npos);
  CHECK(net.mailboxes[1]->failure()->reason.find("rank 1 runs allreduce of float32") != std::string::npos);
}

TEST_CASE("ranks that run a collective with different signatures are told, though no message meets a receive") {
  constexpr uint64_t ROOT_0 = uint64_t{SENNIT_BROADCAST} << 56, ROOT_1 = ROOT_0 | uint64_t{1} << 32;
  constexpr uint64_t KEY = uint64_t{3} << KEY_SLOT_BITS;
  for (const size_t size : {size_t{40}, size_t{400}}) {  // eager, bulk
    for (const bool sends : {true, false}) {
      for (const bool is_late : {true, false}) {
        CAPTURE(size);
        CAPTURE(sends);
        CAPTURE(is_late);
        Triangle net;
        std::vector<char> got(size);
        const auto begin = [&](int rank) {
          const uint64_t signature = rank == 0 ? ROOT_0 : ROOT_1;
          net.mailboxes[rank]->meet(rank, 3, signature);
          if (sends) {
            net.send(rank, 1, 1 - rank, KEY, pattern(size, rank), signature);
          } else {
            net.mailboxes[rank]->receive(net.clients[rank], 1, 1 - rank, {KEY, signature, size}, got.data());
          }
        };
        begin(0);
        if (is_late) net.pump();
        begin(1);
        net.pump();
        look_often(net);
        const MailboxFailure* failure =
            net.mailboxes[0]->failure() ? net.mailboxes[0]->failure() : net.mailboxes[1]->failure();
        REQUIRE(failure != nullptr);
        CHECK(failure->kind == MailboxFailure::Kind::mismatch);
        CHECK(failure->reason.find("rank 0 runs broadcast of uint8, root 0") != std::string::npos);
        CHECK(failure->reason.find("rank 1 runs broadcast of uint8, root 1") != std::string::npos);
      }
    }
  }
  SUBCASE("also where the collective has ended, and the one that they compare is far behind the latest") {
    Triangle net;
    for (uint64_t sequence = 1; sequence <= 200; ++sequence) net.mailboxes[0]->meet(0, sequence, ROOT_0);
    net.send(1, 1, 0, KEY, pattern(40, 1), ROOT_1);
    net.pump();
    REQUIRE(net.mailboxes[0]->failure() != nullptr);
    CHECK(net.mailboxes[0]->failure()->peer == 1);
  }
  SUBCASE("ranks that are ahead of this one are compared when it begins") {
    Triangle net;
    for (uint64_t sequence = 1; sequence <= 1'000; ++sequence)
      net.send(1, 1, 0, sequence << KEY_SLOT_BITS, pattern(40, 1), sequence == 3 ? ROOT_1 : ROOT_0);
    net.pump();
    for (const uint64_t sequence : {1, 2}) net.mailboxes[0]->meet(0, sequence, ROOT_0);
    CHECK(net.mailboxes[0]->failure() == nullptr);
    net.mailboxes[0]->meet(0, 3, ROOT_0);
    REQUIRE(net.mailboxes[0]->failure() != nullptr);
    CHECK(net.mailboxes[0]->failure()->peer == 1);
  }
  SUBCASE("a question about a collective that is not known, or is equal, changes nothing") {
    Triangle net;
    std::vector<char> got(40);
    net.mailboxes[0]->meet(0, 3, ROOT_0);
    net.mailboxes[0]->receive(net.clients[0], 1, 1, {KEY, ROOT_0, 40}, got.data());
    look_often(net);
    net.mailboxes[1]->meet(1, 3, ROOT_0);
    net.mailboxes[1]->receive(net.clients[1], 1, 0, {KEY | 1, ROOT_0, 40}, got.data());
    look_often(net);
    net.send(1, 2, 0, KEY, pattern(40, 1), ROOT_0);
    net.pump();
    CHECK(net.clients[0].received.size() == 1);
    for (const auto& mailbox : net.mailboxes) CHECK(mailbox->failure() == nullptr);
  }
}

TEST_CASE("a lost peer fails what waits for it, and only that") {
  Triangle net;
  std::vector<char> got(8);
  net.receive(0, 1, 2, 5, got);
  net.mailboxes[0]->on_peer_lost(1, "process ended");
  CHECK(net.mailboxes[0]->failure() == nullptr);
  net.send(2, 1, 0, 5, pattern(8, 1));
  net.pump();
  CHECK(net.clients[0].received.size() == 1);
  net.receive(0, 2, 1, 6, got);
  REQUIRE(net.mailboxes[0]->failure() != nullptr);
  CHECK(net.mailboxes[0]->failure()->peer == 1);
}

TEST_CASE("lanes hear that something waits for their peers, and only those") {
  Triangle net;
  std::vector<char> got(8), any(8);
  const auto looks = [&](int peer) { return std::exchange(net.lanes[{0, peer}]->expected, 0); };
  uint64_t now_us = 0;
  const auto progress = [&] {
    for (int round = 0; round < 10; ++round) net.mailboxes[0]->progress(now_us += 10'000);
  };
  progress();
  CHECK(looks(1) + looks(2) == 0);
  net.receive(0, 1, 2, 5, got);
  progress();
  CHECK(looks(1) == 0);
  CHECK(looks(2) >= 2);
  // Any rank that may still send must live.
  net.receive(0, 2, SENNIT_ANY_PEER, P2P_KEY | 3, any);
  progress();
  CHECK(looks(1) >= 2);
  CHECK(looks(2) >= 2);
}

TEST_CASE("a receive from any rank fails with the last of them") {
  Triangle net;
  std::vector<char> got(8);
  net.receive(0, 1, SENNIT_ANY_PEER, P2P_KEY | 3, got);
  net.mailboxes[0]->on_peer_lost(1, "gave no sign of life");
  CHECK(net.mailboxes[0]->failure() == nullptr);
  net.mailboxes[0]->on_peer_lost(2, "process ended");
  REQUIRE(net.mailboxes[0]->failure() != nullptr);
  CHECK(net.mailboxes[0]->failure()->peer == 2);
}

TEST_CASE("a lost peer fails what was to be sent to it") {
  Triangle net;
  net.lanes[{0, 1}]->full = true;
  net.send(0, 1, 1, 5, pattern(8, 1));
  net.mailboxes[0]->on_peer_lost(1, "process ended");
  REQUIRE(net.mailboxes[0]->failure() != nullptr);
  CHECK(net.mailboxes[0]->failure()->kind == MailboxFailure::Kind::peer_lost);
}

TEST_CASE("a peer that ends the group fails it, whether or not anything waits for that peer") {
  Triangle net;
  net.mailboxes[0]->on_peer_aborted(2, "lost 1: rank 1 process ended");
  REQUIRE(net.mailboxes[0]->failure() != nullptr);
  CHECK(net.mailboxes[0]->failure()->kind == MailboxFailure::Kind::peer_aborted);
  CHECK(net.mailboxes[0]->failure()->peer == 2);
}

TEST_CASE("the mailbox lists the ranks that operations wait for") {
  Triangle net;
  std::vector<char> got(8);
  CHECK(net.mailboxes[0]->awaited().empty());
  net.receive(0, 1, 2, 5, got);
  net.receive(0, 2, SENNIT_ANY_PEER, P2P_KEY | 3, got);
  CHECK(net.mailboxes[0]->awaited() == std::vector<uint32_t>{2});
  net.lanes[{0, 1}]->full = true;
  net.send(0, 3, 1, 6, pattern(8, 1));
  CHECK(net.mailboxes[0]->awaited() == std::vector<uint32_t>{1, 2});
}
