// SPDX-License-Identifier: Apache-2.0
// How long a peer has given no sign of life while somebody here waited for it, and when to ask it for one.
//
// Only time in which this process looked counts: one look adds no more than LOOK_CREDIT_MAX_US. So a process that was
// stopped (by a debugger, or with its whole machine) does not blame its peers for its own pause.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

namespace sennit::flow {

// A thread that waits looks this often.
inline constexpr uint64_t LOOK_MAX_US = 50'000;
inline constexpr uint64_t LOOK_CREDIT_MAX_US = 200'000;
// The first question, after the last data packet. A peer that answers and goes on computing is asked ever more rarely.
inline constexpr uint64_t QUESTION_FIRST_US = 100'000, QUESTION_MAX_US = 250'000;

class Silence {
 public:
  enum class Step : uint8_t { wait, ask, ask_everywhere, give_up };

  // The rest of the timeout is for the last look and for telling the others, who then know within the timeout.
  static constexpr uint64_t limit_us(uint64_t timeout_us) { return timeout_us - timeout_us / 20; }

  explicit Silence(uint64_t timeout_us)
      : timeout_us_(timeout_us),
        limit_us_(limit_us(timeout_us)),
        look_us_(std::clamp<uint64_t>(timeout_us / 16, 1, LOOK_MAX_US)),
        credit_us_(std::clamp<uint64_t>(timeout_us / 4, 1, LOOK_CREDIT_MAX_US)),
        first_us_(std::clamp<uint64_t>(timeout_us / 16, 1, QUESTION_FIRST_US)) {}

  void on_heard(uint64_t now_us) {
    heard_us_ = now_us;
    was_heard_ = true;
  }
  void on_data() { patience_us_ = first_us_; }

  // Somebody waits. Call it at least every next_look_us() - now_us, or the peer is given up later than possible.
  Step look(uint64_t now_us) {
    // Nothing is known of the time before the first look.
    const uint64_t since_us = looked_us_ == NEVER_US ? std::max(now_us, heard_us_) : std::max(looked_us_, heard_us_);
    looked_us_ = looked_us_ == NEVER_US ? now_us : std::max(looked_us_, now_us);
    if (was_heard_) {
      if (questions_ != 0) patience_us_ = std::min(2 * patience_us_, std::max(first_us_, question_max_us()));
      was_heard_ = false;
      questions_ = 0;
      silent_us_ = 0;
      ask_at_us_ = patience_us_;
    }
    if (now_us > since_us) silent_us_ += std::min(now_us - since_us, credit_us_);
    if (silent_us_ >= limit_us_) return Step::give_up;
    if (silent_us_ < ask_at_us_) return Step::wait;
    ++questions_;
    ask_at_us_ = silent_us_ + std::min(first_us_ << std::min(questions_, 8u), std::max(timeout_us_ / 16, first_us_));
    return silent_us_ >= timeout_us_ / 2 ? Step::ask_everywhere : Step::ask;
  }

  uint64_t next_look_us() const { return looked_us_ == NEVER_US ? 0 : looked_us_ + look_us_; }
  uint64_t silent_us() const { return was_heard_ ? 0 : silent_us_; }
  uint64_t heard_us() const { return heard_us_; }  // 0: never
  uint32_t questions() const { return questions_; }

  static std::string seconds(uint64_t time_us) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(time_us) / 1e6);
    return text;
  }

 private:
  static constexpr uint64_t NEVER_US = UINT64_MAX;

  uint64_t question_max_us() const { return std::min(QUESTION_MAX_US, timeout_us_ / 8); }

  const uint64_t timeout_us_, limit_us_, look_us_, credit_us_, first_us_;
  uint64_t looked_us_ = NEVER_US, heard_us_ = 0, silent_us_ = 0;
  uint64_t patience_us_ = first_us_;  // the silence after which the next question goes out
  uint64_t ask_at_us_ = first_us_;    // silent_us_ at the next question
  uint32_t questions_ = 0;            // since the peer was heard
  bool was_heard_ = false;            // since the last look
};

}  // namespace sennit::flow
