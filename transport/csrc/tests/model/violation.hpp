// SPDX-License-Identifier: Apache-2.0
// A rule that a schedule broke. Thrown only by the model, never through the flow.
#pragma once
#include <stdexcept>
#include <string>

namespace sennit::model {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The text is made only when needed, because this is in the innermost loops.
template <typename Text>
inline void require(bool holds, const Text& text) {
  if (holds) [[likely]]
    return;
  if constexpr (std::is_invocable_v<Text>) {
    throw Violation(text());
  } else {
    throw Violation(text);
  }
}

}  // namespace sennit::model
