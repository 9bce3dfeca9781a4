// SPDX-License-Identifier: Apache-2.0
// Runs xstate.c of testbed/vm/uml-xstate.patch outside the kernel.
// `xstate_host real` saves and restores a traced process on this processor; it is built without -DFAKE_HOST.
// Every other argument names a fake host, whose ptrace and CPUID are below. Exits with 77 if it cannot run here.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sysdep/ptrace_user.h>
#include <sysdep/xstate.h>
#include <unistd.h>

#define CANNOT_RUN 77
#define REQUIRE(condition)                                                      \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #condition, errno); \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

#ifdef FAKE_HOST
#include <stdarg.h>

#define HEADER_AT 512
#define HEADER_BYTES 64
#define PID 4711

// Intel SDM, volume 1, 13.4 and 13.5: the components in the standard form, at the places that processors use.
struct component {
  int number;
  unsigned size, offset, supervisor;
};
static const struct component components[] = {
    {2, 256, 576, 0},     // AVX
    {5, 64, 1088, 0},     // AVX-512: mask registers
    {6, 512, 1152, 0},    // AVX-512: upper halves of ZMM0-15
    {7, 1024, 1664, 0},   // AVX-512: ZMM16-31
    {9, 8, 2688, 0},      // PKRU
    {11, 16, 0, 1},       // shadow stack
    {17, 64, 2752, 0},    // AMX: tile configuration
    {18, 8192, 2816, 0},  // AMX: tiles
    {19, 128, 960, 0},    // APX
};
#define COMPONENTS (sizeof components / sizeof *components)

struct host {
  const char* name;
  size_t area_bytes;
  uint64_t features;
};
#define BIT(number) (1ULL << (number))
#define AVX (BIT(0) | BIT(1) | BIT(2) | BIT(11))
#define AVX512 (AVX | BIT(5) | BIT(6) | BIT(7) | BIT(9))
static const struct host hosts[] = {
    {"avx", 832, AVX},
    {"avx512", 2696, AVX512},
    {"amx", 11008, AVX512 | BIT(17) | BIT(18)},
    {"amx_apx", 11008, AVX512 | BIT(17) | BIT(18) | BIT(19)},
};
static const struct host* host;
static unsigned char state[16384];  // of the traced process

// Without arch_prctl(ARCH_REQ_XCOMP_PERM) a process may not have tiles.
static uint64_t permitted(void) { return host->features & ~(BIT(11) | BIT(18)); }

int fake_cpuid(unsigned leaf, unsigned number, unsigned* eax, unsigned* ebx, unsigned* ecx) {
  *eax = *ebx = *ecx = 0;
  for (size_t at = 0; at < COMPONENTS; at++) {
    if (leaf != 0xd || components[at].number != (int)number || !(host->features & BIT(number))) continue;
    *eax = components[at].size;
    *ebx = components[at].offset;
    *ecx = components[at].supervisor;
  }
  return 1;
}

static uint64_t word(const unsigned char* area, size_t at) {
  uint64_t value;
  memcpy(&value, area + at, sizeof value);
  return value;
}

// arch/x86/kernel/fpu/xstate.c, copy_uabi_to_xstate(): components that the header does not name become initial.
static long set_state(const unsigned char* area) {
  uint64_t named = word(area, HEADER_AT);
  if (named & ~permitted()) return EINVAL;
  for (size_t at = HEADER_AT + 8; at < HEADER_AT + HEADER_BYTES; at++) {
    if (area[at] != 0) return EINVAL;
  }
  memset(state, 0, sizeof state);
  memcpy(state, area, HEADER_AT + 8);
  for (size_t at = 0; at < COMPONENTS; at++) {
    const struct component* part = &components[at];
    if (named & BIT(part->number)) memcpy(state + part->offset, area + part->offset, part->size);
  }
  return 0;
}

// arch/x86/kernel/fpu/regset.c: xstateregs_get() copies what fits. xstateregs_set() takes only the whole area.
long ptrace(enum __ptrace_request request, ...) {
  va_list arguments;
  va_start(arguments, request);
  int pid = va_arg(arguments, int);
  (void)va_arg(arguments, long);
  struct iovec* iov = va_arg(arguments, struct iovec*);
  va_end(arguments);
  REQUIRE(pid == PID);
  if (iov->iov_len > host->area_bytes) iov->iov_len = host->area_bytes;
  if (request == PTRACE_GETREGSET) {
    memcpy(iov->iov_base, state, iov->iov_len);
    return 0;
  }
  REQUIRE(request == PTRACE_SETREGSET);
  errno = iov->iov_len != host->area_bytes ? EFAULT : (int)set_state(iov->iov_base);
  return errno ? -1 : 0;
}

