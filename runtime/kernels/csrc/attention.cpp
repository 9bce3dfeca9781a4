// SPDX-License-Identifier: Apache-2.0
#include "attention.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#if defined(SENNIT_X86_KERNELS)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "instruction_sets.hpp"
#include "parallel.hpp"

namespace sennit::kernels {

#if defined(SENNIT_X86_KERNELS)
namespace amx {
extern const AttentionKernels tile_attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels, tile_attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels, tile_attention_kernels;
}
#endif
namespace portable {
extern const AttentionKernels attention_kernels, tile_attention_kernels;
}

namespace {

#if defined(SENNIT_X86_KERNELS)
// Registers of 8 KiB are saved for threads of processes that have asked for them alone (Linux, Documentation/arch/x86/
// xstate.rst). Refused on systems that do not save them, and by filters of system calls.
bool may_use_tiles() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_tiles() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("avx512bf16") && find_kernels("avx512") != nullptr && may_use_tiles();
}
#endif

struct AvailableSets {
  std::array<AttentionSet, 4> list;
  std::size_t count = 0;

  AvailableSets() {
#if defined(SENNIT_X86_KERNELS)
    if (has_tiles()) add("amx", avx512::attention_kernels, amx::tile_attention_kernels);
    if (find_kernels("avx512") != nullptr) add("avx512", avx512::attention_kernels, avx512::tile_attention_kernels);
    if (find_kernels("avx2") != nullptr) add("avx2", avx2::attention_kernels, avx2::tile_attention_kernels);
#endif
    add("portable", portable::attention_kernels, portable::tile_attention_kernels);
  }

  void add(std::string_view name, const AttentionKernels& of_fp32, const AttentionKernels& of_bf16) {
    list[count++] = {name, &of_fp32, &of_bf16};
  }
};

}  // namespace

std::span<const AttentionSet> attention_sets() {
  static const AvailableSets found;
  return {found.list.data(), found.count};
}

const AttentionSet* find_attention(std::string_view instruction_set) {
  for (const AttentionSet& set : attention_sets())
    if (set.name == instruction_set) return &set;
  return nullptr;
}

namespace {

// The longest sequences come first, so that no thread ends with one alone.
template <typename Job>
void for_each_head(const Attention& attention, unsigned threads, Job job) {
  std::vector<std::size_t> order(attention.sequences);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto length = [&](std::size_t sequence) {
    return attention.offsets[sequence + 1] - attention.offsets[sequence];
  };
  if (threads > 1)
    std::stable_sort(order.begin(), order.end(), [&](auto one, auto other) { return length(one) > length(other); });
  std::vector<AttentionScratch> scratch(std::max(threads, 1u));
  parallel_for(threads, attention.sequences * attention.heads, [&](std::size_t task, unsigned worker) {
    const std::size_t sequence = order[task / attention.heads];
    if (length(sequence) > 0) job(sequence, task % attention.heads, scratch[worker]);
  });
}

}  // namespace

void attend(const AttentionSet& set, const Attention& attention, const AttentionResult& result, unsigned threads) {
  const AttentionKernels& kernels = set.of(attention);
  for_each_head(attention, threads, [&](std::size_t sequence, std::size_t head, AttentionScratch& scratch) {
    kernels.attend(attention, result, sequence, head, scratch);
  });
}

void differentiate(const AttentionSet& set, const Attention& attention, const AttentionGradients& gradients,
                   unsigned threads) {
  const AttentionKernels& kernels = set.of(attention);
  for_each_head(attention, threads, [&](std::size_t sequence, std::size_t head, AttentionScratch& scratch) {
    kernels.differentiate(attention, gradients, sequence, head, scratch);
  });
  if (gradients.bias == nullptr) return;
  const std::size_t entries = attention.heads * attention.bias_entries();
  float* total = gradients.bias + attention.sequences * entries;
  for (std::size_t sequence = 0; sequence < attention.sequences; sequence++)
    for (std::size_t entry = 0; entry < entries; entry++) total[entry] += gradients.bias[sequence * entries + entry];
}

}  // namespace sennit::kernels
