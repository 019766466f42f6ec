/* The softmax of attention: of a row's scores with one chunk of keys, and of the chunks together.
 *
 * Scores are taken times log2(e), so that the weights e^score are powers of two, which cost less.
 */
#ifndef QUIRE_ATTENTION_SOFTMAX_H
#define QUIRE_ATTENTION_SOFTMAX_H

#include "activations.h"
#include "attention_products.h"
#include "attention_tile.h"

#define LOG2_E 1.44269504f

/* Keys whose weights are made at a time: two vectors, which are one vector of bfloat16. */
enum { UNIT = 2 * LANES };

/* The units [first, last) that hold all of some keys. */
static inline seen units_of(seen keys) { return (seen){keys.first / UNIT, (keys.last + UNIT - 1) / UNIT}; }

/* 0, 1, 2, ... */
INLINE vint lane_numbers(void) {
  vint numbers;
  for (int32_t lane = 0; lane < LANES; lane++) numbers[lane] = lane;
  return numbers;
}

/* Soft cap and ALiBi of some units of a row's scores with a chunk, times the scale before. */
static void shape_scores(const rows_of_tile *of, int32_t row, int32_t chunk, float *scores, seen units) {
  const q_attention *layer = of->layer;
  float cap = layer->softcap, slope = layer->slopes ? layer->slopes[of->head + row % of->group] : 0.0f;
  int32_t before = chunk * Q_CHUNK - position_of(of, row);
  for (int32_t key = units.first * UNIT; key < units.last * UNIT; key += LANES) {
    vfloat score = vf_load(scores + key) * vf_set(layer->scale * layer->k_scale);
    if (cap != 0) score = vf_set(cap) * vf_tanh(score / vf_set(cap));
    vint distance = lane_numbers() + (before + key);
    if (slope != 0) score = vf_fma(vf_set(slope), __builtin_convertvector(distance, vfloat), score);
    vf_store(scores + key, score);
  }
}

/* Make the scores of the keys of a unit that a row does not see -infinity. */
INLINE void hide(float *scores, int32_t unit, seen own) {
  for (int32_t key = unit * UNIT; key < (unit + 1) * UNIT; key += LANES) {
    vint number = lane_numbers() + key;
    vint sees = (number >= own.first) & (number < own.last);
    vf_store(scores + key, vf_select(sees, vf_load(scores + key), vf_set(-INFINITY)));
  }
}

/* The largest of some units of scores, times a factor. */
INLINE float largest_of(const float *scores, seen units, vfloat factor) {
  vfloat even = vf_set(-INFINITY), odd = even;
  for (const float *at = scores + units.first * UNIT; at < scores + units.last * UNIT; at += UNIT) {
    even = vf_max(even, vf_load(at) * factor);
    odd = vf_max(odd, vf_load(at + LANES) * factor);
  }
  return vf_largest(vf_max(even, odd));
}

/* Write a unit's weights as the words of the product with the values, and add them to ``sum`` as that takes them. */
INLINE vfloat store_weights(int32_t kind, float *scores, int32_t unit, vfloat first, vfloat second, vfloat sum) {
#if defined(__AVX512BF16__)
  if (kind == PAIRS) {
    __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first), ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    memcpy(scores + unit * LANES, &pairs, sizeof pairs);
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, pairs, ones);
  }
#endif
  vf_store(scores + unit * UNIT, first);
  vf_store(scores + unit * UNIT + LANES, second);
  return sum + (first + second);
}

/* A row's scores become weights 2^(factor * score - largest) in place, as words; 0 for keys of ``any`` that it does not
 * see. ``sums`` gets the largest score and the sum of weights, 0 where the row sees nothing of the chunk. */
INLINE void softmax_row(const rows_of_tile *of, int32_t row, int32_t chunk, seen any, int32_t kind, float *scores,
                        float *sums) {
  seen own = seen_of(of, row, chunk), all = units_of(any), units = units_of(own);
  vfloat none = vf_set(0.0f), sum = none;
  sums[1] = 0.0f;
  if (own.last <= own.first) {
    for (int32_t unit = all.first; unit < all.last; unit++) store_weights(kind, scores, unit, none, none, none);
    return;
  }
  float scale = of->layer->scale * of->layer->k_scale;
  if (of->layer->softcap != 0 || of->layer->slopes) {
    shape_scores(of, row, chunk, scores, units);
    scale = 1.0f;
  }
  if (own.first % UNIT != 0) hide(scores, units.first, own);
  if (own.last % UNIT != 0) hide(scores, units.last - 1, own);
  vfloat factor = vf_set(scale * LOG2_E);
  sums[0] = largest_of(scores, units, factor);
  for (int32_t unit = all.first; unit < units.first; unit++) store_weights(kind, scores, unit, none, none, none);
  for (int32_t unit = units.first; unit < units.last; unit++) {
    vfloat first = vf_exp2(vf_fma(vf_load(scores + unit * UNIT), factor, vf_set(-sums[0])));
    vfloat second = vf_exp2(vf_fma(vf_load(scores + unit * UNIT + LANES), factor, vf_set(-sums[0])));
    sum = store_weights(kind, scores, unit, first, second, sum);
  }
  for (int32_t unit = units.last; unit < all.last; unit++) store_weights(kind, scores, unit, none, none, none);
  sums[1] = vf_sum(sum);
}

/* By what two sums of weights are multiplied that were made with different largest scores, to be added. */
typedef struct {
  float first, second;
} factors;

INLINE factors factors_of(float first_largest, float second_largest) {
  float difference = first_largest - second_largest;
  float less = vf_exp2(vf_set(difference < 0.0f ? difference : -difference))[0];
  return difference < 0.0f ? (factors){less, 1.0f} : (factors){1.0f, less};
}

/* One more chunk's result for a row, in order: [size] as q_partial_size says. */
static void merge(float *into, const float *chunk, int32_t size) {
  float *at = into + size - 16;
  const float *other = chunk + size - 16;
  if (other[1] == 0.0f) return;
  if (at[1] == 0.0f) {
    memcpy(into, chunk, (size_t)size * sizeof(float));
    return;
  }
  factors by = factors_of(at[0], other[0]);
  for (int32_t i = 0; i < size - 16; i += LANES)
    vf_store(into + i, vf_fma(vf_load(chunk + i), vf_set(by.second), vf_load(into + i) * vf_set(by.first)));
  at[0] = at[0] > other[0] ? at[0] : other[0];
  at[1] = at[1] * by.first + other[1] * by.second;
}

/* What a row's sums of values are multiplied by: their scale / sum of weights, with the head's sink in that sum. */
static inline float normalizer(const rows_of_tile *of, int32_t row, const float *sums) {
  if (of->layer->sinks == NULL) return of->layer->v_scale / sums[1];
  factors by = factors_of(sums[0], of->layer->sinks[of->head + row % of->group] * LOG2_E);
  return of->layer->v_scale * (by.first / (sums[1] * by.first + by.second));
}

#endif
