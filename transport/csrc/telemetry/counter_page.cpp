// SPDX-License-Identifier: Apache-2.0
#include "telemetry/counter_page.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "sennit/reserve.hpp"

namespace sennit {
namespace {

constexpr uint64_t MAGIC = 0x31'52'54'43'4E'4E'45'53;  // "SENNCTR1": the revision of the layout
// Not "sennit-": the shared-memory port searches that prefix for its orphans.
constexpr const char* FOLDER = "/dev/shm";
constexpr const char* PREFIX = "sennit.counters-";
// Address space: 1,024 peers with 16 paths take 3 MiB.
constexpr size_t RESERVED_BYTES = size_t{1} << 28;
constexpr size_t GROW_BYTES = 65'536;

size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

// Removes files whose writers are gone. Readers can read them until somebody makes a new page.
void remove_orphans() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(FOLDER), &closedir);
  if (!folder) return;
  while (const dirent* entry = readdir(folder.get())) {
    if (std::strncmp(entry->d_name, PREFIX, std::strlen(PREFIX)) != 0) continue;
    struct stat info {};
    // Those of others are not opened: there may be many.
    if (fstatat(dirfd(folder.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 || info.st_uid != geteuid())
      continue;
    const int fd = openat(dirfd(folder.get()), entry->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) continue;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == geteuid() && flock(fd, LOCK_EX | LOCK_NB) == 0)
      unlinkat(dirfd(folder.get()), entry->d_name, 0);
    ::close(fd);
  }
}

}  // namespace

struct CounterPage::Header {
  uint64_t magic;
  std::atomic<uint64_t> used_bytes;
  uint32_t rank, world;
  uint64_t process;   // the process id in its own namespace
  uint64_t began_ns;  // CLOCK_BOOTTIME
  uint64_t reserved[3];
};

struct CounterPage::Entry {
  uint32_t entry_bytes;  // includes this header
  uint16_t kind;         // 1: names, 2: counters
  uint16_t names_id;
  uint32_t peer, path;
};

// After the delegated constructor, the destructor closes what a later step leaves behind.
CounterPage::CounterPage(uint32_t rank, uint32_t world) : CounterPage() {
  static std::once_flag swept;
  std::call_once(swept, remove_orphans);
  if (!create(rank, world) && base_ != nullptr) {
    munmap(base_, reserved_bytes_);
    base_ = nullptr;
  }
}

CounterPage::~CounterPage() {
  if (base_ != nullptr) munmap(base_, reserved_bytes_);
  if (fd_ >= 0) ::close(fd_);
  if (!path_.empty()) unlink(path_.c_str());
}

bool CounterPage::create(uint32_t rank, uint32_t world) {
  // The file has no name until it has content to read.
  fd_ = ::open(FOLDER, O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
  if (fd_ < 0) return false;
  // The lock shows that there is a writer. It is held as long as the page is mapped, whatever else the process closes.
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0 || !grow(sizeof(Header))) return false;
  void* base = mmap(nullptr, RESERVED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (base == MAP_FAILED) return false;
  base_ = static_cast<std::byte*>(base);
  reserved_bytes_ = RESERVED_BYTES;
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  auto* header = new (base_) Header{};
  header->rank = rank;
  header->world = world;
  header->process = static_cast<uint64_t>(getpid());
  header->began_ns = static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  header->magic = MAGIC;
  publish(sizeof(Header));
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) return false;
  char path[64], open_file[32];
  std::snprintf(path, sizeof path, "%s/%s%016llx", FOLDER, PREFIX, static_cast<unsigned long long>(number));
  std::snprintf(open_file, sizeof open_file, "/proc/self/fd/%d", fd_);
  path_ = path;
  if (linkat(AT_FDCWD, open_file, AT_FDCWD, path, AT_SYMLINK_FOLLOW) != 0) {
    path_.clear();
    return false;
  }
  // The mapping keeps the file open, and so its lock (flock(2)).
  ::close(std::exchange(fd_, -1));
  return true;
}

// Allocates the pages now, because running out later would be a SIGBUS.
bool CounterPage::grow(size_t bytes) {
  if (bytes <= file_bytes_) return true;
  const size_t more_bytes = (bytes - file_bytes_ + GROW_BYTES - 1) / GROW_BYTES * GROW_BYTES;
  const int fd = fd_ >= 0 ? fd_ : ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  const bool has_grown = fd >= 0 && reserve(fd, file_bytes_, more_bytes) == 0;
  if (fd >= 0 && fd != fd_) ::close(fd);
  if (has_grown) file_bytes_ += more_bytes;
  return has_grown;
}

void CounterPage::publish(size_t bytes) {
  used_bytes_ = bytes;
  reinterpret_cast<Header*>(base_)->used_bytes.store(bytes, std::memory_order_release);
}

std::byte* CounterPage::append(uint32_t kind, uint32_t names_id, uint32_t peer, uint32_t path, size_t payload_bytes) {
  const size_t entry_bytes = sizeof(Entry) + padded(payload_bytes);
  if (base_ == nullptr || used_bytes_ + entry_bytes > reserved_bytes_ || !grow(used_bytes_ + entry_bytes))
    return nullptr;
  std::byte* at = base_ + used_bytes_;
  new (at) Entry{static_cast<uint32_t>(entry_bytes), static_cast<uint16_t>(kind), static_cast<uint16_t>(names_id), peer,
                 path};
  return at + sizeof(Entry);
}

uint32_t CounterPage::names_id(std::string_view group, Names names, size_t count) {
  const auto known = std::find(groups_.begin(), groups_.end(), group);
  const auto id = static_cast<uint32_t>(known - groups_.begin());
  if (known != groups_.end()) return id;
  groups_.emplace_back(group);
  std::string text(group);
  text += '\0';
  const std::vector<std::string> words = names();
  for (size_t i = 0; i < count; ++i) text.append(words.at(i)).append(1, '\0');
  if (std::byte* at = append(1, id, ANY_PEER, NO_PATH, text.size())) {
    std::memcpy(at, text.data(), text.size());
    publish(used_bytes_ + sizeof(Entry) + padded(text.size()));
  }
  return id;
}

void* CounterPage::add(std::string_view group, Names names, size_t count, uint32_t peer, uint32_t path) {
  const uint32_t id = names_id(group, names, count);
  std::byte* at = append(2, id, peer, path, count * 8);
  if (at == nullptr) return unshared_.emplace_back(std::make_unique<uint64_t[]>(count)).get();
  publish(used_bytes_ + sizeof(Entry) + count * 8);
  return at;
}

}  // namespace sennit
