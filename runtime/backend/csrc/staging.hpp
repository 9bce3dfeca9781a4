// SPDX-License-Identifier: Apache-2.0
// Collectives on an accelerator's tensors, pipelined through pinned host buffers.
//
// The core moves host memory. A lane (a thread, two side streams and a few pinned slots) cuts a call into rounds
// of at most one slot: copy to the host, exchange, copy back; up to SLOTS rounds are under way at once. Only c10's
// device-generic interfaces are used, so the same object serves every accelerator that torch knows, and the host
// itself (without streams), which is how it is tested where there is none.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>

#include "poster.hpp"

namespace sennit::runtime {

// A collective over pieces: byte views of what goes to and comes from each rank (one piece where all ranks share).
struct StagedCall {
  Collective collective = Collective::BARRIER;
  const char* title = "";
  c10d::OpType type = c10d::OpType::UNKNOWN;
  uint8_t type_code = 0;
  uint8_t reduce = 0;
  uint32_t item_bytes = 1;
  uint32_t root = 0;
  bool is_send = false;
  bool agree_on_rounds = false;  // only this rank's sizes are known here (AlltoAll with splits)
  PostOptions options;
  std::vector<at::Tensor> inputs;  // user's tensors, cut into pieces: 1-D bytes
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> result;  // user's tensors as they were passed
  c10::Device device{c10::kCPU};
};

class StagedWork final : public c10d::Work {
 public:
  StagedWork(std::shared_ptr<GroupState> group, StagedCall call);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  friend class StagingLane;
  void finish_call(std::exception_ptr error, std::optional<c10::Stream> stream, int source);
  void complete_future(const c10::intrusive_ptr<c10::ivalue::Future>& future);

  const std::shared_ptr<GroupState> group_;
  StagedCall call_;
  std::optional<c10::Event> ready_;  // the caller's stream has written the inputs
  std::optional<c10::Event> done_;   // the outputs are written, on stream_
  std::optional<c10::Stream> stream_;
  int source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Runs calls in order. Collectives of a group share one lane; point-to-point calls have one for each
// (direction, peer, tag), so that a receive that waits never holds up the send that its peer waits for.
class StagingLane {
 public:
  explicit StagingLane(std::shared_ptr<Poster> poster);
  ~StagingLane();
  void submit(c10::intrusive_ptr<StagedWork> work);
  bool idle();
  // Idle, and its thread runs no callback either: one that submits a call, or waits for the GIL of a thread that does,
  // could not be joined.
  bool is_closable();
  bool wait_idle(std::chrono::steady_clock::time_point deadline);

 private:
  static constexpr size_t SLOTS = 4;
  struct Slot {
    at::Tensor input;
    at::Tensor output;
    std::optional<c10::Event> filled;   // the inputs are on the host
    std::optional<c10::Event> drained;  // the outputs have left the host
    sennit_op* op = nullptr;
  };
  // What a lane keeps for a device that it has served; no streams for the host.
  struct Side {
    std::optional<c10::Stream> to_host;
    std::optional<c10::Stream> to_device;
    std::vector<Slot> slots;
  };
  struct Rounds;

  void serve();
  int run(StagedCall& call, const std::optional<c10::Event>& ready, Side& side);
  void issue(const StagedCall& call, const Rounds& rounds, uint64_t round, Side& side);
  void post(const StagedCall& call, const Rounds& rounds, uint64_t round, Slot& slot, uint64_t deadline_us);
  void retire(const StagedCall& call, const Rounds& rounds, uint64_t round, Side& side, int* source);
  uint64_t agreed_rounds(const StagedCall& call, uint64_t mine);
  Side& side_of(c10::Device device);

  const std::shared_ptr<Poster> poster_;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, Side> sides_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<StagedWork>> queue_;
  bool busy_ = false;
  bool telling_ = false;  // that a call is done
  bool stop_ = false;
  std::thread thread_;
};

// All lanes of one backend, made when first needed.
class Staging {
 public:
  explicit Staging(std::shared_ptr<Poster> poster);
  c10::intrusive_ptr<c10d::Work> submit(StagedCall call);
  // A collective is queued or running: later collectives must follow it, to keep the order of posts.
  bool busy();
  // Waits until no call is queued or running; false when `limit` passed first.
  bool drain(std::chrono::microseconds limit);
  // Leaves threads and memory to whoever owns them (the parent, after a fork).
  void forget();
  // Ends the threads; calls in flight must have failed or finished before (abort, shutdown).
  void stop();

 private:
  // Beyond this many lanes idle ones are closed, so that programs with a tag a message do not collect threads.
  static constexpr size_t KEPT_LANES = 16;
  enum class Direction { COLLECTIVE, SEND, RECEIVE };
  using Key = std::tuple<Direction, uint32_t, uint32_t>;  // peer, tag
  const std::shared_ptr<Poster> poster_;
  std::mutex mutex_;
  std::map<Key, std::unique_ptr<StagingLane>> lanes_;
};

// The bytes of `tensor` as a 1-D view.
at::Tensor byte_view(const at::Tensor& tensor);
// Byte views of `count` equal pieces, or of pieces of the given sizes in bytes.
std::vector<at::Tensor> even_pieces(const at::Tensor& tensor, int64_t count);
std::vector<at::Tensor> sized_pieces(const at::Tensor& tensor, const std::vector<int64_t>& sizes_bytes);

}  // namespace sennit::runtime
