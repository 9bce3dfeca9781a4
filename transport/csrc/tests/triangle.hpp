// SPDX-License-Identifier: Apache-2.0
// Three mailboxes of one process over lanes of plain memory.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "messages/mailbox.hpp"

namespace sennit::test {

inline constexpr uint64_t SIGNATURE = uint64_t{9} << 56;

// A lane whose other end is a mailbox of this process. pump() delivers what it carries.
class MemoryLane final : public Lane {
 public:
  MemoryLane(uint32_t own_rank, Mailbox& peer_mailbox) : own_rank_(own_rank), peer_mailbox_(peer_mailbox) {}
  MemoryLane* reverse = nullptr;
  bool lends = false;  // a transfer ends with a record of the peer, as a reference in shared memory does
  Mailbox* own_mailbox = nullptr;
  bool full = false;
  uint64_t heard_at_us = 0, silent_for_us = 0;

  uint64_t eager_max_bytes() const override { return 64; }
  bool send_eager(const MessageHeader& header, uint32_t flags, const void* data) override {
    if (full) return false;
    const auto* bytes = static_cast<const std::byte*>(data);
    const size_t size = flags == EAGER_REQUEST ? 0 : header.size_bytes;
    std::vector<std::byte> copy(bytes, bytes + size);
    queue_.push_back(
        [this, header, flags, copy] { return peer_mailbox_.on_eager(own_rank_, header, flags, copy.data()); });
    return true;
  }
  void advertise(uint64_t receive_id, const MessageHeader& header, void* destination) override {
    const uint64_t advert = adverts_.size() + 1;
    adverts_.push_back({receive_id, header, static_cast<std::byte*>(destination)});
    queue_.push_back([this, header, advert] {
      peer_mailbox_.on_advert(own_rank_, header, advert);
      return true;
    });
  }
  using Lane::transfer;
  void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use) override {
    const auto* bytes = static_cast<const std::byte*>(data);
    std::vector<std::byte> copy(bytes, bytes + size_bytes);
    queue_.push_back([this, advert_id, send_id, copy] {
      if (lends) {
        reverse->queue_.push_back([this, send_id] {
          own_mailbox->on_sent(send_id);
          return true;
        });
      }
      return reverse->place(advert_id, copy);
    });
    if (!lends) own_mailbox->on_sent(send_id);
  }
  bool release(uint64_t loan_id) override {
    loans_.erase(loan_id);
    return true;
  }
  void expect(uint64_t) override { ++expected; }
  uint64_t heard_us() const override { return heard_at_us; }
  uint64_t silent_us() const override { return silent_for_us; }
  uint64_t expected = 0;
  std::string describe() const override { return "memory"; }

  bool pump() {
    bool moved = false;
    while (!queue_.empty() && queue_.front()()) {
      queue_.pop_front();
      moved = true;
    }
    return moved;
  }
  size_t loan_count() const { return loans_.size(); }

 private:
  struct Advert {
    uint64_t receive_id;
    MessageHeader header;
    std::byte* destination;
  };
  bool place(uint64_t advert_id, const std::vector<std::byte>& bytes) {
    const Advert advert = adverts_[advert_id - 1];
    if (advert.destination != nullptr) {
      std::memcpy(advert.destination, bytes.data(), bytes.size());
      own_mailbox->on_received(advert.receive_id, advert.destination, 0);
    } else {
      loans_[advert_id] = bytes;
      own_mailbox->on_received(advert.receive_id, loans_[advert_id].data(), advert_id);
    }
    return true;
  }

  const uint32_t own_rank_;
  Mailbox& peer_mailbox_;
  std::deque<std::function<bool()>> queue_;
  std::deque<Advert> adverts_;
  std::map<uint64_t, std::vector<std::byte>> loans_;
};

class Recorder final : public MailboxClient {
 public:
  void on_message_sent(uint32_t step) override { sent.push_back(step); }
  void on_message_received(uint32_t step, uint32_t peer, const std::byte* data, uint64_t loan) override {
    received.push_back({step, peer, data, loan});
  }
  struct Received {
    uint32_t step, peer;
    const std::byte* data;
    uint64_t loan;
  };
  std::vector<uint32_t> sent;
  std::vector<Received> received;
};

// Three ranks, fully connected.
struct Triangle {
  std::vector<std::unique_ptr<Mailbox>> mailboxes;
  std::map<std::pair<int, int>, std::unique_ptr<MemoryLane>> lanes;
  std::vector<Recorder> clients{3};
  std::deque<std::vector<char>> held;

  Triangle() {
    for (uint32_t rank = 0; rank < 3; ++rank) mailboxes.push_back(std::make_unique<Mailbox>(rank, 3));
    for (int from = 0; from < 3; ++from) {
      for (int to = 0; to < 3; ++to) {
        if (from != to) lanes[{from, to}] = std::make_unique<MemoryLane>(from, *mailboxes[to]);
      }
    }
    for (auto& [ends, lane] : lanes) {
      lane->reverse = lanes[{ends.second, ends.first}].get();
      lane->own_mailbox = mailboxes[ends.first].get();
      mailboxes[ends.first]->set_lane(ends.second, lane.get());
    }
  }
  void pump() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (auto& [ends, lane] : lanes) moved |= lane->pump();
      for (auto& mailbox : mailboxes) moved |= mailbox->progress(1);
    }
  }
  void send(uint32_t from, uint32_t step, uint32_t to, uint64_t key, const std::vector<char>& data,
            uint64_t signature = SIGNATURE) {
    held.push_back(data);  // a sender's buffer lives until it is taken
    mailboxes[from]->send(clients[from], step, to, {key, signature, data.size()}, held.back().data());
  }
  void receive(uint32_t at, uint32_t step, uint32_t from, uint64_t key, std::vector<char>& data) {
    mailboxes[at]->receive(clients[at], step, from, {key, SIGNATURE, data.size()}, data.data());
  }
};

inline std::vector<char> pattern(size_t size, int seed) {
  std::vector<char> bytes(size);
  std::iota(bytes.begin(), bytes.end(), static_cast<char>(seed));
  return bytes;
}

}  // namespace sennit::test
