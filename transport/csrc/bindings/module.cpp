// SPDX-License-Identifier: Apache-2.0
// sennit.transport._core: communicators, plans and operations for Python. All functions that wait release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <span>
#include <string_view>

#include "bindings/aggregator.hpp"
#include "bindings/buffer_views.hpp"
#include "bindings/codecs.hpp"
#include "bindings/errors.hpp"
#include "executor/engine.hpp"
#include "executor/lent_time.hpp"
#include "executor/operation_log.hpp"
#include "flow/congestion.hpp"
#include "flow/control.hpp"
#include "flow/path_policy.hpp"
#include "memory/available.hpp"
#include "messages/signature.hpp"
#include "ports/interfaces.hpp"
#include "wire/icrc.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sennit::bindings;

namespace {

// How often Python checks for signals while it waits for an operation.
constexpr uint64_t SIGNAL_SLICE_US = 100'000;

uint64_t to_us(double seconds) {
  if (!(seconds >= 0) || !std::isfinite(seconds))
    raise_status(SENNIT_ARGUMENT, "a time must be finite and not negative");
  return static_cast<uint64_t>(std::min(seconds, 1e9) * 1e6);
}

std::vector<std::byte> to_bytes(const nb::bytes& bytes) {
  const auto* begin = static_cast<const std::byte*>(bytes.data());
  return {begin, begin + bytes.size()};
}

nb::bytes from_bytes(const std::vector<std::byte>& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

nb::tuple to_names(std::span<const std::string_view> names) {
  nb::list out;
  for (const std::string_view name : names) out.append(nb::str(name.data(), name.size()));
  return nb::tuple(out);
}

class PyPlan {
 public:
  explicit PyPlan(const nb::bytes& data) {
    char error[512];
    plan_ = sennit_plan_load(data.data(), data.size(), error, sizeof error);
    if (plan_ == nullptr) raise_status(SENNIT_ARGUMENT, error);
  }
  ~PyPlan() { sennit_plan_release(plan_); }
  PyPlan(const PyPlan&) = delete;
  sennit_plan* handle() const { return plan_; }
  sennit::Plan& plan() const { return *reinterpret_cast<sennit::Plan*>(plan_); }

 private:
  sennit_plan* plan_ = nullptr;
};

class PyOp {
 public:
  explicit PyOp(const nb::sequence& buffers) : views_(std::make_unique<BufferViews>(buffers)) {}
  ~PyOp() {
    if (op_ != nullptr) give_up(op_, std::move(views_));
  }
  PyOp(const PyOp&) = delete;

  // To be called once, before everything else.
  void post(sennit_comm* comm, const PyPlan& plan, const sennit_post_options& options) {
    views_->check_writable(plan.plan());
    const std::vector<sennit_buffer> buffers = views_->buffers();
    char error[2048] = "";
    sennit_status status;
    {
      nb::gil_scoped_release release;
      status = sennit_post(comm, plan.handle(), buffers.data(), static_cast<uint32_t>(buffers.size()), &options, &op_,
                           error, sizeof error);
    }
    if (status != SENNIT_OK) raise_status(status, error);
  }

  void wait(double timeout_s) {
    const uint64_t total_us = to_us(timeout_s);
    uint64_t spent_us = 0;
    sennit_status status = sennit_op_status(op_);
    while (status == SENNIT_PENDING) {
      if (total_us != 0 && spent_us >= total_us) {
        raise_status(SENNIT_TIMEOUT,
                     "the wait of " + std::to_string(timeout_s) + " s is over; the operation is still running");
      }
      const uint64_t slice_us = total_us == 0 ? SIGNAL_SLICE_US : std::min(SIGNAL_SLICE_US, total_us - spent_us);
      {
        nb::gil_scoped_release release;
        status = sennit_wait(op_, slice_us);
      }
      spent_us += slice_us;
      if (status == SENNIT_PENDING && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    if (status != SENNIT_OK) raise_status(status, sennit_op_error(op_));
  }
  bool done() const { return sennit_op_status(op_) != SENNIT_PENDING; }
  uint32_t source() const { return sennit_op_source(op_); }

 private:
  sennit_op* op_ = nullptr;
  std::unique_ptr<BufferViews> views_;
};

// While the view exists, its owner can neither free nor resize the memory (PEP 3118).
class PyRegistration {
 public:
  PyRegistration(sennit::Engine* engine, const nb::object& buffer)
      : engine_(engine), views_(std::make_unique<BufferViews>(nb::borrow<nb::sequence>(nb::make_tuple(buffer)))) {
    with_engine(&sennit::Engine::register_memory);
    engine_->retain();
  }
  ~PyRegistration() { close(); }
  PyRegistration(const PyRegistration&) = delete;

  void close() {
    if (!views_) return;
    if (!engine_->is_inherited()) with_engine(&sennit::Engine::unregister_memory);
    engine_->release();
    views_.reset();
  }

 private:
  void with_engine(void (sennit::Engine::*call)(const void*, uint64_t)) {
    const sennit_buffer buffer = views_->buffers()[0];
    nb::gil_scoped_release release;
    (engine_->*call)(buffer.data, buffer.size_bytes);
  }

  sennit::Engine* const engine_;
  std::unique_ptr<BufferViews> views_;
};

class PyCommunicator {
 public:
  PyCommunicator(uint32_t rank, uint32_t world, double timeout_s, uint64_t seed, uint32_t ranks_here,
                 double peer_timeout_s, uint32_t threads) {
    guarded([&] {
      engine_ = new sennit::Engine({rank, world, std::max<uint64_t>(1, to_us(timeout_s)), seed,
                                    std::max(1u, ranks_here), std::max<uint64_t>(1, to_us(peer_timeout_s)), threads});
    });
  }
  ~PyCommunicator() {
    shutdown(0);
    sennit_comm_release(handle());
  }
  PyCommunicator(const PyCommunicator&) = delete;

  nb::bytes shm_offer(const std::vector<uint32_t>& ranks_here) {
    return from_bytes(guarded([&] { return usable()->ports().shm_offer(ranks_here); }));
  }
  std::string shm_why_unnamed() {
    return guarded([&] { return usable()->ports().shm_why_unnamed(); });
  }
  std::string shm_accept(uint32_t rank, const nb::bytes& offer) {
    const std::vector<std::byte> bytes = to_bytes(offer);
    std::string why = "that rank has none of its own";
    return guarded([&] { return usable()->ports().shm_accept(rank, bytes, &why); }) ? "" : why;
  }
  nb::bytes udp_open(const std::vector<std::pair<std::string, std::string>>& rails, uint32_t path_count,
                     const std::string& path_policy, const std::string& congestion, uint32_t window_bytes,
                     const std::pair<uint16_t, uint16_t>& ports, uint64_t seed) {
    sennit::UdpConfig config;
    config.ports = {ports.first, ports.second};
    for (const auto& [address, other] : rails) config.rails.push_back({address, 0, other});
    config.path_count = path_count;
    config.path_policy = path_policy;
    config.congestion = congestion;
    config.window_bytes = window_bytes;
    config.seed = seed;
    return from_bytes(guarded([&] { return usable()->ports().udp_open(config); }));
  }
  nb::bytes verbs_open(const std::vector<std::string>& addresses, uint32_t path_count, const std::string& path_policy,
                       const std::string& congestion, uint32_t window_bytes, const std::string& service,
                       uint64_t seed) {
    if (service != "uc" && service != "rc") raise_status(SENNIT_ARGUMENT, "service " + service + "; allowed: uc, rc");
    sennit::VerbsConfig config;
    config.addresses = addresses;
    config.path_count = path_count;
    config.path_policy = path_policy;
    config.congestion = congestion;
    config.window_bytes = window_bytes;
    config.service = service == "rc" ? sennit::VerbsService::rc : sennit::VerbsService::uc;
    config.seed = seed;
    return from_bytes(guarded([&] { return usable()->ports().verbs_open(config); }));
  }
  std::string aggregator_open(const std::string& address, uint16_t port, uint64_t key, double limit_s) {
    sennit::aggregation::ClientConfig config;
    config.key = key;
    sennit::Engine* const engine = usable();
    config.leaf = static_cast<uint16_t>(engine->rank());
    config.leaves = static_cast<uint16_t>(engine->world());
    return guarded([&] {
      const sennit::wire::Endpoint aggregator = sennit::wire::parse_endpoint(address, port);
      nb::gil_scoped_release release;
      return engine->ports().aggregator_open(aggregator, config, to_us(limit_s));
    });
  }
  void aggregator_drop() {
    guarded([&] { usable()->ports().aggregator_drop(); });
  }
  nb::bytes offer_for(uint32_t rank) {
    return from_bytes(guarded([&] { return usable()->ports().offer_for(rank); }));
  }
  using PyRoutes = std::vector<std::pair<std::string, nb::bytes>>;
  void begin_trial(const PyRoutes& routes) {
    const std::vector<sennit::Route> native = to_routes(routes);
    guarded([&] { usable()->ports().begin_trial(native); });
  }
  bool try_network(double limit_s) {
    const uint64_t limit_us = to_us(limit_s);
    sennit::Engine* const engine = usable();
    return guarded([&] {
      nb::gil_scoped_release release;
      return engine->ports().try_network(limit_us);
    });
  }
  bool is_tried(uint32_t rank) const { return trial(rank) == nullptr || trial(rank)->is_settled(); }
  bool is_perfect(uint32_t rank) const { return trial(rank) == nullptr || trial(rank)->is_perfect(); }
  nb::bytes trial_message(uint32_t rank) const {
    return trial(rank) == nullptr ? nb::bytes("", 0) : from_bytes(trial(rank)->message());
  }
  void learn_trial(uint32_t rank, const nb::bytes& message) {
    sennit::Trial* its = trial(rank);
    if (its == nullptr) return;
    if (message.size() == 0)
      its->settle_as_perfect();
    else
      its->on_message(sennit::clock_us(), to_bytes(message));
  }
  nb::list tried_paths(uint32_t rank) const {
    nb::list out;
    trial(rank);  // checks the rank
    for (const sennit::TriedPath& path : engine_->ports().tried_paths(rank))
      out.append(nb::make_tuple(sennit::wire::address_text(path.out_source), path.out_source.port,
                                sennit::wire::address_text(path.out_listen), path.out_listen.port, path.in_source.port,
                                path.in_listen.port, path.told_bytes, path.heard_bytes, path.error, path.is_used,
                                path.device));
    return out;
  }
  uint32_t trial_payload_bytes(uint32_t rank) const { return trial(rank) ? trial(rank)->payload_bytes() : 0; }
  uint32_t trial_payload_max_bytes(uint32_t rank) const { return trial(rank) ? trial(rank)->payload_max_bytes() : 0; }
  void refuse_group(const std::string& reason) { usable()->ports().give_up(reason); }
  void connect(const PyRoutes& routes) {
    const std::vector<sennit::Route> native = to_routes(routes);
    guarded([&] { usable()->connect(native); });
  }

  PyRegistration* register_memory(const nb::object& buffer) { return new PyRegistration(usable(), buffer); }

  PyOp* post(const PyPlan& plan, const nb::sequence& buffers, double timeout_s, bool background,
             std::optional<uint32_t> tag, double scalar, const std::vector<int64_t>& counts, uint64_t seed) {
    BufferViews::drop_now();
    const std::vector<uint64_t> unsigned_counts(counts.begin(), counts.end());
    sennit_post_options options{to_us(timeout_s),
                                0,
                                tag.value_or(0),
                                scalar,
                                unsigned_counts.data(),
                                static_cast<uint32_t>(unsigned_counts.size()),
                                seed};
    if (background) options.flags |= SENNIT_POST_ASYNC;
    if (tag) options.flags |= SENNIT_POST_P2P;
    auto op = std::make_unique<PyOp>(buffers);
    op->post(handle(), plan, options);
    return op.release();
  }

  // Runs the plan `iterations` times without Python in between. Returns the seconds of each run.
  std::vector<double> time_plan(const PyPlan& plan, const nb::sequence& buffers, uint32_t iterations,
                                const std::vector<uint64_t>& counts) {
    auto views = std::make_unique<BufferViews>(buffers);
    views->check_writable(plan.plan());
    const std::vector<sennit_buffer> native = views->buffers();
    std::vector<double> seconds;
    seconds.reserve(iterations);
    sennit_status status = SENNIT_OK;
    bool is_interrupted = false;
    char error[2048] = "";
    {
      nb::gil_scoped_release release;
      for (uint32_t i = 0; i < iterations && status == SENNIT_OK; ++i) {
        const auto start = std::chrono::steady_clock::now();
        const sennit_post_options options{0, 0, 0, 1.0, counts.data(), static_cast<uint32_t>(counts.size()), 0};
        sennit_op* op = nullptr;
        status = sennit_post(handle(), plan.handle(), native.data(), static_cast<uint32_t>(native.size()), &options,
                             &op, error, sizeof error);
        if (status != SENNIT_OK) break;
        while ((status = sennit_wait(op, SIGNAL_SLICE_US)) == SENNIT_PENDING && !is_interrupted) {
          const nb::gil_scoped_acquire gil;
          is_interrupted = PyErr_CheckSignals() != 0;
        }
        if (is_interrupted) {
          give_up(op, std::move(views));
          break;
        }
        if (status != SENNIT_OK) std::snprintf(error, sizeof error, "%s", sennit_op_error(op));
        sennit_op_release(op);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
    }
    if (is_interrupted) throw nb::python_error();
    if (status != SENNIT_OK) raise_status(status, error);
    return seconds;
  }

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(engine_); }
  nb::dict counters() const {
    nb::dict out;
    for (const auto& [name, value] : usable()->counters()) out[name.c_str()] = value;
    return out;
  }
  std::string counter_page() const { return engine_->counter_page(); }
  std::string describe() const { return usable()->describe(); }
  uint64_t sequence() const { return engine_->sequence(); }
  void set_timeout(double timeout_s) { usable()->set_timeout(std::max<uint64_t>(1, to_us(timeout_s))); }
  std::string failure() const { return usable()->failure(); }
  std::vector<uint32_t> lost_ranks() const { return usable()->lost_ranks(); }
  std::vector<uint32_t> find_gone_ranks() const {
    sennit::Engine* const engine = usable();
    nb::gil_scoped_release release;
    return engine->find_gone_ranks();
  }
  void abort(const std::string& reason) {
    nb::gil_scoped_release release;
    sennit_abort(handle(), reason.c_str());
  }
  void shutdown(double timeout_s) {
    const uint64_t timeout_us = to_us(timeout_s);
    nb::gil_scoped_release release;
    sennit_shutdown(handle(), timeout_us);
  }

 private:
  sennit::Engine* usable() const {
    if (engine_->is_inherited()) raise_status(SENNIT_ARGUMENT, sennit::INHERITED);
    return engine_;
  }
  static std::vector<sennit::Route> to_routes(const PyRoutes& routes) {
    std::vector<sennit::Route> native;
    for (const auto& [kind, info] : routes) {
      using Kind = sennit::Route::Kind;
      static const std::map<std::string, Kind> KINDS = {
          {"self", Kind::self}, {"shm", Kind::shm}, {"udp", Kind::udp}, {"verbs", Kind::verbs}};
      const auto known = KINDS.find(kind);
      if (known == KINDS.end()) raise_status(SENNIT_ARGUMENT, "unknown route " + kind);
      native.push_back({known->second, to_bytes(info)});
    }
    return native;
  }
  sennit::Trial* trial(uint32_t rank) const {
    if (rank >= engine_->world()) raise_status(SENNIT_ARGUMENT, "no rank " + std::to_string(rank));
    return engine_->ports().trial(rank);
  }
  sennit_comm* handle() const { return reinterpret_cast<sennit_comm*>(engine_); }
  sennit::Engine* engine_ = nullptr;
};

// Whether this processor has what the fast kernels of its kind need. On kinds without fast kernels it is true.
bool has_wide_vectors() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
  return true;
#endif
}

// The log of operations, and the processor time of callers.
void bind_operation_log(nb::module_& module) {
  module.def(
      "operation_log_begin",
      [](int file, uint64_t offset, size_t room) { sennit::OperationLog::shared().begin(file, offset, room); },
      "file"_a, "offset"_a, "room"_a,
      "Writes the last `room` operations of all groups to this file descriptor from now on, at this offset, a multiple "
      "of the page size (executor/operation_log.hpp has the format).");
  module.def(
      "operation_log_end", [] { sennit::OperationLog::shared().end(); }, "Stops.");
  module.def(
      "operation_log_name",
      [](uintptr_t group, std::string_view name) {
        sennit::OperationLog::shared().name_group(
            static_cast<const sennit::OperationHost*>(reinterpret_cast<const sennit::Engine*>(group)), name);
      },
      "group"_a, "name"_a, "Names the group with this handle in the log.");
  module.def("lent_time_count", &sennit::LentTime::count, "is_on"_a,
             "Counts the processor time of posts and waits from now on. Each call with True takes one with False.");
  module.def("lent_time_ns", &sennit::LentTime::total_ns,
             "Processor time that threads of the caller spent in posts and waits, while it was counted.");
}

}  // namespace

NB_MODULE(_core, m) {
  // As in _kernels: what torch holds at the end of a program is no leak.
#ifdef __OPTIMIZE__
  nb::set_leak_warnings(false);
#endif
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { python_runs = false; }));
  m.doc() = "The native data plane: plans run over shared memory, RoCEv2 on UDP, and RDMA devices.";
  m.attr("WIRE_REVISION") = static_cast<int>(sennit::flow::CONTROL_VERSION);
  m.attr("HAS_WIDE_VECTORS") = has_wide_vectors();
  m.attr("PATH_POLICIES") = to_names(sennit::flow::path_policies());
  const sennit::flow::FlowConfig config;
  nb::dict defaults;
  defaults["paths"] = config.path_count;
  defaults["window_bytes"] = config.window_bytes;
  defaults["path_policy"] = std::string(config.path_policy);
  defaults["congestion"] = std::string(config.congestion);
  const double peer_timeout_s = static_cast<double>(config.peer_timeout_us) / 1e6;
  defaults["peer_timeout_s"] = peer_timeout_s;
  m.attr("DEFAULTS") = defaults;
  m.attr("CONGESTION_CONTROLS") = to_names(sennit::flow::congestion_controls());
  m.attr("CRC_BY") = nb::str(sennit::wire::crc_by().data(), sennit::wire::crc_by().size());
  m.attr("HAS_VERBS") = sennit::has_verbs();
  m.def(
      "rdma_ports",
      [] {
        nb::list out;
        for (const sennit::ListedPort& port : guarded([] { return sennit::list_device_ports(); })) {
          nb::list gids;
          for (const auto& [index, address, link] : port.gids) gids.append(nb::make_tuple(index, address, link));
          out.append(nb::make_tuple(port.device, port.number, port.state, port.is_ethernet, port.mtu_bytes,
                                    port.partitions, gids, port.problem));
        }
        return out;
      },
      "The ports of all RDMA devices: (device, number, state, Ethernet or not, largest payload, partition keys, RoCE "
      "v2 GIDs as (index, address, interface index), problem). Number 0: only `problem` counts.");
  m.def(
      "interfaces",
      [](const std::string& if_inet6) {
        nb::list out;
        for (const sennit::Interface& interface : sennit::read_interfaces(if_inet6)) {
          nb::list addresses;
          for (const sennit::InterfaceAddress& address : interface.addresses)
            if (address.is_offered) addresses.append(sennit::wire::address_text(address.endpoint));
          out.append(nb::make_tuple(interface.name, interface.is_up, interface.is_loopback, addresses));
        }
        return out;
      },
      "if_inet6"_a,
      "The interfaces by index: (name, up or not, loopback or not, addresses that a peer could send to).");
  bind_aggregator(m);
  bind_codecs(m);
  bind_operation_log(m);
  m.def(
      "symmetric_alloc",
      [](uint64_t size_bytes) { return reinterpret_cast<uintptr_t>(sennit_symmetric_alloc(size_bytes)); },
      "size_bytes"_a, "The address of memory that the ranks of this host map; 0 if there is none left.");
  m.def(
      "symmetric_free", [](uintptr_t address) { return sennit_symmetric_free(reinterpret_cast<void*>(address)) != 0; },
      "address"_a, "Frees what symmetric_alloc returned. False: it is not from there.");
  m.def(
      "available_bytes",
      [](const std::string& proc, const std::string& cgroup) {
        return std::min(sennit::available_bytes(proc, cgroup), uint64_t{1} << 62);
      },
      "proc"_a = "/proc", "cgroup"_a = "/sys/fs/cgroup",
      "Memory that this process can still use: `MemAvailable`, or less if its control group (v1 or v2) has less left. "
      "2**62 without information.");
  m.def("describe_signature", &sennit::describe_signature, "signature"_a, "A plan's signature in words.");
  nb::class_<PyPlan>(m, "Plan", "A compiled plan (docs/reference/plans.md). Raises ArgumentError for malformed bytes.")
      .def(nb::init<const nb::bytes&>(), "data"_a)
      .def_prop_ro("name", [](const PyPlan& self) { return self.plan().name; })
      .def_prop_ro(
          "buffer_bytes",
          [](const PyPlan& self) {
            if (self.plan().count_count != 0) return std::vector<uint64_t>();
            std::vector<uint64_t> extents = self.plan().sizes_of({})->buffer_extents;
            extents.pop_back();  // the scratch
            return extents;
          },
          "Bytes of each of the caller's buffers that the plan touches; empty if it takes counts.")
      .def_prop_ro("step_count", [](const PyPlan& self) { return self.plan().steps.size(); });

