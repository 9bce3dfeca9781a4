// SPDX-License-Identifier: Apache-2.0
// The shared heap: what it gives, what others see of it, and what is left of it in a child and after a detachment.
#include "memory/shared_heap.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "tests/fault_injection.hpp"
#include "tests/in_child.hpp"

using namespace sennit;
using test::check_in_child;
using test::Child;
using test::failure_in_child;

namespace {

// How often the next calls of posix_fallocate end by a signal. (Linux 6.18 goes on where a handler took the signal.)
uint32_t interruptions = 0;

}  // namespace

extern "C" int posix_fallocate(int fd, off_t offset, off_t size_bytes) {
  if (interruptions != 0) return --interruptions, EINTR;
  return fallocate(fd, 0, offset, size_bytes) == 0 ? 0 : errno;
}

namespace {

constexpr uint64_t PAGE = SharedHeap::PAGE_BYTES;

std::byte* allocate(uint64_t size_bytes) { return static_cast<std::byte*>(SharedHeap::allocate(size_bytes)); }

uint64_t pages_of(uint64_t size_bytes) { return std::max<uint64_t>((size_bytes + PAGE - 1) / PAGE, 1) * PAGE; }

// The first and the last byte of each page.
template <class Visit>
void for_some_bytes(std::byte* data, uint64_t size_bytes, Visit visit) {
  for (uint64_t at = 0; at < size_bytes; at += PAGE) {
    visit(data[at], at);
    visit(data[std::min(at + PAGE, size_bytes) - 1], at);
  }
}

void mark(std::byte* data, uint64_t size_bytes, uint32_t seed) {
  for_some_bytes(data, size_bytes, [=](std::byte& byte, uint64_t at) { byte = std::byte(seed + at / PAGE); });
}

bool is_marked(std::byte* data, uint64_t size_bytes, uint32_t seed) {
  bool is = true;
  for_some_bytes(data, size_bytes, [&](std::byte byte, uint64_t at) { is &= byte == std::byte(seed + at / PAGE); });
  return is;
}

uint64_t held_bytes() {
  struct stat info {};
  return fstat(SharedHeap::name()->descriptor, &info) == 0 ? static_cast<uint64_t>(info.st_blocks) * 512 : 0;
}

}  // namespace

TEST_CASE("a random sequence of allocations keeps to a model: whole pages, apart, with their content") {
  struct Live {
    uint64_t size_bytes;
    uint32_t seed;
  };
  const uint64_t used_before = SharedHeap::used_bytes();
  std::map<std::byte*, Live> live;
  uint64_t used_bytes = 0;
  std::mt19937 random(1);
  for (uint32_t round = 0; round < 6'000; ++round) {
    if (live.size() < 40 && (live.empty() || random() % 2 == 0)) {
      const uint64_t size_bytes = random() % 4 == 0 ? random() % 2'000'000 : 1 + random() % 20'000;
      std::byte* const data = allocate(size_bytes);
      REQUIRE(data != nullptr);
      REQUIRE(reinterpret_cast<uintptr_t>(data) % PAGE == 0);
      REQUIRE(SharedHeap::contains(data, size_bytes));
      const auto next = live.lower_bound(data);
      REQUIRE((next == live.end() || data + pages_of(size_bytes) <= next->first));
      REQUIRE((next == live.begin() || std::prev(next)->first + pages_of(std::prev(next)->second.size_bytes) <= data));
      if (size_bytes != 0) mark(data, size_bytes, round);
      live.emplace(data, Live{size_bytes, round});
      used_bytes += pages_of(size_bytes);
    } else {
      const auto it = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      const auto [data, entry] = *it;
      if (entry.size_bytes != 0) REQUIRE(is_marked(data, entry.size_bytes, entry.seed));
      REQUIRE(SharedHeap::free(data));
      REQUIRE_FALSE(SharedHeap::free(data));
      used_bytes -= pages_of(entry.size_bytes);
      live.erase(it);
    }
    REQUIRE(SharedHeap::used_bytes() == used_before + used_bytes);
    REQUIRE(SharedHeap::kept_bytes() <= SharedHeap::KEPT_MAX_BYTES);
  }
  for (const auto& [data, entry] : live) CHECK(SharedHeap::free(data));
  CHECK(SharedHeap::used_bytes() == used_before);
}

