// SPDX-License-Identifier: Apache-2.0
#include "model/rank.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "flow/immediate.hpp"
#include "flow/silence.hpp"
#include "model/violation.hpp"

namespace sennit::model {
namespace {

constexpr size_t EAGER_MEMORY_BYTES = 32 * size_t{PAYLOAD_MAX_BYTES};
// A round sends at most a window and some controls. The timers of eight paths may expire one after the other.
constexpr uint32_t MOST_PACKETS_A_ROUND = 2'000;
constexpr uint32_t MOST_IDLE_WAKES = 64, MOST_IMMEDIATE_ROUNDS = 4;
// A deferred eager message is offered again at the program's next round.
constexpr uint64_t DEFERRED_US = 20;
// After so many eager packets the number of one may be taken for a later one's, until the flow sees its header. Only
// fault_model_small gets there.
constexpr uint64_t KNOWN_EAGER_PACKETS = (uint64_t{1} << (flow::INDEX_BITS - 1)) - 32;
// A bulk packet this old may belong to a credit whose slot is used again. The flow then refuses it by number, key or
// address.
constexpr uint64_t KNOWN_PACKETS = flow::CREDIT_SLOTS / 2 - flow::CREDIT_WINDOW;

uint32_t next_of(const Direction& direction, uint32_t from, bool is_eager) {
  while (from < direction.count() && direction.draw(from).is_eager != is_eager) ++from;
  return from;
}

}  // namespace

Rank::Rank(uint32_t index) : index_(index), eager_memory_(EAGER_MEMORY_BYTES) {}

uint32_t Rank::eager_rkey() const { return 0xEA6E'0001 + index_; }

void Rank::begin(const Schedule& schedule, Network& network, Direction& outgoing, Direction& incoming,
                 bool is_verbose) {
  schedule_ = &schedule;
  draw_ = &schedule.ranks[index_];
  network_ = &network;
  outgoing_ = &outgoing;
  incoming_ = &incoming;
  is_verbose_ = is_verbose;
  random_ = SimRandom(SimRandom(schedule.seed ^ (uint64_t{index_ + 1} << 62)).next());
  const auto memory =
      std::span(eager_memory_).first(size_t{schedule.config.eager_slot_count} * schedule.config.payload_max_bytes);
  budget_.emplace(draw_->budget);
  flow::FlowConfig config = schedule.config;
  config.path_policy = draw_->path_policy;
  config.congestion = draw_->congestion;
  config.receive_budget = draw_->has_budget ? &*budget_ : nullptr;
  flow_.emplace(config, memory, eager_rkey());
  wake_us_ = NEVER;
  idle_wakes_ = immediate_rounds_ = 0;
  end_reason_.clear();
  has_ended_ = is_lost_ = is_told_ = is_dead_ = is_closed_ = has_deferred_ = false;
  last_heard_us_ = last_excuse_us_ = 0;
  next_eager_out_ = next_of(outgoing, 0, true);
  next_eager_in_ = next_of(incoming, 0, true);
  next_advert_ = next_of(incoming, 0, false);
  next_bulk_out_ = next_of(outgoing, 0, false);
  open_receives_ = sent_ = received_ = eager_out_ = eager_in_ = waiting_transfers_ = 0;
  transferred_.fill(false);
  orders_.fill(0);
  seen_ = {};
}

void Rank::introduce(const Rank& peer) {
  flow_->set_remote_eager(reinterpret_cast<uint64_t>(peer.eager_memory_.data()), peer.eager_rkey());
}

void Rank::end() {
  flow_.reset();
  require(budget_->granted_bytes() == 0 && budget_->parked_bytes() == 0 && budget_->expecting_flows() == 0,
          "the flow is gone and a part of the receive budget with it");
}

void Rank::say(const char* format, ...) const {
  if (!is_verbose_) [[likely]]
    return;
  std::printf("%10llu us  rank %u  ", static_cast<unsigned long long>(network_->now_us()), index_);
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::putchar('\n');
}

void Rank::deliver(const Packet& packet, uint64_t age_packets) {
  last_heard_us_ = network_->now_us();
  excuse();
  idle_wakes_ = 0;
  if (packet.is_control) {
    ++seen_.control_in;
    say("control of %u bytes on path %u", packet.data.size_bytes, packet.path);
    return flow_->on_control(clock_us(), packet.path, std::span(packet.body).first(packet.data.size_bytes));
  }
  place(packet, age_packets);
}

void Rank::place(const Packet& packet, uint64_t age_packets) {
  using flow::Verdict;
  if (happens(draw().scribble)) scribble();
  const flow::DataOut& data = packet.data;
  flow::Placement place{};
  const Verdict verdict = flow_->locate(data.immediate, data.remote_address, data.rkey, data.size_bytes, place);
  say("packet %u of message %u on path %u: verdict %d", packet.part, packet.message, packet.path,
      static_cast<int>(verdict));
  // A flow may have ended before its event is taken.
  if (has_ended() || (verdict == Verdict::bad_slot && flow_->ended())) {
    require(verdict == Verdict::bad_slot && place.destination == nullptr, "a flow that has ended takes data");
    ++seen_.after_end;
    return;
  }
  if (incoming_->is_delivered(packet)) {
    if (verdict == Verdict::place && age_packets > KNOWN_EAGER_PACKETS &&
        flow::slot_of(data.immediate) == flow::EAGER_SLOT) {
      // It gets to the place of a packet that is still to come, and no further.
      incoming_->check_destination(place.destination, data.size_bytes);
      std::memcpy(place.destination, packet.body.data(), data.size_bytes);
      flow_->on_data(clock_us(), packet.path, data.immediate, data.size_bytes, packet.is_marked, 0);
      ++seen_.unknown;
      return;
    }
    require(verdict == Verdict::duplicate || (age_packets > KNOWN_PACKETS && verdict != Verdict::place),
            "a packet that is there already is not a duplicate");
    require(place.destination == nullptr, "a duplicate has a place");
    if (verdict != Verdict::duplicate) {
      ++seen_.unknown;
      return;
    }
    ++seen_.duplicate;
  } else {
    require(verdict == Verdict::place, [&] { return "a good packet was refused: " + describe(); });
    require(place.destination != nullptr && place.size_bytes == data.size_bytes, "a good packet has no place");
    incoming_->check_destination(place.destination, data.size_bytes);
    require(reinterpret_cast<uint64_t>(place.destination) == data.remote_address, "a good packet has another place");
    std::memcpy(place.destination, packet.body.data(), data.size_bytes);
    incoming_->on_delivered(packet);
    ++seen_.placed;
  }
  seen_.marked += packet.is_marked;
  flow_->on_data(clock_us(), packet.path, data.immediate, data.size_bytes, packet.is_marked,
                 random_.below(draw().tick_us));
}

// A port that receives straight into predicted places leaves refused bytes there.
void Rank::scribble() {
  std::array<flow::Placement, 16> places;
  const size_t count = flow_->predict(places);
  for (size_t at = 0; at < count; ++at) {
    incoming_->check_destination(places[at].destination, places[at].size_bytes);
    std::memset(places[at].destination, static_cast<int>(random_.next() & 0xFF), places[at].size_bytes);
  }
}

void Rank::round(bool has_read_all) {
  if (is_dead_) return;
  if (!needs_peer()) excuse();
  const uint64_t timeout_us = flow_->next_timeout_us();
  const bool is_due = has_read_all && timeout_us <= clock_us();
  if (is_due || (has_read_all && draw().is_restless)) flow_->on_timeout(clock_us());
  poll_events();
  if (is_waiting()) {
    flow_->expect(clock_us());
    if (flow_->ended()) poll_events();
  }
  send_eager_messages();
  advertise();
  transfer();
  if (draw().closes && !is_closed_ && !has_ended() && is_complete()) close();
  const bool moved = send_packets();
  if (!needs_peer()) excuse();
  // Programs that deferred a message, or wait quietly, come here without a timer.
  idle_wakes_ = moved ? 0 : idle_wakes_ + is_due;
  if (has_read_all) set_wake();
}

void Rank::poll_events() {
  has_deferred_ = false;
  flow::Event event;
  while (flow_->poll_event(event)) {
    idle_wakes_ = 0;
    require(!has_ended(), "an event after the end");
    on_event(event);
  }
}

void Rank::on_event(const flow::Event& event) {
  using Kind = flow::Event::Kind;
  switch (event.kind) {
    case Kind::eager:
      if (happens(draw().deferral)) {
        has_deferred_ = true;
        return flow_->defer_eager();
      }
      say("takes eager message %u", next_eager_in_);
      incoming_->on_eager(next_eager_in_, event);
      ++eager_in_;
      next_eager_in_ = next_of(*incoming_, next_eager_in_ + 1, true);
      return;
    case Kind::advert:
      say("may transfer message %u", next_bulk_out_);
      outgoing_->on_advert(next_bulk_out_, event.header);
      advert_ids_[next_bulk_out_] = event.id;
      ++waiting_transfers_;
      next_bulk_out_ = next_of(*outgoing_, next_bulk_out_ + 1, false);
      return;
    case Kind::received:
      say("received message %u", static_cast<unsigned>(event.id));
      incoming_->on_received(event.id, event.data);
      ++received_;
      --open_receives_;
      return;
    case Kind::returned:
      require(false, "an advert came back that nobody had asked for");
      return;
    case Kind::sent:
      say("sent message %u", static_cast<unsigned>(event.id));
      outgoing_->on_sent(event.id);
      ++sent_;
      return;
    case Kind::peer_lost:
    case Kind::peer_aborted:
      return on_end(event);
  }
}

void Rank::on_end(const flow::Event& event) {
  say("lost its peer: %s", event.reason);
  end_reason_ = event.reason;
  has_ended_ = is_lost_ = true;
  is_told_ = event.kind == flow::Event::Kind::peer_aborted;
  incoming_->close_destinations();
  outgoing_->close_sources();
  if (!is_told_ && end_reason_.starts_with("gave no sign of life ")) {
    require(network_->now_us() - last_heard_us_ >= flow::Silence::limit_us(schedule_->config.peer_timeout_us),
            "a peer that was heard was lost for its silence");
  }
  require(flow_->idle(), "a flow that lost its peer is not idle");
}

void Rank::send_eager_messages() {
  while (next_eager_out_ < outgoing_->count() && outgoing_->draw(next_eager_out_).send_us <= network_->now_us()) {
    const std::byte* const data = outgoing_->fill_source(next_eager_out_);
    if (!flow_->send_eager(outgoing_->header(next_eager_out_), EAGER_DATA, data, clock_us())) break;
    require(!has_ended(), "an eager message was taken after the end");
    say("sends eager message %u", next_eager_out_);
    outgoing_->on_eager_pushed(next_eager_out_);
    ++eager_out_;
    next_eager_out_ = next_of(*outgoing_, next_eager_out_ + 1, true);
  }
}

void Rank::advertise() {
  while (!has_ended() && next_advert_ < incoming_->count() && open_receives_ < draw().open_receives &&
         incoming_->draw(next_advert_).receive_us <= network_->now_us()) {
    say("advertises message %u", next_advert_);
    flow_->advertise(next_advert_, incoming_->header(next_advert_), incoming_->prepare_destination(next_advert_),
                     incoming_->rkey(next_advert_), clock_us());
    ++open_receives_;
    next_advert_ = next_of(*incoming_, next_advert_ + 1, false);
  }
}

void Rank::transfer() {
  if (waiting_transfers_ == 0 || has_ended()) return;
  for (uint32_t message = 0; message < next_bulk_out_ && message < outgoing_->count(); ++message) {
    const MessageDraw& draw = outgoing_->draw(message);
    if (draw.is_eager || transferred_[message] || draw.send_us > network_->now_us()) continue;
    say("transfers message %u", message);
    transferred_[message] = true;
    --waiting_transfers_;
    outgoing_->on_transfer(message);
    flow_->transfer(message, advert_ids_[message], outgoing_->fill_source(message), draw.size_bytes);
  }
}

uint64_t& Rank::order_of(const Packet& packet) {
  return orders_[flow::slot_of(packet.data.immediate) == flow::EAGER_SLOT];
}

bool Rank::send_packets() {
  uint32_t packets = 0, path = 0;
  std::array<flow::DataOut, 15> batch;
  while (const size_t count = flow_->poll_data(clock_us(), std::span(batch).first(draw().batch_packets), path)) {
    require(!has_ended(), "data was given out after the end");
    require(path < schedule_->config.path_count, "a path that does not exist");
    for (size_t at = 0; at < count; ++at) {
      require(at + 1 == count || batch[at].size_bytes == schedule_->config.payload_max_bytes,
              "a batch with a short packet in front");
      Packet* const packet = network_->new_packet();
      require(packet != nullptr && ++packets < MOST_PACKETS_A_ROUND, "a flood of data packets");
      packet->data = batch[at];
      packet->path = path;
      packet->is_control = false;
      packet->order = order_of(*packet)++;
      outgoing_->on_packet_out(batch[at], *packet);
      std::memcpy(packet->body.data(), batch[at].payload, batch[at].size_bytes);
      say("gives out packet %u of message %u on path %u", packet->part, packet->message, path);
      ++seen_.data_out;
      network_->transmit(index_, *packet);
    }
  }
  while (true) {
    std::array<std::byte, flow::CONTROL_MAX_BYTES> control;
    const size_t size_bytes = flow_->poll_control(clock_us(), control, path);
    if (size_bytes == 0) break;
    require(size_bytes <= BODY_MAX_BYTES, "a control payload larger than a packet of the path");
    require(path < schedule_->config.path_count, "a path that does not exist");
    Packet* const packet = network_->new_packet();
    require(packet != nullptr && ++packets < MOST_PACKETS_A_ROUND, "a flood of control packets");
    packet->data = {};
    packet->data.size_bytes = static_cast<uint32_t>(size_bytes);
    packet->path = path;
    packet->is_control = true;
    std::memcpy(packet->body.data(), control.data(), size_bytes);
    say("gives out a control of %zu bytes on path %u", size_bytes, path);
    ++seen_.control_out;
    network_->transmit(index_, *packet);
  }
  return packets != 0;
}

uint64_t Rank::next_post_us() const {
  uint64_t next_us = NEVER;
  const auto consider = [&](uint64_t at_us) {
    if (at_us > network_->now_us()) next_us = std::min(next_us, at_us);
  };
  if (next_eager_out_ < outgoing_->count()) consider(outgoing_->draw(next_eager_out_).send_us);
  if (next_advert_ < incoming_->count()) consider(incoming_->draw(next_advert_).receive_us);
  if (waiting_transfers_ != 0)
    for (uint32_t message = 0; message < next_bulk_out_ && message < outgoing_->count(); ++message)
      if (!outgoing_->draw(message).is_eager && !transferred_[message]) consider(outgoing_->draw(message).send_us);
  if (is_waiting()) consider(network_->now_us() + look_us());
  if (has_deferred_) consider(network_->now_us() + DEFERRED_US);
  return next_us;
}

void Rank::set_wake() {
  const uint64_t timeout_us = flow_->next_timeout_us();
  // All packets are sent, so a timer that is still due stays due. (Sending may bring a timer forward once.)
  immediate_rounds_ = timeout_us <= clock_us() ? immediate_rounds_ + 1 : 0;
  require(immediate_rounds_ <= MOST_IMMEDIATE_ROUNDS, [&] { return "the timer spins: " + flow_->describe(); });
  require(idle_wakes_ <= MOST_IDLE_WAKES,
          [&] { return "the timer fires again and again for nothing: " + flow_->describe(); });
  uint64_t wake_us = timeout_us == NEVER ? NEVER : std::max(timeout_us, clock_us()) - draw().clock_us;
  if (!has_ended()) wake_us = std::min(wake_us, next_post_us());
  if (wake_us == NEVER || wake_us == wake_us_) {
    wake_us_ = wake_us;
    return;
  }
  const uint64_t tick_us = draw().tick_us;
  wake_us_ = (wake_us + tick_us - 1) / tick_us * tick_us;
  network_->wake(wake_us_, index_);
}

void Rank::abort(const char* reason) {
  if (is_dead_ || has_ended()) return;
  say("aborts: %s", reason);
  flow_->abort(reason);
  end_reason_ = reason;
  has_ended_ = true;
  incoming_->close_destinations();
  outgoing_->close_sources();
}

void Rank::close() {
  if (is_dead_ || has_ended()) return;
  say("closes");
  flow_->close();
  is_closed_ = true;
}

void Rank::notice_peer_failed() {
  if (is_dead_) return;
  say("is told that its peer failed");
  flow_->on_peer_failed("connection refused");
}

bool Rank::is_complete() const {
  return next_eager_out_ >= outgoing_->count() && next_eager_in_ >= incoming_->count() &&
         sent_ + eager_out_ == outgoing_->count() && received_ + eager_in_ == incoming_->count() && flow_->idle();
}

bool Rank::needs_peer() const { return is_waiting() || outgoing_->is_sending() || incoming_->is_receiving(); }

// As often as the flow itself would look.
uint64_t Rank::look_us() const { return std::min(schedule_->config.peer_timeout_us / 16, flow::LOOK_MAX_US); }

void Rank::check_counters(const Rank& peer) const {
  const flow::FlowCounters& counters = flow_->counters();
  const auto equal = [&](const char* what, uint64_t counted, uint64_t expected) {
    require(counted == expected, [&] {
      return "rank " + std::to_string(index_) + " counts " + std::to_string(counted) + " " + what + ", it was " +
             std::to_string(expected);
    });
  };
  equal("data packets sent", counters.data_packets_sent, seen_.data_out);
  equal("retransmitted packets", counters.retransmitted_packets, seen_.data_out - outgoing_->distinct_packets_out());
  equal("control packets sent", counters.control_packets_sent, seen_.control_out);
  equal("control packets received", counters.control_packets_received, seen_.control_in);
  equal("data packets received", counters.data_packets_received, seen_.placed);
  equal("congestion marks", counters.np_ecn_marked_roce_packets, seen_.marked);
  equal("duplicates", counters.duplicate_packets, seen_.duplicate);
  equal("bad controls", counters.bad_control, 0);
  if (schedule_->loses_nothing) {
    equal("packets sent again but for probes", counters.retransmitted_packets, counters.tail_probe_packets);
    equal("changes of paths' states", counters.path_state_changes, 0);
  }
  const uint64_t refused = counters.bad_key + counters.bad_range + counters.bad_slot;
  equal("refused packets", refused, seen_.unknown + seen_.after_end);
  if (!is_complete() || has_ended()) return;
  outgoing_->check_all_delivered();
  if (!peer.has_ended())
    equal("first transmissions", seen_.data_out - counters.retransmitted_packets, peer.seen_.placed);
}

std::string Rank::describe() const {
  if (!flow_) return "rank " + std::to_string(index_) + ", its flow gone";
  return "rank " + std::to_string(index_) + (is_dead_ ? " (gone)" : "") +
         (is_complete() ? " complete" : " incomplete") + (has_ended() ? ", ended: " + end_reason_ : "") + ", " +
         flow_->describe();
}

}  // namespace sennit::model
