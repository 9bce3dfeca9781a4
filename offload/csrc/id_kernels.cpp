// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set. CMake compiles this file once for each and names it by SENNIT_ISA. Plain loops
// that the compiler vectorises. AVX2 has no variant: without a 64-bit multiplication it is no faster than scalar code.
#include "id_kernels.hpp"

#include <limits>

// The BPF programs use the same headers.
#include "../../ebpf/include/checksum.h"
#include "../../ebpf/include/operators.h"

namespace sennit::offload::SENNIT_ISA {
namespace {

// The upper half of a 128-bit product.
inline std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
#if defined(__AVX512DQ__)
  // Computed from 32-bit products, which vectors have.
  const std::uint64_t a_low = a & 0xffffffff, a_high = a >> 32, b_low = b & 0xffffffff, b_high = b >> 32;
  const std::uint64_t middle = a_high * b_low + (a_low * b_low >> 32);
  const std::uint64_t other = a_low * b_high + (middle & 0xffffffff);
  return a_high * b_high + (middle >> 32) + (other >> 32);
#else
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// The remainder with the divisor's sign, by multiplication with the inverse (Barrett). The quotient of a number below
// 2^64 is right or one too low.
class FloorMod {
 public:
  explicit FloorMod(std::int64_t divisor)
      : divisor_(static_cast<std::uint64_t>(divisor)),
        inverse_(divisor == 1 ? std::numeric_limits<std::uint64_t>::max()
                              : static_cast<std::uint64_t>((static_cast<unsigned __int128>(1) << 64) / divisor_)) {}

  std::int64_t operator()(std::uint64_t value) const {
    // A negative number is the complement of a non-negative one, so its remainder counts from the other end.
    const auto sign = static_cast<std::uint64_t>(static_cast<std::int64_t>(value) >> 63);
    const std::uint64_t magnitude = value ^ sign;
    const std::uint64_t quotient = multiply_high(magnitude, inverse_);
    std::uint64_t remainder = magnitude - quotient * divisor_;
    // Branchless, because half of all hashes are negative.
    remainder -= divisor_ & (std::uint64_t{0} - static_cast<std::uint64_t>(remainder >= divisor_));
    return static_cast<std::int64_t>((sign & (divisor_ - 1 - remainder)) | (~sign & remainder));
  }

 private:
  std::uint64_t divisor_, inverse_;
};

void sigrid_hash(const std::int64_t* __restrict ids, std::int64_t* __restrict out, std::size_t count, std::int64_t salt,
                 std::int64_t divisor) {
  const FloorMod modulus(divisor);
  const auto first = static_cast<std::uint64_t>(salt);
  for (std::size_t i = 0; i < count; i++)
    out[i] = modulus(hash_combine(first, twang_mix64(static_cast<std::uint64_t>(ids[i]))));
}

void sigrid_hash_of_8(const char* __restrict texts, std::int64_t* __restrict out, std::size_t count, std::int64_t salt,
                      std::int64_t divisor) {
  const FloorMod modulus(divisor);
  const auto first = static_cast<std::uint64_t>(salt);
  for (std::size_t i = 0; i < count; i++) {
    __u64 word;
    __builtin_memcpy(&word, texts + 8 * i, 8);
    const __u64 id = checksum_end(checksum_tail_word(CHECKSUM_PRIME_5 + 8, word));
    out[i] = modulus(hash_combine(first, twang_mix64(id)));
  }
}

void positive_modulus(const std::int64_t* __restrict ids, std::int64_t* __restrict out, std::size_t count,
                      std::int64_t divisor) {
  const FloorMod modulus(divisor);
  for (std::size_t i = 0; i < count; i++) out[i] = modulus(static_cast<std::uint64_t>(ids[i]));
}

}  // namespace

const IdKernels ID_KERNELS{
    .sigrid_hash = sigrid_hash, .sigrid_hash_of_8 = sigrid_hash_of_8, .positive_modulus = positive_modulus};

}  // namespace sennit::offload::SENNIT_ISA
