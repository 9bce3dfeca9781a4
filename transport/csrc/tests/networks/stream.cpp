// SPDX-License-Identifier: Apache-2.0
#include "networks/stream.hpp"

namespace sennit::networks {
namespace {

constexpr uint32_t EAGER_KEY = 1, KEY = 2;

std::vector<std::byte> eager_memory(const flow::FlowConfig& config) {
  return std::vector<std::byte>(size_t{config.eager_slot_count} * config.payload_max_bytes);
}

uint64_t address_of(const std::vector<std::byte>& memory) { return reinterpret_cast<uint64_t>(memory.data()); }

}  // namespace

Stream::Stream(SimNetwork& network, const flow::FlowConfig& sender, const flow::FlowConfig& receiver,
               std::span<const uint32_t> there, std::span<const uint32_t> back, const Work& work)
    : network_(network),
      work_(work),
      source_(work.message_bytes),
      destination_(work.message_bytes),
      sender_eager_(eager_memory(sender)),
      receiver_eager_(eager_memory(receiver)),
      sender_(sender, sender_eager_, EAGER_KEY),
      receiver_(receiver, receiver_eager_, EAGER_KEY) {
  sender_.set_remote_eager(address_of(receiver_eager_), EAGER_KEY);
  receiver_.set_remote_eager(address_of(sender_eager_), EAGER_KEY);
  network.connect(
      sender_, receiver_, there, back, [this](uint64_t now_us) { progress_sender(now_us); },
      [this](uint64_t now_us) { progress_receiver(now_us); });
}

void Stream::start(uint64_t at_us) {
  network_.call_at(at_us, [this] {
    is_started_ = true;
    network_.kick();
  });
}

void Stream::progress_sender(uint64_t) {
  flow::Event event;
  while (sender_.poll_event(event)) {
    if (event.kind == flow::Event::Kind::advert)
      sender_.transfer(transfers_++, event.id, source_.data(), event.header.size_bytes);
    if (event.kind == flow::Event::Kind::sent) ++sent_;
    if (event.kind == flow::Event::Kind::peer_lost) lost_ = event.reason;
  }
}

void Stream::progress_receiver(uint64_t now_us) {
  flow::Event event;
  while (receiver_.poll_event(event)) {
    if (event.kind == flow::Event::Kind::received && ++received_ == work_.messages) finished_us_ = now_us;
    if (event.kind == flow::Event::Kind::peer_lost) lost_ = event.reason;
  }
  if (!is_started_ || is_stopped_) return;
  for (; advertised_ < work_.messages && advertised_ - received_ < work_.open_receives; ++advertised_)
    receiver_.advertise(advertised_, {advertised_, 0, work_.message_bytes}, destination_.data(), KEY, now_us);
}

}  // namespace sennit::networks
