// SPDX-License-Identifier: Apache-2.0
// The C interface of the native core, which the torch extension and the Python binding call.
//
// A `sennit_comm` is one process group: this rank's channels to every peer, and the operations in flight on them. An
// operation is a compiled plan (docs/reference/plans.md) run over caller-owned buffers. Every wait has a deadline. All
// functions may be called from several threads. None needs the Python GIL.
//
// Errors. No function here throws. A failure leaves one of two states:
//   the call had no effect   sennit_plan_load, sennit_post: nothing was sent, no buffer is in use, and the
//                            call may be tried again
//   the group has ended      every operation in flight has ended with a status and a text that say why, all
//                            buffers are the caller's again, and later posts report the same reason
// Memory that runs out once an operation runs ends the group (SENNIT_DEVICE, "out of memory").
//
// Fork. A child of fork shares the parent's sockets and queues but has none of its threads. In the child, calls that
// would touch them do nothing: sennit_post reports SENNIT_ARGUMENT, and so does the status of an operation that was in
// flight. Release keeps what belongs to the parent.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SENNIT_API __attribute__((visibility("default")))

// Who must act: the caller (argument, mismatch), the operator (peer, device), nobody (pending, ok).
typedef enum sennit_status {
  SENNIT_OK = 0,
  SENNIT_PENDING = 1,   // not finished yet
  SENNIT_TIMEOUT = 2,   // the deadline passed; the message names the ranks still awaited
  SENNIT_ABORTED = 3,   // sennit_abort or shutdown on this rank
  SENNIT_PEER = 4,      // a peer died, aborted or reported a failure; the message names it
  SENNIT_MISMATCH = 5,  // a peer runs another operation, size, dtype or split
  SENNIT_ARGUMENT = 6,  // malformed plan, counts or buffers; nothing was sent
  SENNIT_DEVICE = 7,    // the system refused a socket, device, thread or memory; the message says which
} sennit_status;

// Element types of arithmetic. Pure data movement uses bytes (SENNIT_U8).
typedef enum sennit_dtype {
  SENNIT_U8 = 0,
  SENNIT_I8 = 1,
  SENNIT_I16 = 2,
  SENNIT_I32 = 3,
  SENNIT_I64 = 4,
  SENNIT_F16 = 5,
  SENNIT_BF16 = 6,
  SENNIT_F32 = 7,
  SENNIT_F64 = 8,
  SENNIT_C64 = 9,
  SENNIT_C128 = 10,  // pairs of f32, f64
  SENNIT_BOOL = 11,
  SENNIT_U16 = 12,
  SENNIT_U32 = 13,
  SENNIT_U64 = 14,
  SENNIT_C32 = 15,
} sennit_dtype;

typedef enum sennit_reduce {
  SENNIT_SUM = 0,
  SENNIT_AVG = 1,
  SENNIT_PRODUCT = 2,
  SENNIT_MIN = 3,
  SENNIT_MAX = 4,
  SENNIT_BAND = 5,
  SENNIT_BOR = 6,
  SENNIT_BXOR = 7,
  SENNIT_PREMUL_SUM = 8,
} sennit_reduce;

// What a plan does: the top byte of its signature (docs/reference/plans.md).
typedef enum sennit_collective {
  SENNIT_ALLREDUCE = 1,
  SENNIT_REDUCE = 2,
  SENNIT_BROADCAST = 3,
  SENNIT_ALLGATHER = 4,
  SENNIT_GATHER = 5,
  SENNIT_SCATTER = 6,
  SENNIT_REDUCE_SCATTER = 7,
  SENNIT_ALLTOALL = 8,
  SENNIT_P2P = 9,  // send or receive
  SENNIT_BARRIER = 10,
} sennit_collective;

typedef struct sennit_comm sennit_comm;
typedef struct sennit_plan sennit_plan;
typedef struct sennit_op sennit_op;

typedef struct sennit_buffer {
  void* data;
  uint64_t size_bytes;
} sennit_buffer;

#define SENNIT_ANY_PEER 0xFFFFFFFFu
#define SENNIT_AGGREGATOR 0xFFFFFFFEu  // as a peer of a plan: the group's aggregator

