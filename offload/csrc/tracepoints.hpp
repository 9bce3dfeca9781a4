// SPDX-License-Identifier: Apache-2.0
// The tracepoints of ingest (USDT, provider `sennit`). Names and arguments are an interface, described in
// docs/reference/tracepoints.md. A tracepoint without a listener is two nops. transport/csrc/trace/tracepoints.hpp has
// the same, but this library does not know the transport.
#pragma once

#include <cstdint>

#if SENNIT_USDT
#define SDT_USE_VARIADIC
#include <sys/sdt.h>
#if defined(__x86_64__)
// The second nop is for a call instead of a trap, on Linux 6.18.
#undef _SDT_NOP
#define _SDT_NOP \
  nop;           \
  .nops 5
#endif
#define SENNIT_TRACEPOINT(name, ...) STAP_PROBEV(sennit, name, ##__VA_ARGS__)
#else
#define SENNIT_TRACEPOINT(name, ...) sennit::offload::trace::discard(__VA_ARGS__)
#endif

namespace sennit::offload::trace {

template <class... Arguments>
inline void discard(const Arguments&...) {}

// One batch of one rank, from its first row to the end of its use. A session in Python fires these.
inline void batch_begun(std::uint32_t rank, std::uint32_t batch) { SENNIT_TRACEPOINT(batch_begun, rank, batch); }
inline void batch_complete(std::uint32_t rank, std::uint32_t batch, std::uint32_t rows) {
  SENNIT_TRACEPOINT(batch_complete, rank, batch, rows);
}
inline void batch_wanted(std::uint32_t rank, std::uint32_t batch) { SENNIT_TRACEPOINT(batch_wanted, rank, batch); }
inline void batch_taken(std::uint32_t rank, std::uint32_t batch) { SENNIT_TRACEPOINT(batch_taken, rank, batch); }
inline void batch_released(std::uint32_t rank, std::uint32_t batch) { SENNIT_TRACEPOINT(batch_released, rank, batch); }
// `why`: offload/ingest/leases.py.
inline void rows_requested(std::uint32_t rank, std::uint32_t batch, std::uint32_t row, std::uint32_t why) {
  SENNIT_TRACEPOINT(rows_requested, rank, batch, row, why);
}

// From the receiver of the target cpu; `verdict`: receiver.hpp.
inline void datagram_refused(std::uint32_t session, std::uint32_t verdict, const void* address,
                             std::uint64_t size_bytes) {
  SENNIT_TRACEPOINT(datagram_refused, session, verdict, address, size_bytes);
}
// From a feeder. The rows before `next_row` are in the socket; `error` is an errno or 0.
inline void packets_sent(std::uint32_t session, std::uint32_t batch, std::uint32_t first_row, std::uint32_t next_row,
                         std::uint32_t packets, std::uint32_t error) {
  SENNIT_TRACEPOINT(packets_sent, session, batch, first_row, next_row, packets, error);
}

}  // namespace sennit::offload::trace