TEST_CASE("freed neighbours are one range again, in whatever order they come, and it is cut for smaller ones") {
  std::array<size_t, 3> order = {0, 1, 2};
  do {
    check_in_child([&](Child child) {
      const uint64_t pages[] = {3, 5, 7};
      std::byte* parts[3];
      for (size_t i = 0; i < 3; ++i) parts[i] = allocate(pages[i] * PAGE);
      CHILD_REQUIRE(child, parts[1] == parts[0] + 3 * PAGE && parts[2] == parts[1] + 5 * PAGE);
      for (const size_t i : order) CHILD_REQUIRE(child, SharedHeap::free(parts[i]));
      CHILD_REQUIRE(child, SharedHeap::kept_bytes() == 15 * PAGE);
      CHILD_REQUIRE(child, allocate(15 * PAGE) == parts[0]);
      CHILD_REQUIRE(child, SharedHeap::kept_bytes() == 0);
      CHILD_REQUIRE(child, SharedHeap::free(parts[0]));
      CHILD_REQUIRE(child, allocate(PAGE) == parts[0]);
      CHILD_REQUIRE(child, allocate(2 * PAGE) == parts[0] + PAGE);
      CHILD_REQUIRE(child, SharedHeap::kept_bytes() == 12 * PAGE);
      CHILD_REQUIRE(child, SharedHeap::used_bytes() == 3 * PAGE);
    });
  } while (std::ranges::next_permutation(order).found);
}

TEST_CASE("what was freed stays with the process up to a limit, and the rest goes back to the system") {
  check_in_child([](Child child) {
    constexpr uint64_t SIZE = SharedHeap::KEPT_MAX_BYTES / 8 * 5;
    std::byte *const first = allocate(SIZE), *const second = allocate(SIZE);
    CHILD_REQUIRE(child, first != nullptr && second != nullptr);
    mark(second, SIZE, 1);
    CHILD_REQUIRE(child, held_bytes() >= 2 * SIZE);
    CHILD_REQUIRE(child, SharedHeap::free(first));
    CHILD_REQUIRE(child, SharedHeap::kept_bytes() == SIZE);
    CHILD_REQUIRE(child, SharedHeap::free(second));
    CHILD_REQUIRE(child, SharedHeap::kept_bytes() == SIZE);
    CHILD_REQUIRE(child, held_bytes() < SIZE + SIZE / 2);
    CHILD_REQUIRE(child, allocate(SIZE) == first);
    std::byte* const again = allocate(SIZE);  // of pages that must come back
    CHILD_REQUIRE(child, again != nullptr);
    mark(again, SIZE, 2);
    CHILD_REQUIRE(child, is_marked(again, SIZE, 2));
  });
}

TEST_CASE("signals take no memory away while it is reserved, such as those of a profiler") {
  check_in_child([](Child child) {
    CHILD_REQUIRE(child, allocate(PAGE) != nullptr);
    interruptions = 3;
    CHILD_REQUIRE(child, allocate(1 << 20) != nullptr);
    CHILD_REQUIRE(child, interruptions == 0);
  });
}

