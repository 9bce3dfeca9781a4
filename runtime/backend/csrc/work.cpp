// SPDX-License-Identifier: Apache-2.0
#include "work.hpp"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>

#include "interpreter.hpp"

namespace sennit::runtime {
namespace {

// The duration of one wait before signals are checked: short enough for Ctrl-C, and long enough to cost nothing.
constexpr uint64_t SIGNAL_CHECK_US = 100'000;
// The longest wait for the thread that completes the future of an operation that has ended.
constexpr std::chrono::seconds COMPLETION_LIMIT{5};
// A longer wait is one of this length: the clock counts nanoseconds, and would overflow.
constexpr std::chrono::milliseconds LONGEST_WAIT = std::chrono::hours(24 * 36'500);

// Holds the tensors of a Work that was dropped before its operation was done.
struct Orphan {
  sennit_op* op;  // a reference
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> held;
  std::vector<Packed> packed;
  std::optional<c10::Stream> stream;

  static void release(void* self) {
    const std::unique_ptr<Orphan> orphan(static_cast<Orphan*>(self));
    if (!orphan->packed.empty() && sennit_op_status(orphan->op) == SENNIT_OK) unpack(orphan->packed, orphan->stream);
    sennit_op_release(orphan->op);
  }
};

}  // namespace

GroupState::GroupState(sennit_comm* communicator) : comm(communicator) { sennit_comm_retain(comm); }

GroupState::~GroupState() { sennit_comm_release(comm); }

void GroupState::note_failure(sennit_status status) {
  using c10d::ErrorType;
  const bool is_remote = status == SENNIT_PEER || status == SENNIT_MISMATCH;
  const ErrorType kind = status == SENNIT_TIMEOUT ? ErrorType::TIMEOUT
                         : is_remote              ? ErrorType::REMOTE_ERROR
                                                  : ErrorType::COMM_ERROR;
  ErrorType none = ErrorType::SUCCESS;
  error.compare_exchange_strong(none, kind);
}

std::pair<FutureOfWork::Pointer, bool> FutureOfWork::get(const std::vector<c10::Device>& devices) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return {future_, false};
  signal_ = std::make_shared<Signal>();
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  // The first callback of all.
  future_->addCallback(
      [signal = signal_](c10::ivalue::Future&) {
        const std::lock_guard<std::mutex> lock(signal->mutex);
        signal->is_complete.notify_all();
      },
      /*uses_future=*/false);
  return {future_, true};
}

void FutureOfWork::wait_until_complete() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) return;
  }
  // Neither changes once it is there.
  std::unique_lock<std::mutex> lock(signal_->mutex);
  signal_->is_complete.wait_for(lock, COMPLETION_LIMIT, [this] { return future_->completed(); });
}

std::exception_ptr make_error(sennit_status status, const std::string& message) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  switch (status) {
    case SENNIT_ARGUMENT:
      return std::make_exception_ptr(c10::ValueError(here, message));
    case SENNIT_DEVICE:
      return std::make_exception_ptr(c10::DistNetworkError(here, message));
    default:
      return std::make_exception_ptr(c10::DistBackendError(here, message));
  }
}

SennitWork::SennitWork(std::shared_ptr<GroupState> group, c10d::OpType type, const char* title, sennit_op* op,
                       std::vector<at::Tensor> outputs, std::vector<at::Tensor> held, std::vector<Packed> packed,
                       std::optional<c10::Stream> stream)
    // The title is set only if a profiler is on: the record costs more than posting a small operation.
    : Work(static_cast<int>(sennit_comm_rank(group->comm)), type, at::hasCallbacks() ? title : nullptr),
      group_(std::move(group)),
      title_(title),
      op_(op),
      outputs_(std::move(outputs)),
      held_(std::move(held)),
      packed_(std::move(packed)),
      stream_(stream) {}

SennitWork::~SennitWork() {
  // A future keeps this Work until the operation is done, so if it is pending here, nobody has asked for a future.
  if (sennit_op_status(op_) == SENNIT_PENDING) {
    sennit_op_on_done(op_, &Orphan::release, new Orphan{op_, std::move(outputs_), std::move(held_), packed_, stream_});
    return;
  }
  if (sennit_op_status(op_) == SENNIT_OK) unpack();
  sennit_op_release(op_);
}

bool SennitWork::isCompleted() {
  const sennit_status status = sennit_op_status(op_);
  if (status == SENNIT_OK) unpack();
  return status != SENNIT_PENDING;
}

bool SennitWork::isSuccess() const { return sennit_op_status(op_) == SENNIT_OK; }

std::exception_ptr SennitWork::failure() const {
  const sennit_status status = sennit_op_status(op_);
  if (status == SENNIT_OK || status == SENNIT_PENDING) return nullptr;
  group_->note_failure(status);
  return make_error(status, std::string(title_) + ": " + sennit_op_error(op_));
}

std::exception_ptr SennitWork::exception() const { return failure(); }

int SennitWork::sourceRank() const {
  const uint32_t source = sennit_op_source(op_);
  return source == SENNIT_ANY_PEER ? -1 : static_cast<int>(source);
}

std::vector<at::Tensor> SennitWork::result() { return outputs_; }

