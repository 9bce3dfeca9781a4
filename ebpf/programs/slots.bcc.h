/* SPDX-License-Identifier: Apache-2.0 */
/* A histogram's slot for a value: eight to every doubling, so that a percentile read from it is right to 1/8.
 * The other half is runtime/trace/histogram.py.
 */
static inline u32 slot_of(u64 value) {
  if (value < 8) return value;
  u32 exponent = bpf_log2l(value) - 1;
  return (exponent - 2) * 8 + ((value >> (exponent - 3)) & 7);
}
