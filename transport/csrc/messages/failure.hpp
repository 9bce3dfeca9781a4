// SPDX-License-Identifier: Apache-2.0
// What a rank tells the others when it ends the group: the reason, and the ranks to blame.
//
// The notice is text, so that people can read it in a packet capture: "lost 2,5: rank 2 process ended", or the reason
// alone if no rank is to blame. Every rank that hears a notice repeats it. So every survivor's error names the rank
// that is gone, not the rank that reported it.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sennit {

struct FailureNotice {
  std::vector<uint32_t> lost;  // ascending
  std::string reason;

  std::string encode() const {
    if (lost.empty()) return reason;
    std::string text(PREFIX);
    for (const uint32_t rank : lost) text.append(text.size() == PREFIX.size() ? "" : ",").append(std::to_string(rank));
    return text.append(": ").append(reason);
  }

  // Ranks outside the world are left out, because the text came from the network.
  static FailureNotice decode(std::string_view text, uint32_t world) {
    FailureNotice notice;
    std::string_view rest = text;
    if (rest.starts_with(PREFIX)) {
      rest.remove_prefix(PREFIX.size());
      for (;;) {
        uint32_t rank = 0;
        const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), rank);
        if (error != std::errc()) return {{}, std::string(text)};
        if (rank < world) notice.lost.push_back(rank);
        rest.remove_prefix(static_cast<size_t>(end - rest.data()));
        if (!rest.starts_with(',')) break;
        rest.remove_prefix(1);
      }
      if (!rest.starts_with(": ")) return {{}, std::string(text)};
      rest.remove_prefix(2);
      std::sort(notice.lost.begin(), notice.lost.end());
      notice.lost.erase(std::unique(notice.lost.begin(), notice.lost.end()), notice.lost.end());
    }
    notice.reason = rest;
    return notice;
  }

 private:
  static constexpr std::string_view PREFIX = "lost ";
};

}  // namespace sennit
