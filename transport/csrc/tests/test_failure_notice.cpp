// SPDX-License-Identifier: Apache-2.0
// The notices about failures that ranks send each other: ranks and text, which may come from anywhere.
#include <doctest/doctest.h>

#include "messages/failure.hpp"
#include "wire/utf8.hpp"

using namespace sennit;

TEST_CASE("a notice of failure keeps its ranks, and a malformed one is kept as plain text") {
  for (const FailureNotice& notice : {FailureNotice{{}, "the disk is full"}, FailureNotice{{3}, "rank 3 process ended"},
                                      FailureNotice{{0, 2, 7}, ""}}) {
    const FailureNotice read = FailureNotice::decode(notice.encode(), 8);
    CHECK(read.lost == notice.lost);
    CHECK(read.reason == notice.reason);
  }
  CHECK(FailureNotice{{2, 5}, "gone"}.encode() == "lost 2,5: gone");
  CHECK(FailureNotice::decode("lost 9,2,2,1: x", 8).lost == std::vector<uint32_t>{1, 2});
  for (const char* text : {"lost", "lost ", "lost 1", "lost 1,", "lost 1,: x", "lost x: y", "lost 99999999999: x"}) {
    CAPTURE(text);
    const FailureNotice read = FailureNotice::decode(text, 8);
    CHECK(read.lost.empty());
    CHECK(read.reason == text);
  }
}

TEST_CASE("a text is cut between characters, and bytes that are not UTF-8 become question marks (RFC 3629)") {
  const std::string text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80";  // 1, 2, 3 and 4 bytes
  const std::vector<size_t> lengths = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10};
  for (size_t max_bytes = 0; max_bytes < lengths.size(); ++max_bytes) {
    CAPTURE(max_bytes);
    CHECK(utf8_prefix(text, max_bytes) == text.substr(0, lengths[max_bytes]));
  }
  CHECK(repaired_utf8(text) == text);
  for (const auto& [broken, repaired] : std::initializer_list<std::pair<std::string, std::string>>{
           {"\x80", "?"},                 // no lead
           {"\xC3", "?"},                 // no end
           {"\xE2\x82", "??"},            //
           {"\xE2\x28\xA1", "?(?"},       // a lead without its followers
           {"\xC0\x80", "??"},            // NUL in two bytes
           {"\xE0\x80\xAF", "???"},       // '/' in three
           {"\xED\xA0\x80", "???"},       // a surrogate
           {"\xF4\x90\x80\x80", "????"},  // beyond Unicode
           {"\xFF\xFE", "??"},            //
           {std::string("x\0y", 3), "x?y"}}) {
    CAPTURE(repaired);
    CHECK(repaired_utf8(broken) == repaired);
  }
}
