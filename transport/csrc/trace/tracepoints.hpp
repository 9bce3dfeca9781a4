// SPDX-License-Identifier: Apache-2.0
// The tracepoints of the data plane: user-level statically defined tracing (USDT), as perf, bcc, bpftrace and libbpf
// read it from the ELF notes of this library. Provider `sennit`; names and arguments are an interface, described in
// docs/tracepoints.md; bpftrace reads the first six.
//
// One that nobody listens to is a single nop: no branch, no load beyond what its arguments need. So arguments are
// values at hand, of fixed width, and never computed for the tracepoint alone. They fire in the simulator as well.
#pragma once

#include <cstddef>
#include <cstdint>

#if SENNIT_USDT
#define SDT_USE_VARIADIC
#include <sys/sdt.h>
#define SENNIT_TRACEPOINT(name, ...) STAP_PROBEV(sennit, name, ##__VA_ARGS__)
#else
#define SENNIT_TRACEPOINT(name, ...) sennit::trace::discard(__VA_ARGS__)
#endif

namespace sennit::trace {

template <class... Arguments>
inline void discard(const Arguments&...) {}

// Whose flow it is: both ranks, which the flow itself has no use for.
struct Ends {
  uint32_t rank, peer;
};

// `operation` tells operations in flight from each other; only collectives have a sequence number above 0.
inline void operation_begin(uint32_t rank, const void* operation, const char* name, uint64_t sent_bytes,
                            uint64_t received_bytes, uint64_t signature, uint64_t sequence) {
  SENNIT_TRACEPOINT(operation_begin, rank, operation, name, sent_bytes, received_bytes, signature, sequence);
}
inline void operation_end(uint32_t rank, const void* operation, uint32_t status, uint64_t sequence) {
  SENNIT_TRACEPOINT(operation_end, rank, operation, status, sequence);
}
inline void step_begin(uint32_t rank, const void* operation, uint32_t step, uint32_t kind, uint32_t peer,
                       uint64_t size_bytes) {
  SENNIT_TRACEPOINT(step_begin, rank, operation, step, kind, peer, size_bytes);
}
inline void step_end(uint32_t rank, const void* operation, uint32_t step, uint32_t kind, uint32_t peer,
                     uint64_t size_bytes) {
  SENNIT_TRACEPOINT(step_end, rank, operation, step, kind, peer, size_bytes);
}

inline void packet_sent(Ends ends, uint32_t path, uint32_t immediate, uint32_t size_bytes, uint32_t transmission) {
  SENNIT_TRACEPOINT(packet_sent, ends.rank, ends.peer, path, immediate, size_bytes, transmission);
}
inline void packet_received(Ends ends, uint32_t path, uint32_t immediate, uint32_t size_bytes, uint32_t is_duplicate) {
  SENNIT_TRACEPOINT(packet_received, ends.rank, ends.peer, path, immediate, size_bytes, is_duplicate);
}
inline void sack_received(Ends ends, uint32_t path, uint64_t rtt_us, uint32_t unacknowledged_packets) {
  SENNIT_TRACEPOINT(sack_received, ends.rank, ends.peer, path, rtt_us, unacknowledged_packets);
}
inline void packet_lost(Ends ends, uint32_t path, uint32_t immediate, uint64_t sent_us) {
  SENNIT_TRACEPOINT(packet_lost, ends.rank, ends.peer, path, immediate, sent_us);
}
inline void retransmit(Ends ends, uint32_t path, uint32_t lost_path, uint32_t immediate, uint32_t transmission) {
  SENNIT_TRACEPOINT(retransmit, ends.rank, ends.peer, path, lost_path, immediate, transmission);
}
inline void probe_timeout(Ends ends, uint32_t path, uint32_t unanswered, uint64_t rto_us) {
  SENNIT_TRACEPOINT(probe_timeout, ends.rank, ends.peer, path, unanswered, rto_us);
}
inline void path_state(Ends ends, uint32_t path, uint32_t before, uint32_t after) {
  SENNIT_TRACEPOINT(path_state, ends.rank, ends.peer, path, before, after);
}
inline void credit_stall_begin(Ends ends, uint64_t granted_packets) {
  SENNIT_TRACEPOINT(credit_stall_begin, ends.rank, ends.peer, granted_packets);
}
inline void credit_stall_end(Ends ends, uint64_t granted_packets) {
  SENNIT_TRACEPOINT(credit_stall_end, ends.rank, ends.peer, granted_packets);
}

}  // namespace sennit::trace
