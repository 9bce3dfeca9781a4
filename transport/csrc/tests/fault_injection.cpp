// SPDX-License-Identifier: Apache-2.0
#include "tests/fault_injection.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <new>

namespace sennit::test {
namespace {

enum class Role : uint8_t { other, exposed, spared };

thread_local Role role = Role::other;
std::atomic<int64_t> left{-1};  // requests until the one that fails; below 0: none does
std::atomic<Scarce> scarce{};
std::atomic<FaultAt::Where> place{};

bool fails(Scarce what) {
  if (left.load(std::memory_order_relaxed) < 0 || scarce != what) return false;
  const bool is_meant = place == FaultAt::Where::here ? role == Role::exposed : role == Role::other;
  return is_meant && left.fetch_sub(1) == 0;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

FaultAt::FaultAt(Scarce what, uint64_t n, Where where) {
  scarce = what;
  place = where;
  left = static_cast<int64_t>(n);
}

FaultAt::~FaultAt() { left = -1; }

bool FaultAt::has_fired() const { return left < 0; }

Spared::Spared() { role = Role::spared; }
Spared::~Spared() { role = Role::other; }

Exposed::Exposed() { role = Role::exposed; }
Exposed::~Exposed() { role = Role::spared; }

}  // namespace sennit::test

using sennit::test::fails;
using sennit::test::next;
using sennit::test::Scarce;

void* operator new(size_t size_bytes) {
  void* const memory = fails(Scarce::memory) ? nullptr : std::malloc(size_bytes != 0 ? size_bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) noexcept {
  static auto* const real = next<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  return fails(Scarce::thread) ? EAGAIN : real(thread, attributes, run, argument);
}

int eventfd(unsigned count, int flags) noexcept {
  static auto* const real = next<int(unsigned, int)>("eventfd");
  if (!fails(Scarce::descriptor)) return real(count, flags);
  errno = EMFILE;
  return -1;
}

int socket(int family, int type, int protocol) noexcept {
  static auto* const real = next<int(int, int, int)>("socket");
  if (!fails(Scarce::descriptor)) return real(family, type, protocol);
  errno = EMFILE;
  return -1;
}

int memfd_create(const char* name, unsigned flags) noexcept {
  static auto* const real = next<int(const char*, unsigned)>("memfd_create");
  if (!fails(Scarce::descriptor)) return real(name, flags);
  errno = EMFILE;
  return -1;
}

int open(const char* path, int flags, ...) {
  static auto* const real = next<int(const char*, int, ...)>("open");
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  if (!fails(Scarce::descriptor)) return real(path, flags, mode);
  errno = EMFILE;
  return -1;
}
}
