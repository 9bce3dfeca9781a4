// SPDX-License-Identifier: Apache-2.0
#include "staging.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>

#include "arguments.hpp"
#include "interpreter.hpp"

namespace sennit::runtime {
namespace {

// 4 slots of 2 MiB in and out: 16 MiB of pinned memory a lane, and a copy long enough to hide its launch.
constexpr uint64_t SLOT_BYTES = 2 * 1024 * 1024;
constexpr auto SIGNAL_CHECK = std::chrono::milliseconds(100);

using Clock = std::chrono::steady_clock;

uint64_t now_us() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count());
}

bool has_streams(c10::Device device) { return device.type() != c10::kCPU; }

// All ranks work on the same elements of one tensor, in one buffer.
bool is_shared(Collective collective) {
  return collective == Collective::ALLREDUCE || collective == Collective::REDUCE ||
         collective == Collective::BROADCAST || collective == Collective::P2P;
}

uint64_t piece_bytes(const at::Tensor& piece) { return static_cast<uint64_t>(piece.numel()); }

}  // namespace

at::Tensor byte_view(const at::Tensor& tensor) {
  auto view = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(tensor.device()));
  const int64_t offset = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  view.set_(tensor.storage(), offset, {static_cast<int64_t>(data_bytes(tensor))}, {1});
  return view;
}

std::vector<at::Tensor> sized_pieces(const at::Tensor& tensor, const std::vector<int64_t>& sizes_bytes) {
  const at::Tensor bytes = byte_view(tensor);
  std::vector<at::Tensor> pieces;
  int64_t offset = 0;
  for (const int64_t size : sizes_bytes) {
    pieces.push_back(bytes.narrow(0, offset, size));
    offset += size;
  }
  return pieces;
}

std::vector<at::Tensor> even_pieces(const at::Tensor& tensor, int64_t count) {
  return sized_pieces(
      tensor, std::vector<int64_t>(static_cast<size_t>(count), static_cast<int64_t>(data_bytes(tensor)) / count));
}

// How a call is cut: round r covers elements [r * chunk, (r + 1) * chunk) of every piece.
struct StagingLane::Rounds {
  uint64_t chunk_bytes;  // of one piece
  uint64_t count;
  bool shared;  // inputs and outputs are the same host buffer

  Rounds(const StagedCall& call, uint32_t world) : shared(is_shared(call.collective)) {
    const uint64_t pieces = shared ? 1 : world;
    const uint64_t elements = std::max<uint64_t>(SLOT_BYTES / (pieces * call.item_bytes), 1);
    chunk_bytes = elements * call.item_bytes;
    uint64_t longest = 0;
    for (const at::Tensor& piece : call.inputs) longest = std::max(longest, piece_bytes(piece));
    for (const at::Tensor& piece : call.outputs) longest = std::max(longest, piece_bytes(piece));
    count = std::max<uint64_t>((longest + chunk_bytes - 1) / chunk_bytes, 1);
  }

  uint64_t size_bytes(const at::Tensor& piece, uint64_t round) const {
    const uint64_t first = std::min(piece_bytes(piece), round * chunk_bytes);
    return std::min(piece_bytes(piece) - first, chunk_bytes);
  }

  uint64_t total_bytes(const std::vector<at::Tensor>& pieces, uint64_t round) const {
    uint64_t total = 0;
    for (const at::Tensor& piece : pieces) total += size_bytes(piece, round);
    return total;
  }

  // Calls visit(part of the piece, offset in the host buffer) for what round `round` moves of each piece.
  template <typename Visit>
  void each(const std::vector<at::Tensor>& pieces, uint64_t round, Visit visit) const {
    int64_t host_offset = 0;
    for (const at::Tensor& piece : pieces) {
      const auto size = static_cast<int64_t>(size_bytes(piece, round));
      if (size != 0) visit(piece.narrow(0, static_cast<int64_t>(round * chunk_bytes), size), host_offset);
      host_offset += size;
    }
  }
};

StagedWork::StagedWork(std::shared_ptr<GroupState> group, StagedCall call)
    : Work(static_cast<int>(sennit_comm_rank(group->comm)), call.type, at::hasCallbacks() ? call.title : nullptr),
      group_(std::move(group)),
      call_(std::move(call)) {
  if (has_streams(call_.device)) {
    const c10::impl::VirtualGuardImpl guard(call_.device.type());
    ready_.emplace(call_.device.type());
    ready_->record(guard.getStream(call_.device));
  }
}

