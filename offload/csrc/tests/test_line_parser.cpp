// SPDX-License-Identifier: Apache-2.0
// Every instruction set cuts alike, and no text makes the parser read outside of it. What it parses to is compared with
// pyarrow in tests/offload/test_text_lines.py.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "line_parser.hpp"
#include "text_kernels.hpp"

using namespace sennit::offload;

namespace {

std::vector<const TextKernels*> kernels_here() {
  std::vector<const TextKernels*> found{&portable::TEXT_KERNELS};
#if defined(SENNIT_X86_KERNELS)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) found.push_back(&avx2::TEXT_KERNELS);
  if (__builtin_cpu_supports("avx512bw")) found.push_back(&avx512::TEXT_KERNELS);
#endif
  return found;
}

std::string any_text(std::mt19937_64& random, std::size_t size, std::string_view signs) {
  std::string made(size, ' ');
  for (char& sign : made) sign = signs[random() % signs.size()];
  return made;
}

// In memory of exactly its size, so that the sanitizer sees each byte that is read behind it.
// `more`: lines beside those that have an end.
bool is_plain(const LineParser& parser, const std::string& text, std::size_t more) {
  const auto lines = static_cast<std::size_t>(std::ranges::count(text, '\n')) + more;
  const auto exact = std::make_unique<char[]>(text.size());
  std::copy(text.begin(), text.end(), exact.get());
  const auto found = parser.parse({exact.get(), text.size()}, lines);
  if (!found) return false;
  for (const ParsedColumn& column : *found)
    if (column.offsets) REQUIRE(static_cast<std::size_t>((*column.offsets)[lines]) <= text.size());
  return true;
}

}  // namespace

TEST_CASE("blocks are cut alike, whatever the vectors") {
  std::mt19937_64 random(1);
  for (int turn = 0; turn < 2'000; turn++) {
    // Bytes beside the signs, and those with the uppermost bit.
    const std::string text =
        any_text(random, TextKernels::BLOCK_BYTES, turn % 2 == 0 ? "\t\n\r\x0b\x08\x89\x8a\xffx" : "xxxxxxxxxx\t\n");
    for (const TextKernels* kernels : kernels_here()) {
      std::array<std::uint32_t, TextKernels::BLOCK_BYTES + 8> ends{};
      const Cuts cuts = kernels->cut(text.data(), '\t', 1000, ends.data());
      Cuts expected;
      for (std::size_t i = 0; i < text.size(); i++) {
        expected.newlines += text[i] == '\n';
        expected.returns += text[i] == '\r';
        if (text[i] == '\n' || text[i] == '\t') REQUIRE(ends[expected.ends++] == 1000 + i);
      }
      REQUIRE(cuts.ends == expected.ends);
      REQUIRE(cuts.newlines == expected.newlines);
      REQUIRE(cuts.returns == expected.returns);
    }
  }
}

TEST_CASE("any text is parsed or left, within its bytes") {
  std::mt19937_64 random(2);
  const LineParser parser(',', 2, {"", "0"}, {{0, "g"}, {1, "u"}});
  const LineParser times(',', 1, {}, {{0, "tss:"}});
  std::size_t plain = 0;
  for (int turn = 0; turn < 20'000; turn++) {
    const std::string text = any_text(random, random() % 40, turn % 2 == 0 ? "01,\n" : "019.-e,\r\n");
    plain += is_plain(parser, text, random() % 2);
    is_plain(times, text, 1);
  }
  CHECK(plain > 100);
  std::string lines;
  for (int line = 0; line < 200; line++)
    lines += std::to_string(line * 12345) + "," + std::string(static_cast<std::size_t>(line) % 30, 'x') + "\n";
  CHECK(is_plain(parser, lines, 0));
  // Every truncation.
  for (std::size_t size = 0; size < lines.size(); size++) is_plain(parser, lines.substr(0, size), 1);
}
