/* Mixtures of experts: the choice of a token's experts, and the sum of what they give. */
#include "route.h"

#include <math.h>
#include <stddef.h>

#include "simd.h"

/* e^(x - largest) of ``count`` values in place, and their sum in one fixed order. ``x`` has room up to a multiple of
 * LANES, which is filled with zeros. */
static float exponentials(float *x, int32_t count) {
  float largest = x[0];
  for (int32_t at = 1; at < count; at++) largest = x[at] > largest ? x[at] : largest;
  vfloat sum = {0};
  for (int32_t at = 0; at < count; at += LANES) {
    for (int32_t behind = count; behind < at + LANES; behind++) x[behind] = -INFINITY;
    vfloat values = vf_exp(vf_load(x + at) - vf_set(largest));
    vf_store(x + at, values);
    sum += values;
  }
  return vf_sum(sum);
}

static void softmax(float *x, int32_t count) {
  float sum = exponentials(x, count);
  for (int32_t at = 0; at < count; at++) x[at] /= sum;
}

/* 1 / (1 + e^-x) of all values, in place; there is room up to a multiple of LANES. */
static void sigmoid(float *x, int32_t count) {
  for (int32_t at = 0; at < count; at += LANES)
    vf_store(x + at, vf_set(1.0f) / (vf_set(1.0f) + vf_exp(-vf_load(x + at))));
}

/* The ``wanted`` <= count largest of ``values``, best first, and their places. Of equal values the first is taken. */
static void choose_best(const float *values, int32_t count, int32_t wanted, float *best, int32_t *places) {
  int32_t found = 0;
  for (int32_t at = 0; at < count; at++) {
    float value = values[at];
    if (found == wanted && !(value > best[found - 1])) continue;
    int32_t to = found < wanted ? found++ : found - 1;
    for (; to > 0 && value > best[to - 1]; to--) {
      best[to] = best[to - 1];
      places[to] = places[to - 1];
    }
    best[to] = value;
    places[to] = at;
  }
}

/* Makes ``choice`` -infinity outside the best groups. A group is worth its two best experts' sum (DeepSeek-V3), where
 * scores are a softmax its best one's (DeepSeek-V2). */
static void keep_best_groups(const q_router *router, float *choice) {
  float worth[Q_MOST_EXPERTS], best[Q_MOST_EXPERTS];
  int32_t kept[Q_MOST_EXPERTS], size = router->experts / router->groups;
  int32_t counted = router->scoring == Q_SIGMOID && size > 1 ? 2 : 1;
  for (int32_t group = 0; group < router->groups; group++) {
    choose_best(choice + group * size, size, counted, best, kept);
    worth[group] = counted == 2 ? best[0] + best[1] : best[0];
  }
  choose_best(worth, router->groups, router->topk_groups, best, kept);
  for (int32_t group = 0; group < router->groups; group++) {
    int32_t found = 0;
    for (int32_t at = 0; at < router->topk_groups; at++) found |= kept[at] == group;
    for (int32_t at = 0; !found && at < size; at++) choice[group * size + at] = -INFINITY;
  }
}

/* The weights of the chosen experts, best first, from all scores. */
static void weigh(const q_router *router, const float *scores, const int32_t *ids, float *weights) {
  float sum = 0.0f;
  for (int32_t rank = 0; rank < router->top_k; rank++) sum += weights[rank] = scores[ids[rank]];
  if (!router->renormalise) return;
  /* Sigmoids of very low logits may all be zero. */
  for (int32_t rank = 0; rank < router->top_k; rank++) weights[rank] /= sum + 1e-20f;
}

/* From best first to lowest number first. */
static void sort_by_id(int32_t count, int32_t *ids, float *weights) {
  for (int32_t next = 1; next < count; next++) {
    int32_t id = ids[next], at = next;
    float weight = weights[next];
    for (; at > 0 && ids[at - 1] > id; at--) {
      ids[at] = ids[at - 1];
      weights[at] = weights[at - 1];
    }
    ids[at] = id;
    weights[at] = weight;
  }
}

void Q_NAME(route)(const q_router *router, const float *logits, int32_t *ids, float *weights) {
  _Alignas(64) float scores[Q_MOST_EXPERTS], choice[Q_MOST_EXPERTS];
  int32_t experts = router->experts, top_k = router->top_k;
  memcpy(scores, logits, (size_t)experts * sizeof *scores);
  if (router->scoring == Q_TOPK_SOFTMAX) {
    choose_best(scores, experts, top_k, choice, ids);
    softmax(choice, top_k);
    memcpy(weights, choice, (size_t)top_k * sizeof *weights);
  } else {
    router->scoring == Q_SIGMOID ? sigmoid(scores, experts) : softmax(scores, experts);
    for (int32_t at = 0; at < experts; at++)
      choice[at] = router->correction == NULL ? scores[at] : scores[at] + router->correction[at];
    if (router->groups) keep_best_groups(router, choice);
    choose_best(choice, experts, top_k, weights, ids);
    weigh(router, scores, ids, weights);
  }
  for (int32_t rank = 0; rank < top_k; rank++) weights[rank] *= router->scale;
  sort_by_id(top_k, ids, weights);
}

void Q_NAME(combine)(const float *rows, int64_t stride, const int32_t *slots, const float *weights, int32_t count,
                     int32_t add, float *out, int32_t size) {
  for (int32_t at = 0; at < size; at += LANES) {
    int32_t part = size - at < LANES ? size - at : LANES;
    vfloat sum = {0};
    for (int32_t rank = 0; rank < count; rank++) {
      const float *row = (const float *)((const char *)rows + slots[rank] * stride);
      sum = vf_fma(vf_load_part(row + at, part), vf_set(weights[rank]), sum);
    }
    if (add) sum += vf_load_part(out + at, part);
    vf_store_part(out + at, sum, part);
  }
}