  nb::class_<PyOp>(m, "Op", "One run of a plan.")
      .def("wait", &PyOp::wait, "timeout_s"_a = 0.0,
           "Blocks until done (0: until the operation's own deadline); raises the error it ended with.")
      .def("done", &PyOp::done)
      .def_prop_ro("source", &PyOp::source, "The rank that a receive from any rank matched.");

  nb::class_<PyRegistration>(m, "Registration", "Memory that devices keep registered.")
      .def("close", &PyRegistration::close);

  nb::class_<PyCommunicator>(m, "Communicator", "This rank's channels to all ranks of a group.")
      .def(nb::init<uint32_t, uint32_t, double, uint64_t, uint32_t, double, uint32_t>(), "rank"_a, "size"_a,
           nb::kw_only(), "timeout_s"_a, "seed"_a, "ranks_here"_a = 1, "peer_timeout_s"_a = peer_timeout_s,
           "threads"_a = 1)
      .def("shm_offer", &PyCommunicator::shm_offer, "ranks_here"_a = std::vector<uint32_t>(),
           "Makes this rank's shared-memory segment for these ranks of its host, all if empty; what peers need to open "
           "it.")
      .def("shm_accept", &PyCommunicator::shm_accept, "rank"_a, "offer"_a,
           "Opens a peer's segment; why it cannot be reached, or empty.")
      .def("shm_why_unnamed", &PyCommunicator::shm_why_unnamed, "Why its segment has no name in /dev/shm, or empty.")
      .def("udp_open", &PyCommunicator::udp_open, "rails"_a, nb::kw_only(), "path_count"_a, "path_policy"_a,
           "congestion"_a, "window_bytes"_a, "ports"_a = std::pair<uint16_t, uint16_t>(0, 0), "seed"_a = 0,
           "Opens the sockets on the rails, (address, address of the other family or \"\"); what all peers need to "
           "connect.")
      .def("aggregator_open", &PyCommunicator::aggregator_open, "address"_a, "port"_a, nb::kw_only(), "key"_a,
           "limit_s"_a, "Asks an aggregator to take the group. Returns why it does not, or an empty string.")
      .def("aggregator_drop", &PyCommunicator::aggregator_drop)
      .def("verbs_open", &PyCommunicator::verbs_open, "addresses"_a, nb::kw_only(), "path_count"_a, "path_policy"_a,
           "congestion"_a, "window_bytes"_a, "service"_a, "seed"_a = 0,
           "Opens the RDMA device that serves these local addresses; what all peers need to connect.")
      .def("offer_for", &PyCommunicator::offer_for, "rank"_a,
           "After udp_open or verbs_open: what that rank alone needs besides. Its route is both, this part last.")
      .def("begin_trial", &PyCommunicator::begin_trial, "routes"_a,
           "Before connect, with its routes: begins to send packets over every path to the peers of udp routes.")
      .def("try_network", &PyCommunicator::try_network, "limit_s"_a,
           "Goes on with the trial for so long at most; True when there is nothing more to find out.")
      .def("is_tried", &PyCommunicator::is_tried, "rank"_a, "The trial with this rank is over, or there is none.")
      .def("is_perfect", &PyCommunicator::is_perfect, "rank"_a,
           "Every path takes the largest packet both ways, or there is no trial.")
      .def("trial_message", &PyCommunicator::trial_message, "rank"_a,
           "What this end knows, for that rank's learn_trial.")
      .def("learn_trial", &PyCommunicator::learn_trial, "rank"_a, "message"_a,
           "A trial_message of that rank that came another way; empty: it found every path perfect.")
      .def("tried_paths", &PyCommunicator::tried_paths, "rank"_a,
           "For each path: own address and source port, the peer's address and port, its source port and our port, the "
           "largest payload that arrived there and here, errno of the last send that failed, whether it is used, our "
           "RDMA device.")
      .def("trial_payload_bytes", &PyCommunicator::trial_payload_bytes, "rank"_a,
           "The size of packets that the trial found; 0 before and without one.")
      .def("trial_payload_max_bytes", &PyCommunicator::trial_payload_max_bytes, "rank"_a,
           "The largest that the interfaces at both ends take.")
      .def("give_up", &PyCommunicator::refuse_group, "reason"_a,
           "In place of connect: tells the peers that could be reached why there will be no group.")
      .def("connect", &PyCommunicator::connect, "routes"_a, "Per rank: ('self'|'shm'|'udp'|'verbs', the peer's blob).")
      .def("register_memory", &PyCommunicator::register_memory, "buffer"_a, nb::rv_policy::take_ownership,
           "Keeps a buffer where it is, and registered with RDMA devices once it is used, until closed.")
      .def("post", &PyCommunicator::post, "plan"_a, "buffers"_a, nb::kw_only(), "timeout_s"_a = 0.0,
           "background"_a = false, "tag"_a = nb::none(), "scalar"_a = 1.0, "counts"_a = std::vector<int64_t>(),
           "seed"_a = 0, nb::rv_policy::take_ownership)
      .def("time_plan", &PyCommunicator::time_plan, "plan"_a, "buffers"_a, "iterations"_a,
           "counts"_a = std::vector<uint64_t>(),
           "Runs a plan many times without Python in between; returns seconds a run.")
      .def_prop_ro("handle", &PyCommunicator::address, "sennit_comm* of the C interface, as an integer.")
      .def("set_timeout", &PyCommunicator::set_timeout, "timeout_s"_a,
           "The default deadline of operations from now on.")
      .def_prop_ro("failure", &PyCommunicator::failure, "Why the group ended; empty while it works.")
      .def_prop_ro("lost_ranks", &PyCommunicator::lost_ranks, "Ranks that the failure blames.")
      .def("find_gone_ranks", &PyCommunicator::find_gone_ranks,
           "Peers whose processes, or whose ends of this group, are gone.")
      .def_prop_ro("sequence", &PyCommunicator::sequence)
      .def("counters", &PyCommunicator::counters)
      .def("counter_page", &PyCommunicator::counter_page)
      .def("describe", &PyCommunicator::describe)
      .def("abort", &PyCommunicator::abort, "reason"_a)
      .def("shutdown", &PyCommunicator::shutdown, "timeout_s"_a = 5.0);
}
