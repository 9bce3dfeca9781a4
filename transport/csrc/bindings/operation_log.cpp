// SPDX-License-Identifier: Apache-2.0
#include "bindings/operation_log.hpp"

#include <nanobind/stl/string.h>

#include "bindings/errors.hpp"
#include "executor/engine.hpp"
#include "executor/lent_time.hpp"
#include "executor/operation_log.hpp"

namespace sennit::bindings {

using namespace nb::literals;

void bind_operation_log(nb::module_& module) {
  module.def(
      "operation_log_begin", [](size_t room) { OperationLog::shared().begin(room); }, "room"_a,
      "Keeps the last `room` operations of all groups from now on, and forgets what there was.");
  module.def(
      "operation_log_read",
      [] {
        const OperationLog::Content content = OperationLog::shared().read();
        nb::list records, groups;
        for (const OperationRecord& one : content.records) {
          const bool is_named = one.group != OperationRecord::NO_GROUP;
          records.append(nb::make_tuple(is_named ? content.groups[one.group].c_str() : "", one.sequence,
                                        one.name.data(), one.sent_bytes, one.received_bytes, one.status, one.posted_ns,
                                        one.returned_ns, one.wait_ns, one.end_ns, one.posting_thread,
                                        one.waiting_thread));
        }
        return nb::make_tuple(records, content.lost);
      },
      "The operations, in the order in which their owners let them go, and how many older ones there was no room for. "
      "Each: group, sequence (0: point-to-point), plan, bytes sent, bytes received, status; when it was posted, when "
      "that call was over, when the first wait began (0: none) and when it ended, as time.monotonic_ns; the kernel's "
      "numbers of the threads that posted it and waited.");
  module.def(
      "operation_log_end", [] { OperationLog::shared().end(); }, "Stops, and gives the memory back.");
  module.def(
      "operation_log_name",
      [](uintptr_t group, const std::string& name) {
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
