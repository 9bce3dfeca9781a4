// SPDX-License-Identifier: Apache-2.0
#include "ports/shm/shm_segment.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "sennit/reserve.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {
namespace {

constexpr uint64_t SEGMENT_MAGIC = 0x37'30'54'49'4E'4E'45'53;  // "SENNIT07": the revision of the layout
constexpr size_t PAGE_BYTES = 4'096;
constexpr size_t LINE = 64;

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// The bytes of an inbox that a peer may write to at any time. The blocks follow.
constexpr uint64_t ALWAYS_BYTES = (sizeof(ShmInboxHeader) + LINE - 1) / LINE * LINE + CONTROL_RING_BYTES;

uint64_t stride_of(uint64_t blocks) { return ALWAYS_BYTES + blocks * BULK_BLOCK_BYTES; }

uint64_t inbox_offset(uint64_t stride, uint32_t number) {
  return round_up(sizeof(ShmSegmentHeader), LINE) + stride * number;
}

uint64_t random_u64() {
  uint64_t value = 0;
  if (getrandom(&value, sizeof value, 0) != sizeof value)
    throw std::system_error(errno, std::generic_category(), "getrandom");
  return value;
}

std::string path_of(uint64_t nonce) {
  char name[48];
  std::snprintf(name, sizeof name, "/dev/shm/sennit-%016llx", static_cast<unsigned long long>(nonce));
  return name;
}

std::string bell_of(const std::string& path) { return path + ".bell"; }

// A rank that is killed before its peers have opened its segment leaves the name and the memory behind. This runs once
// for each process, before it has its own segments, because closing a file gives up the process's own lock on it. Young
// files are left alone, because a segment has its name before its lock.
void remove_orphans() {
  constexpr time_t YOUNG_S = 60;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/dev/shm"), &closedir);
  if (!folder) return;
  while (const dirent* entry = readdir(folder.get())) {
    if (std::strncmp(entry->d_name, "sennit-", 7) != 0) continue;
    struct stat info {};
    // Those of others are not opened: there may be many.
    if (fstatat(dirfd(folder.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 || info.st_uid != geteuid())
      continue;
    const int fd = openat(dirfd(folder.get()), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) continue;
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    if (fstat(fd, &info) == 0 && (S_ISREG(info.st_mode) || S_ISFIFO(info.st_mode)) && info.st_uid == geteuid() &&
        info.st_mtime + YOUNG_S < time(nullptr) && fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK)
      unlinkat(dirfd(folder.get()), entry->d_name, 0);
    close(fd);
  }
}

[[noreturn]] void fail(const char* what, int error) { throw std::system_error(error, std::generic_category(), what); }

// Where peers find a segment.
struct Offer {
  uint64_t nonce;
  // Only for a segment without a name. Otherwise the offer has only the nonce.
  int32_t process, descriptor, bell, reserved;
};

std::string descriptor_path(int32_t process, int32_t descriptor) {
  return "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
}

// Says why this process cannot open another's memory, after open(2) failed with `error`. Throws if descriptors or
// memory ran out, because the other process is then within reach all the same.
std::string why_closed(const std::string& path, int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      fail("cannot open a peer's shared memory", error);
    case ENOENT:
      return "no such file here. Give containers of one host a common /dev/shm (docker run --ipc=host)";
    case EACCES:
    case EPERM: {
      // The owner of a file below /proc/PID/fd cannot be asked, but that of /proc/PID can.
      const bool is_named = path.starts_with("/dev/shm/");
      struct stat owner {};
      if (stat(is_named ? path.c_str() : path.substr(0, path.find("/fd/")).c_str(), &owner) == 0 &&
          owner.st_uid != geteuid())
        return "it belongs to user " + std::to_string(owner.st_uid) + ", and that rank runs as user " +
               std::to_string(geteuid()) + ". Run all ranks of a host as one user";
      [[fallthrough]];
    }
    default:
      return std::generic_category().message(error);
  }
}

// Reserves what peers may write to at any time: running out of pages later would be a SIGBUS. The blocks get theirs
// with the first message of a peer that is as large, because clearing them takes longer than all the rest of making a
// group. But all ranks of this host must find room for them in /dev/shm now.
void reserve_inboxes(int fd, uint64_t stride, uint32_t own, uint32_t inbox_count, bool is_named) {
  const uint32_t peers = std::max(1u, inbox_count - 1);
  int error = reserve(fd, 0, sizeof(ShmSegmentHeader));
  for (uint32_t peer = 0; peer < inbox_count && error == 0; ++peer) {
    if (peer != own || inbox_count == 1) error = reserve(fd, inbox_offset(stride, peer), ALWAYS_BYTES);
  }
  if (!is_named) {
    if (error != 0) fail("no memory for the inboxes of this host's ranks", error);
    return;
  }
  struct statvfs folder {};
  struct stat reserved {};
  if (fstatvfs(fd, &folder) != 0 || fstat(fd, &reserved) != 0) fail("cannot look up the room in /dev/shm", errno);
  const uint64_t free_bytes = folder.f_bavail * folder.f_frsize;
  if (error == 0 && free_bytes >= (stride - ALWAYS_BYTES) * peers * inbox_count) return;
  const auto mib = [](uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; };
  const std::string reason = "/dev/shm is too small for the inboxes of this host's " + std::to_string(inbox_count) +
                             " ranks: " + mib(stride * peers * inbox_count) + " needed, " +
                             mib(free_bytes + static_cast<uint64_t>(reserved.st_blocks) * 512) + " of " +
                             mib(folder.f_blocks * folder.f_frsize) + " free";
  fail(reason.c_str(), error != 0 ? error : ENOSPC);
}

// Tells remove_orphans() that the file's owner lives; with a bell also peers (ShmSegment::owner_alive).
void lock(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (fcntl(fd, F_SETLK, &lock) != 0) fail("cannot lock the shared-memory segment", errno);
}

bool has_owner(const ShmSegmentHeader& header, int bell_fd) {
  if (header.process_id == this_process_id()) return true;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(bell_fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace

uint64_t this_process_id() {
  // Keyed by pid, because a forked child must not be taken for its parent.
  static std::mutex mutex;
  static pid_t owner = 0;
  static uint64_t id = 0;
  const std::lock_guard lock(mutex);
  if (owner != getpid()) {
    id = random_u64();
    owner = getpid();
  }
  return id;
}

ShmSegment ShmSegment::create(uint32_t rank, uint32_t own, uint32_t inbox_count, uint64_t nonce) {
  std::string why;
  try {
    return make(rank, own, inbox_count, nonce, true);
  } catch (const std::system_error& error) {
    why = error.what();
  }
  ShmSegment segment = create_unnamed(rank, own, inbox_count, nonce);
  segment.why_unnamed_ = std::move(why);
  return segment;
}

ShmSegment ShmSegment::create_unnamed(uint32_t rank, uint32_t own, uint32_t inbox_count, uint64_t nonce) {
  return make(rank, own, inbox_count, nonce, false);
}

ShmSegment ShmSegment::make(uint32_t rank, uint32_t own, uint32_t inbox_count, uint64_t nonce, bool is_named) {
  const uint32_t peers = std::max(1u, inbox_count - 1);
  const uint64_t blocks =
      std::clamp<uint64_t>(BULK_BUDGET_BYTES / peers / BULK_BLOCK_BYTES, BULK_BLOCKS_MIN, BULK_BLOCKS_MAX);
  const uint64_t stride = stride_of(blocks);
  ShmSegment segment;
  segment.mine_ = true;
  segment.size_bytes_ = round_up(inbox_offset(stride, inbox_count), PAGE_BYTES);
  static std::once_flag swept;
  std::call_once(swept, remove_orphans);
  segment.is_named_ = is_named;
  std::string path = path_of(nonce);
  segment.fd_ = is_named ? ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)
                         : memfd_create("sennit-segment", MFD_CLOEXEC);
  if (segment.fd_ < 0) fail(is_named ? "cannot create a file in /dev/shm" : "cannot create a memfd", errno);
  if (is_named) segment.path_ = std::move(path);
  if (ftruncate(segment.fd_, static_cast<off_t>(segment.size_bytes_)) != 0)
    fail("cannot size the shared-memory segment", errno);
  reserve_inboxes(segment.fd_, stride, own, inbox_count, is_named);
  void* base = mmap(nullptr, segment.size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, segment.fd_, 0);
  if (base == MAP_FAILED) fail("cannot map the shared-memory segment", errno);
  segment.base_ = static_cast<std::byte*>(base);
  lock(segment.fd_);
  segment.make_bell();
  auto* header = new (segment.base_) ShmSegmentHeader{};
  header->rank = rank;
  header->inbox_count = inbox_count;
  header->bulk_blocks = blocks;
  header->inbox_stride = stride;
  header->process_id = this_process_id();
  header->nonce = nonce;
  header->magic = SEGMENT_MAGIC;
  trace::registration(rank, trace::Memory::segment, trace::Registration::made, 0, base, segment.size_bytes_);
  return segment;
}

void ShmSegment::make_bell() {
  int ends[2] = {-1, -1};
  if (is_named_ ? mkfifo(bell_of(path_).c_str(), 0600) != 0 : pipe2(ends, O_CLOEXEC) != 0)
    fail("cannot create a bell for the shared-memory segment", errno);
  const std::string path = is_named_ ? bell_of(path_) : descriptor_path(getpid(), ends[0]);
  // Open both ways, so that it neither waits for a peer nor sees an end of file when the last peer closes it.
  bell_fd_ = ::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  const int error = errno;
  for (const int end : ends)
    if (end >= 0) close(end);
  if (bell_fd_ < 0) fail("cannot open the bell of the shared-memory segment", error);
  lock(bell_fd_);
}

ShmSegment ShmSegment::open(std::span<const std::byte> offer, uint32_t rank, uint32_t inbox_count, std::string* why) {
  std::string unused;
  std::string& reason = why != nullptr ? *why : unused;
  reason = "what is there is no segment of that rank";
  Offer given{};
  const bool is_named = offer.size() == sizeof given.nonce;
  if (!is_named && offer.size() != sizeof given) return {};
  std::memcpy(&given, offer.data(), offer.size());
  const uint64_t nonce = given.nonce;
  const std::string path = is_named ? path_of(nonce) : descriptor_path(given.process, given.descriptor);
  const std::string bell = is_named ? bell_of(path) : descriptor_path(given.process, given.bell);
  // The files below /proc are links.
  const int flags = O_CLOEXEC | O_NONBLOCK | (is_named ? O_NOFOLLOW : 0);
  ShmSegment segment;
  segment.fd_ = ::open(path.c_str(), O_RDWR | flags);
  if (segment.fd_ < 0) {
    reason = why_closed(path, errno);
    return {};
  }
  struct stat info {};
  if (fstat(segment.fd_, &info) != 0 || !S_ISREG(info.st_mode) ||
      info.st_size < static_cast<off_t>(sizeof(ShmSegmentHeader)))
    return {};
  segment.size_bytes_ = static_cast<size_t>(info.st_size);
  void* base = mmap(nullptr, segment.size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, segment.fd_, 0);
  if (base == MAP_FAILED) fail("cannot map a peer's shared memory", errno);
  segment.base_ = static_cast<std::byte*>(base);
  const ShmSegmentHeader& header = segment.header();
  if (header.magic != SEGMENT_MAGIC || header.nonce != nonce || header.rank != rank ||
      header.inbox_count != inbox_count || header.bulk_blocks < BULK_BLOCKS_MIN ||
      header.bulk_blocks > BULK_BLOCKS_MAX || header.inbox_stride != stride_of(header.bulk_blocks) ||
      inbox_offset(header.inbox_stride, inbox_count) > segment.size_bytes_) {
    return {};
  }
  segment.bell_fd_ = ::open(bell.c_str(), O_WRONLY | flags);
  if (segment.bell_fd_ < 0) {
    reason = why_closed(bell, errno);
    return {};
  }
  if (fstat(segment.bell_fd_, &info) != 0 || !S_ISFIFO(info.st_mode)) return {};
  // The mapping stays, and the bell shows whether the owner lives.
  close(std::exchange(segment.fd_, -1));
  return segment;
}

ShmSegment::ShmSegment(ShmSegment&& other) noexcept { *this = std::move(other); }

ShmSegment& ShmSegment::operator=(ShmSegment&& other) noexcept {
  if (this != &other) {
    reset();
    base_ = std::exchange(other.base_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
    fd_ = std::exchange(other.fd_, -1);
    bell_fd_ = std::exchange(other.bell_fd_, -1);
    is_named_ = other.is_named_;
    path_ = std::exchange(other.path_, {});
    why_unnamed_ = std::exchange(other.why_unnamed_, {});
    mine_ = std::exchange(other.mine_, false);
  }
  return *this;
}

ShmSegment::~ShmSegment() { reset(); }

void ShmSegment::reset() noexcept {
  unlink();
  if (mine_ && base_ != nullptr)
    trace::registration(header().rank, trace::Memory::segment, trace::Registration::released, 0, base_, size_bytes_);
  if (base_ != nullptr) munmap(base_, size_bytes_);
  if (fd_ >= 0) close(fd_);
  if (bell_fd_ >= 0) close(bell_fd_);
  base_ = nullptr;
  fd_ = bell_fd_ = -1;
}

ShmInbox ShmSegment::inbox(uint32_t number) const {
  const ShmSegmentHeader& head = header();
  const uint64_t offset = inbox_offset(head.inbox_stride, number);
  ShmInbox inbox;
  inbox.segment = &header();
  inbox.header = reinterpret_cast<ShmInboxHeader*>(base_ + offset);
  inbox.bulk_offset = offset + ALWAYS_BYTES;
  inbox.bulk = base_ + inbox.bulk_offset;
  inbox.control = inbox.bulk - CONTROL_RING_BYTES;
  inbox.bulk_blocks = static_cast<uint32_t>(head.bulk_blocks);
  inbox.fd = fd_;
  inbox.bell_fd = bell_fd_;
  return inbox;
}

bool ShmInbox::owner_alive() const { return bell_fd < 0 || has_owner(*segment, bell_fd); }

int ShmInbox::reserve_blocks(uint64_t each_bytes) const {
  if (fd < 0) return 0;
  int error = 0;
  for (uint64_t block = 0; block < bulk_blocks && error == 0; ++block)
    error = reserve(fd, bulk_offset + block * BULK_BLOCK_BYTES, each_bytes);
  return error;
}

std::vector<std::byte> ShmSegment::offer() const {
  const Offer given{header().nonce, getpid(), fd_, bell_fd_, 0};
  std::vector<std::byte> bytes(is_named_ ? sizeof given.nonce : sizeof given);
  std::memcpy(bytes.data(), &given, bytes.size());
  return bytes;
}

void ShmSegment::unlink() {
  if (path_.empty()) return;
  ::unlink(path_.c_str());
  ::unlink(bell_of(path_).c_str());
  path_.clear();
}

bool ShmSegment::ask_to_watch(uint32_t from_rank) const {
  const uint32_t bit = from_rank % WATCH_BITS;
  std::atomic<uint64_t>& word = header().watched[bit / 64];
  const uint64_t mask = uint64_t{1} << bit % 64;
  // Mostly the bit is set, and reading it takes the cache line from nobody.
  if ((word.load(std::memory_order_relaxed) & mask) != 0) return false;
  word.fetch_or(mask, std::memory_order_seq_cst);
  return true;
}

void ShmSegment::wake_owner() const {
  ShmSegmentHeader& head = header();
  if (head.sleeping.load(std::memory_order_relaxed) == 0) return;
  // If several peers bring news, the first makes the system call.
  const auto how = static_cast<Sleep>(head.sleeping.exchange(0, std::memory_order_seq_cst));
  if (how == Sleep::awake) return;
  head.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (how == Sleep::poll) {
    // A full FIFO is readable, so nothing is lost where this fails.
    [[maybe_unused]] const ssize_t written = write(bell_fd_, "", 1);
  } else {
    // Not FUTEX_PRIVATE: the word is shared between processes.
    syscall(SYS_futex, &head.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void ShmSegment::silence_bell() const {
  char rings[64];
  while (read(bell_fd_, rings, sizeof rings) == sizeof rings) {
  }
}

bool ShmSegment::owner_alive() const { return mine_ || has_owner(header(), bell_fd_); }

}  // namespace sennit
