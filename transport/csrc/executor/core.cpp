// SPDX-License-Identifier: Apache-2.0
// The C interface: handles are the C++ objects themselves.
#include "sennit/core.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "executor/engine.hpp"
#include "wire/utf8.hpp"

namespace {

using sennit::Engine;
using sennit::Operation;
using sennit::Plan;

Engine& engine(sennit_comm* handle) { return *reinterpret_cast<Engine*>(handle); }
Operation& operation(sennit_op* handle) { return *reinterpret_cast<Operation*>(handle); }
const Operation& operation(const sennit_op* handle) { return *reinterpret_cast<const Operation*>(handle); }

void report(const std::string& text, char* error, size_t error_size) {
  if (error == nullptr || error_size == 0) return;
  const std::string_view fitting = sennit::utf8_prefix(text, error_size - 1);
  *std::copy(fitting.begin(), fitting.end(), error) = '\0';
}

}  // namespace

int sennit_reduce_is_defined(uint32_t dtype, uint32_t reduce) {
  return dtype <= SENNIT_C32 && reduce <= SENNIT_PREMUL_SUM &&
         sennit::find_fold(static_cast<sennit_dtype>(dtype), static_cast<sennit_reduce>(reduce)) != nullptr;
}

sennit_plan* sennit_plan_load(const void* bytes, size_t size_bytes, char* error, size_t error_size) {
  try {
    return reinterpret_cast<sennit_plan*>(Plan::decode(bytes, size_bytes).release());
  } catch (const std::exception& failure) {
    report(failure.what(), error, error_size);
    return nullptr;
  }
}

void sennit_plan_release(sennit_plan* handle) {
  auto* plan = reinterpret_cast<Plan*>(handle);
  if (plan != nullptr && plan->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete plan;
}

sennit_status sennit_post(sennit_comm* comm, sennit_plan* plan, const sennit_buffer* buffers, uint32_t buffer_count,
                          const sennit_post_options* options, sennit_op** out, char* error, size_t error_size) {
  *out = nullptr;
  std::string reason;
  sennit_status status = SENNIT_DEVICE;
  try {
    Operation* posted = nullptr;
    status = engine(comm).post(*reinterpret_cast<Plan*>(plan), buffers, buffer_count, *options, &posted, reason);
    *out = reinterpret_cast<sennit_op*>(posted);
  } catch (const std::exception& failure) {
    reason = failure.what();
  }
  if (status != SENNIT_OK) report(reason, error, error_size);
  return status;
}

sennit_status sennit_wait(sennit_op* op, uint64_t timeout_us) {
  return operation(op).engine().wait(operation(op), timeout_us);
}

sennit_status sennit_op_status(const sennit_op* op) { return operation(op).status(); }
const char* sennit_op_error(const sennit_op* op) { return operation(op).error().c_str(); }
uint32_t sennit_op_source(const sennit_op* op) { return operation(op).source(); }
uint64_t sennit_op_sequence(const sennit_op* op) { return operation(op).sequence(); }
void sennit_op_retain(sennit_op* op) { operation(op).retain(); }
void sennit_op_release(sennit_op* op) { operation(op).release(); }

void sennit_op_on_done(sennit_op* op, void (*callback)(void*), void* argument) {
  operation(op).engine().on_done(operation(op), {callback, argument});
}

void sennit_comm_retain(sennit_comm* comm) { engine(comm).retain(); }
void sennit_comm_release(sennit_comm* comm) { engine(comm).release(); }
uint32_t sennit_comm_rank(const sennit_comm* comm) { return reinterpret_cast<const Engine*>(comm)->rank(); }
uint32_t sennit_comm_size(const sennit_comm* comm) { return reinterpret_cast<const Engine*>(comm)->world(); }
uint64_t sennit_comm_sequence(const sennit_comm* comm) { return reinterpret_cast<const Engine*>(comm)->sequence(); }
void sennit_abort(sennit_comm* comm, const char* reason) { engine(comm).abort(reason); }
void sennit_shutdown(sennit_comm* comm, uint64_t timeout_us) { engine(comm).shutdown(timeout_us); }
