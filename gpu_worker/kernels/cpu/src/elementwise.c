/* What is done to each value or row between the products: norms, rotary positions, activations, embeddings. Sizes are
 * any; each result depends on its own row alone. */
#include <math.h>
#include <stddef.h>

#include "activations.h"
#include "kernels.h"
#include "simd.h"

/* The sum over a row of x - centre, or of its square, in one fixed order: four vectors take turns, then are added. */
INLINE float row_sum(const float *x, int32_t size, float centre, int squared) {
  vfloat sums[4] = {{0}, {0}, {0}, {0}}, shift = vf_set(centre);
  int32_t at = 0;
  for (int turn = 0; at + LANES <= size; at += LANES, turn = (turn + 1) % 4) {
    vfloat part = vf_load(x + at) - shift;
    sums[turn] += squared ? part * part : part;
  }
  float total = vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; at < size; at++) total += squared ? (x[at] - centre) * (x[at] - centre) : x[at] - centre;
  return total;
}

/* x * weight + bias of the values from ``at`` on, of which ``count`` <= LANES are looked at. */
INLINE vfloat weighted(const q_norm *norm, vfloat x, int32_t at, int32_t count) {
  if (norm->weight != NULL) x *= vf_load_part(norm->weight + at, count);
  if (norm->bias != NULL) x += vf_load_part(norm->bias + at, count);
  return x;
}

/* x / sqrt(mean(x^2) + eps), or with Q_LAYER of x - mean(x), times the weight, plus the bias. */
void Q_NAME(norm)(const q_norm *norm, const float *x, float *out) {
  float count = (float)norm->size;
  float mean = norm->kind == Q_LAYER ? row_sum(x, norm->size, 0.0f, 0) / count : 0.0f;
  float variance = row_sum(x, norm->size, mean, 1) / count;
  vfloat centre = vf_set(mean), scale = vf_set(1.0f / sqrtf(variance + norm->eps));
  int32_t at = 0;
  for (; at + LANES <= norm->size; at += LANES)
    vf_store(out + at, weighted(norm, (vf_load(x + at) - centre) * scale, at, LANES));
  int32_t rest = norm->size - at;
  if (rest) vf_store_part(out + at, weighted(norm, (vf_load_part(x + at, rest) - centre) * scale, at, rest), rest);
}

/* Rotates dim i with dim i + half. */
static void rotate_halves(float *restrict first, float *restrict second, const float *restrict cos,
                          const float *restrict sin, int32_t half) {
  for (int32_t at = 0; at < half; at++) {
    float one = first[at], other = second[at];
    first[at] = one * cos[at] - other * sin[at];
    second[at] = other * cos[at] + one * sin[at];
  }
}

/* Rotates dim 2 i with dim 2 i + 1. */
static void rotate_pairs(float *restrict x, const float *restrict cos, const float *restrict sin, int32_t half) {
  for (int32_t at = 0; at < half; at++) {
    float one = x[2 * at], other = x[2 * at + 1];
    x[2 * at] = one * cos[at] - other * sin[at];
    x[2 * at + 1] = other * cos[at] + one * sin[at];
  }
}

void Q_NAME(rotate)(float *x, int32_t heads, int32_t head_dim, const float *cos, const float *sin, int32_t rotary_dim,
                    int32_t interleaved) {
  int32_t half = rotary_dim / 2;
  for (int32_t head = 0; head < heads; head++, x += head_dim) {
    if (interleaved)
      rotate_pairs(x, cos, sin, half);
    else
      rotate_halves(x, x + half, cos, sin, half);
  }
}

void Q_NAME(activate)(int32_t kind, const float *x, float *out, int32_t size) {
  int32_t at = 0;
  for (; at + LANES <= size; at += LANES) vf_store(out + at, vf_activation(kind, vf_load(x + at)));
  if (at < size) vf_store_part(out + at, vf_activation(kind, vf_load_part(x + at, size - at)), size - at);
}

void Q_NAME(gate)(int32_t kind, const float *gate, const float *up, float *out, int32_t size) {
  int32_t at = 0;
  for (; at + LANES <= size; at += LANES) vf_store(out + at, vf_gated(kind, vf_load(gate + at), vf_load(up + at)));
  if (at == size) return;
  vfloat last = vf_gated(kind, vf_load_part(gate + at, size - at), vf_load_part(up + at, size - at));
  vf_store_part(out + at, last, size - at);
}

void Q_NAME(embed)(int32_t type, const void *row, float scale, float *out, int32_t size) {
  const float *wide = row;
  const uint16_t *narrow = row;
  for (int32_t at = 0; at < size; at++) out[at] = scale * (type == Q_BF16 ? from_bf16(narrow[at]) : wide[at]);
}

void Q_NAME(add)(const float *x, float scale, float *out, int32_t size) {
  for (int32_t at = 0; at < size; at++) out[at] += scale * x[at];
}

void Q_NAME(softcap)(float *x, float cap, int32_t size) {
  vfloat limit = vf_set(cap);
  int32_t at = 0;
  for (; at + LANES <= size; at += LANES) vf_store(x + at, limit * vf_tanh(vf_load(x + at) / limit));
  if (at < size) vf_store_part(x + at, limit * vf_tanh(vf_load_part(x + at, size - at) / limit), size - at);
}
