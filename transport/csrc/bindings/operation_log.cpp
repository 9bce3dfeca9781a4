// SPDX-License-Identifier: Apache-2.0
#include "bindings/operation_log.hpp"

#include <nanobind/stl/string_view.h>

#include "bindings/errors.hpp"
#include "executor/engine.hpp"
#include "executor/lent_time.hpp"
#include "executor/operation_log.hpp"

namespace sennit::bindings {

using namespace nb::literals;

void bind_operation_log(nb::module_& module) {
  module.def(
      "operation_log_begin",
      [](int file, uint64_t offset, size_t room) { OperationLog::shared().begin(file, offset, room); }, "file"_a,
      "offset"_a, "room"_a,
      "Writes the last `room` operations of all groups to this file descriptor from now on, at this offset, a multiple "
      "of the page size (executor/operation_log.hpp has the format).");
  module.def(
      "operation_log_end", [] { OperationLog::shared().end(); }, "Stops.");
  module.def(
      "operation_log_name",
      [](uintptr_t group, std::string_view name) {
        OperationLog::shared().name_group(static_cast<const OperationHost*>(reinterpret_cast<const Engine*>(group)),
                                          name);
      },
      "group"_a, "name"_a, "Names the group with this handle in the log.");
  module.def("lent_time_count", &LentTime::count, "is_on"_a,
             "Counts the processor time of posts and waits from now on. Each call with True takes one with False.");
  module.def("lent_time_ns", &LentTime::total_ns,
             "Processor time that threads of the caller spent in posts and waits, while it was counted.");
}

}  // namespace sennit::bindings
