// SPDX-License-Identifier: Apache-2.0
// The C interface. Handles are pointers to the C++ objects.
#include "sennit/core.h"

#include <cxxabi.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "executor/engine.hpp"
#include "executor/lent_time.hpp"
#include "memory/shared_heap.hpp"
#include "wire/utf8.hpp"

namespace {

using sennit::Engine;
using sennit::INHERITED;
using sennit::Operation;
using sennit::Plan;

Engine& engine(sennit_comm* handle) { return *reinterpret_cast<Engine*>(handle); }
Operation& operation(sennit_op* handle) { return *reinterpret_cast<Operation*>(handle); }
const Operation& operation(const sennit_op* handle) { return *reinterpret_cast<const Operation*>(handle); }

// No exception leaves a C function, except the one that ends the thread, which C++ must not stop.
template <class Result, class Body>
Result guarded(Result failed, Body body) {
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    throw;
  } catch (...) {
    return failed;
  }
}

void report(std::string_view text, char* error, size_t error_size) {
  if (error == nullptr || error_size == 0) return;
  const std::string_view fitting = sennit::utf8_prefix(text, error_size - 1);
  *std::copy(fitting.begin(), fitting.end(), error) = '\0';
}

sennit_status post(sennit_comm* comm, sennit_plan* plan, const sennit::OperationMemory& memory,
                   const sennit_post_options* options, sennit_op** out, char* error, size_t error_size) {
  *out = nullptr;
  const sennit::LentTime lent;
  if (engine(comm).is_inherited()) {
    report(INHERITED, error, error_size);
    return SENNIT_ARGUMENT;
  }
  try {
    std::string reason;
    Operation* posted = nullptr;
    const sennit_status status = engine(comm).post(*reinterpret_cast<Plan*>(plan), memory, *options, &posted, reason);
    *out = reinterpret_cast<sennit_op*>(posted);
    if (status != SENNIT_OK) {
      report(reason, error, error_size);
    } else {
      posted->note_return();
    }
    return status;
  } catch (const std::bad_alloc&) {
    report("out of memory; nothing was sent", error, error_size);
  } catch (const std::exception& failure) {
    report(failure.what(), error, error_size);
  }
  return SENNIT_DEVICE;
}

sennit_status on_done(sennit_op* op, Operation::Callback callback, bool in_order) {
  Operation& watched = operation(op);
  if (watched.engine().is_inherited()) return SENNIT_ARGUMENT;
  return guarded(SENNIT_DEVICE,
                 [&] { return watched.engine().on_done(watched, callback, in_order) ? SENNIT_OK : SENNIT_DEVICE; });
}

}  // namespace

int sennit_reduce_is_defined(uint32_t dtype, uint32_t reduce) {
  return dtype <= SENNIT_C32 && reduce <= SENNIT_PREMUL_SUM &&
         sennit::find_fold(static_cast<sennit_dtype>(dtype), static_cast<sennit_reduce>(reduce)) != nullptr;
}

sennit_plan* sennit_plan_load(const void* bytes, size_t size_bytes, char* error, size_t error_size) {
  try {
    return reinterpret_cast<sennit_plan*>(Plan::decode(bytes, size_bytes).release());
  } catch (const std::bad_alloc&) {
    report("out of memory", error, error_size);
  } catch (const std::exception& failure) {
    report(failure.what(), error, error_size);
  }
  return nullptr;
}

void sennit_plan_release(sennit_plan* handle) {
  auto* plan = reinterpret_cast<Plan*>(handle);
  if (plan != nullptr && plan->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete plan;
}

sennit_status sennit_post(sennit_comm* comm, sennit_plan* plan, const sennit_buffer* buffers, uint32_t buffer_count,
                          const sennit_post_options* options, sennit_op** out, char* error, size_t error_size) {
  return post(comm, plan, {{buffers, buffer_count}, nullptr}, options, out, error, error_size);
}

sennit_status sennit_post_on_device(sennit_comm* comm, sennit_plan* plan, const sennit_device* device,
                                    const sennit_post_options* options, sennit_op** out, char* error,
                                    size_t error_size) {
  return post(comm, plan, {{}, device}, options, out, error, error_size);
}

void sennit_copy_done(sennit_op* op, uint32_t step, const char* error) {
  Operation& copied = operation(op);
  if (copied.engine().is_inherited()) return;
  guarded(0, [&] {
    copied.engine().copy_done(copied, step, error);
    return 0;
  });
}

sennit_status sennit_wait(sennit_op* op, uint64_t timeout_us) {
  Operation& awaited = operation(op);
  if (awaited.engine().is_inherited()) return sennit_op_status(op);
  const sennit::LentTime lent;
  awaited.note_wait();
  return guarded(SENNIT_DEVICE, [&] { return awaited.engine().wait(awaited, timeout_us); });
}

sennit_status sennit_op_status(const sennit_op* op) {
  const sennit_status status = operation(op).status();
  return status == SENNIT_PENDING && operation(op).engine().is_inherited() ? SENNIT_ARGUMENT : status;
}

const char* sennit_op_error(const sennit_op* op) {
  const Operation& ended = operation(op);
  return ended.status() == SENNIT_PENDING && ended.engine().is_inherited() ? INHERITED : ended.error().c_str();
}

uint32_t sennit_op_source(const sennit_op* op) { return operation(op).source(); }
uint64_t sennit_op_sequence(const sennit_op* op) { return operation(op).sequence(); }
void sennit_op_retain(sennit_op* op) { operation(op).retain(); }
void sennit_op_release(sennit_op* op) { operation(op).release(); }

sennit_status sennit_op_on_done(sennit_op* op, void (*callback)(void*), void* argument) {
  return on_done(op, {callback, argument}, false);
}

sennit_status sennit_op_on_done_in_order(sennit_op* op, void (*callback)(void*), void* argument) {
  return on_done(op, {callback, argument}, true);
}

uint64_t sennit_fork_count() {
  return guarded(uint64_t{0}, [] { return sennit::fork_count(); });
}

int sennit_comm_is_inherited(const sennit_comm* comm) {
  return reinterpret_cast<const Engine*>(comm)->is_inherited() ? 1 : 0;
}

void sennit_comm_retain(sennit_comm* comm) { engine(comm).retain(); }
void sennit_comm_release(sennit_comm* comm) { engine(comm).release(); }
uint32_t sennit_comm_rank(const sennit_comm* comm) { return reinterpret_cast<const Engine*>(comm)->rank(); }
uint32_t sennit_comm_size(const sennit_comm* comm) { return reinterpret_cast<const Engine*>(comm)->world(); }
uint64_t sennit_comm_sequence(const sennit_comm* comm) { return reinterpret_cast<const Engine*>(comm)->sequence(); }

void sennit_abort(sennit_comm* comm, const char* reason) {
  if (engine(comm).is_inherited()) return;
  guarded(0, [&] {
    engine(comm).abort(reason != nullptr ? reason : "");
    return 0;
  });
}

void sennit_shutdown(sennit_comm* comm, uint64_t timeout_us) {
  if (engine(comm).is_inherited()) return;
  guarded(0, [&] {
    engine(comm).shutdown(timeout_us);
    return 0;
  });
}

void* sennit_symmetric_alloc(uint64_t size_bytes) { return sennit::SharedHeap::allocate(size_bytes); }

int sennit_symmetric_free(void* memory) { return sennit::SharedHeap::free(memory) ? 1 : 0; }

int sennit_symmetric_contains(const void* memory, uint64_t size_bytes) {
  return sennit::SharedHeap::owns(memory, size_bytes) ? 1 : 0;
}