bool StagedWork::isCompleted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && (exception_ || !done_ || done_->query());
}

bool StagedWork::isSuccess() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr StagedWork::exception() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

int StagedWork::sourceRank() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return source_;
}

std::vector<at::Tensor> StagedWork::result() { return call_.result; }

void StagedWork::synchronize() { wait(kNoTimeout); }

bool StagedWork::wait(std::chrono::milliseconds timeout) {
  const bool bounded = timeout > kNoTimeout;
  const Clock::time_point deadline = Clock::now() + (bounded ? timeout : std::chrono::milliseconds(0));
  const WithoutGil without_gil;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    TORCH_CHECK_WITH(DistBackendError, !bounded || Clock::now() < deadline, call_.title, ": not done after the ",
                     timeout.count(), " ms that this wait allowed; the operation itself goes on");
    const auto slice = Clock::now() + SIGNAL_CHECK;
    cv_.wait_until(lock, bounded ? std::min(slice, deadline) : slice);
    if (!completed_) {
      lock.unlock();
      check_signals();
      lock.lock();
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  if (done_) {
    const c10::impl::VirtualGuardImpl guard(call_.device.type());
    done_->block(guard.getStream(call_.device));
  }
  return true;
}

void StagedWork::abort() {
  const WithoutGil without_gil;
  sennit_abort(group_->comm, "Work.abort was called");
}

c10::intrusive_ptr<c10::ivalue::Future> StagedWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool is_done = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    std::vector<c10::Device> devices;
    if (has_streams(call_.device)) devices.push_back(call_.device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future = future_;
    is_done = completed_;
  }
  const WithoutGil without_gil;
  if (is_done) complete_future(future);
  return future;
}

void StagedWork::complete_future(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  if (exception_) {
    future->setErrorIfNeeded(exception_);
    return;
  }
  // A future on a device records its event on the current stream: the one that wrote the outputs.
  c10::OptionalStreamGuard guard;
  if (stream_) guard.reset_stream(*stream_);
  future->markCompleted(c10::IValue(call_.result));
}

void StagedWork::finish_call(std::exception_ptr error, std::optional<c10::Stream> stream, int source) {
  std::function<void()> end_profile;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    exception_ = error;
    source_ = source;
    stream_ = stream;
    if (stream_ && !error) {
      done_.emplace(stream_->device_type());
      done_->record(*stream_);
    }
    completed_ = true;
    future = future_;
    end_profile.swap(recordFunctionEndCallback_);
  }
  cv_.notify_all();
  if (end_profile) end_profile();
  if (future) complete_future(future);
}

StagingLane::StagingLane(std::shared_ptr<Poster> poster) : poster_(std::move(poster)), thread_([this] { serve(); }) {}

StagingLane::~StagingLane() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StagingLane::submit(c10::intrusive_ptr<StagedWork> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

bool StagingLane::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

bool StagingLane::is_closable() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_ && !telling_;
}

bool StagingLane::wait_idle(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return queue_.empty() && !busy_; });
}

void StagingLane::serve() {
  const at::NoGradGuard no_grad;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    c10::intrusive_ptr<StagedWork> work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    std::optional<c10::Stream> stream;
    int source = -1;
    try {
      Side& side = side_of(work->call_.device);
      stream = side.to_device;
      source = run(work->call_, work->ready_, side);
    } catch (...) {
      error = std::current_exception();
    }
    // Not busy before the work is seen as done: whoever waited for it may post directly from now on.
    lock.lock();
    busy_ = false;
    telling_ = true;
    lock.unlock();
    changed_.notify_all();
    work->finish_call(error, stream, source);
    work.reset();
    lock.lock();
    telling_ = false;
  }
}

StagingLane::Side& StagingLane::side_of(c10::Device device) {
  Side& side = sides_[{device.type(), device.index()}];
  if (!side.slots.empty()) return side;
  const bool streams = has_streams(device);
  if (streams) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    side.to_host = guard.getStreamFromGlobalPool(device);
    side.to_device = guard.getStreamFromGlobalPool(device);
  }
  side.slots.resize(SLOTS);
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(streams);
  for (Slot& slot : side.slots) {
    slot.input = at::empty({static_cast<int64_t>(SLOT_BYTES)}, options);
    slot.output = at::empty({static_cast<int64_t>(SLOT_BYTES)}, options);
    if (streams) {
      slot.filled.emplace(device.type());
      slot.drained.emplace(device.type());
    }
  }
  return side;
}

