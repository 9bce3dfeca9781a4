/* SPDX-License-Identifier: Apache-2.0 */
/* The session `loss` (docs/how-to/trace.md): what each path loses, how soon that is known, and what is sent again. */
#include <uapi/linux/ptrace.h>
#include "slots.h"

#define PATHS_MAX 10240
#define LATENCIES_MAX 65536

enum { GOOD, SKIP, BAD, PROBING };

struct path {
	u32 process, rank, peer, number;
};

struct total {
	u64 lost, retransmitted, moved, timeouts, turned_bad, readmitted;
};

struct latency {
	struct path path;
	u32 slot, unused;
};

BPF_HASH(totals, struct path, struct total, PATHS_MAX);
BPF_HASH(latencies, struct latency, u64, LATENCIES_MAX);

static __always_inline struct total *total_of(struct path *path)
{
	struct total zero = {};
	struct total *found = totals.lookup_or_try_init(path, &zero);

	if (!found)
		count_uncounted(MAP_FULL);
	return found;
}

/* (bcc finds the arguments of a tracepoint by the function that reads them, so each function reads its own.) */
static inline struct path here(void)
{
	struct path path = {.process = bpf_get_current_pid_tgid() >> 32};

	return path;
}

int packet_lost(struct pt_regs *ctx)
{
	struct path path = here();
	bpf_usdt_readarg(1, ctx, &path.rank);
	bpf_usdt_readarg(2, ctx, &path.peer);
	bpf_usdt_readarg(3, ctx, &path.number);

	struct total *total = total_of(&path);
	if (total)
		lock_xadd(&total->lost, 1);
	struct latency latency = {.path = path};
	u64 sent_us = 0;
	bpf_usdt_readarg(5, ctx, &sent_us);
	u64 now_us = bpf_ktime_get_ns() / 1000;
	latency.slot = slot_of(now_us > sent_us ? now_us - sent_us : 0);
	u64 none = 0;
	u64 *count = latencies.lookup_or_try_init(&latency, &none);
	if (count)
		lock_xadd(count, 1);
	else
		count_uncounted(MAP_FULL);
	return 0;
}

int retransmit(struct pt_regs *ctx)
{
	struct path path = here();
	bpf_usdt_readarg(1, ctx, &path.rank);
	bpf_usdt_readarg(2, ctx, &path.peer);
	bpf_usdt_readarg(3, ctx, &path.number);

	u32 path_before = 0;
	bpf_usdt_readarg(4, ctx, &path_before);

	struct total *total = total_of(&path);
	if (!total)
		return 0;
	lock_xadd(&total->retransmitted, 1);
	lock_xadd(&total->moved, path_before != path.number);
	return 0;
}

int probe_timeout(struct pt_regs *ctx)
{
	struct path path = here();
	bpf_usdt_readarg(1, ctx, &path.rank);
	bpf_usdt_readarg(2, ctx, &path.peer);
	bpf_usdt_readarg(3, ctx, &path.number);

	struct total *total = total_of(&path);
	if (total)
		lock_xadd(&total->timeouts, 1);
	return 0;
}

int path_state(struct pt_regs *ctx)
{
	struct path path = here();
	bpf_usdt_readarg(1, ctx, &path.rank);
	bpf_usdt_readarg(2, ctx, &path.peer);
	bpf_usdt_readarg(3, ctx, &path.number);

	u32 before = 0, after = 0;
	bpf_usdt_readarg(4, ctx, &before);
	bpf_usdt_readarg(5, ctx, &after);

	struct total *total = total_of(&path);
	if (!total)
		return 0;
	int was_bad = before == BAD || before == PROBING;
	int is_bad = after == BAD || after == PROBING;
	lock_xadd(&total->turned_bad, is_bad && !was_bad);
	lock_xadd(&total->readmitted, was_bad && !is_bad);
	return 0;
}
