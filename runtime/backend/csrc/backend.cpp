// SPDX-License-Identifier: Apache-2.0
// The backend's life cycle, and how a checked call is started. The calls themselves are in collectives.cpp.
#include "backend.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <functional>
#include <numeric>
#include <ranges>
#include <set>

#include "arguments.hpp"
#include "interpreter.hpp"
#include "outputs.hpp"
#include "stand_in.hpp"

namespace sennit::runtime {
namespace {

// The longest time that destroy_process_group waits for the last acknowledgements.
constexpr uint64_t SHUTDOWN_US = 5'000'000;

std::mutex open_mutex;
std::set<SennitBackend*> open_backends;

}  // namespace

SennitBackend::SennitBackend(sennit_comm* comm, CompilePlan compile, StagedClasses staged_classes, Shrink shrink,
                             std::shared_ptr<void> owner, c10::intrusive_ptr<Options> options)
    : Backend(static_cast<int>(sennit_comm_rank(comm)), static_cast<int>(sennit_comm_size(comm))),
      options_(std::move(options)),
      owner_(std::move(owner)),
      staged_classes_(std::move(staged_classes)),
      shrink_(std::move(shrink)),
      group_(std::make_shared<GroupState>(comm)),
      poster_(
          std::make_shared<Poster>(group_, std::move(compile), options_->plan_cache_bytes, to_us(options_->timeout))),
      copies_(std::make_shared<DeviceCopies>()) {
  init();
  const std::lock_guard<std::mutex> lock(open_mutex);
  open_backends.insert(this);
}

SennitBackend::~SennitBackend() {
  {
    const std::lock_guard<std::mutex> lock(open_mutex);
    open_backends.erase(this);
  }
  if (is_inherited()) {
    // Threads and sockets belong to the parent: this process must not touch them, not even reference counts.
    new std::shared_ptr<Poster>(poster_);
    new std::shared_ptr<DeviceCopies>(copies_);
    return;
  }
  shutdown();
}

void SennitBackend::close_all() {
  std::vector<SennitBackend*> backends;
  {
    const std::lock_guard<std::mutex> lock(open_mutex);
    backends.assign(open_backends.begin(), open_backends.end());
  }
  for (SennitBackend* backend : backends) backend->shutdown();
}

void SennitBackend::check_usable() const {
  TORCH_CHECK(!is_inherited(),
              "sennit: this process was forked after init_process_group; its connections belong to the parent. ",
              "Start processes with spawn or forkserver, or initialise after the fork");
}

void SennitBackend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "timeout is ", timeout.count(), " ms; allowed: at least 1");
  options_->timeout = timeout;
  poster_->set_timeout_us(to_us(timeout));
}

uint64_t SennitBackend::getSequenceNumberForGroup() { return sennit_comm_sequence(group_->comm); }

c10d::ErrorType SennitBackend::getError() { return group_->error.load(); }

void SennitBackend::abort() {
  check_usable();
  const WithoutGil without_gil;
  sennit_abort(group_->comm, "abort was called");
}

void SennitBackend::shutdown() {
  if (is_inherited() || is_shut_down_.exchange(true)) return;
  const WithoutGil without_gil;
  if (!copies_->drain(std::chrono::microseconds(SHUTDOWN_US))) {
    sennit_abort(group_->comm, "shut down with calls on device memory still in flight");
  }
  sennit_shutdown(group_->comm, std::min(SHUTDOWN_US, poster_->timeout_us()));
  copies_->stop(std::chrono::microseconds(SHUTDOWN_US));
}

c10::intrusive_ptr<c10d::Backend> SennitBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                                        const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  check_usable();
  TORCH_CHECK_VALUE(options == nullptr, "sennit shrink_group: pg_options is given; allowed: None (the group's own)");
  for (const int64_t rank : ranks_to_exclude) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_ && rank != rank_, "sennit shrink: rank ", rank,
                      " is to be excluded; allowed: 0 to ", size_ - 1, " but this rank ", rank_);
  }
  return shrink_(ranks_to_exclude, (shrink_flags & SHRINK_ABORT) != 0);
}

