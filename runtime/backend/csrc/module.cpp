// SPDX-License-Identifier: Apache-2.0
// sennit.runtime.backend._c10d: the backend class, for runtime/backend/process_group.py. Types:
// runtime/backend/_c10d.pyi.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "backend.hpp"
#include "interpreter.hpp"

namespace py = pybind11;

namespace sennit::runtime {
namespace {

// Holds Python callables beyond the interpreter's end without touching it then.
class Compiler {
 public:
  Compiler(py::function function, py::function shrink) : function_(std::move(function)), shrink_(std::move(shrink)) {}
  Compiler(const Compiler&) = delete;
  Compiler& operator=(const Compiler&) = delete;
  ~Compiler() {
    if (!interpreter_is_usable()) {
      function_.release();
      shrink_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    let_go();
  }

  const py::function& function() const { return function_; }
  // At the interpreter's exit: nothing is compiled any more, and Python objects must not outlive it.
  void let_go() {
    // In a child made by fork it would end the parent's connections.
    if (sennit_fork_count() != forks_) {
      function_.release();
      shrink_.release();
    } else {
      function_ = py::function();
      shrink_ = py::function();
    }
  }

  std::string operator()(const PlanShape& shape) const {
    const py::gil_scoped_acquire gil;
    TORCH_CHECK(function_.ptr() != nullptr, "sennit: the interpreter is exiting; no new operation can start");
    py::tuple counts(shape.counts.size());
    for (size_t index = 0; index < shape.counts.size(); ++index) counts[index] = py::int_(shape.counts[index]);
    const py::bytes plan =
        function_(static_cast<unsigned>(shape.collective), shape.type_code, shape.reduce, shape.item_bytes, shape.root,
                  shape.separate, shape.in_place, shape.is_send, counts);
    return plan;
  }

  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& excluded, bool abort) const {
    const py::gil_scoped_acquire gil;
    TORCH_CHECK(shrink_.ptr() != nullptr, "sennit: the interpreter is exiting; no group can be made");
    return py::cast<c10::intrusive_ptr<SennitBackend>>(shrink_(excluded, abort));
  }

 private:
  py::function function_, shrink_;
  const uint64_t forks_ = sennit_fork_count();
};

std::vector<std::weak_ptr<Compiler>>& compilers() {
  static std::vector<std::weak_ptr<Compiler>> made;  // guarded by the GIL
  return made;
}

void close_all() {
  {
    const py::gil_scoped_release without_gil;
    SennitBackend::close_all();
  }
  for (const std::weak_ptr<Compiler>& weak : compilers()) {
    if (const auto compiler = weak.lock()) compiler->let_go();
  }
  compilers().clear();
}

c10::intrusive_ptr<SennitBackend> make_backend(uintptr_t communicator, py::function compile_plan, py::function shrink,
                                               std::chrono::milliseconds timeout, const std::string& group_name,
                                               std::vector<uint64_t> global_ranks, size_t plan_cache_bytes,
                                               bool stage_host_tensors) {
  auto options = c10::make_intrusive<SennitBackend::Options>(timeout);
  options->group_name = group_name;
  options->global_ranks_in_group = std::move(global_ranks);
  options->plan_cache_bytes = plan_cache_bytes;
  options->stage_host_tensors = stage_host_tensors;
  // A copy of std::function copies what it holds; the callable is shared instead.
  auto compiler = std::make_shared<Compiler>(std::move(compile_plan), std::move(shrink));
  std::erase_if(compilers(), [](const auto& weak) { return weak.expired(); });
  compilers().push_back(compiler);
  return c10::make_intrusive<SennitBackend>(
      reinterpret_cast<sennit_comm*>(communicator), [compiler](const PlanShape& shape) { return (*compiler)(shape); },
      [compiler](const std::vector<int64_t>& excluded, bool abort) { return compiler->shrink(excluded, abort); },
      compiler, std::move(options));
}

py::object compiler_of(const SennitBackend& backend) {
  return static_cast<const Compiler*>(backend.owner().get())->function();
}

}  // namespace
}  // namespace sennit::runtime

PYBIND11_MODULE(_c10d, module) {
  using sennit::runtime::SennitBackend;
  module.doc() = "The torch.distributed backend over libsennit_core.";
  module.attr("BUILT_FOR_TORCH") = TORCH_VERSION;
  // Its base class is registered by torch itself.
  py::module_::import("torch.distributed");
  py::class_<SennitBackend::Options, c10::intrusive_ptr<SennitBackend::Options>, c10d::Backend::Options>(module,
                                                                                                         "Options")
      .def_readonly("plan_cache_bytes", &SennitBackend::Options::plan_cache_bytes)
      .def_readonly("stage_host_tensors", &SennitBackend::Options::stage_host_tensors);
  py::class_<SennitBackend, c10::intrusive_ptr<SennitBackend>, c10d::Backend>(module, "SennitBackend")
      .def(py::init(&sennit::runtime::make_backend), py::kw_only(), py::arg("communicator"), py::arg("compile_plan"),
           py::arg("shrink"), py::arg("timeout"), py::arg("group_name"), py::arg("global_ranks"),
           py::arg("plan_cache_bytes"), py::arg("stage_host_tensors"))
      .def_property_readonly("options", &SennitBackend::options)
      .def_property_readonly("compile_plan", &sennit::runtime::compiler_of);
  module.def("close_all", &sennit::runtime::close_all);
}
