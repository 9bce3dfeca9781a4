// SPDX-License-Identifier: Apache-2.0
#include "memory/shared_heap.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "memory/available.hpp"
#include "sennit/reserve.hpp"

namespace sennit {
namespace {

constexpr uint64_t MAGIC = 0x31'30'50'41'45'48'4E'53;  // "SNHEAP01"
constexpr uint64_t HUGE_PAGE_BYTES = 2'097'152;
// Every rank of a host maps the heaps of all others, and a process has 2^47 addresses.
constexpr uint64_t SIZE_MAX_BYTES = uint64_t{1} << 40;
// Smaller allocations do not ask the kernel how much memory is left.
constexpr uint64_t LARGE_BYTES = 67'108'864;

// The first page of the heap.
struct Header {
  uint64_t magic;
  uint64_t nonce;
};

// The addresses of all heaps that this process has, or had. More forks in a row than these leak addresses.
struct Addresses {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uint64_t> size_bytes{0};
};
std::array<Addresses, 8> known;
std::atomic<uint32_t> known_count{0};

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t heap_size_bytes() {
  const uint64_t memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * SharedHeap::PAGE_BYTES;
  return std::min(std::bit_ceil(std::max(memory, HUGE_PAGE_BYTES)), SIZE_MAX_BYTES);
}

// A reservation that takes the last memory makes the kernel kill processes. malloc would have failed or waited.
bool has_memory_for(uint64_t size_bytes) { return size_bytes < LARGE_BYTES || size_bytes <= available_bytes(); }

}  // namespace

// The heap behind the static functions: what is free, in one map by place and two sets by size.
class SharedHeapState {
 public:
  std::mutex mutex;

  void* allocate(uint64_t asked_bytes) {
    if (asked_bytes > SIZE_MAX_BYTES) return nullptr;
    std::map<uint64_t, uint64_t> entry{{0, 0}};  // made first, because it may fail
    const uint64_t size_bytes = round_up(std::max<uint64_t>(asked_bytes, 1), SharedHeap::PAGE_BYTES);
    if (is_detached_ || (descriptor_ < 0 && !make())) return nullptr;
    uint64_t offset = take(true, size_bytes);
    if (offset == NONE) {
      if (!has_memory_for(size_bytes)) return nullptr;
      offset = take(false, size_bytes);
      if (offset == NONE) return nullptr;
      if (reserve(descriptor_, offset, size_bytes) != 0) {
        punch(offset, size_bytes);
        insert(offset, size_bytes, false);
        return nullptr;
      }
#ifdef MADV_POPULATE_WRITE
      // One call in place of a fault for each page. Where the kernel does not know it, the faults come.
      madvise(base_ + offset, size_bytes, MADV_POPULATE_WRITE);
#endif
    }
    auto used = entry.extract(entry.begin());
    used.key() = offset;
    used.mapped() = size_bytes;
    used_.insert(std::move(used));
    used_bytes_ += size_bytes;
    return base_ + offset;
  }

  // Frees memory that is, or was, in a heap of this process.
  bool free(void* memory) {
    const auto found = used_.find(SharedHeap::offset_of(memory));
    if (found == used_.end()) return !is_own(memory);  // that of a parent goes with this process
    const auto [offset, size_bytes] = *found;
    used_.erase(found);
    used_bytes_ -= size_bytes;
    if (is_detached_) {  // some of the pages are the copies
      madvise(memory, size_bytes, MADV_DONTNEED);
      punch(offset, size_bytes);
      return true;
    }
    const bool is_kept = kept_bytes_ + size_bytes <= SharedHeap::KEPT_MAX_BYTES;
    if (!is_kept) punch(offset, size_bytes);
    try {
      insert(offset, size_bytes, is_kept);
    } catch (const std::bad_alloc&) {  // the addresses are lost, not the memory
      if (is_kept) punch(offset, size_bytes);
    }
    return true;
  }

  std::optional<SharedHeapName> name() const {
    if (descriptor_ < 0 || is_detached_) return std::nullopt;
    return SharedHeapName{nonce_, size_bytes_, getpid(), descriptor_};
  }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t kept_bytes() const { return kept_bytes_; }

  void detach(const void* data, uint64_t size_bytes) {
    if (descriptor_ < 0) return;
    SharedHeap::end_.store(0, std::memory_order_relaxed);
    // This comes before the copy is made, so that a message that is not in the copy sees that nothing is in the heap.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    is_detached_ = true;
    auto* const first = reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(data) & ~(SharedHeap::PAGE_BYTES - 1));
    const auto* const end = static_cast<const std::byte*>(data) + size_bytes;
    replace_by_copy(first, round_up(static_cast<uint64_t>(end - first), SharedHeap::PAGE_BYTES));
  }

