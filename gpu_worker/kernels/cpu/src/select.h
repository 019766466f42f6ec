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

/* The largest and the smallest of ``count`` > 0 values. */
static inline void range_of(const float *values, int32_t count, float *high, float *low) {
  vfloat largest = vf_set(values[0]), smallest = largest;
  int32_t at = 0;
  for (; at + LANES <= count; at += LANES) {
    vfloat part = vf_load(values + at);
    largest = vf_max(largest, part);
    smallest = vf_min(smallest, part);
  }
  *high = vf_largest(largest);
  *low = -vf_largest(-smallest);
  for (; at < count; at++) {
    *high = values[at] > *high ? values[at] : *high;
    *low = values[at] < *low ? values[at] : *low;
  }
}

/* The k-th largest of ``count`` >= k > 0 values, which are moved about: a byte of them after the other.
 *
 * Values side by side are counted in tables of their own: adding to one place again and again would wait each time. */
static inline float kth_largest(float *values, int32_t count, int32_t k) {
  for (int shift = 24; shift >= 0 && count > 1; shift -= 8) {
    float high, low;
    range_of(values, count, &high, &low);
    if (high == low) break;
    int32_t found[4][256] = {{0}}, digit = 256, here = 0, kept = 0;
    for (int32_t at = 0; at < count; at++) found[at % 4][ordered(values[at]) >> shift & 255]++;
    for (; k > 0; k -= here) {
      digit--;
      here = found[0][digit] + found[1][digit] + found[2][digit] + found[3][digit];
    }
    k += here; /* its place among those of this digit */
    for (int32_t at = 0; at < count && here < count; at++) {
      float value = values[at];
      values[kept] = value;
      kept += (ordered(value) >> shift & 255) == (uint32_t)digit;
    }
    count = here;
  }
  return values[0];
}

/* The k-th largest of the peaks of a row's chunks: at least k of its values are no lower. */
static inline float kth_peak(const q_row *row, int32_t k) {
  memcpy(row->spare, row->peaks, (size_t)row->chunks * sizeof(float));
  return kth_largest(row->spare, row->chunks, k);
}

#endif
