// SPDX-License-Identifier: Apache-2.0
#include "aggregation/client.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace sennit::aggregation {
namespace {

// As many later answers show that an earlier block was lost (RFC 5681: three duplicate acknowledgements).
constexpr uint64_t REORDER_BLOCKS = 3;
constexpr double FIRST_ALLOWED = 16;
constexpr double LEAST_ALLOWED = 4;
// A longer queue than this makes a rank send less.
constexpr double QUEUE_US = 5'000;
constexpr uint64_t LEAST_PAUSE_US = 4'000;
constexpr uint64_t FIRST_PAUSE_US = 20'000;
constexpr uint64_t MOST_PAUSE_US = 50'000;
constexpr uint32_t LEAST_QUESTIONS = 5;
constexpr uint64_t JOIN_PAUSE_US = 1'000'000;
// Operations without the aggregator after one that failed, doubled each time.
constexpr uint64_t FIRST_PENALTY = 8;
constexpr uint64_t MOST_PENALTY = 1'024;

uint64_t blocks_of(uint64_t size_bytes) { return (size_bytes + AGGREGATION_BLOCK_BYTES - 1) / AGGREGATION_BLOCK_BYTES; }

uint8_t stripes_of(uint64_t block_bytes) {
  return static_cast<uint8_t>((block_bytes + AGGREGATION_STRIPE_BYTES - 1) / AGGREGATION_STRIPE_BYTES);
}

// The stripes are there already.
size_t write(Datagram out, const Header& header) {
  write_header(out.data(), header);
  return header.packet_bytes();
}

std::string describe_reason(uint16_t reason) {
  switch (reason) {
    case AGGREGATION_UNKNOWN_JOB:
      return "it does not know this group";
    case AGGREGATION_NO_ROOM:
      return "it has no room for another group";
    case AGGREGATION_OTHER_PLAN:
      return "ranks run different operations";
    case AGGREGATION_OTHER_JOB:
      return "it knows this group with another number of ranks";
    default:
      return "it refused with the unknown reason " + std::to_string(reason);
  }
}

}  // namespace

Client::Client(const ClientConfig& config, ClientCounters& counters)
    : config_(config),
      counters_(counters),
      window_(config.window),
      join_pause_us_(config.join_again_us),
      penalty_(FIRST_PENALTY),
      flights_(config.window),
      allowed_(FIRST_ALLOWED),
      threshold_(config.window) {}

uint64_t Client::foresee(uint64_t operation, uint64_t size_bytes, uint8_t arithmetic, uint32_t mark) {
  const uint64_t number = first_message_ + messages_.size(), blocks = blocks_of(size_bytes);
  messages_.push_back({.operation = operation,
                       .first_block = end_,
                       .end_block = end_ + blocks,
                       .size_bytes = size_bytes,
                       .arithmetic = arithmetic,
                       .mark = mark,
                       .blocks_left = blocks});
  end_ += blocks;
  if (!is_joined_ || operation < resume_at_ || blocks == 0) settle(messages_.size() - 1);
  advance();
  return number;
}

void Client::set_source(uint64_t message, const std::byte* data) {
  if (message >= first_message_) messages_[message - first_message_].source = data;
}

void Client::set_destination(uint64_t message, std::byte* data) {
  if (message >= first_message_) messages_[message - first_message_].destination = data;
}

void Client::give_up(uint64_t operation) {
  for (size_t at = 0; at < messages_.size(); ++at)
    if (messages_[at].operation == operation && !messages_[at].is_over) settle(at);
  fail(operation);
  advance();
}

void Client::drop() {
  for (Message& message : messages_) message.source = nullptr, message.destination = nullptr, message.is_over = true;
  advance();
  lost_.clear();
  ended_.clear();
  under_way_ = 0;
}

std::vector<Client::Ended> Client::take_ended() { return std::exchange(ended_, {}); }