TEST_CASE("memory that no machine has is refused") {
  const uint64_t used_before = SharedHeap::used_bytes();
  for (const uint64_t size_bytes :
       {UINT64_MAX, UINT64_MAX - PAGE, UINT64_MAX - 1'000, uint64_t{1} << 63, uint64_t{1} << 40, uint64_t{1} << 48}) {
    CAPTURE(size_bytes);
    CHECK(SharedHeap::allocate(size_bytes) == nullptr);
  }
  CHECK(SharedHeap::used_bytes() == used_before);
  std::byte* const data = allocate(0);  // still a place of its own
  CHECK(data != nullptr);
  CHECK(SharedHeap::used_bytes() == used_before + PAGE);
  CHECK(SharedHeap::free(data));
}

TEST_CASE("only what was allocated can be freed") {
  std::byte* const data = allocate(3 * PAGE);
  REQUIRE(data != nullptr);
  std::byte other[16];
  CHECK_FALSE((SharedHeap::owns(other, 1) || SharedHeap::owns(nullptr, 0) || SharedHeap::owns(data, UINT64_MAX)));
  CHECK_FALSE(SharedHeap::free(other));
  CHECK_FALSE(SharedHeap::free(nullptr));
  CHECK_FALSE(SharedHeap::free(data + 1));
  CHECK_FALSE(SharedHeap::free(data + PAGE));
  CHECK_FALSE(SharedHeap::free(data - SharedHeap::offset_of(data)));  // the header
  CHECK(SharedHeap::free(data));
  CHECK_FALSE(SharedHeap::free(data));
}

TEST_CASE("the heap ends where it ends") {
  std::byte* const data = allocate(PAGE);
  REQUIRE(data != nullptr);
  const uint64_t size_bytes = SharedHeap::name()->size_bytes;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) - SharedHeap::offset_of(data);
  const auto contains = [](uintptr_t at, uint64_t size) {
    return SharedHeap::contains(reinterpret_cast<const void*>(at), size);
  };
  CHECK(contains(begin, size_bytes));
  CHECK(contains(begin, 0));
  CHECK(contains(begin + size_bytes - 1, 1));
  CHECK(SharedHeap::contains(data, size_bytes - SharedHeap::offset_of(data)));
  CHECK_FALSE(SharedHeap::contains(data, size_bytes - SharedHeap::offset_of(data) + 1));
  CHECK_FALSE(contains(begin, size_bytes + 1));
  CHECK_FALSE(contains(begin + 1, size_bytes));
  CHECK_FALSE(contains(begin - 1, 1));
  CHECK_FALSE(contains(begin - 1, 2));
  CHECK_FALSE(contains(begin + size_bytes - 1, 2));
  CHECK_FALSE(contains(begin + size_bytes, 0));
  CHECK_FALSE(contains(begin + size_bytes, 1));
  for (const uintptr_t at : {uintptr_t{0}, begin - PAGE, begin + size_bytes, UINTPTR_MAX})
    CHECK_FALSE(contains(at, UINT64_MAX));
  for (const uintptr_t at : {begin, begin + 1, begin + size_bytes - 1}) CHECK_FALSE(contains(at, UINT64_MAX - at + 1));
  CHECK(SharedHeap::free(data));
}

TEST_CASE("threads allocate and free at the same time") {
  const uint64_t used_before = SharedHeap::used_bytes();
  std::vector<std::thread> threads;
  std::array<bool, 4> is_right{};
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      bool right = true;
      for (int round = 0; round < 300; ++round) {
        const uint64_t size_bytes = 1 + random() % 100'000;
        std::byte* const data = allocate(size_bytes);
        if (data == nullptr) return;
        mark(data, size_bytes, thread * 50);
        std::this_thread::yield();
        right &= is_marked(data, size_bytes, thread * 50) && SharedHeap::free(data);
      }
      is_right[thread] = right;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(is_right == std::array{true, true, true, true});
  CHECK(SharedHeap::used_bytes() == used_before);
}