int StagingLane::run(StagedCall& call, const std::optional<c10::Event>& ready, Side& side) {
  if (ready) {
    ready->block(*side.to_host);
    ready->block(*side.to_device);
  }
  const uint64_t budget_us = call.options.timeout_us != 0 ? call.options.timeout_us : poster_->timeout_us();
  const uint64_t deadline_us = now_us() + budget_us;
  Rounds rounds(call, poster_->world());
  if (call.agree_on_rounds) rounds.count = agreed_rounds(call, rounds.count);

  int source = -1;
  uint64_t issued = 0;
  uint64_t posted = 0;
  uint64_t retired = 0;
  try {
    while (retired < rounds.count) {
      // From whoever comes first: the later rounds must come from that same rank.
      const bool is_anyone = call.collective == Collective::P2P && call.root == SENNIT_ANY_PEER;
      const uint64_t window = is_anyone ? 1 : SLOTS;
      while (issued < rounds.count && issued - retired < window) issue(call, rounds, issued++, side);
      while (posted < issued) {
        Slot& slot = side.slots[posted % SLOTS];
        // Wait for the oldest round's copy; later rounds are posted early only if theirs is done already.
        if (slot.filled && posted > retired && !slot.filled->query()) break;
        if (slot.filled) slot.filled->synchronize();
        post(call, rounds, posted++, slot, deadline_us);
      }
      retire(call, rounds, retired, side, &source);
      if (is_anyone) call.root = static_cast<uint32_t>(source);
      ++retired;
    }
  } catch (...) {
    // The core borrows the slots until every posted round has ended; each has a deadline.
    for (Slot& slot : side.slots) {
      if (slot.op == nullptr) continue;
      sennit_wait(slot.op, 0);
      sennit_op_release(slot.op);
      slot.op = nullptr;
    }
    throw;
  }
  return source;
}

uint64_t StagingLane::agreed_rounds(const StagedCall& call, uint64_t mine) {
  auto longest = static_cast<int64_t>(mine);
  const uint64_t one = 1;
  PlanShape shape;
  shape.collective = Collective::ALLREDUCE;
  shape.type_code = SENNIT_I64;
  shape.reduce = SENNIT_MAX;
  shape.item_bytes = sizeof longest;
  shape.counts = {&one, 1};
  PostOptions options = call.options;
  options.async = false;
  sennit_op* op = poster_->post(shape, Buffers{{&longest, sizeof longest}}, options);
  const sennit_status status = sennit_wait(op, 0);
  const std::string reason = sennit_op_error(op);
  sennit_op_release(op);
  if (status != SENNIT_OK) std::rethrow_exception(make_error(status, std::string(call.title) + ": " + reason));
  return static_cast<uint64_t>(longest);
}

void StagingLane::issue(const StagedCall& call, const Rounds& rounds, uint64_t round, Side& side) {
  Slot& slot = side.slots[round % SLOTS];
  c10::OptionalStreamGuard guard;
  if (side.to_host) {
    guard.reset_stream(*side.to_host);
    // The slot's last outputs must have left before the host buffers are written again.
    slot.drained->block(*side.to_host);
  }
  rounds.each(call.inputs, round, [&](const at::Tensor& part, int64_t offset) {
    slot.input.narrow(0, offset, part.numel()).copy_(part, /*non_blocking=*/true);
  });
  if (side.to_host) slot.filled->record(*side.to_host);
}

