/* SPDX-License-Identifier: Apache-2.0 */
/* The session `ops` (docs/how-to/trace.md): count, duration and bytes of operations. */
#include <uapi/linux/ptrace.h>
#include "slots.h"

#define OPERATIONS_IN_FLIGHT 16384
#define GROUPS_MAX 10240
#define LATENCIES_MAX 65536

struct operation {
	u64 address; /* of the operation's object, which lives as long as the operation */
	u32 process;
	u32 unused;
};

struct begun {
	u64 at_ns, signature, sent_bytes, received_bytes;
};

struct group {
	u32 process, rank, kind, size_log2;
};

struct total {
	u64 count, failed, sent_bytes, received_bytes, time_ns;
};

struct latency {
	struct group group;
	u32 slot, unused;
};

BPF_TABLE("lru_hash", struct operation, struct begun, begun, OPERATIONS_IN_FLIGHT);
BPF_HASH(totals, struct group, struct total, GROUPS_MAX);
BPF_HASH(latencies, struct latency, u64, LATENCIES_MAX);

int operation_begin(struct pt_regs *ctx)
{
	struct operation operation = {.process = bpf_get_current_pid_tgid() >> 32};
	struct begun now = {.at_ns = bpf_ktime_get_ns()};

	bpf_usdt_readarg(2, ctx, &operation.address);
	bpf_usdt_readarg(4, ctx, &now.sent_bytes);
	bpf_usdt_readarg(5, ctx, &now.received_bytes);
	bpf_usdt_readarg(6, ctx, &now.signature);
	begun.update(&operation, &now);
	return 0;
}

int operation_end(struct pt_regs *ctx)
{
	struct operation operation = {.process = bpf_get_current_pid_tgid() >> 32};
	struct latency latency = {};
	u32 status = 0;

	bpf_usdt_readarg(2, ctx, &operation.address);
	struct begun *start = begun.lookup(&operation);
	if (!start) { /* posted before the session began, or with too many others */
		count_uncounted(UNMATCHED);
		return 0;
	}
	u64 time_ns = bpf_ktime_get_ns() - start->at_ns;
	u64 bytes = start->sent_bytes > start->received_bytes ? start->sent_bytes : start->received_bytes;

	latency.group.process = operation.process;
	bpf_usdt_readarg(1, ctx, &latency.group.rank);
	latency.group.kind = start->signature >> 56;
	latency.group.size_log2 = bytes ? bpf_log2l(bytes) - 1 : 0;
	latency.slot = slot_of(time_ns / 1000);
	bpf_usdt_readarg(3, ctx, &status);

	struct total zero = {};
	struct total *total = totals.lookup_or_try_init(&latency.group, &zero);
	if (total) {
		lock_xadd(&total->count, 1);
		lock_xadd(&total->failed, status != 0);
		lock_xadd(&total->sent_bytes, start->sent_bytes);
		lock_xadd(&total->received_bytes, start->received_bytes);
		lock_xadd(&total->time_ns, time_ns);
	} else {
		count_uncounted(MAP_FULL);
	}
	u64 none = 0;
	u64 *count = latencies.lookup_or_try_init(&latency, &none);
	if (count)
		lock_xadd(count, 1);
	else
		count_uncounted(MAP_FULL);
	begun.delete(&operation);
	return 0;
}