// A process that has used everything it may: random bytes in every component.
static void run_process(unsigned seed) {
  srand(seed);
  memset(state, 0, sizeof state);
  for (size_t at = 0; at < HEADER_AT; at++) state[at] = (unsigned char)rand();
  uint64_t used = permitted();
  memcpy(state + HEADER_AT, &used, sizeof used);
  for (size_t part = 0; part < COMPONENTS; part++) {
    if (!(used & BIT(components[part].number))) continue;
    for (unsigned at = 0; at < components[part].size; at++) state[components[part].offset + at] = (unsigned char)rand();
  }
}

// The part of `before` that a task can hold: everything except the tile configuration.
static void require_restored(const unsigned char* before) {
  unsigned char expected[sizeof state];
  memcpy(expected, before, sizeof state);
  uint64_t kept = permitted() & ~BIT(17);
  memcpy(expected + HEADER_AT, &kept, sizeof kept);
  if (host->features & BIT(17)) memset(expected + 2752, 0, 64);
  REQUIRE(memcmp(state, expected, sizeof state) == 0);
}

static int run(const char* name) {
  for (size_t at = 0; at < sizeof hosts / sizeof *hosts; at++) {
    if (strcmp(hosts[at].name, name) == 0) host = &hosts[at];
  }
  REQUIRE(host != NULL);
  unsigned long tasks[2][FP_SIZE];
  unsigned char before[2][sizeof state];
  REQUIRE(xstate_init(PID) == 0);
  for (int task = 0; task < 2; task++) {
    run_process((unsigned)task + 1);
    memcpy(before[task], state, sizeof state);
    REQUIRE(xstate_save(PID, tasks[task]) == 0);
  }
  for (int task = 0; task < 2; task++) {
    REQUIRE(xstate_restore(PID, tasks[task]) == 0);
    require_restored(before[task]);
  }
  // A program's signal frame can come back with any header.
  tasks[0][HEADER_AT / sizeof(long)] = ~0UL;
  REQUIRE(xstate_restore(PID, tasks[0]) == 0);
  require_restored(before[0]);
  // The fake refuses what a host refuses. The kernel did this before the patch.
  struct iovec task_alone = {tasks[1], sizeof tasks[1]};
  long done = ptrace(PTRACE_SETREGSET, PID, 0, &task_alone);
  REQUIRE((done == 0) == (host->area_bytes <= sizeof tasks[0]));
  return 0;
}

#else  // the real host
#include <sys/syscall.h>

#define REGISTER_BYTES 32

// Loads YMM0, stops until the tracer continues, and stores YMM0. In assembly, because C might use the register.
static void stop_with(const unsigned char* loaded, unsigned char* stored) {
  long result = SYS_kill;
  __asm__ volatile(
      "vmovdqu (%[loaded]), %%ymm0\n"
      "syscall\n"
      "vmovdqu %%ymm0, (%[stored])\n"
      : "+a"(result)
      : [loaded] "r"(loaded), [stored] "r"(stored), "D"((long)getpid()), "S"((long)SIGSTOP)
      : "rcx", "r11", "xmm0", "memory");
}

static int be_traced(void) {
  unsigned char first[REGISTER_BYTES], second[REGISTER_BYTES], found[REGISTER_BYTES];
  memset(first, 0x5a, sizeof first);
  memset(second, 0xc3, sizeof second);
  if (ptrace(PTRACE_TRACEME, 0, 0, 0) < 0) return CANNOT_RUN;
  stop_with(first, found);
  if (memcmp(found, first, sizeof found) != 0) return 2;
  stop_with(second, found);
  return memcmp(found, first, sizeof found) == 0 ? 0 : 3;
}

static int run(const char* name) {
  (void)name;
  if (!__builtin_cpu_supports("avx")) return CANNOT_RUN;
  pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(be_traced());
  unsigned long task[FP_SIZE];
  int status;
  for (int stop = 0; waitpid(child, &status, 0) == child && WIFSTOPPED(status); stop++) {
    if (stop == 0) REQUIRE(xstate_init(child) == 0 && xstate_save(child, task) == 0);
    if (stop == 1) REQUIRE(xstate_restore(child, task) == 0);
    REQUIRE(ptrace(PTRACE_CONT, child, 0, 0) == 0);
  }
  return WEXITSTATUS(status);
}
#endif

int main(int count, char** arguments) {
  REQUIRE(count == 2);
  return run(arguments[1]);
}