void StagingLane::post(const StagedCall& call, const Rounds& rounds, uint64_t round, Slot& slot, uint64_t deadline_us) {
  c10::SmallVector<uint64_t, 16> counts;
  Buffers buffers;
  const uint64_t input_bytes = rounds.total_bytes(call.inputs, round);
  const uint64_t output_bytes = rounds.total_bytes(call.outputs, round);
  const auto count_pieces = [&](const std::vector<at::Tensor>& pieces) {
    for (const at::Tensor& piece : pieces) counts.push_back(rounds.size_bytes(piece, round) / call.item_bytes);
  };
  if (rounds.shared) {
    const uint64_t size_bytes = std::max(input_bytes, output_bytes);
    counts.push_back(size_bytes / call.item_bytes);
    buffers.push_back({slot.input.mutable_data_ptr(), size_bytes});
  } else {
    if (!call.inputs.empty()) buffers.push_back({slot.input.mutable_data_ptr(), input_bytes});
    if (!call.outputs.empty()) buffers.push_back({slot.output.mutable_data_ptr(), output_bytes});
    if (call.collective == Collective::ALLTOALL) {
      count_pieces(call.inputs);
      count_pieces(call.outputs);
    } else if (call.collective != Collective::BARRIER) {
      const std::vector<at::Tensor>& many = call.inputs.size() > call.outputs.size() ? call.inputs : call.outputs;
      const std::vector<at::Tensor>& known = many.size() == poster_->world() ? many : call.inputs;
      if (known.size() == poster_->world()) {
        count_pieces(known);
      } else {  // gather and scatter away from the root: all parts are as large as the own one
        const auto& own = call.inputs.empty() ? call.outputs[0] : call.inputs[0];
        counts.append(poster_->world(), rounds.size_bytes(own, round) / call.item_bytes);
      }
    }
  }
  PlanShape shape;
  shape.collective = call.collective;
  shape.type_code = call.type_code;
  shape.reduce = call.reduce;
  shape.item_bytes = call.item_bytes;
  shape.root = call.root;
  shape.is_send = call.is_send;
  shape.counts = {counts.data(), counts.size()};
  PostOptions options = call.options;
  const uint64_t now = now_us();
  options.timeout_us = deadline_us > now ? deadline_us - now : 1;
  options.async = true;
  slot.op = poster_->post(shape, buffers, options);
}

void StagingLane::retire(const StagedCall& call, const Rounds& rounds, uint64_t round, Side& side, int* source) {
  Slot& slot = side.slots[round % SLOTS];
  const sennit_status status = sennit_wait(slot.op, 0);
  if (status != SENNIT_OK) {
    poster_->group()->note_failure(status);
    std::rethrow_exception(make_error(status, std::string(call.title) + ": " + sennit_op_error(slot.op)));
  }
  if (const uint32_t from = sennit_op_source(slot.op); from != SENNIT_ANY_PEER) *source = static_cast<int>(from);
  sennit_op_release(slot.op);
  slot.op = nullptr;
  const at::Tensor& host = rounds.shared ? slot.input : slot.output;
  c10::OptionalStreamGuard guard;
  if (side.to_device) guard.reset_stream(*side.to_device);
  rounds.each(call.outputs, round, [&](const at::Tensor& part, int64_t offset) {
    at::Tensor target = part;
    target.copy_(host.narrow(0, offset, part.numel()), /*non_blocking=*/true);
  });
  if (side.to_device) slot.drained->record(*side.to_device);
}

Staging::Staging(std::shared_ptr<Poster> poster) : poster_(std::move(poster)) {}

c10::intrusive_ptr<c10d::Work> Staging::submit(StagedCall call) {
  const bool is_p2p = call.collective == Collective::P2P;
  const Direction direction = !is_p2p ? Direction::COLLECTIVE : call.is_send ? Direction::SEND : Direction::RECEIVE;
  const Key key{direction, is_p2p ? call.root : 0, is_p2p ? call.options.tag : 0};
  auto work = c10::make_intrusive<StagedWork>(poster_->group(), std::move(call));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lanes_.size() > KEPT_LANES) {
    std::erase_if(lanes_, [](const auto& entry) { return entry.second->is_closable(); });
  }
  std::unique_ptr<StagingLane>& lane = lanes_[key];
  if (!lane) lane = std::make_unique<StagingLane>(poster_);
  lane->submit(work);
  return work;
}

bool Staging::busy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto lane = lanes_.find(Key{Direction::COLLECTIVE, 0, 0});
  return lane != lanes_.end() && !lane->second->idle();
}

bool Staging::drain(std::chrono::microseconds limit) {
  const auto deadline = Clock::now() + limit;
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [&](const auto& entry) { return entry.second->wait_idle(deadline); });
}

void Staging::forget() {
  for (auto& entry : lanes_) (void)entry.second.release();
}

void Staging::stop() {
  std::map<Key, std::unique_ptr<StagingLane>> lanes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    lanes.swap(lanes_);
  }
  lanes.clear();
}

}  // namespace sennit::runtime
