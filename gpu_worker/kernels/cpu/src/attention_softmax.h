/* The softmax of attention: of a row's scores with one chunk of keys, and of the chunks together.
 *
 * Scores are taken times log2(e), so that the weights e^score are powers of two, which cost less.
 */
#ifndef QUIRE_ATTENTION_SOFTMAX_H
#define QUIRE_ATTENTION_SOFTMAX_H

#include "activations.h"
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
    vfloat score = vf_load(scores + key) * vf_set(layer->scale);
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

/* A row's scores become weights 2^(factor * score - largest) in place, 0 for keys of ``any`` that it does not see.
 * ``sums`` gets the largest score and the sum of weights; a sum of 0 says that the row sees nothing of the chunk. */
static void softmax_row(const rows_of_tile *of, int32_t row, int32_t chunk, seen any, float *scores, float *sums) {
  seen own = seen_of(of, row, chunk), all = units_of(any), units = units_of(own);
  if (own.last <= own.first) units.first = units.last = all.first;
  for (int32_t key = all.first * UNIT; key < units.first * UNIT; key++) scores[key] = 0.0f;
  for (int32_t key = units.last * UNIT; key < all.last * UNIT; key++) scores[key] = 0.0f;
  sums[1] = 0.0f;
  if (own.last <= own.first) return;
  float scale = of->layer->scale;
  if (of->layer->softcap != 0 || of->layer->slopes) {
    shape_scores(of, row, chunk, scores, units);
    scale = 1.0f;
  }
  if (own.first % UNIT != 0) hide(scores, units.first, own);
  if (own.last % UNIT != 0) hide(scores, units.last - 1, own);
  vfloat factor = vf_set(scale * LOG2_E), even = vf_set(0.0f), odd = even;
  sums[0] = largest_of(scores, units, factor);
  for (float *at = scores + units.first * UNIT; at < scores + units.last * UNIT; at += UNIT) {
    vfloat first = vf_exp2(vf_fma(vf_load(at), factor, vf_set(-sums[0])));
    vfloat second = vf_exp2(vf_fma(vf_load(at + LANES), factor, vf_set(-sums[0])));
    vf_store(at, first);
    vf_store(at + LANES, second);
    even += first;
    odd += second;
  }
  sums[1] = vf_sum(even + odd);
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

/* What a row's sums of values are multiplied by: 1 / sum of weights, with the head's sink in that sum. */
static inline float normalizer(const rows_of_tile *of, int32_t row, const float *sums) {
  if (of->layer->sinks == NULL) return 1.0f / sums[1];
  factors by = factors_of(sums[0], of->layer->sinks[of->head + row % of->group] * LOG2_E);
  return by.first / (sums[1] * by.first + by.second);
}

#endif