enum sennit_post_flags {
  SENNIT_POST_ASYNC = 1,  // the caller will not wait at once: wake the background thread
  SENNIT_POST_P2P = 2,    // matched by `tag` instead of the group's operation sequence
};

typedef struct sennit_post_options {
  uint64_t timeout_us;  // deadline from now; 0 means the communicator's default
  uint32_t flags;
  uint32_t tag;   // P2P only
  double scalar;  // factor of SENNIT_PREMUL_SUM
  // The counts for a plan that takes them, in elements. There are as many as the plan says. Read only during the call.
  const uint64_t* counts;
  uint32_t count_count;
  uint64_t seed;  // of stochastic rounding, in a plan that encodes
} sennit_post_options;

// Whether `reduce` is defined for elements of type `dtype`, so that a plan may contain it.
SENNIT_API int sennit_reduce_is_defined(uint32_t dtype, uint32_t reduce);

// Plans are immutable and reference-counted. Any number of operations may share a plan.
SENNIT_API sennit_plan* sennit_plan_load(const void* bytes, size_t size_bytes, char* error, size_t error_size);
SENNIT_API void sennit_plan_release(sennit_plan* plan);

// Starts an operation. `buffers` are the plan's buffers in order, borrowed until the operation is done. Takes its own
// references on plan and communicator. On any status but SENNIT_OK nothing was sent, `*out` is null and `error` (may be
// null) holds the reason. For an operation that fails as soon as it runs, sennit_post returns SENNIT_OK, and the
// operation's status has the error.
SENNIT_API sennit_status sennit_post(sennit_comm* comm, sennit_plan* plan, const sennit_buffer* buffers,
                                     uint32_t buffer_count, const sennit_post_options* options, sennit_op** out,
                                     char* error, size_t error_size);

// Where a device's copy reads or writes: the bytes from `offset` of the operation's buffer number `buffer`.
typedef struct sennit_place {
  void* host;  // null: the buffer is device memory, which only its owner can address
  uint32_t buffer;
  uint64_t offset;
} sennit_place;

// How an operation reaches the memory of a device. Its plan says which bytes to copy and when. The owner of the device
// makes the copies. `copy` and `scratch` are called with a lock held: they must not block or throw, and may call no
// function of the core except sennit_op_retain.
typedef struct sennit_device {
  void* context;
  // Starts a copy. The owner calls sennit_copy_done(op, step, ...) once, from any thread, but not from within `copy`.
  // Until then it keeps a reference on `op`. Copies to the host end in the order of their starts. A result other than 0
  // means that the copy cannot start, and the operation fails.
  int (*copy)(void* context, sennit_op* op, uint32_t step, const sennit_place* from, const sennit_place* to,
              uint64_t size_bytes);
  // Returns host memory for the plan's scratch, through which all bytes of the device pass; null when there is none. It
  // belongs to the operation until `ended`, and to copies that still run then until they end.
  void* (*scratch)(void* context, uint64_t size_bytes);
  // The operation has ended: none of these is called any more, and the core does not touch its memory. No lock is held.
  void (*ended)(void* context);
} sennit_device;

// Starts an operation whose plan is for device memory (docs/reference/plans.md). It takes its place in the group's
// order at once. A few such operations run at a time, and the others wait in that order. `device` is copied.
SENNIT_API sennit_status sennit_post_on_device(sennit_comm* comm, sennit_plan* plan, const sennit_device* device,
                                               const sennit_post_options* options, sennit_op** out, char* error,
                                               size_t error_size);
// A copy has ended. `error` null: all bytes are in place. Has no effect on an operation that has ended.
SENNIT_API void sennit_copy_done(sennit_op* op, uint32_t step, const char* error);