  // In the child: it reads the parent's pages until it writes them itself.
  void become_private() {
    if (descriptor_ < 0) return;
    const auto map_private = [this](uint64_t offset, uint64_t size_bytes) {
      return mmap(base_ + offset, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                  descriptor_, static_cast<off_t>(offset)) != MAP_FAILED;
    };
    // As a whole, because the kernel limits the pieces (vm.max_map_count). If some of the pages are copies already, or
    // if the kernel commits no more memory than there is (vm.overcommit_memory 2), only what is in use.
    if (is_detached_ || !map_private(0, size_bytes_)) {
      for (const auto& [offset, size_bytes] : used_)
        is_detached_ ? replace_by_copy(base_ + offset, size_bytes) : void(map_private(offset, size_bytes));
    }
    close(descriptor_);
    SharedHeap::end_.store(0, std::memory_order_relaxed);
    descriptor_ = -1;
    base_ = nullptr;
    used_bytes_ = kept_bytes_ = 0;
    is_detached_ = false;
    used_.clear();
    by_place_.clear();
    for (auto& sizes : by_size_) sizes.clear();
  }

 private:
  bool is_own(const void* data) const { return base_ != nullptr && SharedHeap::offset_of(data) < size_bytes_; }

  static constexpr uint64_t NONE = UINT64_MAX;
  struct Free {
    uint64_t size_bytes;
    bool is_kept;  // its pages are there
  };

  static void replace_by_copy(std::byte* first, uint64_t size_bytes) {
    void* const copy = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return;
    std::memcpy(copy, first, size_bytes);
    if (mremap(copy, size_bytes, size_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, first) == MAP_FAILED)
      munmap(copy, size_bytes);
  }

  bool make() {
    const uint64_t size_bytes = heap_size_bytes();
    const int descriptor = memfd_create("sennit-heap", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor < 0) return false;
    uint64_t nonce = 0;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce ||
        ftruncate(descriptor, static_cast<off_t>(size_bytes)) != 0 ||
        reserve(descriptor, 0, SharedHeap::PAGE_BYTES) != 0 ||
        fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      close(descriptor);
      return false;
    }
    void* base = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) {
      close(descriptor);
      return false;
    }
    madvise(base, size_bytes, MADV_HUGEPAGE);  // has an effect where shmem_enabled says "advise"
    const Header header{MAGIC, nonce};
    std::memcpy(base, &header, sizeof header);
    try {
      insert(SharedHeap::PAGE_BYTES, size_bytes - SharedHeap::PAGE_BYTES, false);
    } catch (...) {
      munmap(base, size_bytes);
      close(descriptor);
      throw;
    }
    base_ = static_cast<std::byte*>(base);
    size_bytes_ = size_bytes;
    descriptor_ = descriptor;
    nonce_ = nonce;
    const uint32_t number = known_count.load(std::memory_order_relaxed);
    if (number < known.size()) {
      known[number].begin.store(reinterpret_cast<uintptr_t>(base), std::memory_order_relaxed);
      known[number].size_bytes.store(size_bytes, std::memory_order_relaxed);
      known_count.store(number + 1, std::memory_order_release);
    }
    SharedHeap::base_.store(reinterpret_cast<uintptr_t>(base), std::memory_order_release);
    SharedHeap::end_.store(size_bytes, std::memory_order_release);
    return true;
  }

  // The smallest free range that is large enough, or NONE. The rest of it stays free, in the same entries: no want of
  // memory can lose it.
  uint64_t take(bool is_kept, uint64_t size_bytes) {
    auto& sizes = by_size_[is_kept];
    const auto found = sizes.lower_bound({size_bytes, 0});
    if (found == sizes.end()) return NONE;
    const auto [found_bytes, offset] = *found;
    auto by_size = sizes.extract(found);
    auto by_place = by_place_.extract(offset);
    if (is_kept) kept_bytes_ -= size_bytes;
    if (found_bytes > size_bytes) {
      by_size.value() = {found_bytes - size_bytes, offset + size_bytes};
      by_place.key() = offset + size_bytes;
      by_place.mapped().size_bytes = found_bytes - size_bytes;
      sizes.insert(std::move(by_size));
      by_place_.insert(std::move(by_place));
    }
    return offset;
  }

  // Makes a range free, and one with free neighbours of its kind. If it throws, nothing has changed.
  void insert(uint64_t offset, uint64_t size_bytes, bool is_kept) {
    std::map<uint64_t, Free> place{{0, {}}};
    std::set<std::pair<uint64_t, uint64_t>> size{{0, 0}};
    auto next = by_place_.lower_bound(offset);
    if (next != by_place_.end() && next->first == offset + size_bytes && next->second.is_kept == is_kept) {
      size_bytes += next->second.size_bytes;
      const uint64_t at = next->first;
      ++next;
      erase(at);
    }
    if (next != by_place_.begin()) {
      const auto [at, before] = *std::prev(next);
      if (at + before.size_bytes == offset && before.is_kept == is_kept) {
        offset = at;
        size_bytes += before.size_bytes;
        erase(at);
      }
    }
    auto by_place = place.extract(place.begin());
    by_place.key() = offset;
    by_place.mapped() = {size_bytes, is_kept};
    by_place_.insert(std::move(by_place));
    auto by_size = size.extract(size.begin());
    by_size.value() = {size_bytes, offset};
    by_size_[is_kept].insert(std::move(by_size));
    if (is_kept) kept_bytes_ += size_bytes;
  }

  void erase(uint64_t offset) {
    const auto found = by_place_.find(offset);
    const Free range = found->second;
    by_place_.erase(found);
    by_size_[range.is_kept].erase({range.size_bytes, offset});
    if (range.is_kept) kept_bytes_ -= range.size_bytes;
  }

  void punch(uint64_t offset, uint64_t size_bytes) const {
    fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(size_bytes));
  }

  std::byte* base_ = nullptr;
  uint64_t size_bytes_ = 0;
  uint64_t nonce_ = 0;
  int descriptor_ = -1;
  bool is_detached_ = false;
  uint64_t used_bytes_ = 0, kept_bytes_ = 0;
  std::map<uint64_t, uint64_t> used_;  // size by offset
  std::map<uint64_t, Free> by_place_;
  std::array<std::set<std::pair<uint64_t, uint64_t>>, 2> by_size_;  // (size, offset), by is_kept
};

