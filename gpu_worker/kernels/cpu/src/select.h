/* Values by their order: what threshold.c and logprobs.c find in the logits of one row. */
#ifndef QUIRE_SELECT_H
#define QUIRE_SELECT_H

#include "choose.h"
#include "simd.h"

/* A float32's bits as an unsigned number that is larger where the value is. */
INLINE uint32_t ordered(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

/* The k-th largest of ``count`` >= k > 0 values, which are moved about: a byte of them after the other. */
static inline float kth_largest(float *values, int32_t count, int32_t k) {
  for (int shift = 24; shift >= 0 && count > 1; shift -= 8) {
    int32_t found[256] = {0}, digit = 255, kept = 0;
    for (int32_t at = 0; at < count; at++) found[ordered(values[at]) >> shift & 255]++;
    for (; found[digit] < k; digit--) k -= found[digit];
    for (int32_t at = 0; at < count; at++) {
      float value = values[at];
      values[kept] = value;
      kept += (ordered(value) >> shift & 255) == (uint32_t)digit;
    }
    count = kept;
  }
  return values[0];
}

/* The k-th largest of the peaks of a row's chunks: at least k of its values are no lower. */
static inline float kth_peak(const q_row *row, int32_t k) {
  memcpy(row->spare, row->peaks, (size_t)row->chunks * sizeof(float));
  return kth_largest(row->spare, row->chunks, k);
}

#endif
