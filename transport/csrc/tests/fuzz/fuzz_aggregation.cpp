// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: whatever comes to an aggregator, it stays in its memory, and answers are whole packets.
//
// The input is a list of datagrams: a byte with the number of stripes, a byte that says what to repair, and the bytes.
// Without repairs nearly all would fail at the checksum, and what is behind it would never run.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "aggregation/store.hpp"

namespace sennit {
namespace baseline {
FoldKernel find(sennit_dtype dtype, sennit_reduce reduce);
}
// One variant is enough here.
FoldKernel find_fold(sennit_dtype dtype, sennit_reduce reduce) { return baseline::find(dtype, reduce); }
}  // namespace sennit

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sennit::aggregation;
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  // Kept from run to run, because to clear 4 MiB takes longer than a run. A new store has no jobs.
  static std::vector<Line> lines(Store::MEMORY_MIN_BYTES / sizeof(Line));
  std::fill_n(lines.begin(), sizeof(aggregation_job) * AGGREGATION_JOBS_MAX / sizeof(Line), Line{});
  Store store({reinterpret_cast<std::byte*>(lines.data()), Store::MEMORY_MIN_BYTES});
  uint32_t newest = 0;
  Answers answers;
  while (size >= 2) {
    const uint8_t stripes = data[0], repairs = data[1];
    data += 2, size -= 2;
    const size_t given = std::min(size, HEADER_BYTES + size_t{AGGREGATION_STRIPE_BYTES} * stripes);
    std::vector<std::byte> packet(reinterpret_cast<const std::byte*>(data),
                                  reinterpret_cast<const std::byte*>(data) + given);
    data += given, size -= given;
    if ((repairs & 1) && packet.size() >= HEADER_BYTES) {
      packet.resize(HEADER_BYTES +
                    (packet.size() - HEADER_BYTES) / AGGREGATION_STRIPE_BYTES * AGGREGATION_STRIPE_BYTES);
      Header header{.kind = static_cast<uint8_t>(packet[3]), .job = (repairs & 2) ? newest : 0};
      header.key = (repairs & 4) ? 1 : sennit::wire::load_be64(packet.data() + 8);
      header.block = (repairs & 8) ? static_cast<uint8_t>(packet[23]) : sennit::wire::load_be64(packet.data() + 16);
      header.leaf = static_cast<uint8_t>(packet[29]) % 66;
      header.arithmetic = static_cast<uint8_t>(packet[30]) % 4;
      header.stripes = static_cast<uint8_t>((packet.size() - HEADER_BYTES) / AGGREGATION_STRIPE_BYTES);
      write_header(packet.data(), header);
    }
    if (repairs & 16) store.second_passed();
    answers.clear();
    Endpoint from{};
    from.family = 4;
    from.port = repairs;
    if (store.take(packet, from, answers) >= AGGREGATION_VERDICTS) std::abort();
    for (const auto& answer : answers.all()) {
      Header header;
      if (read_packet(answers.bytes_of(answer), header) != Refusal::none) std::abort();
      if (header.kind == AGGREGATION_JOINED) newest = header.job;
    }
  }
  return 0;
}
