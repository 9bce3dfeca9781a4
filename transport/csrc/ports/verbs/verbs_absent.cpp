// SPDX-License-Identifier: Apache-2.0
// Stands in for the verbs port in a build without the headers of libibverbs.
#include <stdexcept>

#include "ports/verbs/device_port.hpp"

namespace sennit {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "verbs: this build has no verbs port, because it did not find infiniband/verbs.h; install the headers of "
      "libibverbs (Debian: libibverbs-dev) and build again, or choose another SENNIT_TRANSPORT");
}

}  // namespace

bool has_verbs() { return false; }
std::unique_ptr<DevicePort> open_verbs(uint32_t, uint32_t, const VerbsConfig&) { refuse(); }
std::vector<ListedPort> list_device_ports() { refuse(); }

}  // namespace sennit
