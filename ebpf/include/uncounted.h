/* SPDX-License-Identifier: Apache-2.0 */
/* Hits that a session of bcc could not count, so that nothing is lost silently: a map was full, or the session had not
 * seen the beginning of what ended here. (tracepoint.h has the same for our own programs.)
 *
 * It is put in front of the program and not included: bcc rewrites accesses to maps in the text alone. */

enum uncounted_reason { MAP_FULL, UNMATCHED, UNCOUNTED_REASONS };

BPF_PERCPU_ARRAY(uncounted, u64, UNCOUNTED_REASONS);

static __always_inline void count_uncounted(int reason) {
  u64* count = uncounted.lookup(&reason);

  if (count) *count += 1;
}
