/* Rows of a weight in the type that it is kept in. */
#include "linear.h"
#include "simd.h"

typedef uint8_t vbyte __attribute__((vector_size(LANES)));

/* ``size`` values of ``type`` as float32, and zeros up to ``padded``. */
static void float_row(int32_t type, const void *from, int32_t size, int32_t padded, float *out) {
  if (type == Q_F32) {
    memcpy(out, from, (size_t)size * sizeof *out);
  } else {
    const uint16_t *halves = from;
    int32_t at = 0;
    for (; at + LANES <= size; at += LANES) vf_store(out + at, vf_load_bf16(halves + at));
    for (; at < size; at++) out[at] = from_bf16(halves[at]);
  }
  memset(out + size, 0, (size_t)(padded - size) * sizeof *out);
}

/* A row as int8, by a scale of its own: its largest magnitude / 127. */
static void int8_row(const float *x, const q_weight *to, int32_t place, int8_t *out) {
  int32_t sum;
  Q_NAME(quantize_row)(x, to->padded_inputs, to->padded_inputs, to->padded_inputs, 0, out,
                       (float *)to->scales + place, &sum);
  ((int32_t *)to->offsets)[place] = -128 * sum;
}

/* The value of the largest magnitude of a group, of equal ones the first. */
static float largest_value(const float x[Q_GROUP]) {
  vfloat best = {0};
  for (int32_t at = 0; at < Q_GROUP; at += LANES) best = vf_max(best, vf_abs(vf_load(x + at)));
  const float largest = vf_largest(best);
  int32_t at = 0;
  while (at < Q_GROUP - 1 && fabsf(x[at]) != largest) at++;
  return x[at];
}

/* One group as int4 with 8 added, by ``scale``. Returns the sum of the squares of what is lost. */
static float int4_by(const float x[Q_GROUP], const float scale, uint8_t out[Q_GROUP]) {
  const vfloat inverse = vf_set(scale != 0.0f ? 1.0f / scale : 0.0f);
  const vfloat shift = vf_set(12582912.0f); /* adding 1.5 * 2^23 rounds to a whole number, in the float's lower bits */
  vfloat lost = {0};
  for (int32_t at = 0; at < Q_GROUP; at += LANES) {
    const vfloat values = vf_load(x + at);
    const vfloat rounded = vf_min(vf_max(values * inverse, vf_set(-8.0f)), vf_set(7.0f)) + shift;
    const vfloat off = (rounded - shift) * vf_set(scale) - values;
    lost += off * off;
    vbyte bytes = __builtin_convertvector((vint)rounded - (vint)shift + 8, vbyte);
    memcpy(out + at, &bytes, sizeof bytes);
  }
  return vf_sum(lost);
}

/* One group as int4 with 8 added. Of scales that make -8 of the value of the largest magnitude, or of a little less, the
 * one that loses least: a finer scale serves the many values, and cuts that one off. Returns the scale. */
static uint16_t int4_group(const float x[Q_GROUP], uint8_t out[Q_GROUP]) {
  static const float shares[] = {1.0f, 0.95f, 0.9f, 0.85f}; /* layers/formats/online.py has the same */
  const float largest = largest_value(x);
  float least = INFINITY;
  uint16_t best = to_bf16(largest / -8.0f);
  for (int share = 0; share < 4; share++) {
    uint8_t codes[Q_GROUP];
    const uint16_t scale = to_bf16(largest * shares[share] / -8.0f);
    const float lost = int4_by(x, from_bf16(scale), codes);
    if (share > 0 && !(lost < least)) continue;
    least = lost;
    best = scale;
    memcpy(out, codes, sizeof codes);
  }
  return best;
}

/* A row as int4 in words of eight: the first four in the low halves of the bytes, the next four in the high ones. */
static void int4_row(const float *x, const q_weight *to, int32_t place, uint32_t *out) {
  const int32_t groups = to->padded_inputs / Q_GROUP, panel = place / Q_PANEL, column = place % Q_PANEL;
  uint16_t *scales = (uint16_t *)to->group_scales + (int64_t)panel * groups * Q_PANEL + column;
  for (int32_t group = 0; group < groups; group++) {
    uint8_t values[Q_GROUP];
    uint32_t fours[Q_GROUP / 4];
    scales[group * Q_PANEL] = int4_group(x + group * Q_GROUP, values);
    memcpy(fours, values, sizeof fours);
    for (int32_t word = 0; word < Q_GROUP / 8; word++) *out++ = fours[2 * word] | fours[2 * word + 1] << 4;
  }
}

void Q_NAME(convert_row)(int32_t type, const void *from, const q_weight *to, int32_t place, float *floats,
                         uint32_t *out) {
  if (to->type == Q_F32) floats = (float *)out;
  float_row(type, from, to->inputs, to->padded_inputs, floats);
  switch (to->type) {
    case Q_BF16: Q_NAME(prepare)(to, floats, out, NULL, NULL); break;
    case Q_I8: int8_row(floats, to, place, (int8_t *)out); break;
    case Q_I4: int4_row(floats, to, place, out); break;
  }
}