// Drives progress in the calling thread until done. `timeout_us` 0: until the operation's own deadline. Returns the
// final status, or SENNIT_PENDING if only this wait (not the operation) timed out.
SENNIT_API sennit_status sennit_wait(sennit_op* op, uint64_t timeout_us);
SENNIT_API sennit_status sennit_op_status(const sennit_op* op);
// The error text of a failed operation, else empty. Valid as long as the op.
SENNIT_API const char* sennit_op_error(const sennit_op* op);
// The rank that a SENNIT_ANY_PEER receive matched. SENNIT_ANY_PEER before the match.
SENNIT_API uint32_t sennit_op_source(const sennit_op* op);
// The operation's sequence number in the group (collectives), or 0 (P2P, or it waits for a callback:
// sennit_op_on_done_in_order).
SENNIT_API uint64_t sennit_op_sequence(const sennit_op* op);
// Calls `callback(argument)` once when the op is done: at once if it already is, else from a thread of its own, soon
// after. There it may do what any thread may: wait, post, take locks, sleep, shut groups down. Callbacks of a process
// run one after the other, in the order in which their ops end, but none waits long for one that blocks. A sennit_wait
// for the op does not wait for its callback. An op takes at most one callback. A callback should not throw. If it does,
// the exception is dropped and counted (callbacks_failed). The background thread drives the op from here on, so nobody
// has to wait for it. SENNIT_DEVICE: a thread for this cannot be started. The callback is set, but some wait or post on
// this group must finish the op, and the callback runs once a thread can be started. SENNIT_ARGUMENT: in a child of
// fork. The callback is never called.
SENNIT_API sennit_status sennit_op_on_done(sennit_op* op, void (*callback)(void*), void* argument);
// The same for a callback that may post collectives of the group. All ranks get them in one order: that of a program in
// which the callback runs in this call. So collectives that are posted later, and callbacks that are asked for later,
// wait until this callback has returned. If it blocks for 5 s while they wait, and not in a wait for an op, the group
// keeps no such order any more, and a collective that would be out of order is refused (SENNIT_ARGUMENT). A callback
// that waits for an op behind it takes that op and the collectives before it first. Same as sennit_op_on_done: for a
// point-to-point op, and within callbacks of such ops and of other groups.
SENNIT_API sennit_status sennit_op_on_done_in_order(sennit_op* op, void (*callback)(void*), void* argument);
SENNIT_API void sennit_op_retain(sennit_op* op);
SENNIT_API void sennit_op_release(sennit_op* op);

// The Python binding makes communicators (rendezvous is in Python). These functions retain and end them.
SENNIT_API void sennit_comm_retain(sennit_comm* comm);
SENNIT_API void sennit_comm_release(sennit_comm* comm);
SENNIT_API uint32_t sennit_comm_rank(const sennit_comm* comm);
SENNIT_API uint32_t sennit_comm_size(const sennit_comm* comm);
// Operations numbered so far on this rank (collectives only). Equal on all ranks that are in step.
SENNIT_API uint64_t sennit_comm_sequence(const sennit_comm* comm);
// True (1) in a child of fork: the communicator belongs to the parent.
SENNIT_API int sennit_comm_is_inherited(const sennit_comm* comm);
// How often this process and its ancestors have forked since the first call or communicator.
SENNIT_API uint64_t sennit_fork_count(void);
// Tells the peers, takes all buffers back from ports and devices (at most a second), fails every operation in flight
// and all later ones, and returns. Does nothing to a group that has ended.
SENNIT_API void sennit_abort(sennit_comm* comm, const char* reason);
// Ends collectives and sends in flight, and sends what is still unacknowledged (at most `timeout_us` for both). Says
// goodbye to the peers, takes all buffers back as sennit_abort does, ends operations still in flight, such as receives,
// with SENNIT_ABORTED, and leaves the background threads. Waits for callbacks of this group at most as long again, not
// for one in which it is called. Those that block longer go on.
SENNIT_API void sennit_shutdown(sennit_comm* comm, uint64_t timeout_us);

// Memory that the other ranks of this host map: their transfers from it are one copy, or none where they only sum it.
// Any buffer of any group may lie there. Aligned to a page, with any content. Null if there is none left; use other
// memory then.
SENNIT_API void* sennit_symmetric_alloc(uint64_t size_bytes);
// False (0): the memory is not from sennit_symmetric_alloc.
SENNIT_API int sennit_symmetric_free(void* memory);
// Whether (1) all of the range was allocated there, by this process or by one that it was forked from. Takes no lock.
SENNIT_API int sennit_symmetric_contains(const void* memory, uint64_t size_bytes);

#ifdef __cplusplus
}
#endif
