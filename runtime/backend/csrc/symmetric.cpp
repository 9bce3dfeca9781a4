// SPDX-License-Identifier: Apache-2.0
#include "symmetric.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <sennit/core.h>

#include <atomic>
#include <cstring>
#include <mutex>

namespace sennit::runtime::symmetric {
namespace {

// Smaller messages are copied anyway, and malloc is faster than the shared heap.
constexpr size_t MIN_BYTES = 16'384;
// Torch's own allocators have priority 0.
constexpr uint8_t PRIORITY = 1;

std::atomic<bool> everywhere{false};
thread_local int depth = 0;

// Gives symmetric memory where it is wanted, and otherwise what the allocator before gives.
class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t size_bytes) override {
    void* memory = nullptr;
    if (size_bytes >= MIN_BYTES && (depth > 0 || everywhere.load(std::memory_order_relaxed))) {
      memory = sennit_symmetric_alloc(size_bytes);
      if (memory == nullptr) {
        TORCH_WARN_ONCE("sennit: no symmetric memory for a tensor of ", size_bytes,
                        " bytes; it gets ordinary memory, with the same results");
      } else {
        c10::profiledCPUMemoryReporter().New(memory, size_bytes);
      }
    }
    if (memory == nullptr) memory = before_->raw_allocate(size_bytes);
    return {memory, memory, &Allocator::release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* to, const void* from, size_t size_bytes) const override {
    default_copy_data(to, from, size_bytes);
  }

  static Allocator* installed;

 private:
  static void release(void* memory) {
    if (memory == nullptr) return;
    if (sennit_symmetric_contains(memory, 1) == 0) {
      installed->before_->raw_deallocate(memory);
      return;
    }
    c10::profiledCPUMemoryReporter().Delete(memory);
    sennit_symmetric_free(memory);
  }

  c10::Allocator* const before_;
};

Allocator* Allocator::installed = nullptr;

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::Allocator* const before = c10::GetAllocator(c10::DeviceType::CPU);
    TORCH_CHECK(before->raw_deleter() != nullptr,
                "sennit: another CPU allocator is installed that does not say how its memory is freed");
    Allocator::installed = new Allocator(before);  // tensors outlive every static object
    c10::SetAllocator(c10::DeviceType::CPU, Allocator::installed, PRIORITY);
    TORCH_CHECK(c10::GetAllocator(c10::DeviceType::CPU) == Allocator::installed,
                "sennit: another CPU allocator with a higher priority is installed");
  });
}

}  // namespace

void set_everywhere(bool on) {
  install();
  everywhere.store(on, std::memory_order_relaxed);
}

void begin() {
  install();
  ++depth;
}

void end() { --depth; }

bool contains(const void* data) { return sennit_symmetric_contains(data, 1) != 0; }

}  // namespace sennit::runtime::symmetric
