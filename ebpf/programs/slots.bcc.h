/* SPDX-License-Identifier: Apache-2.0 */
/* A histogram's slot for a value: eight to every doubling, so a percentile read from it is accurate to 1/16.
 * runtime/trace/histogram.py reads the slots.
 */
static inline u32 slot_of(u64 value) {
  if (value < 8) return value;
  u32 exponent = bpf_log2l(value) - 1;
  return (exponent - 2) * 8 + ((value >> (exponent - 3)) & 7);
}
