// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs_joint_exposure.hpp"

namespace sennit {

bool VerbsJointExposure::is_open(uint64_t region, flow::Keys& keys) {
  keys.count = static_cast<uint32_t>(devices_.size());
  bool is_open = true;
  for (uint32_t index = 0; index < keys.count; ++index) {
    flow::Keys own;
    is_open &= devices_[index]->is_open(region, own);
    keys.of[index] = own.of[0];
  }
  return is_open;
}

bool VerbsJointExposure::close_all() {
  bool is_closed = true;
  for (VerbsExposure* device : devices_) is_closed &= device->close_all();
  return is_closed;
}

std::string_view VerbsJointExposure::failure() const {
  for (const VerbsExposure* device : devices_)
    if (!device->failure().empty()) return device->failure();
  return {};
}

}  // namespace sennit
