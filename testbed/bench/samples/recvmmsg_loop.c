// SPDX-License-Identifier: Apache-2.0
// The smallest C program for `sennit bench offload --end-to-end`: recvmmsg takes 64 datagrams a call, and the plan's
// operators run on each record where it lies in the buffer. It is compiled for one schema (26 ids of 4 bytes, 13
// float32, little-endian) and one plan (PositiveModulus, Clamp from 0 to 1). It checks only the size and place of
// records.
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#define HEADER_BYTES 32
#define TABLES 26
#define DENSE 13
#define RECORD_BYTES (1 + 4 * DENSE + 4 * TABLES)
#define MESSAGES 64
#define PLACE_BYTES (4096 + 64)  // not a power of two, for the first-level cache

static uint32_t big_endian(const uint8_t* from) {
  uint32_t raw;
  memcpy(&raw, from, sizeof raw);
  return __builtin_bswap32(raw);
}

// Takes the waiting records of a batch from row `row` on, and returns the row after the last one.
// Shapes: [rows], [rows, DENSE], [TABLES, pitch].
int take(int fd, uint32_t batch, int row, int rows, int pitch, float* labels, float* dense, int64_t* values) {
  static uint8_t places[MESSAGES][PLACE_BYTES];
  struct iovec parts[MESSAGES];
  struct mmsghdr messages[MESSAGES];
  memset(messages, 0, sizeof messages);
  for (int n = 0; n < MESSAGES; n++) {
    parts[n] = (struct iovec){places[n], PLACE_BYTES};
    messages[n].msg_hdr.msg_iov = &parts[n];
    messages[n].msg_hdr.msg_iovlen = 1;
  }
  while (row < rows) {
    const int count = recvmmsg(fd, messages, MESSAGES, MSG_DONTWAIT, 0);
    if (count <= 0) return row;
    for (int n = 0; n < count; n++) {
      const uint8_t* at = places[n];
      const int records = (at[20] << 8 | at[21]);
      if (messages[n].msg_len != (unsigned)(HEADER_BYTES + records * RECORD_BYTES) || big_endian(at + 12) != batch ||
          big_endian(at + 16) != (uint32_t)row || row + records > rows)
        continue;
      at += HEADER_BYTES;
      for (int record = 0; record < records; record++, row++, at += RECORD_BYTES) {
        labels[row] = at[0] != 0;
        float numbers[DENSE];
        uint32_t ids[TABLES];
        memcpy(numbers, at + 1, sizeof numbers);
        memcpy(ids, at + 1 + sizeof numbers, sizeof ids);
        for (int k = 0; k < DENSE; k++)
          dense[row * DENSE + k] = numbers[k] < 0.0F ? 0.0F : numbers[k] > 1.0F ? 1.0F : numbers[k];
#pragma GCC unroll 26
        for (int k = 0; k < TABLES; k++) values[k * pitch + row] = ids[k] % (uint32_t)(FIRST_ROWS + k);
      }
    }
  }
  return row;
}
