// SPDX-License-Identifier: Apache-2.0
// Every instruction set gives the results of the definition, computed in 128 bits.
#include <doctest/doctest.h>

#include <limits>
#include <random>
#include <vector>

#include "../../../ebpf/include/operators.h"
#include "id_kernels.hpp"
#include "xxh64.hpp"

using namespace sennit::offload;

namespace {

constexpr std::int64_t LEAST = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t MOST = std::numeric_limits<std::int64_t>::max();

std::vector<std::int64_t> numbers(std::mt19937_64& random, std::size_t count) {
  std::vector<std::int64_t> found{0, 1, -1, LEAST, LEAST + 1, MOST, MOST - 1, 1ll << 32, -(1ll << 32), (1ll << 32) - 1};
  while (found.size() < count) found.push_back(static_cast<std::int64_t>(random() >> random() % 64));
  found.resize(count);
  return found;
}

std::vector<const IdKernels*> variants() {
  std::vector<const IdKernels*> found{&portable::ID_KERNELS};
#if defined(SENNIT_X86_KERNELS)
  if (has_avx512()) found.push_back(&avx512::ID_KERNELS);
#endif
  return found;
}

}  // namespace

TEST_CASE("ids are hashed and divided alike, whatever the vectors and the number of ids") {
  std::mt19937_64 random(1);
  for (std::int64_t divisor : numbers(random, 200)) {
    if (divisor < 1) continue;
    for (const std::size_t count : {0, 1, 7, 8, 9, 64, 75}) {
      const auto ids = numbers(random, count);
      const auto salt = static_cast<std::int64_t>(random());
      for (const IdKernels* kernels : variants()) {
        std::vector<std::int64_t> hashed(count), rest(count), of_texts(count);
        kernels->sigrid_hash(ids.data(), hashed.data(), count, salt, divisor);
        kernels->positive_modulus(ids.data(), rest.data(), count, divisor);
        const auto* const texts = reinterpret_cast<const char*>(ids.data());
        kernels->sigrid_hash_of_8(texts, of_texts.data(), count, salt, divisor);
        for (std::size_t i = 0; i < count; i++) {
          const auto hash = hash_combine(static_cast<__u64>(salt), twang_mix64(static_cast<__u64>(ids[i])));
          REQUIRE(hashed[i] == floor_mod(static_cast<__s64>(hash), divisor));
          REQUIRE(rest[i] == floor_mod(ids[i], divisor));
          const auto of_text = hash_combine(static_cast<__u64>(salt), twang_mix64(xxh64(texts + 8 * i, 8)));
          REQUIRE(of_texts[i] == floor_mod(static_cast<__s64>(of_text), divisor));
        }
      }
    }
  }
}
