// SPDX-License-Identifier: Apache-2.0
// sennit.testbed._lab: simulated fabrics for sennit.testbed.simulation, the relay of sennit.testbed.topology, a bare
// UDP transfer for the benchmarks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "executor/plan.hpp"
#include "fabric/simulation.hpp"
#include "relay.hpp"
#include "udp_bare.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sennit::fabric;

namespace {

// Events between two looks at Python's signal handlers: some tens of milliseconds.
constexpr uint64_t EVENTS_A_SLICE = 50'000;

constexpr std::array TIERS{"host_up", "leaf_up", "spine_up", "spine_down", "leaf_down", "host_down"};

class PyFabricSimulation {
 public:
  explicit PyFabricSimulation(const nb::dict& values) {
    SimulationConfig config;
    const auto read = [&](const char* name, auto& field) {
      field = nb::cast<std::remove_reference_t<decltype(field)>>(values[name]);
    };
    read("hosts", config.topology.hosts);
    read("hosts_per_leaf", config.topology.hosts_per_leaf);
    read("spines", config.topology.spines);
    read("leaves_per_pod", config.topology.leaves_per_pod);
    read("cores_per_spine", config.topology.cores_per_spine);
    read("rate_gbps", config.link.rate_gbps);
    read("delay_ns", config.link.delay_ns);
    read("queue_limit_bytes", config.link.queue_limit_bytes);
    read("mark_min_bytes", config.link.mark_min_bytes);
    read("mark_max_bytes", config.link.mark_max_bytes);
    read("failed_fraction", config.failure.fraction);
    read("fail_at_us", config.failure.at_us);
    read("convergence_us", config.failure.convergence_us);
    read("path_count", config.transport.flow.path_count);
    read("payload_bytes", config.transport.flow.payload_max_bytes);
    read("window_bytes", config.transport.flow.window_bytes);
    read("ack_every_packets", config.transport.flow.ack_every_packets);
    read("ack_delay_us", config.transport.flow.ack_delay_us);
    read("target_queue_us", config.transport.flow.target_queue_us);
    read("batch_packets", config.transport.batch_packets);
    read("turn_packets", config.transport.turn_packets);
    read("control_first", config.transport.control_first);
    read("ticks_per_us", config.transport.ticks_per_us);
    read("receive_budget_bytes", config.transport.receive_budget_bytes);
    read("seed", config.seed);
    read("deadline_us", config.deadline_us);
    read("sample_us", config.sample_us);
    read("path_policy", path_policy_);
    read("congestion", congestion_);
    config.transport.flow.path_policy = path_policy_;
    config.transport.flow.congestion = congestion_;
    nb::gil_scoped_release release;
    simulation_ = std::make_unique<Simulation>(config);
  }

  void add_rank(const nb::bytes& plan, const std::vector<uint64_t>& counts) {
    try {
      simulation_->add_rank({static_cast<const std::byte*>(plan.data()), plan.size()}, counts);
    } catch (const sennit::PlanError& wrong) {
      throw std::invalid_argument(wrong.what());
    }
  }

  void run() {
    for (bool goes_on = true; goes_on;) {
      {
        nb::gil_scoped_release release;
        goes_on = simulation_->advance(EVENTS_A_SLICE);
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
  }

  nb::dict result() const {
    const SimulationResult result = simulation_->result();
    nb::dict out;
    out["is_complete"] = result.is_complete;
    out["failure"] = result.failure;
    out["completion_us"] = result.completion_us;
    out["ideal_us"] = result.ideal_us;
    out["trace_hash"] = result.trace_hash;
    out["events"] = result.events;
    out["connections"] = result.connections;
    out["messages"] = result.messages;
    out["message_bytes"] = result.message_bytes;
    out["sent_packets"] = result.sent_packets;
    out["delivered_packets"] = result.delivered_packets;
    out["queue_dropped_packets"] = result.queue_dropped_packets;
    out["black_holed_packets"] = result.black_holed_packets;
    out["marked_packets"] = result.marked_packets;
    out["in_flight_packets"] = result.in_flight_packets;
    out["control_packets"] = result.flow.control_packets_sent;
    out["retransmitted_packets"] = result.flow.retransmitted_packets;
    out["duplicate_packets"] = result.flow.duplicate_packets;
    out["local_ack_timeout_err"] = result.flow.local_ack_timeout_err;
    out["tail_probe_packets"] = result.flow.tail_probe_packets;
    out["message_us"] = nb::bytes(result.message_us.data(), result.message_us.size() * sizeof(float));
    nb::list arrived;
    for (const uint64_t bytes : result.arrived_bytes) arrived.append(bytes);
    out["arrived_bytes"] = arrived;
    nb::list links;
    for (const LinkUse& link : result.links)
      links.append(nb::make_tuple(TIERS[static_cast<size_t>(link.tier)], link.has_failed, link.fraction,
                                  link.peak_queue_bytes, link.dropped_packets));
    out["links"] = links;
    return out;
  }

  nb::list traffic() const {
    nb::list pairs;
    for (const Traffic& pair : simulation_->traffic())
      pairs.append(nb::make_tuple(pair.from, pair.to, pair.messages, pair.bytes));
    return pairs;
  }

 private:
  std::string path_policy_, congestion_;
  std::unique_ptr<Simulation> simulation_;
};

}  // namespace

NB_MODULE(_lab, m) {
  m.doc() = "What simulations, delayed networks and benchmarks run natively.";
  nb::class_<PyFabricSimulation>(m, "FabricSimulation", "One simulated run of plans over a Clos fabric.")
      .def(nb::init<const nb::dict&>(), "config"_a,
           "Every field of sennit.testbed.simulation's Scenario by name. Raises KeyError for a missing one, ValueError "
           "for one out of range.")
      .def("add_rank", &PyFabricSimulation::add_rank, "plan"_a, "counts"_a,
           "Adds the next rank's plan in its binary form, and the counts of its post. Raises ValueError for one that "
           "cannot run.")
      .def("run", &PyFabricSimulation::run, "Until every plan is done or the deadline has passed.")
      .def("result", &PyFabricSimulation::result)
      .def("traffic", &PyFabricSimulation::traffic, "(from, to, messages, bytes) for each pair, as received.");

  m.def(
      "relay",
      [](int inlet, int outlet, int table, int stop, uint32_t first_port, uint32_t ports_a_plane) {
        sennit::Relay(inlet, outlet, table, stop, first_port, ports_a_plane).run();
      },
      nb::kw_only(), "inlet"_a, "outlet"_a, "table"_a, "stop"_a, "first_port"_a, "ports_a_plane"_a,
      nb::call_guard<nb::gil_scoped_release>(),
      "Passes packets on, each after its delay, until `stop` can be read. Raises RuntimeError if a socket fails.");

  nb::class_<sennit::UdpBare>(m, "UdpBare", "The bare both-ways UDP transfer that benchmarks compare with.")
      .def(nb::init<const std::string&>(), "local_address"_a)
      .def_prop_ro("port", &sennit::UdpBare::port)
      .def("exchange", &sennit::UdpBare::exchange, "peer_address"_a, "peer_port"_a, "size_bytes"_a, "timeout_s"_a,
           nb::call_guard<nb::gil_scoped_release>());
}
