// SPDX-License-Identifier: Apache-2.0
// How much memory this process can still use.
#pragma once

#include <cstdint>
#include <string>

namespace sennit {

// `MemAvailable` of the host, or less if the control group of this process (v1 or v2), or one around it, has less left.
// UINT64_MAX without any information. `proc` and `cgroup` are where these file systems are.
uint64_t available_bytes(const std::string& proc = "/proc", const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace sennit