size_t Client::place_of(uint64_t block) const {
  const auto found = std::partition_point(messages_.begin(), messages_.end(),
                                          [block](const Message& message) { return message.end_block <= block; });
  return static_cast<size_t>(found - messages_.begin());
}

bool Client::is_awaited(uint64_t block) {
  return block >= base_ && block < next_ && flight(block).block == block && flight(block).state != State::had &&
         !message_of(block).is_over;
}

// The message ends, with what it has.
void Client::settle(size_t at) {
  Message& message = messages_[at];
  message.is_over = true;
  for (uint64_t block = std::max(message.first_block, base_); block < std::min(message.end_block, next_); ++block) {
    Flight& one = flight(block);
    if (one.block != block) continue;
    if (one.state == State::sent || one.state == State::stored) --under_way_;
    one.state = State::had;
  }
  counters_.blocks_given_up += message.blocks_left;
  ended_.push_back({first_message_ + at, message.blocks_left});
  if (under_way_ == 0) repeat_us_ = UINT64_MAX;
}

void Client::advance() {
  while (!messages_.empty() && messages_.front().is_over) {
    base_ = std::max(base_, messages_.front().end_block);
    messages_.pop_front();
    ++first_message_;
  }
  next_ = std::max(next_, base_);
  while (base_ < next_ && flight(base_).block == base_ && flight(base_).state == State::had) ++base_;
}

void Client::fail(uint64_t operation) {
  if (operation < resume_at_) return;
  ++counters_.aggregator_failed;
  resume_at_ = operation + 1 + penalty_;
  penalty_ = std::min(2 * penalty_, MOST_PENALTY);
}

// There is no aggregator any more, or it has forgotten the job.
void Client::stand_aside(uint64_t now_us) {
  if (!messages_.empty()) fail(messages_.front().operation);
  for (size_t at = 0; at < messages_.size(); ++at)
    if (!messages_[at].is_over) settle(at);
  advance();
  is_joined_ = false;
  join_pause_us_ = JOIN_PAUSE_US;
  join_us_ = now_us + join_pause_us_;
}

void Client::have(uint64_t block) {
  Flight& one = flight(block);
  if (one.state == State::sent || one.state == State::stored) --under_way_;
  one.state = State::had;
  ++counters_.blocks_summed;
  const size_t at = place_of(block);
  if (--messages_[at].blocks_left != 0) return;
  if (messages_[at].operation >= resume_at_) penalty_ = FIRST_PENALTY;
  settle(at);
}

// Of blocks that were sent well before one that has come, the leaf or the sum was lost, or the leaf of another rank. To
// find out which, the leaf is sent again.
void Client::find_lost(uint64_t serial) {
  for (uint64_t block = base_; block < next_; ++block) {
    Flight& one = flight(block);
    if (one.block != block || one.state != State::sent) continue;
    if (one.serial + REORDER_BLOCKS > serial) {
      if (one.is_repeated) continue;
      return;  // those behind it were sent later
    }
    lose(block);
  }
}

void Client::lose(uint64_t block) {
  flight(block).state = State::lost;
  lost_.push_back(block);
  --under_way_;
}

// Random loss is no reason to send less: the queue is.
void Client::adapt(uint64_t now_us, double rtt_us) {
  least_rtt_us_ = std::min(least_rtt_us_, rtt_us);
  const double error_us = rtt_us - rtt_us_;
  rtt_us_ = rtt_us_ == 0 ? rtt_us : rtt_us_ + error_us / 8;
  deviation_us_ += (std::abs(error_us) - deviation_us_) / 4;
  if (rtt_us > least_rtt_us_ + QUEUE_US) {
    if (now_us < slowed_us_ + static_cast<uint64_t>(rtt_us)) return;
    slowed_us_ = now_us;
    allowed_ = threshold_ = std::max(allowed_ * 0.7, LEAST_ALLOWED);
  } else {
    allowed_ = std::min<double>(allowed_ + (allowed_ < threshold_ ? 1 : 1 / allowed_), window_);
  }
}

