// SPDX-License-Identifier: Apache-2.0
#include "attention.hpp"

#include <algorithm>
#include <numeric>

#include "instruction_sets.hpp"
#include "parallel.hpp"

namespace sennit::kernels {

#if defined(SENNIT_X86_KERNELS)
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
#endif
namespace portable {
extern const AttentionKernels attention_kernels;
}

const AttentionKernels* find_attention(std::string_view instruction_set) {
  if (find_kernels(instruction_set) == nullptr) return nullptr;
#if defined(SENNIT_X86_KERNELS)
  if (instruction_set == "avx512") return &avx512::attention_kernels;
  if (instruction_set == "avx2") return &avx2::attention_kernels;
#endif
  return &portable::attention_kernels;
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

void attend(const AttentionKernels& kernels, const Attention& attention, const AttentionResult& result,
            unsigned threads) {
  for_each_head(attention, threads, [&](std::size_t sequence, std::size_t head, AttentionScratch& scratch) {
    kernels.attend(attention, result, sequence, head, scratch);
  });
}

void differentiate(const AttentionKernels& kernels, const Attention& attention, const AttentionGradients& gradients,
                   unsigned threads) {
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