void SennitBackend::startCoalescing() {
  // If this thread is in a block already, an error of the program ended it: torch knows no blocks in blocks.
  std::thread::id none;
  const std::thread::id here = std::this_thread::get_id();
  TORCH_CHECK(coalescing_thread_.compare_exchange_strong(none, here) || none == here,
              "sennit: startCoalescing was called while another thread is in a coalescing block of this group");
  coalesced_.clear();
  refusal_ = nullptr;
}

c10::intrusive_ptr<c10d::Work> SennitBackend::endCoalescing() {
  TORCH_CHECK(is_coalescing(), "sennit: endCoalescing was called without startCoalescing in this thread");
  std::vector<WorkPointer> parts = std::exchange(coalesced_, {});
  const std::exception_ptr refusal = std::exchange(refusal_, nullptr);
  coalescing_thread_ = std::thread::id();
  if (refusal) std::rethrow_exception(refusal);
  Tensors outputs;
  for (const auto& part : parts) {
    for (const at::Tensor& tensor : part->result()) outputs.push_back(tensor);
  }
  return c10::make_intrusive<JointWork>(rank_, c10d::OpType::COALESCED, std::move(parts), std::move(outputs));
}

SennitBackend::WorkPointer SennitBackend::guarded(c10::function_ref<WorkPointer()> call) {
  if (!is_coalescing()) return call();
  if (!refusal_) {
    try {
      coalesced_.push_back(call());
      return coalesced_.back();
    } catch (const std::exception&) {
      refusal_ = std::current_exception();
    }
  }
  return c10::make_intrusive<JointWork>(rank_, c10d::OpType::COALESCED, std::vector<WorkPointer>{}, Tensors());
}

Call SennitBackend::new_call(const char* title, c10d::OpType type, Collective collective, const at::Tensor& like,
                             std::chrono::milliseconds timeout, bool async) const {
  Call call;
  call.title = title;
  call.type = type;
  call.collective = collective;
  call.type_code = type_code(like.scalar_type());
  call.item_bytes = static_cast<uint32_t>(like.element_size());
  call.device = like.device();
  call.options.timeout_us = timeout.count() > 0 ? to_us(timeout) : 0;
  call.options.async = async;
  return call;
}

// The size in all, rounded up to a power of two. An alltoall's parts that are received do not count.
static int size_class_of(const Call& call, int world) {
  const auto end = call.counts.begin() + world;
  const uint64_t size_bytes = std::accumulate(call.counts.begin(), end, uint64_t{0}) * call.item_bytes;
  return std::bit_width(std::max<uint64_t>(size_bytes, 1) - 1);
}

bool SennitBackend::is_staged(const Call& call) {
  const int size_class = size_class_of(call, size_);
  if (size_class == 0) return false;
  std::atomic<uint64_t>& known = staged_[static_cast<size_t>(call.collective)];
  uint64_t classes = known.load(std::memory_order_relaxed);
  if (classes == 0) {
    classes = staged_classes_(call.collective) | 1;
    known.store(classes, std::memory_order_relaxed);
  }
  return (classes >> size_class & 1) != 0;
}

// The size, rounded up to one of four sizes between two powers of two (transport/choice/selection.py, `grade`).
static int grade_of(uint64_t size_bytes) {
  const int shift = size_bytes == 0 ? 0 : std::max(static_cast<int>(std::bit_width(size_bytes - 1)) - 3, 0);
  return 4 * shift + static_cast<int>((size_bytes + (uint64_t{1} << shift) - 1) >> shift);
}

// From what all ranks know: the sizes of an allgather, or that the parts of an alltoall are equal.
void SennitBackend::choose_way(Call& call) {
  switch (call.collective) {
    case Collective::REDUCE_SCATTER:
      return cut_shares(call);
    case Collective::ALLREDUCE:
      if (options_->is_coded) return;
      [[fallthrough]];
    case Collective::REDUCE:
    case Collective::BROADCAST:
      call.size_class = static_cast<uint8_t>(1 + grade_of(call.counts[0] * call.item_bytes));
      return;
    default:
      break;
  }
  const bool is_allgather = call.collective == Collective::ALLGATHER;
  if (!(is_allgather || call.equal_parts) || !is_staged(call)) return;
  // Such an allgather serves all sizes. What others pass on in an alltoall is in scratch, of a size that the plan must
  // know.
  call.size_class = is_allgather ? 1 : static_cast<uint8_t>(size_class_of(call, size_));
  if (call.equal_parts) call.counts.resize(1);
}