void Client::take_datagram(uint64_t now_us, std::span<const std::byte> datagram) {
  Header header;
  // A sum for all ranks has the leaf of the rank that came last.
  if (read_packet(datagram, header) != Refusal::none || header.key != config_.key ||
      !take(now_us, header, datagram.data() + HEADER_BYTES))
    ++counters_.packets_dropped;
}

bool Client::take(uint64_t now_us, const Header& header, const std::byte* stripes) {
  if (header.kind == AGGREGATION_JOINED) return take_joined(now_us, header, stripes);
  if (header.kind == AGGREGATION_REFUSED) return take_refusal(now_us, header, stripes);
  if (!is_joined_ || header.job != job_ || !is_awaited(header.block)) return false;
  Flight& one = flight(header.block);
  const Message& message = message_of(header.block);
  if (header.kind == AGGREGATION_WAITING) {
    heard(now_us);
    if (one.state == State::lost) ++under_way_;
    one.state = State::stored;
    return true;
  }
  const uint64_t offset = (header.block - message.first_block) * AGGREGATION_BLOCK_BYTES;
  const uint64_t size_bytes = std::min<uint64_t>(message.size_bytes - offset, AGGREGATION_BLOCK_BYTES);
  if (header.kind != AGGREGATION_RESULT || header.mark != message.mark || header.arithmetic != message.arithmetic ||
      header.stripes != stripes_of(size_bytes))
    return false;
  heard(now_us);
  std::memcpy(message.destination + offset, stripes, size_bytes);
  if (!one.is_repeated) adapt(now_us, static_cast<double>(now_us - one.sent_us));
  const uint64_t serial = one.serial;
  have(header.block);
  find_lost(serial);
  advance();
  pause_us_ = std::clamp(static_cast<uint64_t>(rtt_us_ + 4 * deviation_us_), LEAST_PAUSE_US, MOST_PAUSE_US);
  repeat_us_ = under_way_ == 0 ? UINT64_MAX : now_us + pause_us_;
  return true;
}

void Client::heard(uint64_t now_us) {
  heard_us_ = now_us;
  questions_ = 0;
}

bool Client::take_joined(uint64_t now_us, const Header& header, const std::byte* stripe) {
  if (header.stripes != 1) return false;
  const uint16_t leaves = wire::load_be16(stripe + offsetof(aggregation_join, leaves));
  const uint16_t window = wire::load_be16(stripe + offsetof(aggregation_join, window));
  if (is_joined_ || leaves != config_.leaves || window == 0 || window > config_.window) return false;
  heard(now_us);
  is_joined_ = true;
  job_ = header.job;
  window_ = window;
  refusal_.clear();
  return true;
}

bool Client::take_refusal(uint64_t now_us, const Header& header, const std::byte* stripe) {
  if (header.stripes != 1) return false;
  const uint16_t reason = wire::load_be16(stripe + offsetof(aggregation_refusal, reason));
  if (!is_joined_) {
    refusal_ = describe_reason(reason);
    join_pause_us_ = JOIN_PAUSE_US;
    join_us_ = now_us + join_pause_us_;
  } else if (reason == AGGREGATION_UNKNOWN_JOB) {
    if (header.job != job_) return false;
    stand_aside(now_us);
  } else {
    if (header.job != job_ || !is_awaited(header.block)) return false;
    heard(now_us);
    give_up(message_of(header.block).operation);
  }
  return true;
}

