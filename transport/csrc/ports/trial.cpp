// SPDX-License-Identifier: Apache-2.0
#include "ports/trial.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace sennit {
namespace {

constexpr std::byte VERSION{2};
constexpr size_t HEADER_BYTES = 4;  // version, 0, level of the settled size, path count less one
constexpr uint32_t PATH_MAX_COUNT = 256;
static_assert(HEADER_BYTES + PATH_MAX_COUNT / 2 <= Trial::MESSAGE_MAX_BYTES);

// A peer that has not begun keeps arriving probes in its socket, and a peer with too few processors answers late. So
// little is repeated before the first contact, and not much just after it.
constexpr uint64_t FIRST_WAIT_US = 50'000, LONGEST_WAIT_US = 200'000;
// After contact, an unanswered probe is repeated this often before it counts as lost for good. At a loss of one packet
// in ten, one path in a hundred million is misjudged.
constexpr uint64_t CONTACT_WAIT_US = 40'000, LONGEST_CONTACT_WAIT_US = 150'000;
constexpr uint32_t DECIDING_ROUNDS = 8, LAST_ROUND = 25;
// If many ranks share few processors, each runs rarely: 64 ranks on two cores answer after 100 ms.
constexpr uint64_t WAIT_PER_PEER_US = 2'500;
// Reserves are tried from the second round on. Mostly there is none.
constexpr uint32_t RESERVE_ROUND = 2;
// From this round on, smaller packets are tried as well. The count starts at contact, if there is any.
constexpr uint32_t LADDER_ROUND = 3;
// One packet may be lost. It is unlikely that so many over different paths all are.
constexpr uint32_t MESSAGE_COPIES = 2, VERDICT_COPIES = 4;

// A path's four bits in a message: its level, and whether the verdict leaves it out.
constexpr std::byte LEVEL_MASK{7}, LEFT_OUT{8};

uint8_t level_of(uint32_t payload_bytes) {
  if (payload_bytes < 256 || payload_bytes > 4'096 || !std::has_single_bit(payload_bytes)) return 0;
  return static_cast<uint8_t>(std::countr_zero(payload_bytes) - 7);
}

}  // namespace

Trial::Trial(const Config& config)
    : target_(level_of(config.payload_max_bytes)),
      decides_(config.decides),
      wait_us_(std::min(CONTACT_WAIT_US + WAIT_PER_PEER_US * (std::max(config.peer_count, 1u) - 1),
                        LONGEST_CONTACT_WAIT_US)),
      reserve_of_(config.reserve_of),
      is_used_(config.pair_count),
      heard_(config.path_count),
      told_(config.path_count) {
  if (target_ == 0 || config.path_count < 1 || config.path_count > PATH_MAX_COUNT)
    throw std::invalid_argument("trial: " + std::to_string(config.path_count) + " paths with a payload of " +
                                std::to_string(config.payload_max_bytes) + " bytes; allowed: 1 to " +
                                std::to_string(PATH_MAX_COUNT) + " paths, powers of two from 256 to 4096 bytes");
  if (config.pair_count == 0 || reserve_of_.size() >= config.pair_count ||
      std::any_of(reserve_of_.begin(), reserve_of_.end(), [this](uint32_t pair) { return pair >= first_pairs(); }))
    throw std::invalid_argument("trial: " + std::to_string(config.pair_count) + " pairs of rails with " +
                                std::to_string(reserve_of_.size()) + " reserves");
  choose_pairs();
}

bool Trial::all_reach(const std::vector<Level>& levels) const {
  for (uint32_t path = 0; path < path_count(); ++path)
    if (levels[path] != target_ && !is_reserve(path)) return false;
  return true;
}

unsigned Trial::directions_of(uint32_t pair) const {
  unsigned directions = 0;
  for (size_t path = pair; path < heard_.size(); path += is_used_.size())
    directions |= (heard_[path] != 0 ? 1u : 0u) | (told_[path] != 0 ? 2u : 0u);
  return directions;
}

// A reserve is used for a direction that its pair does not carry, and the pair only for one that the reserve does not.
void Trial::choose_pairs() {
  for (uint32_t pair = 0; pair < is_used_.size(); ++pair) is_used_[pair] = pair < first_pairs();
  if (!decides_) return;
  for (uint32_t index = 0; index < reserve_of_.size(); ++index) {
    const uint32_t pair = reserve_of_[index], reserve = first_pairs() + index;
    const unsigned by_pair = directions_of(pair), by_reserve = directions_of(reserve);
    if ((by_reserve & ~by_pair) == 0) continue;
    is_used_[reserve] = true;
    if ((by_pair & ~by_reserve) == 0) is_used_[pair] = false;
  }
}

bool Trial::is_perfect() const { return settled_level_ == target_ && all_reach(heard_) && all_reach(told_); }

bool Trial::poll(uint64_t now_us, Probe& out) {
  if (now_us >= next_round_us_) start_round(now_us);
  if (due_.empty()) return false;
  out = due_.front();
  due_.pop_front();
  return true;
}

uint64_t Trial::next_timeout_us() const { return due_.empty() ? next_round_us_ : 0; }

void Trial::start_round(uint64_t now_us) {
  if (decides_) decide(now_us);
  if (is_settled()) {
    next_round_us_ = UINT64_MAX;
    return;
  }
  ++round_;
  if (has_contact()) ++rounds_of_contact_;
  const bool tries_smaller = (has_contact() ? rounds_of_contact_ : round_) >= LADDER_ROUND;
  for (uint32_t path = 0; path < path_count(); ++path) {
    if (told_[path] == target_ || (is_reserve(path) && round_ < RESERVE_ROUND)) continue;
    due_.push_back({path, bytes_of(target_)});
    if (!tries_smaller) continue;
    for (Level level = static_cast<Level>(told_[path] + 1); level < target_; ++level)
      due_.push_back({path, bytes_of(level)});
  }
  // All probes may be lost, and the peer waits for news.
  if (has_contact()) send_message(1);
  const uint64_t wait_us =
      has_contact() && rounds_of_contact_ < LAST_ROUND
          ? wait_us_
          : std::min(std::max(FIRST_WAIT_US, wait_us_) << std::min(round_ - 1, 2u), LONGEST_WAIT_US);
  next_round_us_ = now_us + wait_us;
}

void Trial::decide(uint64_t now_us) {
  if (is_settled()) return;
  if (all_reach(heard_) && all_reach(told_)) return settle(target_);
  if (rounds_of_contact_ < DECIDING_ROUNDS) return;
  if (now_us < news_us_ + 2 * wait_us_ && rounds_of_contact_ < LAST_ROUND) return;
  choose_pairs();
  Level least = target_;
  bool hears = false, reaches = false;
  for (uint32_t path = 0; path < path_count(); ++path) {
    if (!is_used(path)) continue;
    hears |= heard_[path] != 0;
    reaches |= told_[path] != 0;
    for (const Level level : {heard_[path], told_[path]})
      if (level != 0) least = std::min(least, level);
  }
  if (hears && reaches) settle(least);
}

void Trial::settle(Level level) {
  choose_pairs();
  settled_level_ = level;
  due_.clear();
  next_round_us_ = UINT64_MAX;
  send_message(VERDICT_COPIES);
}

// Uses paths that are known to carry something, and the smallest packet.
void Trial::send_message(uint32_t copies) {
  const bool reaches = std::any_of(told_.begin(), told_.end(), [](Level level) { return level != 0; });
  uint32_t sent = 0;
  for (uint32_t turn = 0; turn < path_count() && sent < copies; ++turn) {
    const uint32_t path = next_path_ % path_count();
    ++next_path_;
    if (reaches && told_[path] == 0) continue;
    if (is_settled() ? !is_used(path) : is_reserve(path) && round_ < RESERVE_ROUND) continue;
    due_.push_back({path, bytes_of(1)});
    ++sent;
  }
}

std::vector<std::byte> Trial::message() const {
  std::vector<std::byte> out(HEADER_BYTES + (heard_.size() + 1) / 2);
  out[0] = VERSION;
  out[2] = std::byte{settled_level_};
  out[3] = static_cast<std::byte>(heard_.size() - 1);
  for (size_t path = 0; path < heard_.size(); ++path)
    out[HEADER_BYTES + path / 2] |=
        (std::byte{heard_[path]} | (is_settled() && !is_used(static_cast<uint32_t>(path)) ? LEFT_OUT : std::byte{}))
        << (path % 2 * 4);
  return out;
}

void Trial::note_contact(uint64_t now_us) {
  if (has_contact()) return;
  contact_us_ = news_us_ = now_us;
  // Probes sent earlier may have come before the peer listened.
  if (next_round_us_ != 0 && !is_settled()) next_round_us_ = std::min(next_round_us_, now_us + wait_us_);
}

void Trial::on_probe(uint64_t now_us, uint32_t path, std::span<const std::byte> payload) {
  const Level level = level_of(static_cast<uint32_t>(payload.size()));
  if (level == 0 || level > target_ || path >= path_count()) return;
  note_contact(now_us);
  if (level > heard_[path]) {
    heard_[path] = level;
    news_us_ = now_us;
  }
  on_message(now_us, payload);
}

void Trial::on_message(uint64_t now_us, std::span<const std::byte> message) {
  const size_t levels_bytes = (heard_.size() + 1) / 2;
  if (message.size() < HEADER_BYTES + levels_bytes || message[0] != VERSION) return;
  if (std::to_integer<size_t>(message[3]) + 1 != heard_.size()) return;
  const auto settled = std::to_integer<Level>(message[2]);
  if (settled > target_) return;
  const auto bits_of = [&](size_t path) { return message[HEADER_BYTES + path / 2] >> (path % 2 * 4); };
  for (size_t path = 0; path < told_.size(); ++path) {
    const auto level = std::to_integer<Level>(bits_of(path) & LEVEL_MASK);
    if (level <= told_[path] || level > target_) continue;
    told_[path] = level;
    note_contact(now_us);
    news_us_ = now_us;
  }
  is_peer_settled_ = settled != 0;
  if (is_settled()) {
    if (decides_ && !is_peer_settled_ && due_.empty()) send_message(1);  // the verdict was lost
    return;
  }
  if (!decides_ && is_peer_settled_) {
    for (size_t pair = 0; pair < is_used_.size() && pair < told_.size(); ++pair)
      is_used_[pair] = (bits_of(pair) & LEFT_OUT) == std::byte{};
    if (std::none_of(is_used_.begin(), is_used_.end(), [](bool is_used) { return is_used; })) {
      choose_pairs();  // no rank decides that
      return;
    }
    settled_level_ = settled;
    due_.clear();
    next_round_us_ = UINT64_MAX;
    return;
  }
  if (!all_reach(heard_)) return;
  if (decides_ && all_reach(told_)) return settle(target_);
  // The peer waits for this news. If the first round is still to come, it will carry the news.
  if (!is_heard_told_ && round_ != 0) send_message(MESSAGE_COPIES);
  is_heard_told_ = true;
}

void Trial::settle_as_perfect() {
  std::fill(told_.begin(), told_.end(), target_);
  std::fill(heard_.begin(), heard_.end(), target_);
  choose_pairs();
  settled_level_ = target_;
  due_.clear();
  next_round_us_ = UINT64_MAX;
}

}  // namespace sennit
