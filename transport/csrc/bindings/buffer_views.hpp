// SPDX-License-Identifier: Apache-2.0
// The caller's buffers of one operation. They stay alive until the operation has ended.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors.hpp"
#include "executor/plan.hpp"
#include "sennit/core.h"

namespace sennit::bindings {

// False once the interpreter begins to end. From then on other threads must not use it.
inline std::atomic<bool> python_runs{true};

// The caller's buffers. They are held, and cannot be resized, until the operation is done.
class BufferViews {
 public:
  explicit BufferViews(const nb::sequence& objects) {
    const size_t count = nb::len(objects);
    views_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      Py_buffer view;
      const nb::object object = objects[i];
      // Writable if possible. Whether a plan writes to the buffer is checked later.
      if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();
        if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
      }
      views_.push_back(view);
    }
  }
  ~BufferViews() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  BufferViews(const BufferViews&) = delete;

  // Releases the buffers of an operation that was given up while it ran. A thread of callbacks calls this without the
  // GIL. So the buffers go when Python's main thread next runs pending calls, or at the next post.
  static void drop_later(void* self) {
    auto* const views = static_cast<BufferViews*>(self);
    views->next_dropped_ = dropped_.load(std::memory_order_relaxed);
    while (!dropped_.compare_exchange_weak(views->next_dropped_, views, std::memory_order_release)) {
    }
    if (python_runs.load(std::memory_order_acquire)) Py_AddPendingCall(&drop_now, nullptr);
  }
  // Call it with the GIL held.
  static int drop_now(void* = nullptr) {
    if (dropped_.load(std::memory_order_relaxed) == nullptr) return 0;
    BufferViews* views = dropped_.exchange(nullptr, std::memory_order_acquire);
    while (views != nullptr) delete std::exchange(views, views->next_dropped_);
    return 0;
  }

  std::vector<sennit_buffer> buffers() const {
    std::vector<sennit_buffer> out;
    for (const Py_buffer& view : views_) out.push_back({view.buf, static_cast<uint64_t>(view.len)});
    return out;
  }
  // A plan must not write into an object that is read-only in Python.
  void check_writable(const sennit::Plan& plan) const {
    for (const sennit::Step& step : plan.steps) {
      const bool writes =
          step.kind != sennit::StepKind::send && (step.flags & sennit::STEP_LOAN) == 0 && step.size_bytes != 0;
      if (writes && step.destination_buffer < views_.size() && views_[step.destination_buffer].readonly) {
        raise_status(SENNIT_ARGUMENT,
                     "buffer " + std::to_string(step.destination_buffer) + " is read-only, but the plan writes it");
      }
    }
  }

 private:
  inline static std::atomic<BufferViews*> dropped_{nullptr};
  BufferViews* next_dropped_ = nullptr;
  std::vector<Py_buffer> views_;
};

// Nobody waits for the operation any more. The engine finishes it and keeps its buffers until then.
inline void give_up(sennit_op* op, std::unique_ptr<BufferViews> views) {
  if (sennit_op_status(op) == SENNIT_PENDING) sennit_op_on_done(op, &BufferViews::drop_later, views.release());
  sennit_op_release(op);
}

}  // namespace sennit::bindings
