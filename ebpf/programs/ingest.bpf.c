// SPDX-License-Identifier: Apache-2.0
// The session `ingest` (docs/how-to/trace.md): how long batches take to arrive, how long they wait for the trainer, and
// how long the trainer waits for them.
#include "slots.h"
#include "tracepoint.h"

#define TRAINERS_MAX 4096
#define BATCHES_MAX 65536
// More than offload/admission.py and offload/ingest/leases.py (Why) have now. Numbers without a place of their own share
// the last: another version of sennit may have more, and another user's process may write any number.
#define VERDICTS 32
#define REASONS 8

struct trainer_key {
  __u32 process, rank;
};

struct trainer {
  __u64 batches, rows, released;
  __u64 first_ns, last_ns;  // of complete batches
  __u64 asked[REASONS];
  __u32 filling_us[SLOTS];  // from the first row of a batch to the last
  __u32 waiting_us[SLOTS];  // the batch was complete, and the trainer had not taken it
  __u32 starved_us[SLOTS];  // the trainer wanted the batch, and it was not complete
};

struct batch_key {
  __u32 process, rank, batch;
};

struct batch {
  __u64 begun_ns, complete_ns, wanted_ns;
};

struct process_key {
  __u32 process, session;
};

struct refused {
  __u64 datagrams[VERDICTS];
};

struct feeder {
  __u64 packets, rows, calls, blocked, errors;
};

#define HASH(name, entries, key_type, value_type) \
  struct {                                        \
    __uint(type, BPF_MAP_TYPE_HASH);              \
    __uint(map_flags, BPF_F_NO_PREALLOC);         \
    __uint(max_entries, entries);                 \
    __type(key, key_type);                        \
    __type(value, value_type);                    \
  } name SEC(".maps")

HASH(trainers, TRAINERS_MAX, struct trainer_key, struct trainer);
HASH(refused, TRAINERS_MAX, struct process_key, struct refused);
HASH(feeders, TRAINERS_MAX, struct process_key, struct feeder);
HASH(batches, BATCHES_MAX, struct batch_key, struct batch);

static const struct trainer fresh_trainer;
static const struct refused fresh_refused;
static const struct feeder fresh_feeder;
static const struct batch fresh_batch;

static __always_inline __u32 this_process(void) { return bpf_get_current_pid_tgid() >> 32; }

static __always_inline struct trainer *trainer_of(__u32 rank) {
  struct trainer_key key = {this_process(), rank};

  return entry_of(&trainers, &key, &fresh_trainer);
}

static __always_inline struct batch *batch_of(__u32 rank, __u32 number) {
  struct batch_key key = {this_process(), rank, number};

  return entry_of(&batches, &key, &fresh_batch);
}

static __always_inline void note(__u32 slots[SLOTS], __u64 since_ns, __u64 now_ns) {
  __sync_fetch_and_add(&slots[slot_of((now_ns - since_ns) / 1000) & (SLOTS - 1)], 1);
}

TRACEPOINT(batch_begun, __u32 rank, __u32 number) {
  struct batch *batch = batch_of(rank, number);

  if (batch) batch->begun_ns = bpf_ktime_get_ns();
}

TRACEPOINT(batch_complete, __u32 rank, __u32 number, __u32 rows) {
  struct trainer *trainer = trainer_of(rank);
  struct batch *batch = batch_of(rank, number);
  __u64 now_ns = bpf_ktime_get_ns();

  if (!trainer || !batch) return;
  batch->complete_ns = now_ns;
  if (trainer->batches == 0) trainer->first_ns = now_ns;
  trainer->last_ns = now_ns;
  __sync_fetch_and_add(&trainer->batches, 1);
  __sync_fetch_and_add(&trainer->rows, rows);
  if (batch->begun_ns)
    note(trainer->filling_us, batch->begun_ns, now_ns);
  else
    count_unmatched();
}

TRACEPOINT(batch_wanted, __u32 rank, __u32 number) {
  struct batch *batch = batch_of(rank, number);

  if (batch) batch->wanted_ns = bpf_ktime_get_ns();
}

TRACEPOINT(batch_taken, __u32 rank, __u32 number) {
  struct trainer *trainer = trainer_of(rank);
  struct batch *batch = batch_of(rank, number);
  __u64 now_ns = bpf_ktime_get_ns();

  if (!trainer || !batch) return;
  if (!batch->complete_ns || !batch->wanted_ns) {
    count_unmatched();
    return;
  }
  note(trainer->waiting_us, batch->complete_ns, now_ns);
  note(trainer->starved_us, batch->wanted_ns, now_ns);
}

TRACEPOINT(batch_released, __u32 rank, __u32 number) {
  struct batch_key key = {this_process(), rank, number};
  struct trainer *trainer = trainer_of(rank);

  if (trainer) __sync_fetch_and_add(&trainer->released, 1);
  bpf_map_delete_elem(&batches, &key);
}

TRACEPOINT(rows_requested, __u32 rank, __u32 number, __u32 row, __u32 why) {
  struct trainer *trainer = trainer_of(rank);

  if (!trainer) return;
  if (why >= REASONS) why = REASONS - 1;
  // The compiler must keep the mask: the verifier does not follow the check of the range above.
  asm volatile("" : "+r"(why));
  __sync_fetch_and_add(&trainer->asked[why & (REASONS - 1)], 1);
}

TRACEPOINT(datagram_refused, __u32 session, __u32 verdict, __u64 address, __u64 size_bytes) {
  struct process_key key = {this_process(), session};
  struct refused *found = entry_of(&refused, &key, &fresh_refused);

  if (!found) return;
  if (verdict >= VERDICTS) verdict = VERDICTS - 1;
  asm volatile("" : "+r"(verdict));
  __sync_fetch_and_add(&found->datagrams[verdict & (VERDICTS - 1)], 1);
}

TRACEPOINT(packets_sent, __u32 session, __u32 number, __u32 first_row, __u32 next_row, __u32 packets, __u32 error) {
  struct process_key key = {this_process(), session};
  struct feeder *feeder = entry_of(&feeders, &key, &fresh_feeder);

  if (!feeder) return;
  __sync_fetch_and_add(&feeder->calls, 1);
  __sync_fetch_and_add(&feeder->packets, packets);
  __sync_fetch_and_add(&feeder->rows, next_row - first_row);
  if (error == 11)  // EAGAIN
    __sync_fetch_and_add(&feeder->blocked, 1);
  else if (error)
    __sync_fetch_and_add(&feeder->errors, 1);
}

#include TRACEPOINT_ENTRIES
