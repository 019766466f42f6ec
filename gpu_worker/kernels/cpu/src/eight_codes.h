/* Eight codes at a time, between bytes and the bits of a stream. Bytes are in order of their addresses, as on every
 * machine that torch runs on: the first is the lowest. */
#ifndef QUIRE_EIGHT_CODES_H
#define QUIRE_EIGHT_CODES_H

#include <stdint.h>
#include <string.h>

/* The lowest ``width`` bits of each of eight bytes, one behind the other. */
static inline uint64_t q_narrowed(uint64_t bytes, int width) {
  const uint64_t one = (1u << width) - 1, two = (1u << 2 * width) - 1, four = (1ull << 4 * width) - 1;
  uint64_t x = (bytes & one * 0x0001000100010001) | (bytes >> (8 - width) & (one * 0x0001000100010001) << width);
  x = (x & two * 0x0000000100000001) | (x >> (16 - 2 * width) & (two * 0x0000000100000001) << 2 * width);
  return (x & four) | (x >> (32 - 4 * width) & four << 4 * width);
}

/* ``q_narrowed`` backwards: of 8 * ``width`` bits a byte for each code. What lies above these bits is ignored. */
static inline uint64_t q_widened(uint64_t bits, int width) {
  const uint64_t one = (1u << width) - 1, two = (1u << 2 * width) - 1, four = (1ull << 4 * width) - 1;
  uint64_t x = (bits & four) | (bits & four << 4 * width) << (32 - 4 * width);
  x = (x & two * 0x0000000100000001) | (x & (two * 0x0000000100000001) << 2 * width) << (16 - 2 * width);
  return (x & one * 0x0001000100010001) | (x & (one * 0x0001000100010001) << width) << (8 - width);
}

/* ``width`` bytes at ``from``. */
static inline uint64_t q_load_bytes(const uint8_t *from, int width) {
  uint64_t bits = 0;
  memcpy(&bits, from, (size_t)width);
  return bits;
}

#endif
