// SPDX-License-Identifier: Apache-2.0
// sennit.runtime.backend._c10d: the backend class, for runtime/backend/process_group.py. Types:
// runtime/backend/_c10d.pyi.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend.hpp"
#include "interpreter.hpp"
#include "stand_in.hpp"
#include "symmetric.hpp"
#include "torch_versions.hpp"

namespace py = pybind11;

namespace sennit::runtime {
namespace {

// The backend's Python half. It is kept beyond the interpreter's end, but not touched then.
class PythonHalf {
 public:
  PythonHalf(py::object member, py::function compile, py::function staged_classes, py::function shrink)
      : member_(std::move(member)),
        compile_(std::move(compile)),
        staged_classes_(std::move(staged_classes)),
        shrink_(std::move(shrink)) {}
  PythonHalf(const PythonHalf&) = delete;
  PythonHalf& operator=(const PythonHalf&) = delete;
  ~PythonHalf() {
    if (!interpreter_is_usable()) {
      leak();
      return;
    }
    const py::gil_scoped_acquire gil;
    let_go();
  }

  // The group's Member (runtime/backend/process_group.py); null at the interpreter's exit.
  const py::object& member() const { return member_; }
  // When the interpreter exits, nothing is compiled any more, and Python objects must be released.
  void let_go() {
    // In a child of fork this would end the parent's connections.
    if (sennit_fork_count() != forks_) {
      leak();
    } else {
      compile_ = py::function();
      staged_classes_ = py::function();
      shrink_ = py::function();
      member_ = py::object();
    }
  }

  std::string compile(const PlanShape& shape) const {
    const py::gil_scoped_acquire gil;
    check_for_exit(compile_);
    const std::span<const uint64_t> given = shape.compiled_counts();
    py::tuple counts(given.size());
    for (size_t index = 0; index < given.size(); ++index) counts[index] = py::int_(given[index]);
    const py::bytes plan =
        compile_(static_cast<unsigned>(shape.collective), shape.type_code, shape.reduce, shape.item_bytes, shape.root,
                 shape.separate, shape.in_place, shape.is_send, shape.on_device, shape.size_class, counts);
    return plan;
  }

  uint64_t staged_classes(Collective collective) const {
    const py::gil_scoped_acquire gil;
    check_for_exit(staged_classes_);
    return py::cast<uint64_t>(staged_classes_(static_cast<unsigned>(collective)));
  }

  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& excluded, bool abort) const {
    const py::gil_scoped_acquire gil;
    TORCH_CHECK(shrink_.ptr() != nullptr, "sennit: the interpreter is exiting; no group can be made");
    return py::cast<c10::intrusive_ptr<SennitBackend>>(shrink_(excluded, abort));
  }

 private:
  static void check_for_exit(const py::function& function) {
    TORCH_CHECK(function.ptr() != nullptr, "sennit: the interpreter is exiting; no new operation can start");
  }

  void leak() {
    member_.release();
    compile_.release();
    staged_classes_.release();
    shrink_.release();
  }

  py::object member_;
  py::function compile_, staged_classes_, shrink_;
  const uint64_t forks_ = sennit_fork_count();
};

std::vector<std::weak_ptr<PythonHalf>>& python_halves() {
  static std::vector<std::weak_ptr<PythonHalf>> made;  // guarded by the GIL
  return made;
}

void close_all() {
  {
    const py::gil_scoped_release without_gil;
    SennitBackend::close_all();
  }
  for (const std::weak_ptr<PythonHalf>& weak : python_halves()) {
    if (const auto python = weak.lock()) python->let_go();
  }
  python_halves().clear();
}

c10::intrusive_ptr<SennitBackend> make_backend(const py::object& member, py::function compile_plan, py::function shrink,
                                               std::chrono::milliseconds timeout, const std::string& group_name,
                                               std::vector<uint64_t> global_ranks, size_t plan_cache_bytes,
                                               bool is_coded, py::function staged_classes) {
  auto options = c10::make_intrusive<SennitBackend::Options>(timeout);
  options->group_name = group_name;
  options->global_ranks_in_group = std::move(global_ranks);
  options->plan_cache_bytes = plan_cache_bytes;
  options->is_coded = is_coded;
  const auto handle = py::cast<uintptr_t>(member.attr("handle"));
  // A copy of a std::function copies what it holds, so the callables are shared instead.
  auto python =
      std::make_shared<PythonHalf>(member, std::move(compile_plan), std::move(staged_classes), std::move(shrink));
  std::erase_if(python_halves(), [](const auto& weak) { return weak.expired(); });
  python_halves().push_back(python);
  return c10::make_intrusive<SennitBackend>(
      reinterpret_cast<sennit_comm*>(handle), [python](const PlanShape& shape) { return python->compile(shape); },
      [python](Collective collective) { return python->staged_classes(collective); },
      [python](const std::vector<int64_t>& excluded, bool abort) { return python->shrink(excluded, abort); }, python,
      std::move(options));
}

py::object member_of(const SennitBackend& backend) {
  const py::object& member = static_cast<const PythonHalf*>(backend.owner().get())->member();
  return member ? member : py::none();
}

}  // namespace
}  // namespace sennit::runtime

PYBIND11_MODULE(_c10d, module) {
  using sennit::runtime::SennitBackend;
  module.doc() = "The torch.distributed backend over libsennit_core.";
  module.attr("BUILT_FOR_TORCH") = TORCH_VERSION;
  // torch itself registers the base class.
  py::module_::import("torch.distributed");
  py::class_<SennitBackend::Options, c10::intrusive_ptr<SennitBackend::Options>, c10d::Backend::Options>(module,
                                                                                                         "Options");
  py::class_<SennitBackend, c10::intrusive_ptr<SennitBackend>, c10d::Backend>(module, "SennitBackend")
      .def(py::init(&sennit::runtime::make_backend), py::kw_only(), py::arg("member"), py::arg("compile_plan"),
           py::arg("shrink"), py::arg("timeout"), py::arg("group_name"), py::arg("global_ranks"),
           py::arg("plan_cache_bytes"), py::arg("is_coded"), py::arg("staged_classes"))
      .def_property_readonly("options", &SennitBackend::options)
      .def_property_readonly("member", &sennit::runtime::member_of);
  module.def("close_all", &sennit::runtime::close_all);
  py::module_ symmetric = module.def_submodule("symmetric", "New CPU tensors in symmetric memory.");
  symmetric.def("set_everywhere", &sennit::runtime::symmetric::set_everywhere, py::arg("on"));
  symmetric.def("begin", &sennit::runtime::symmetric::begin);
  symmetric.def("end", &sennit::runtime::symmetric::end);
  symmetric.def(
      "contains", [](uintptr_t data) { return sennit::runtime::symmetric::contains(reinterpret_cast<void*>(data)); },
      py::arg("address"));
  py::module_ stand_in = module.def_submodule("stand_in", "Host tensors as device tensors, for tests.");
  stand_in.def("set_active", &sennit::runtime::stand_in::set_active, py::arg("active"));
  stand_in.def("delay_copies", &sennit::runtime::stand_in::delay_copies, py::arg("seed"), py::arg("max_us"));
}