namespace {

// Never destroyed, because tensors may outlive every static object.
SharedHeapState& state() {
  static auto* const heap = [] {
    auto* const made = new SharedHeapState;
    static SharedHeapState* of_fork;
    of_fork = made;
    // No thread holds the lock across a fork.
    pthread_atfork([] { of_fork->mutex.lock(); }, [] { of_fork->mutex.unlock(); },
                   [] {
                     of_fork->become_private();
                     of_fork->mutex.unlock();
                   });
    return made;
  }();
  return *heap;
}

}  // namespace

void* SharedHeap::allocate(uint64_t size_bytes) noexcept {
  try {
    SharedHeapState& heap = state();
    const std::lock_guard lock(heap.mutex);
    return heap.allocate(size_bytes);
  } catch (...) {  // out of memory for the lists
    return nullptr;
  }
}

bool SharedHeap::owns(const void* data, uint64_t size_bytes) noexcept {
  const uint32_t count = known_count.load(std::memory_order_acquire);
  for (uint32_t number = 0; number < count; ++number) {
    const uint64_t at = reinterpret_cast<uintptr_t>(data) - known[number].begin.load(std::memory_order_relaxed);
    const uint64_t heap_bytes = known[number].size_bytes.load(std::memory_order_relaxed);
    if (at < heap_bytes && size_bytes <= heap_bytes - at) return true;
  }
  return false;
}

bool SharedHeap::free(void* memory) noexcept {
  if (!owns(memory, 1)) return false;
  SharedHeapState& heap = state();
  const std::lock_guard lock(heap.mutex);
  return heap.free(memory);
}

std::optional<SharedHeapName> SharedHeap::name() noexcept {
  SharedHeapState& heap = state();
  const std::lock_guard lock(heap.mutex);
  return heap.name();
}

void SharedHeap::detach(const void* data, uint64_t size_bytes) noexcept {
  SharedHeapState& heap = state();
  const std::lock_guard lock(heap.mutex);
  heap.detach(data, size_bytes);
}

uint64_t SharedHeap::used_bytes() noexcept {
  SharedHeapState& heap = state();
  const std::lock_guard lock(heap.mutex);
  return heap.used_bytes();
}

uint64_t SharedHeap::kept_bytes() noexcept {
  SharedHeapState& heap = state();
  const std::lock_guard lock(heap.mutex);
  return heap.kept_bytes();
}

std::shared_ptr<const PeerHeap> PeerHeap::open(const SharedHeapName& name) {
  static std::map<uint64_t, std::weak_ptr<const PeerHeap>> mapped;
  const std::lock_guard lock(state().mutex);
  if (auto heap = mapped[name.nonce].lock()) return heap;
  std::erase_if(mapped, [](const auto& entry) { return entry.second.expired(); });
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", name.process, name.descriptor);
  const int descriptor = ::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return nullptr;
  struct stat info {};
  void* base = MAP_FAILED;
  if (fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode) && info.st_size >= static_cast<off_t>(sizeof(Header)) &&
      static_cast<uint64_t>(info.st_size) == name.size_bytes && (fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK) != 0)
    base = mmap(nullptr, name.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  close(descriptor);
  if (base == MAP_FAILED) return nullptr;
  madvise(base, name.size_bytes, MADV_DONTDUMP);  // a core file has this process's own memory
  const std::shared_ptr<const PeerHeap> heap(new PeerHeap(static_cast<std::byte*>(base), name.size_bytes));
  Header header;
  std::memcpy(&header, base, sizeof header);
  if (header.magic != MAGIC || header.nonce != name.nonce) return nullptr;
  mapped[name.nonce] = heap;
  return heap;
}

PeerHeap::~PeerHeap() { munmap(base_, size_bytes_); }

}  // namespace sennit
