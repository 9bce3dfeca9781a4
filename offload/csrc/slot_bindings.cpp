// SPDX-License-Identifier: Apache-2.0
// The slots of a ring in an arena, as the process that reads them sees them (ebpf/include/feed_slot.h).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sched.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

#include "../../ebpf/include/feed_slot.h"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sennit::offload {
namespace {

class KernelSlots {
 public:
  using Memory = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  KernelSlots(Memory memory, std::uint32_t slots, std::size_t slot_bytes)
      : memory_(std::move(memory)), slots_(slots), slot_bytes_(slot_bytes) {
    if (slots == 0 || slot_bytes < sizeof(feed_slot) || memory_.shape(0) / slot_bytes < slots)
      throw std::invalid_argument(std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes in " +
                                  std::to_string(memory_.shape(0)));
  }

  std::uint32_t rows_taken(std::uint32_t batch) const { return feed_slot_row_of(&slot_of(batch).state, batch); }
  std::uint32_t row_ahead(std::uint32_t batch) const { return feed_slot_row_of(&slot_of(batch).ahead, batch); }

  // Waits while a processor has the slot. That takes microseconds, unless the hypervisor has stopped the processor.
  std::uint64_t claim(std::uint32_t batch, int timeout_ms) {
    feed_slot& slot = slot_of(batch);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    __u64 state = 0;
    while (!feed_slot_claim_any(&slot, &state)) {
      if (std::chrono::steady_clock::now() > end)
        throw std::system_error(ETIMEDOUT, std::generic_category(),
                                "xdp: a processor has filled the slot of batch " + std::to_string(batch) + " for " +
                                    std::to_string(timeout_ms) + " ms");
      sched_yield();
    }
    return state;
  }

  std::uint32_t rows_kept(std::uint32_t batch) const { return slot_of(batch).rows; }
  void give_back(std::uint32_t batch, std::uint64_t state) { feed_slot_publish(&slot_of(batch), state); }

  // Gives a slot that this process owns to the batch.
  void open(std::uint32_t batch) {
    feed_slot& slot = slot_of(batch);
    feed_slot_publish(&slot, feed_slot_opened(&slot, batch));
  }

 private:
  feed_slot& slot_of(std::uint32_t batch) const {
    return *reinterpret_cast<feed_slot*>(memory_.data() + slot_bytes_ * (batch % slots_));
  }

  Memory memory_;
  std::uint32_t slots_;
  std::size_t slot_bytes_;
};

}  // namespace

void bind_slots(nb::module_& module) {
  nb::class_<KernelSlots>(module, "KernelSlots")
      .def(nb::init<KernelSlots::Memory, std::uint32_t, std::size_t>(), "memory"_a, "slots"_a, "slot_bytes"_a)
      .def("rows_taken", &KernelSlots::rows_taken)
      .def("row_ahead", &KernelSlots::row_ahead)
      .def("claim", &KernelSlots::claim, "batch"_a, "timeout_ms"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("rows_kept", &KernelSlots::rows_kept)
      .def("give_back", &KernelSlots::give_back)
      .def("open", &KernelSlots::open);
}

}  // namespace sennit::offload
