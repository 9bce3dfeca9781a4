// SPDX-License-Identifier: Apache-2.0
// How threads begin that run no code of the program.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace sennit {

// Names the calling thread, for `top -H` and whoever adds up times by name; Linux keeps 15 characters. Leaves signals
// to the threads of the program: one that it has blocked in all of them, to wait for it, would end the process here.
inline void begin_thread(const char* name) noexcept {
  sigset_t others;
  sigfillset(&others);
  // Faults of this thread, and the signal of profilers.
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF}) sigdelset(&others, own);
  pthread_sigmask(SIG_BLOCK, &others, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace sennit
