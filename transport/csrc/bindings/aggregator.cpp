// SPDX-License-Identifier: Apache-2.0
#include "bindings/aggregator.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "aggregation/server.hpp"
#include "bindings/errors.hpp"

using namespace nanobind::literals;

namespace sennit::bindings {
namespace {

using aggregation::Server;

class PyAggregator {
 public:
  PyAggregator(const std::vector<std::string>& addresses, uint16_t port, size_t memory_bytes, uintptr_t arena)
      : server_(guarded([&] {
          auto* const given = reinterpret_cast<std::byte*>(arena);
          const std::span<std::byte> memory =
              given == nullptr ? std::span<std::byte>() : std::span(given, memory_bytes);
          return std::make_unique<Server>(addresses, port, memory_bytes, memory);
        })) {}

  void run(double seconds) {
    const auto duration = std::chrono::microseconds(static_cast<int64_t>(std::clamp(seconds, 0.0, 1e6) * 1e6));
    guarded([&] {
      nb::gil_scoped_release release;
      server_->run(duration);
    });
  }

  uint16_t port() const { return server_->port(); }

  nb::dict counters() const {
#define SENNIT_NAME(constant, name) #name,
    static constexpr std::array NAMES = {AGGREGATION_EACH_VERDICT(SENNIT_NAME) "answers", "unanswered",
                                         "received_bytes", "sent_bytes"};
#undef SENNIT_NAME
    static_assert(NAMES.size() * sizeof(uint64_t) == sizeof(aggregation_counters));
    nb::dict found;
    const auto* numbers = reinterpret_cast<const uint64_t*>(&server_->counters());
    for (size_t n = 0; n < NAMES.size(); ++n) found[NAMES[n]] = numbers[n];
    found["kernel_drops"] = server_->kernel_drops();
    return found;
  }

  nb::list jobs() const {
    nb::list found;
    for (const auto& job : server_->jobs())
      found.append(nb::make_tuple(job.number, job.leaves, job.window, job.idle_s, job.slots_open));
    return found;
  }

 private:
  std::unique_ptr<Server> server_;
};

}  // namespace

void bind_aggregator(nb::module_& module) {
  nb::class_<PyAggregator>(module, "Aggregator", "A store of leaves behind UDP sockets (aggregation/server.hpp).")
      .def(nb::init<const std::vector<std::string>&, uint16_t, size_t, uintptr_t>(), "addresses"_a, "port"_a,
           nb::kw_only(), "memory_bytes"_a, "arena"_a = 0)
      .def("run", &PyAggregator::run, "seconds"_a, "Answers datagrams for so long; a signal may end it earlier.")
      .def_prop_ro("port", &PyAggregator::port)
      .def("counters", &PyAggregator::counters, "Datagrams by what became of them, and answers.")
      .def("jobs", &PyAggregator::jobs, "(number, leaves, window, seconds without packets, slots open) of each.");
}

}  // namespace sennit::bindings