// Uneven shares: so that the plan of other sizes serves these, too (transport/algorithms/reduce_scatter_counted.py).
void SennitBackend::cut_shares(Call& call) {
  if (std::ranges::adjacent_find(call.counts, std::ranges::not_equal_to()) == call.counts.end()) return;
  if (is_staged(call)) return;
  constexpr uint64_t PIECE_BYTES = 131'072, LINE_BYTES = 64;
  const auto divided = [](uint64_t number, uint64_t by) { return (number + by - 1) / by; };
  const uint64_t largest = *std::max_element(call.counts.begin(), call.counts.end());
  const uint64_t pieces = std::bit_ceil(std::max<uint64_t>(divided(largest * call.item_bytes, PIECE_BYTES), 1));
  const uint64_t line = std::max<uint64_t>(LINE_BYTES / call.item_bytes, 1);
  c10::SmallVector<uint64_t, 8> cut;
  for (uint64_t left : call.counts) {
    const uint64_t size = divided(left, pieces * line) * line;
    for (uint64_t piece = 0; piece < pieces; ++piece) {
      cut.push_back(std::min(size, left));
      left -= cut.back();
    }
  }
  call.size_class = static_cast<uint8_t>(std::bit_width(pieces));
  call.counts = std::move(cut);
}

// What is not contiguous is copied. So is what this rank gives to a PREMUL_SUM, multiplied by its factor: nobody else
// knows that factor.
static void pack(Call& call, int rank) {
  const auto copied = [&](const at::Tensor& given, bool is_scaled) {
    return is_scaled ? scaled_copy(given, *call.factor) : packed_copy(given);
  };
  const bool is_scaled = call.factor && *call.factor != 1.0;
  for (at::Tensor& input : call.inputs) {
    if (is_scaled || !input.is_contiguous()) input = copied(input, is_scaled);
  }
  // Without inputs, the outputs are both.
  const bool scales_outputs = is_scaled && call.inputs.empty();
  const bool is_only_read =
      call.is_send || (call.collective == Collective::REDUCE && static_cast<int>(call.root) != rank);
  for (size_t index = 0; index < call.outputs.size(); ++index) {
    at::Tensor& output = call.outputs[index];
    if (!scales_outputs && output.is_contiguous()) continue;
    at::Tensor packed = copied(output, scales_outputs);
    if (is_only_read) {
      output = std::move(packed);
    } else {
      call.packed.push_back({index, output, std::move(packed)});
    }
  }
}

SennitBackend::WorkPointer SennitBackend::run(Call call) {
  const bool is_awaited = !call.options.async && !is_coalescing();
  WorkPointer work = start(std::move(call));
  if (!is_awaited) return work;
  work->wait(kNoTimeout);
  return nullptr;
}

SennitBackend::WorkPointer SennitBackend::start(Call call) {
  check_usable();
  const bool has_tensors = call.collective != Collective::BARRIER;
  call.on_device = !call.device.is_cpu() || (has_tensors && stand_in::is_active());
  if (!call.on_device) choose_way(call);
  if (is_coalescing()) call.options.async = true;
  pack(call, rank_);
  return call.on_device ? post_on_device(std::move(call)) : post(std::move(call));
}

SennitBackend::WorkPointer SennitBackend::start_all(c10d::OpType type, std::vector<Call> calls) {
  Tensors outputs;
  for (const Call& call : calls) outputs.insert(outputs.end(), call.outputs.begin(), call.outputs.end());
  const Outputs written("outputs", outputs);
  // They run at the same time: an input may lie in the output of another call.
  for (Call& call : calls) {
    if (call.in_place) continue;
    for (at::Tensor& input : call.inputs) input = written.apart(input);
  }
  std::vector<WorkPointer> parts;
  for (Call& call : calls) parts.push_back(start(std::move(call)));
  if (parts.size() == 1) return parts[0];
  return c10::make_intrusive<JointWork>(rank_, type, std::move(parts), std::move(outputs));
}