void SennitWork::synchronize() { wait(kNoTimeout); }

bool SennitWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const bool is_bounded = timeout > kNoTimeout;
  const Clock::time_point deadline =
      is_bounded ? Clock::now() + std::min(timeout, LONGEST_WAIT) : Clock::time_point::max();
  const WithoutGil without_gil;
  sennit_status status = sennit_op_status(op_);
  while (status == SENNIT_PENDING) {
    uint64_t slice_us = SIGNAL_CHECK_US;
    if (is_bounded) {
      const auto left_us = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
      TORCH_CHECK_WITH(DistBackendError, left_us > 0, title_, ": not done after the ", timeout.count(),
                       " ms that this wait allowed; the operation itself goes on until its own deadline");
      slice_us = std::min<uint64_t>(slice_us, static_cast<uint64_t>(left_us));
    }
    status = sennit_wait(op_, slice_us);
    if (status == SENNIT_PENDING) check_signals();
  }
  future_.wait_until_complete();
  end_profile();
  if (const std::exception_ptr error = failure()) std::rethrow_exception(error);
  unpack();
  return true;
}

void SennitWork::unpack() {
  if (packed_.empty()) return;
  std::call_once(is_unpacked_, [this] { runtime::unpack(packed_, stream_); });
}

void SennitWork::end_profile() {
  std::function<void()> callback;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    callback.swap(recordFunctionEndCallback_);
  }
  if (callback) callback();
}

void SennitWork::abort() {
  const WithoutGil without_gil;
  sennit_abort(group_->comm, "Work.abort was called");
}

c10::intrusive_ptr<c10::ivalue::Future> SennitWork::getFuture() {
  std::vector<c10::Device> devices;
  if (stream_) devices.push_back(stream_->device());
  const auto [future, is_new] = future_.get(devices);
  if (!is_new) return future;
  // Callbacks in Python may post. Those of torch itself, as in DDP without a hook, do not: later calls need not wait.
  const auto ask = holds_gil() ? &sennit_op_on_done_in_order : &sennit_op_on_done;
  // The lock of the core is needed, whose holder may need the GIL.
  const WithoutGil without_gil;
  c10::raw::intrusive_ptr::incref(this);
  const sennit_status status = ask(op_, &SennitWork::on_done, this);
  if (status != SENNIT_OK) {
    std::rethrow_exception(
        make_error(status, std::string(title_) + ": no thread can be started that completes the future"));
  }
  return future;
}

void SennitWork::on_done(void* self) {
  const auto work = c10::intrusive_ptr<SennitWork>::reclaim(static_cast<SennitWork*>(self));
  const FutureOfWork::Pointer future = work->future_.get().first;
  work->end_profile();
  if (const std::exception_ptr error = work->failure()) {
    future->setErrorIfNeeded(error);
  } else {
    // A device's future records an event on the current stream: use a stream with nothing left to do.
    c10::OptionalStreamGuard guard;
    if (work->stream_) guard.reset_stream(*work->stream_);
    work->unpack();
    future->markCompleted(c10::IValue(work->outputs_));
  }
}

uint64_t SennitWork::getSequencenumber() const { return sennit_op_sequence(op_); }

JointWork::JointWork(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
                     std::vector<at::Tensor> outputs)
    : Work(rank, type), parts_(std::move(parts)), outputs_(std::move(outputs)) {}

bool JointWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
}

bool JointWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr JointWork::exception() const {
  for (const auto& part : parts_) {
    if (std::exception_ptr error = part->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> JointWork::result() { return outputs_; }

void JointWork::synchronize() { wait(kNoTimeout); }

bool JointWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  for (const auto& part : parts_) {
    auto left = timeout;
    if (timeout > kNoTimeout) {
      const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
      left = std::max(timeout - spent, std::chrono::milliseconds(1));
    }
    part->wait(left);
  }
  const WithoutGil without_gil;
  future_.wait_until_complete();
  return true;
}

void JointWork::abort() {
  for (const auto& part : parts_) part->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> JointWork::getFuture() {
  std::vector<c10::Device> devices;
  for (const at::Tensor& output : outputs_)
    if (!output.device().is_cpu()) devices.push_back(output.device());
  const auto [future, is_new] = future_.get(devices);
  if (!is_new) return future;
  const auto outputs = outputs_;
  if (parts_.empty()) {
    future->markCompleted(c10::IValue(outputs));
    return future;
  }
  std::vector<FutureOfWork::Pointer> of_parts;
  for (const auto& part : parts_) of_parts.push_back(part->getFuture());
  const auto pending = std::make_shared<std::atomic<size_t>>(parts_.size());
  for (const auto& of_part : of_parts) {
    of_part->addCallback([future = future, outputs, of_parts, pending](c10::ivalue::Future& done) {
      if (done.hasError()) future->setErrorIfNeeded(done.exception_ptr());
      if (pending->fetch_sub(1) != 1 || future->completed()) return;
      // The current streams wait for the parts, so that the future's events come after all of them.
      for (const auto& one : of_parts) one->wait();
      future->markCompleted(c10::IValue(outputs));
    });
  }
  return future;
}

}  // namespace sennit::runtime
