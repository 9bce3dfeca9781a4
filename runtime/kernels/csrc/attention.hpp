// SPDX-License-Identifier: Apache-2.0
// Attention over jagged sequences (docs/reference/attention.md): its arguments, and what runs it on threads. Plain
// pointers to memory of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tile_products.hpp"

namespace sennit::kernels {

// Rows of all sequences, one after another: [rows, heads, dim]. The last stride is 1.
struct HeadRows {
  void* data;
  std::size_t row_stride, head_stride, dim;  // Strides in elements.
};

struct Attention {
  HeadRows query, key, value;   // Query and key have one dim. Not written.
  const std::int64_t* offsets;  // [sequences + 1].
  const std::int64_t* targets;  // [sequences]: how many of a sequence's last positions are candidates. Null: none.
  std::size_t sequences, heads;
  std::size_t context;  // The first positions of a sequence, which attend to the whole history and share a place.
  float scale;
  float share;  // What a weight of `silu` is multiplied with. Not used with softmax.
  bool is_softmax;
  bool is_causal;
  bool is_bf16;         // Of query, key, value, and what has their shapes. Otherwise float32.
  std::int64_t window;  // The largest distance at which a position attends to another one.

  // Biases of scores, added by distance and by difference of time. Null: none.
  const float* position_bias;      // [heads, positions].
  std::size_t positions;           // Distances from positions - 1 on share the last entry.
  const float* time_bias;          // [heads, boundaries + 1].
  const std::int64_t* times;       // [rows].
  const std::int64_t* boundaries;  // Rising, above 0.
  std::size_t boundary_count;

  std::size_t bias_entries() const {
    return (position_bias == nullptr ? 0 : positions) + (time_bias == nullptr ? 0 : boundary_count + 1);
  }
};

struct AttentionResult {
  HeadRows output;    // Of the value's dim.
  float* statistics;  // [rows, heads, 2]: the greatest score, 1 / the sum of exponentials. Null with silu.
};

struct AttentionGradients {
  HeadRows output;          // The gradient that arrives. Not written.
  const float* statistics;  // As the forward pass left them.
  HeadRows query, key, value;
  // [heads, bias_entries()], positions first, behind one such matrix for each sequence, of zeros: sums of sequences are
  // added one after another. Null if no gradient of biases is wanted.
  float* bias;
};

struct AttentionScratch {
  std::vector<std::vector<float>> pieces;
};

// One head of one sequence.
struct AttentionKernels {
  void (*attend)(const Attention&, const AttentionResult&, std::size_t sequence, std::size_t head, AttentionScratch&);
  void (*differentiate)(const Attention&, const AttentionGradients&, std::size_t sequence, std::size_t head,
                        AttentionScratch&);
  void (*multiply)(const TileProducts&);  // What those of bfloat16 are made of. Null for float32.
};

// An instruction set, and its kernels for float32 and for bfloat16.
struct AttentionSet {
  std::string_view name;
  const AttentionKernels *of_fp32, *of_bf16;

  const AttentionKernels& of(const Attention& attention) const { return attention.is_bf16 ? *of_bf16 : *of_fp32; }
};

// Those that this processor has, fastest first: of `available_kernels()`, and "amx" in front where the processor has
// tiles of bfloat16 and the kernel lets this process use them.
std::span<const AttentionSet> attention_sets();

// Null if this processor does not have that set.
const AttentionSet* find_attention(std::string_view instruction_set);

// All heads of all sequences. No thread changes a bit.
void attend(const AttentionSet& set, const Attention& attention, const AttentionResult& result, unsigned threads);
void differentiate(const AttentionSet& set, const Attention& attention, const AttentionGradients& gradients,
                   unsigned threads);

}  // namespace sennit::kernels