void Client::look(uint64_t now_us) {
  if (now_us < repeat_us_) return;
  if (questions_ >= LEAST_QUESTIONS && now_us >= heard_us_ + config_.give_up_us) return stand_aside(now_us);
  for (uint64_t block = base_; block < next_; ++block) {
    const Flight& one = flight(block);
    if (one.block != block || (one.state != State::sent && one.state != State::stored)) continue;
    if (one.state == State::sent) allowed_ = threshold_ = std::max(allowed_ / 2, LEAST_ALLOWED);
    lose(block);
    break;
  }
  ++questions_;
  pause_us_ = std::min(2 * pause_us_, MOST_PAUSE_US);
  repeat_us_ = now_us + pause_us_;
}

uint64_t Client::next_timeout_us() const { return is_joined_ ? repeat_us_ : join_us_; }

size_t Client::next_datagram(uint64_t now_us, Datagram out) {
  if (!is_joined_) {
    if (now_us < join_us_) return 0;
    join_us_ = now_us + join_pause_us_;
    std::byte* const stripe = out.data() + HEADER_BYTES;
    std::memset(stripe, 0, AGGREGATION_STRIPE_BYTES);
    wire::store_be16(stripe + offsetof(aggregation_join, leaves), config_.leaves);
    wire::store_be16(stripe + offsetof(aggregation_join, window), config_.window);
    return write(out, {.kind = AGGREGATION_JOIN, .key = config_.key, .leaf = config_.leaf, .stripes = 1});
  }
  for (; !lost_.empty(); lost_.pop_front()) {
    const uint64_t block = lost_.front();
    if (!is_awaited(block) || flight(block).state != State::lost) continue;
    lost_.pop_front();
    flight(block).is_repeated = true;
    ++counters_.leaves_repeated;
    return write_leaf(block, now_us, out);
  }
  while (next_ < end_) {
    const Message& message = message_of(next_);
    if (message.is_over) {
      next_ = message.end_block;
      continue;
    }
    if (!message.is_ready() || next_ >= base_ + window_ || static_cast<double>(under_way_) >= allowed_) return 0;
    flight(next_) = {.block = next_};
    return write_leaf(next_++, now_us, out);
  }
  return 0;
}

size_t Client::write_leaf(uint64_t block, uint64_t now_us, Datagram out) {
  const Message& message = message_of(block);
  Flight& one = flight(block);
  one.state = State::sent;
  one.sent_us = now_us;
  one.serial = ++serial_;
  if (under_way_++ == 0) {
    // A first question after a pause.
    if (repeat_us_ == UINT64_MAX) heard_us_ = now_us, questions_ = 0;
    if (pause_us_ == 0) pause_us_ = FIRST_PAUSE_US;
    repeat_us_ = now_us + pause_us_;
  }
  ++counters_.leaves_sent;
  const uint64_t offset = (block - message.first_block) * AGGREGATION_BLOCK_BYTES;
  const uint64_t size_bytes = std::min<uint64_t>(message.size_bytes - offset, AGGREGATION_BLOCK_BYTES);
  const uint8_t stripes = stripes_of(size_bytes);
  std::byte* const elements = out.data() + HEADER_BYTES;
  std::memcpy(elements, message.source + offset, size_bytes);
  std::memset(elements + size_bytes, 0, size_t{stripes} * AGGREGATION_STRIPE_BYTES - size_bytes);
  return write(out, {.kind = AGGREGATION_LEAF,
                     .job = job_,
                     .key = config_.key,
                     .block = block,
                     .mark = message.mark,
                     .leaf = config_.leaf,
                     .arithmetic = message.arithmetic,
                     .stripes = stripes});
}

size_t Client::leave(Datagram out) const {
  return write(out, {.kind = AGGREGATION_LEAVE, .job = job_, .key = config_.key, .leaf = config_.leaf});
}

std::string Client::describe() const {
  if (!is_joined_) return refusal_.empty() ? "no answer" : refusal_;
  return std::to_string(under_way_) + " blocks under way, " + std::to_string(static_cast<int>(allowed_)) +
         " allowed, round trip " + std::to_string(static_cast<uint64_t>(rtt_us_)) + " us";
}

}  // namespace sennit::aggregation