SennitBackend::WorkPointer SennitBackend::post(Call call) {
  Buffers buffers;
  if (!call.in_place) {
    for (const at::Tensor& tensor : call.inputs) {
      buffers.push_back({const_cast<void*>(tensor.const_data_ptr()), data_bytes(tensor)});
    }
  }
  const size_t first = buffers.size();
  for (const at::Tensor& tensor : call.outputs) buffers.push_back({tensor.mutable_data_ptr(), data_bytes(tensor)});
  for (const Packed& one : call.packed) buffers[first + one.index].data = one.packed.mutable_data_ptr();
  sennit_op* op = poster_->post(call.shape(), buffers, call.options);
  return c10::make_intrusive<SennitWork>(
      group_, call.type, call.title, op,
      Tensors(std::make_move_iterator(call.outputs.begin()), std::make_move_iterator(call.outputs.end())),
      Tensors(std::make_move_iterator(call.inputs.begin()), std::make_move_iterator(call.inputs.end())),
      std::move(call.packed));
}

SennitBackend::WorkPointer SennitBackend::post_on_device(Call call) {
  Tensors buffers;
  if (!call.in_place) buffers.assign(call.inputs.begin(), call.inputs.end());
  const size_t first = buffers.size();
  buffers.insert(buffers.end(), call.outputs.begin(), call.outputs.end());
  for (const Packed& one : call.packed) buffers[first + one.index] = one.packed;
  const auto device_operation = std::make_shared<DeviceOperation>(copies_, call.device, buffers);
  const sennit_device handle = device_operation->handle();
  sennit_op* op = nullptr;
  try {
    op = poster_->post_on_device(call.shape(), handle, call.options);
  } catch (...) {
    DeviceOperation::drop(handle);
    throw;
  }
  return c10::make_intrusive<SennitWork>(
      group_, call.type, call.title, op,
      Tensors(std::make_move_iterator(call.outputs.begin()), std::make_move_iterator(call.outputs.end())), Tensors(),
      std::move(call.packed), device_operation->stream());
}

void SennitBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  // Tags of users are below 2^31. Rank 0 waits for a message of every rank, then answers all of them.
  constexpr uint32_t ARRIVED = 0xFFFF'FF00u;
  constexpr uint32_t RELEASED = 0xFFFF'FF01u;
  check_usable();
  // A deadline of zero asks who is there already.
  const uint64_t timeout_us = options.timeout == c10d::kUnsetTimeout ? poster_->timeout_us() : to_us(options.timeout);
  const WithoutGil without_gil;
  const uint64_t zero = 0;
  const auto post_empty = [&](uint32_t peer, bool is_send, uint32_t tag) {
    PlanShape shape;
    shape.collective = Collective::P2P;
    shape.type_code = SENNIT_U8;
    shape.is_send = is_send;
    shape.root = peer;
    shape.counts = {&zero, 1};
    PostOptions post_options;
    post_options.timeout_us = timeout_us;
    post_options.async = false;
    post_options.tag = tag;
    sennit_op* op = poster_->post(shape, Buffers{{nullptr, 0}}, post_options);
    return std::unique_ptr<sennit_op, decltype(&sennit_op_release)>(op, sennit_op_release);
  };
  const auto finish = [](sennit_op* op) {
    sennit_status status = SENNIT_PENDING;
    while ((status = sennit_wait(op, 100'000)) == SENNIT_PENDING) check_signals();
    return status;
  };
  if (rank_ != 0) {
    const auto arrived = post_empty(0, true, ARRIVED);
    const auto released = post_empty(0, false, RELEASED);
    for (sennit_op* op : {arrived.get(), released.get()}) {
      const sennit_status status = finish(op);
      if (status != SENNIT_OK) {
        group_->note_failure(status);
        std::rethrow_exception(make_error(
            status,
            c10::str("sennit monitored_barrier: rank ", rank_, " was not released by rank 0 within ", timeout_us / 1000,
                     " ms; rank 0's error names the ranks that did not come. ", sennit_op_error(op))));
      }
    }
    return;
  }
  std::vector<std::unique_ptr<sennit_op, decltype(&sennit_op_release)>> arrivals;
  for (int rank = 1; rank < size_; ++rank) arrivals.push_back(post_empty(static_cast<uint32_t>(rank), false, ARRIVED));
  std::vector<int> missing;
  std::string reasons;
  for (int rank = 1; rank < size_; ++rank) {
    sennit_op* op = arrivals[static_cast<size_t>(rank) - 1].get();
    const sennit_status status = finish(op);
    if (status == SENNIT_OK) continue;
    group_->note_failure(status);
    missing.push_back(rank);
    reasons += c10::str(reasons.empty() ? "" : "; ", sennit_op_error(op));
    if (!wait_all_ranks) break;
  }
  TORCH_CHECK_WITH(DistBackendError, missing.empty(),
                   "sennit monitored_barrier: ", missing.size() == 1 ? "rank " : "ranks ", c10::Join(", ", missing),
                   " did not come within ", timeout_us / 1000, " ms (", reasons, ")");
  std::vector<std::unique_ptr<sennit_op, decltype(&sennit_op_release)>> releases;
  for (int rank = 1; rank < size_; ++rank) releases.push_back(post_empty(static_cast<uint32_t>(rank), true, RELEASED));
  for (const auto& op : releases) {
    const sennit_status status = finish(op.get());
    if (status != SENNIT_OK) std::rethrow_exception(make_error(status, sennit_op_error(op.get())));
  }
}

// AllReduce of sparse COO tensors: every rank gathers the indices and values of all ranks, and sums them.
//
// Entries differ between ranks, so a first AllGather exchanges their numbers, and shapes with them: the ranks' indices
// would not fit another shape. The call blocks, because its three exchanges depend on each other. Ranks are summed over
// the tree of docs/reference/plans.md, in the accumulator's type, so all get the same bits.

namespace {

at::ScalarType accumulator(at::ScalarType type) {
  if (type == at::kHalf || type == at::kBFloat16) return at::kFloat;
  return type == at::kComplexHalf ? at::kComplexFloat : type;
}

// A binary counter: rank r's tensor meets as many others as r has trailing ones.
at::Tensor sum_over_tree(const std::vector<at::Tensor>& by_rank) {
  std::vector<at::Tensor> stack;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    stack.push_back(by_rank[rank]);
    const int combinations = rank + 1 == by_rank.size() ? std::popcount(rank) : std::countr_one(rank);
    for (int i = 0; i < combinations; ++i) {
      const at::Tensor right = stack.back();
      stack.pop_back();
      const at::Tensor& left = stack.back();
      // An index is at most once in each: coalescing adds two values, or keeps one.
      stack.back() = at::sparse_coo_tensor(at::cat({left._indices(), right._indices()}, 1),
                                           at::cat({left._values(), right._values()}), left.sizes(), left.options())
                         .coalesce();
    }
  }
  return stack.front();
}

// What a rank says of its sparse tensor before it sends it: numbers, of which only the first may differ between ranks.
constexpr int64_t SPARSE_DIMENSIONS_MAX = 64;  // as in TensorIterator
enum SparseFacts : int64_t { ENTRIES, REDUCE, TYPE, SPARSE_DIMENSIONS, DENSE_DIMENSIONS, SIZES };

at::Tensor sparse_facts(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  TORCH_CHECK_VALUE(tensor.dim() <= SPARSE_DIMENSIONS_MAX, "a sparse tensor has ", tensor.dim(),
                    " dimensions; allowed: up to ", SPARSE_DIMENSIONS_MAX);
  at::Tensor facts = at::zeros({SIZES + SPARSE_DIMENSIONS_MAX}, at::kLong);
  auto* numbers = facts.mutable_data_ptr<int64_t>();
  numbers[ENTRIES] = tensor._nnz();
  numbers[REDUCE] = static_cast<int64_t>(op);
  numbers[TYPE] = static_cast<int64_t>(tensor.scalar_type());
  numbers[SPARSE_DIMENSIONS] = tensor.sparse_dim();
  numbers[DENSE_DIMENSIONS] = tensor.dense_dim();
  std::ranges::copy(tensor.sizes(), numbers + SIZES);
  return facts;
}

std::string describe_sparse(std::span<const int64_t> facts) {
  const auto dimensions = static_cast<size_t>(facts[SPARSE_DIMENSIONS] + facts[DENSE_DIMENSIONS]);
  const at::IntArrayRef sizes(facts.data() + SIZES, dimensions);
  return c10::str("the shape ", sizes, " with ", facts[SPARSE_DIMENSIONS], " sparse dimensions, dtype ",
                  static_cast<at::ScalarType>(facts[TYPE]), ", reduce op ",
                  facts[REDUCE] == static_cast<int64_t>(c10d::ReduceOp::AVG) ? "AVG" : "SUM");
}

// Raises the same on all ranks if they do not give tensors of one shape, kind and operation. `facts`: a row for each.
void check_sparse_facts(const at::Tensor& facts) {
  const int64_t* first = facts.const_data_ptr<int64_t>();
  const auto length = static_cast<size_t>(facts.size(1));
  for (int64_t rank = 1; rank < facts.size(0); ++rank) {
    const int64_t* other = first + rank * facts.size(1);
    TORCH_CHECK_VALUE(std::equal(first + REDUCE, first + length, other + REDUCE), "a sparse all_reduce of ",
                      describe_sparse({first, length}), " on rank 0, but of ", describe_sparse({other, length}),
                      " on rank ", rank, "; allowed: the same on all ranks");
  }
}

}  // namespace

SennitBackend::WorkPointer SennitBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return guarded([&] {
    TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].is_sparse(), "tensors has ", tensors.size(),
                      " tensors; exactly 1 sparse COO tensor is allowed");
    return sum_sparse(tensors[0], options);
  });
}

