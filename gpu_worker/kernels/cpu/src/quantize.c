/* Rows of activations as int8. */
#include "linear.h"
#include "simd.h"

typedef int8_t vbyte __attribute__((vector_size(LANES)));

/* LANES values from ``at`` on of [size], zeros behind them. */
INLINE vfloat values_at(const float *x, int32_t size, int32_t at) {
  if (at + LANES <= size) return vf_load(x + at);
  return at < size ? vf_load_part(x + at, size - at) : (vfloat){0};
}

/* The largest magnitude of [start, stop); NaN where a value is. */
static float largest_of(const float *x, int32_t size, int32_t start, int32_t stop) {
  vfloat best = {0};
  vint nan = {0};
  for (int32_t at = start; at < stop; at += LANES) {
    vfloat values = vf_abs(values_at(x, size, at));
    nan |= values != values;
    best = vf_max(best, values);
  }
  return vf_largest(best) + vf_sum((vfloat)nan); /* a mask's ones are a NaN, its zeros add nothing */
}

void Q_NAME(quantize_row)(const float *x, int32_t size, int32_t padded, int32_t group, int8_t flip, int8_t *out,
                          float *scales, int32_t *sums) {
  /* Adding 1.5 * 2^23 rounds to a whole number, which is then in the float's lower bits. */
  const vfloat shift = vf_set(12582912.0f);
  for (int32_t start = 0; start < padded; start += group) {
    int32_t stop = start + group;
    float largest = largest_of(x, size, start, stop);
    vfloat inverse = vf_set(largest > 0.0f ? 127.0f / largest : 0.0f);
    vint sum = {0};
    for (int32_t at = start; at < stop; at += LANES) {
      vint whole = (vint)(values_at(x, size, at) * inverse + shift) - (vint)shift;
      sum += whole;
      vbyte bytes = __builtin_convertvector(whole, vbyte) ^ flip;
      memcpy(out + at, &bytes, sizeof bytes);
    }
    scales[start / group] = largest / 127.0f;
    if (sums == NULL) continue;
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    sums[start / group] = total;
  }
}
