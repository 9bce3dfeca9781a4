// SPDX-License-Identifier: Apache-2.0
// The tracepoints of the data plane: user-level statically defined tracing (USDT), which perf, bcc, bpftrace and libbpf
// read from the ELF notes of this library. The provider is `sennit`. Names and arguments are an interface, described in
// docs/reference/tracepoints.md. bpftrace reads the first six arguments.
//
// A tracepoint without a listener is two nops: no branch, and no load beyond what its arguments need. So arguments are
// values at hand, of fixed width, and never computed for the tracepoint alone. Tracepoints fire in the simulator too.
#pragma once

#include <cstddef>
#include <cstdint>

#if SENNIT_TRACE_RECORDED
#include <string_view>
#include <type_traits>
#include <vector>

// Hits kept for the tests of this library: what a tracer would see.
namespace sennit::trace {

struct Hit {
  std::string_view name;
  std::vector<uint64_t> arguments;
};

// Where hits of this thread go. Null: nowhere.
inline thread_local std::vector<Hit>* recorder = nullptr;

template <class Argument>
uint64_t number_of(Argument argument) {
  if constexpr (std::is_pointer_v<Argument>)
    return reinterpret_cast<uintptr_t>(argument);
  else
    return static_cast<uint64_t>(argument);
}

template <class... Arguments>
void record(std::string_view name, Arguments... arguments) {
  if (recorder != nullptr) recorder->push_back({name, {number_of(arguments)...}});
}

}  // namespace sennit::trace

#define SENNIT_TRACEPOINT_RECORD(name, ...) sennit::trace::record(#name, ##__VA_ARGS__)
#else
#define SENNIT_TRACEPOINT_RECORD(name, ...) static_cast<void>(0)
#endif

#if SENNIT_USDT
#define SDT_USE_VARIADIC
#include <sys/sdt.h>
#if defined(__x86_64__)
// A nop of five bytes after the usual one. Linux 6.18 puts a call there instead of a trap, which takes a quarter less
// time. Older tracers use the first nop, which every kernel emulates (as in github.com/libbpf/usdt).
#undef _SDT_NOP
#define _SDT_NOP \
  nop;           \
  .nops 5
#endif
#define SENNIT_TRACEPOINT(name, ...)               \
  (SENNIT_TRACEPOINT_RECORD(name, ##__VA_ARGS__)); \
  STAP_PROBEV(sennit, name, ##__VA_ARGS__)
#else
#define SENNIT_TRACEPOINT(name, ...)               \
  (SENNIT_TRACEPOINT_RECORD(name, ##__VA_ARGS__)); \
  sennit::trace::discard(__VA_ARGS__)
#endif

namespace sennit::trace {

template <class... Arguments>
inline void discard(const Arguments&...) {}

// The two ranks of a flow. Only tracepoints need them.
struct Ends {
  uint32_t rank, peer;
};

inline constexpr uint32_t NO_PEER = UINT32_MAX, NO_PATH = UINT32_MAX;

// What was made reachable: memory registered with a device, a window onto such memory, a key of a port that checks each
// packet itself, or a file of /dev/shm.
enum class Memory : uint32_t { region = 0, window = 1, key = 2, segment = 3 };
enum class Registration : uint32_t { made = 0, reused = 1, released = 2 };

// Where an error was met. The comment says what its number is.
enum class PortError : uint32_t {
  send = 0,        // errno: the kernel did not take the packets, so they are lost
  refused = 1,     // errno: a packet came back, because nobody listens there
  receive = 2,     // errno; ibv_wc_status: a message that a device dropped
  completion = 3,  // ibv_wc_status: a queue pair is in error
  queue_pair = 4,  // ibv_event_type: as above; 0: it takes no requests
  port_down = 5,   // ibv_event_type
  device = 6,      // ibv_event_type, or 0 if there was none: the device cannot be used any more
};

// `operation` tells the operations in flight apart. Only collectives have a sequence number above 0.
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
inline void rtt_sample(Ends ends, uint32_t path, uint64_t rtt_us) {
  SENNIT_TRACEPOINT(rtt_sample, ends.rank, ends.peer, path, rtt_us);
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

inline void registration(uint32_t rank, Memory memory, Registration what, uint32_t key, const void* address,
                         uint64_t size_bytes) {
  SENNIT_TRACEPOINT(registration, rank, static_cast<uint32_t>(memory), static_cast<uint32_t>(what), key, address,
                    size_bytes);
}
inline void port_error(uint32_t rank, uint32_t peer, uint32_t path, PortError where, uint32_t error) {
  SENNIT_TRACEPOINT(port_error, rank, peer, path, static_cast<uint32_t>(where), error);
}

}  // namespace sennit::trace
