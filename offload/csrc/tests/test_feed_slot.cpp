// SPDX-License-Identifier: Apache-2.0
// Every interleaving of two processors that fill a slot and the process that reads it, of the very functions that they
// run (ebpf/include/feed_slot.h). Each access to the slot is a step, and memory is sequentially consistent: the swaps
// order everything before and behind them on every processor.
//
// The actors are coroutines on stacks of their own. A schedule says who takes each step. It is run from the start, and
// what it leaves open is tried next, depth first, until every schedule has been tried.
#include <doctest/doctest.h>
#include <linux/types.h>
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace {
void step();
template <typename Word>
Word stepped(Word word) {
  step();
  return word;
}
}  // namespace

#define FEED_SLOT_LOAD(word) (*stepped(word))
#define FEED_SLOT_SWAP(word, next) (*stepped(word) = (next))
#define FEED_SLOT_SWAP_IF(word, expected, next) __sync_val_compare_and_swap(stepped(word), expected, next)
#define FEED_SLOT_STORE(place, value) (step(), (place) = (value))
#include "../../../ebpf/include/feed_slot.h"

namespace {

constexpr std::uint32_t SLOTS = 2, ROWS = 2;
constexpr std::size_t STACK_BYTES = 64 << 10;

struct Actor {
  std::function<void()> body;
  ucontext_t context{};
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
  bool is_done = false;
};

class Explorer {
 public:
  // Calls `bodies` under every schedule, after `begin` and before `end`, or until `end` calls `stop`. Returns the
  // number of schedules.
  std::size_t run(const std::vector<std::function<void()>>& bodies, const std::function<void()>& begin,
                  const std::function<void()>& end) {
    std::size_t schedules = 0;
    schedule_.clear();
    is_stopped_ = false;
    do {
      begin();
      once(bodies);
      end();
      schedules++;
    } while (!is_stopped_ && next_schedule());
    return schedules;
  }

  void stop() { is_stopped_ = true; }

  void yield() {
    Actor* const self = current_;
    swapcontext(&self->context, &main_);
  }

 private:
  struct Choice {
    std::size_t taken, ready;
  };

  static void enter() {
    Explorer& self = *running;
    self.current_->body();
    self.current_->is_done = true;
    swapcontext(&self.current_->context, &self.main_);
  }

  void once(const std::vector<std::function<void()>>& bodies) {
    running = this;
    std::vector<std::unique_ptr<Actor>> actors;
    for (const auto& body : bodies) {
      auto& actor = *actors.emplace_back(std::make_unique<Actor>());
      actor.body = body;
      getcontext(&actor.context);
      actor.context.uc_stack.ss_sp = actor.stack.get();
      actor.context.uc_stack.ss_size = STACK_BYTES;
      makecontext(&actor.context, &Explorer::enter, 0);
    }
    for (std::size_t depth = 0;; depth++) {
      std::vector<Actor*> ready;
      for (const auto& actor : actors)
        if (!actor->is_done) ready.push_back(actor.get());
      if (ready.empty()) return;
      if (depth == schedule_.size()) schedule_.push_back({0, ready.size()});
      current_ = ready[schedule_[depth].taken];
      swapcontext(&main_, &current_->context);
    }
  }

  bool next_schedule() {
    while (!schedule_.empty() && ++schedule_.back().taken == schedule_.back().ready) schedule_.pop_back();
    return !schedule_.empty();
  }

 public:
  static Explorer* running;