TEST_CASE("a peer's view of the heap has the same bytes, both ways, and its edges hold") {
  std::byte* const data = allocate(100'000);
  REQUIRE(data != nullptr);
  mark(data, 100'000, 3);
  const SharedHeapName name = *SharedHeap::name();
  CHECK(name.process == getpid());
  const auto heap = PeerHeap::open(name);
  REQUIRE(heap != nullptr);
  CHECK(PeerHeap::open(name) == heap);
  std::byte* const view = heap->at(SharedHeap::offset_of(data), 100'000);
  REQUIRE(view != nullptr);
  CHECK(view != data);
  CHECK(std::memcmp(view, data, 100'000) == 0);
  mark(view, 100'000, 9);
  CHECK(is_marked(data, 100'000, 9));
  std::byte* const later = allocate(PAGE);  // pages that came after the mapping
  REQUIRE(later != nullptr);
  mark(later, PAGE, 4);
  CHECK(is_marked(heap->at(SharedHeap::offset_of(later), PAGE), PAGE, 4));
  CHECK(heap->at(0, name.size_bytes) != nullptr);
  CHECK(heap->at(name.size_bytes - 1, 1) != nullptr);
  CHECK(heap->at(0, name.size_bytes + 1) == nullptr);
  CHECK(heap->at(1, name.size_bytes) == nullptr);
  CHECK(heap->at(name.size_bytes, 1) == nullptr);
  CHECK(heap->at(name.size_bytes + 1, 0) == nullptr);
  CHECK(heap->at(UINT64_MAX, 1) == nullptr);
  CHECK(heap->at(UINT64_MAX, UINT64_MAX) == nullptr);
  CHECK(heap->at(1, UINT64_MAX) == nullptr);
  CHECK(SharedHeap::free(data));
  CHECK(SharedHeap::free(later));
}

TEST_CASE("a name that is not exactly a heap's opens nothing") {
  std::byte* const data = allocate(PAGE);
  REQUIRE(data != nullptr);
  const SharedHeapName name = *SharedHeap::name();
  const auto opens = [&](auto change) {
    SharedHeapName other = name;
    change(other);
    return PeerHeap::open(other) != nullptr;
  };
  CHECK(opens([](SharedHeapName&) {}));
  CHECK_FALSE(opens([](SharedHeapName& other) { other.nonce ^= 1; }));
  CHECK_FALSE(opens([](SharedHeapName& other) { other.nonce = 0; }));
  for (const int32_t process : {0, -1, 1, INT32_MAX})
    CHECK_FALSE(opens([=](SharedHeapName& other) { other.process = process; }));
  for (const int32_t descriptor : {-1, 0, INT32_MAX})
    CHECK_FALSE(opens([=](SharedHeapName& other) { other.descriptor = descriptor; }));
  for (const uint64_t size_bytes : {uint64_t{0}, uint64_t{8}, PAGE, name.size_bytes - 1, name.size_bytes + PAGE,
                                    name.size_bytes / 2, name.size_bytes * 2, UINT64_MAX})
    CHECK_FALSE(opens([=](SharedHeapName& other) { other.size_bytes = size_bytes; }));
  // Files that are there, but no heaps.
  const int file = memfd_create("test", MFD_CLOEXEC), folder = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC),
            device = open("/dev/zero", O_RDWR | O_CLOEXEC);
  int ends[2];
  REQUIRE((file >= 0 && folder >= 0 && device >= 0 && pipe(ends) == 0));
  REQUIRE(ftruncate(file, static_cast<off_t>(name.size_bytes)) == 0);
  for (const int descriptor : {file, folder, device, ends[0], ends[1]})
    CHECK_FALSE(opens([=](SharedHeapName& other) { other.descriptor = descriptor; }));
  REQUIRE(ftruncate(file, 1) == 0);
  CHECK_FALSE(opens([=](SharedHeapName& other) { other.descriptor = file, other.size_bytes = 1; }));
  for (const int descriptor : {file, folder, device, ends[0], ends[1]}) close(descriptor);
  CHECK(opens([](SharedHeapName&) {}));
  CHECK(SharedHeap::free(data));
}

TEST_CASE("in a child of fork the heap is private, and the child's own heap is another") {
  constexpr uint64_t SIZE = 5 * PAGE;
  std::byte *const data = allocate(SIZE), *const more = allocate(PAGE);
  REQUIRE((data != nullptr && more != nullptr));
  mark(data, SIZE, 20);
  const SharedHeapName name = *SharedHeap::name();
  const uint64_t offset = SharedHeap::offset_of(data), used_bytes = SharedHeap::used_bytes();
  check_in_child([&](Child child) {
    CHILD_REQUIRE(child, is_marked(data, SIZE, 20));
    CHILD_REQUIRE(child, !SharedHeap::contains(data, 1) && SharedHeap::owns(data, SIZE));
    CHILD_REQUIRE(child, !SharedHeap::name());
    CHILD_REQUIRE(child, SharedHeap::used_bytes() == 0);
    mark(data, SIZE, 70);
    CHILD_REQUIRE(child, is_marked(data, SIZE, 70));
    std::byte* const own = allocate(SIZE);
    CHILD_REQUIRE(child, own != nullptr && SharedHeap::contains(own, SIZE));
    CHILD_REQUIRE(child, SharedHeap::name()->nonce != name.nonce && SharedHeap::name()->process == getpid());
    CHILD_REQUIRE(child, SharedHeap::owns(own, SIZE) && SharedHeap::owns(data, SIZE) && !SharedHeap::owns(&own, 1));
    mark(own, SIZE, 33);
    // The parent's heap is now a peer's.
    const auto parent = PeerHeap::open(name);
    CHILD_REQUIRE(child, parent != nullptr);
    std::byte* const view = parent->at(offset, SIZE);
    CHILD_REQUIRE(child, view != nullptr && is_marked(view, SIZE, 20));
    mark(view, SIZE, 21);
    CHILD_REQUIRE(child, is_marked(data, SIZE, 70));
    CHILD_REQUIRE(child, SharedHeap::free(data) && SharedHeap::free(more) && SharedHeap::free(data));
    CHILD_REQUIRE(child, is_marked(data, SIZE, 70));
    const std::string grandchild = failure_in_child([&](Child second) {
      CHILD_REQUIRE(second, is_marked(data, SIZE, 70) && is_marked(own, SIZE, 33));
      mark(data, SIZE, 71);
      mark(own, SIZE, 34);
      CHILD_REQUIRE(second, SharedHeap::free(data) && SharedHeap::free(own));
      CHILD_REQUIRE(second, allocate(PAGE) != nullptr);
    });
    if (!grandchild.empty()) child.fail(grandchild);
    CHILD_REQUIRE(child, is_marked(own, SIZE, 33) && is_marked(data, SIZE, 70));
    CHILD_REQUIRE(child, SharedHeap::used_bytes() == SIZE && SharedHeap::free(own));
  });
  CHECK(is_marked(data, SIZE, 21));
  CHECK(SharedHeap::used_bytes() == used_bytes);
  CHECK(SharedHeap::name()->nonce == name.nonce);
  CHECK(SharedHeap::free(data));
  CHECK(SharedHeap::free(more));
}

TEST_CASE("a child has all of the heap for itself, however many pieces of it are in use") {
  check_in_child([](Child child) {
    constexpr size_t COUNT = 68'000;  // more than the kernel maps in pieces (vm.max_map_count, mostly 65'530)
    std::vector<std::byte*> pages;
    for (size_t i = 0; i < COUNT; ++i) {
      pages.push_back(allocate(1));
      CHILD_REQUIRE(child, pages.back() != nullptr);
    }
    for (size_t i = 0; i < COUNT; i += 2) CHILD_REQUIRE(child, SharedHeap::free(pages[i]));
    for (size_t i = 1; i < COUNT; i += 2) *pages[i] = std::byte{1};
    const std::string grandchild = failure_in_child([&](Child second) {
      for (size_t i = 1; i < COUNT; i += 2) {
        CHILD_REQUIRE(second, *pages[i] == std::byte{1});
        *pages[i] = std::byte{2};
      }
    });
    if (!grandchild.empty()) child.fail(grandchild);
    for (size_t i = 1; i < COUNT; i += 2) CHILD_REQUIRE(child, *pages[i] == std::byte{1});
  });
}

TEST_CASE("a peer's late writes do not reach memory that was detached") {
  check_in_child([](Child child) {
    constexpr uint64_t SIZE = 6 * PAGE;
    std::byte *const data = allocate(SIZE), *const rest = allocate(PAGE);
    CHILD_REQUIRE(child, data != nullptr && rest != nullptr);
    mark(data, SIZE, 40);
    const auto heap = PeerHeap::open(*SharedHeap::name());
    CHILD_REQUIRE(child, heap != nullptr);
    std::byte* const view = heap->at(SharedHeap::offset_of(data), SIZE);
    SharedHeap::detach(data + PAGE + 100, PAGE);  // two pages
    CHILD_REQUIRE(child, is_marked(data, SIZE, 40));
    CHILD_REQUIRE(child, !SharedHeap::contains(data, 1) && !SharedHeap::contains(rest, PAGE));
    CHILD_REQUIRE(child, !SharedHeap::name() && SharedHeap::owns(data, SIZE));
    CHILD_REQUIRE(child, allocate(PAGE) == nullptr);
    mark(view, SIZE, 90);
    CHILD_REQUIRE(child, is_marked(data + PAGE, 2 * PAGE, 41));
    CHILD_REQUIRE(child, is_marked(data, PAGE, 90) && is_marked(data + 3 * PAGE, PAGE, 93));
    mark(data + PAGE, 2 * PAGE, 5);
    CHILD_REQUIRE(child, is_marked(view + PAGE, 2 * PAGE, 91));
    SharedHeap::detach(data, SIZE);  // some of it a second time
    CHILD_REQUIRE(child, is_marked(data, PAGE, 90) && is_marked(data + PAGE, 2 * PAGE, 5));
    mark(view, SIZE, 1);
    CHILD_REQUIRE(child, is_marked(data, PAGE, 90) && is_marked(data + PAGE, 2 * PAGE, 5));
    CHILD_REQUIRE(child, SharedHeap::free(data) && !SharedHeap::free(data) && SharedHeap::free(rest));
    CHILD_REQUIRE(child, SharedHeap::used_bytes() == 0 && allocate(PAGE) == nullptr);
  });
}

TEST_CASE("the child of a process that detached memory has all of it for itself") {
  check_in_child([](Child child) {
    constexpr uint64_t SIZE = 4 * PAGE;
    std::byte* const data = allocate(SIZE);
    CHILD_REQUIRE(child, data != nullptr);
    mark(data, SIZE, 40);
    SharedHeap::detach(data, PAGE);
    mark(data, PAGE, 60);
    const std::string grandchild = failure_in_child([&](Child second) {
      CHILD_REQUIRE(second, is_marked(data, PAGE, 60) && is_marked(data + PAGE, 3 * PAGE, 41));
      mark(data, SIZE, 7);
      CHILD_REQUIRE(second, allocate(PAGE) != nullptr);  // a heap of its own works
    });
    if (!grandchild.empty()) child.fail(grandchild);
    CHILD_REQUIRE(child, is_marked(data, PAGE, 60) && is_marked(data + PAGE, 3 * PAGE, 41));
  });
}

TEST_CASE("without descriptors or pages there is no memory, and later there is") {
  check_in_child([](Child child) {
    {
      const test::FaultAt fault(test::Scarce::descriptor, 0);
      const test::Exposed scope;
      CHILD_REQUIRE(child, allocate(PAGE) == nullptr);
      CHILD_REQUIRE(child, fault.has_fired());
    }
    CHILD_REQUIRE(child, !SharedHeap::name() && SharedHeap::used_bytes() == 0);
    CHILD_REQUIRE(child, !SharedHeap::contains(&child, 1));
    signal(SIGXFSZ, SIG_IGN);
    rlimit files{};
    CHILD_REQUIRE(child, getrlimit(RLIMIT_FSIZE, &files) == 0);
    const auto limit = [&](rlim_t size_bytes) {
      const rlimit limit{size_bytes, files.rlim_max};
      CHILD_REQUIRE(child, setrlimit(RLIMIT_FSIZE, &limit) == 0);
    };
    limit(PAGE);
    CHILD_REQUIRE(child, allocate(PAGE) == nullptr);
    CHILD_REQUIRE(child, !SharedHeap::name());
    limit(files.rlim_cur);
    std::byte* const data = allocate(4 * PAGE);
    CHILD_REQUIRE(child, data != nullptr && SharedHeap::contains(data, 4 * PAGE));
  });
}

TEST_CASE("want of memory for the lists loses neither pages nor addresses") {
  check_in_child([](Child child) {
    std::byte* parts[5];
    for (auto& part : parts) part = allocate(4 * PAGE);
    CHILD_REQUIRE(child, SharedHeap::free(parts[1]) && SharedHeap::free(parts[3]));
    uint64_t refused = 0;
    for (uint64_t n = 0;; ++n) {
      const uint64_t used = SharedHeap::used_bytes(), kept = SharedHeap::kept_bytes();
      std::byte* data;
      {
        const test::FaultAt fault(test::Scarce::memory, n);
        const test::Exposed scope;
        data = allocate(2 * PAGE);
        if (!fault.has_fired()) n = UINT64_MAX - 1;
      }
      if (data == nullptr) {
        ++refused;
        CHILD_REQUIRE(child, SharedHeap::used_bytes() == used && SharedHeap::kept_bytes() == kept);
        continue;
      }
      CHILD_REQUIRE(child, SharedHeap::used_bytes() == used + 2 * PAGE);
      CHILD_REQUIRE(child, SharedHeap::kept_bytes() == kept - 2 * PAGE);
      CHILD_REQUIRE(child, SharedHeap::free(data));
      CHILD_REQUIRE(child, SharedHeap::kept_bytes() == kept);
      if (n == UINT64_MAX - 1) break;
    }
    CHILD_REQUIRE(child, refused != 0);
    // Freeing always works. What it could not note down goes back to the system.
    for (uint64_t n = 0; n < 8; ++n) {
      std::byte* const data = allocate(4 * PAGE);
      CHILD_REQUIRE(child, data != nullptr);
      const uint64_t used = SharedHeap::used_bytes(), kept = SharedHeap::kept_bytes();
      {
        const test::FaultAt fault(test::Scarce::memory, n);
        const test::Exposed scope;
        CHILD_REQUIRE(child, SharedHeap::free(data));
      }
      CHILD_REQUIRE(child, SharedHeap::used_bytes() == used - 4 * PAGE);
      CHILD_REQUIRE(child, SharedHeap::kept_bytes() == kept || SharedHeap::kept_bytes() == kept + 4 * PAGE);
    }
    for (const int i : {0, 2, 4}) CHILD_REQUIRE(child, SharedHeap::free(parts[i]));
    CHILD_REQUIRE(child, SharedHeap::used_bytes() == 0 && SharedHeap::kept_bytes() <= 20 * PAGE);
    CHILD_REQUIRE(child, allocate(100 * PAGE) != nullptr);
  });
}