SennitBackend::WorkPointer SennitBackend::sum_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  const auto op = options.reduceOp.op_;
  TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG,
                    "a sparse all_reduce allows the reduce ops SUM and AVG only");
  checked_reduce(options.reduceOp, tensor.scalar_type());
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.coalesce();
  at::Tensor indices = own.indices().t().contiguous();  // one row an entry
  at::Tensor values = own.values().contiguous();

  c10d::AllgatherOptions gather_options;
  gather_options.timeout = options.timeout;
  gather_options.asyncOp = false;
  at::Tensor own_facts = sparse_facts(own, op);
  at::Tensor facts = at::zeros({size_, own_facts.numel()}, own_facts.options());
  // In a coalescing block they are not awaited yet.
  const auto finish = [](const WorkPointer& work) {
    if (work != nullptr) work->wait(kNoTimeout);
  };
  finish(run(allgather_call("facts", facts, own_facts, gather_options)));
  check_sparse_facts(facts);

  const auto gather_rows = [&](at::Tensor& rows) {
    Tensors all;
    for (int64_t rank = 0; rank < size_; ++rank) {
      std::vector<int64_t> sizes = rows.sizes().vec();
      sizes[0] = facts[rank][ENTRIES].item<int64_t>();
      all.push_back(at::empty(sizes, rows.options()));
    }
    finish(run(allgather_list_call(all, rows, gather_options)));
    return all;
  };
  const Tensors all_indices = gather_rows(indices);
  const Tensors all_values = gather_rows(values);
  const at::ScalarType type = accumulator(own.scalar_type());
  Tensors by_rank;
  for (size_t rank = 0; rank < all_indices.size(); ++rank) {
    by_rank.push_back(
        at::sparse_coo_tensor(all_indices[rank].t(), all_values[rank].to(type), own.sizes(), own.options().dtype(type))
            .coalesce());
  }
  at::Tensor sum = sum_over_tree(by_rank);
  if (op == c10d::ReduceOp::AVG) {
    // As of dense tensors: integers are cut towards zero.
    if (at::isIntegralType(type, false)) {
      sum.div_(size_, "trunc");
    } else {
      sum.div_(size_);
    }
  }
  tensor.copy_(sum.to(own.scalar_type()));
  return c10::make_intrusive<JointWork>(rank_, c10d::OpType::_ALLREDUCE_SPARSE, std::vector<WorkPointer>{},
                                        Tensors{tensor});
}

}  // namespace sennit::runtime