 private:
  std::vector<Choice> schedule_;
  ucontext_t main_{};
  Actor* current_ = nullptr;
  bool is_stopped_ = false;
};
Explorer* Explorer::running = nullptr;

void step() { Explorer::running->yield(); }

// A slot, and the columns behind it: each row has the batch that it came from, plus one.
struct Ring {
  feed_slot slot{};
  std::array<std::uint32_t, ROWS> rows{};
};

using Claim = std::function<feed_claim(feed_slot*, std::uint32_t, std::uint32_t, __u64*)>;

// What a processor does with a packet of one row.
void take(Ring& ring, const Claim& claim, std::uint32_t batch, std::uint32_t row) {
  __u64 state = 0;
  if (claim(&ring.slot, batch, row, &state) != FEED_CLAIMED) return;
  if (row == feed_slot_row(state)) {
    const std::uint32_t kept = (step(), ring.slot.rows);
    step();
    if (kept < ROWS) ring.rows[kept] = batch + 1;
    state = feed_slot_took(&ring.slot, state, 1, kept + 1);
  } else {
    feed_slot_skipped(&ring.slot, state, row);
  }
  feed_slot_publish(&ring.slot, state);
}

bool release(Ring& ring, std::uint32_t batch) {
  __u64 state = 0;
  if (!feed_slot_claim_any(&ring.slot, &state)) return false;
  feed_slot_publish(&ring.slot, feed_slot_opened(&ring.slot, batch + SLOTS));
  return true;
}

// What a reader finds in the columns while packets may come.
struct Reading {
  std::uint32_t rows = 0;
  bool is_wrong = false;
};

// How ArenaReceiver.batch reads a slot: it owns the slot meanwhile, and gives it back as it was.
Reading read(Ring& ring, bool owns) {
  Reading found;
  __u64 state = 0;
  if (!owns)
    state = FEED_SLOT_LOAD(&ring.slot.state);
  else if (!feed_slot_claim_any(&ring.slot, &state))
    return found;
  found.rows = (step(), ring.slot.rows);
  found.is_wrong = found.rows != feed_slot_row(state) || found.rows > ROWS;
  for (std::uint32_t row = 0; row < found.rows && !found.is_wrong; row++)
    found.is_wrong = (step(), ring.rows[row]) != feed_slot_batch(state) + 1;
  if (owns) feed_slot_publish(&ring.slot, state);
  return found;
}

// Batch 0 lacks its second row. One processor takes it, another one a duplicate of the first, while the reader looks at
// the batch, and then releases it if it had all rows. Returns how many schedules read or left a wrong row: at most one.
std::size_t wrong_while_read(bool owns, std::size_t& schedules, std::size_t& whole) {
  std::size_t wrong = 0;
  Ring ring;
  Explorer explorer;
  Reading found;
  schedules = explorer.run(
      {[&] { take(ring, &feed_slot_claim, 0, 1); }, [&] { take(ring, &feed_slot_claim, 0, 0); },
       [&] {
         found = read(ring, owns);
         if (found.rows == ROWS) release(ring, 0);
       }},
      [&] {
        ring = {{.state = 1, .ahead = 0, .rows = 1, .one = 1}, {1, 0}};
        found = {};
      },
      [&] {
        const std::uint64_t state = ring.slot.state;
        bool is_wrong = found.is_wrong || (state & FEED_SLOT_OWNED) != 0 || ring.slot.rows != feed_slot_row(state);
        for (std::uint32_t row = 0; row < feed_slot_row(state); row++)
          is_wrong |= ring.rows[row] != feed_slot_batch(state) + 1;
        wrong += is_wrong;
        if (is_wrong) explorer.stop();
        whole += found.rows == ROWS && feed_slot_batch(state) == SLOTS;
      });
  return wrong;
}

// Batch 0 is complete. One processor takes batch 2, another one late duplicates of batch 0, while the reader releases
// it. Returns how many schedules left a wrong row where the state says that there is a right one: at most one.
std::size_t wrong_after_release(const Claim& claim, std::size_t& schedules, std::size_t& filled) {
  std::size_t wrong = 0;
  Ring ring;
  Explorer explorer;
  schedules = explorer.run(
      {[&] {
         for (std::uint32_t row = 0; row < ROWS; row++) take(ring, claim, SLOTS, row);
       },
       [&] { take(ring, claim, 0, 0); }, [&] { release(ring, 0); }},
      [&] {
        ring = {{.state = ROWS, .ahead = 0, .rows = ROWS, .one = 1}, {1, 1}};
      },
      [&] {
        const std::uint64_t state = ring.slot.state;
        const std::uint32_t taken = feed_slot_row(state), batch = feed_slot_batch(state);
        bool is_wrong = (state & FEED_SLOT_OWNED) != 0 || ring.slot.rows != taken;
        for (std::uint32_t row = 0; row < taken; row++) is_wrong |= ring.rows[row] != batch + 1;
        wrong += is_wrong;
        if (is_wrong) explorer.stop();
        filled += batch == SLOTS && taken == ROWS;
      });
  return wrong;
}

}  // namespace

TEST_CASE("no interleaving of two processors and the reader leaves a wrong row") {
  std::size_t schedules = 0, filled = 0;
  CHECK(wrong_after_release(&feed_slot_claim, schedules, filled) == 0);
  CHECK(schedules > 100);
  CHECK(filled > 0);  // some of them took the next batch whole
}

TEST_CASE("a claim that looks at the batch first and takes the slot later is found out") {
  const Claim careless = [](feed_slot* slot, std::uint32_t batch, std::uint32_t row, __u64* state) {
    const __u64 found = FEED_SLOT_LOAD(&slot->state);
    if (feed_slot_batch(found) != batch) return FEED_CLAIM_OLD_BATCH;
    const __u64 now = FEED_SLOT_LOAD(&slot->state);  // as if the batch could not have changed
    if ((now & FEED_SLOT_OWNED) != 0) return FEED_CLAIM_BUSY;
    if (row < feed_slot_row(now)) return FEED_CLAIM_OLD_ROW;
    slot->state = now | FEED_SLOT_OWNED;
    *state = now;
    return FEED_CLAIMED;
  };
  std::size_t schedules = 0, filled = 0;
  CHECK(wrong_after_release(careless, schedules, filled) > 0);
}

TEST_CASE("a reader that owns the slot finds whole rows alone, and loses none") {
  std::size_t schedules = 0, whole = 0;
  CHECK(wrong_while_read(true, schedules, whole) == 0);
  CHECK(schedules > 100);
  CHECK(whole > 0);  // some of them read all rows, and released the batch
}

TEST_CASE("a reader that owns nothing is found out") {
  std::size_t schedules = 0, whole = 0;
  CHECK(wrong_while_read(false, schedules, whole) > 0);
}

TEST_CASE("two processors with copies of the same packets fill each row once") {
  Ring ring;
  Explorer explorer;
  const auto all = [&] {
    for (std::uint32_t row = 0; row < ROWS; row++) take(ring, &feed_slot_claim, 0, row);
  };
  std::size_t complete = 0;
  explorer.run(
      {all, all},
      [&] {
        ring = {{.state = 0, .ahead = 0, .rows = 0, .one = 1}, {}};
      },
      [&] {
        CHECK((ring.slot.state & FEED_SLOT_OWNED) == 0);
        CHECK(ring.slot.rows == feed_slot_row(ring.slot.state));
        complete += ring.slot.rows == ROWS;
        // A row behind the next one says that there is a gap, and the batch that has it.
        CHECK(feed_slot_batch(ring.slot.ahead) == 0);
      });
  CHECK(complete > 0);
}
