/* Masks and penalties of one row: kernels/masks.py and kernels/penalties.py define them. */
#include <math.h>
#include <stddef.h>

#include "choose.h"
#include "edit.h"
#include "kernels.h"
#include "simd.h"

/* -infinity where a token's bit is 0; NaN stays. A branch at every token would take several times as long. */
static void mask_row(const int32_t *bits, int32_t vocab, float *logits) {
  vuint lane_bits;
  for (int lane = 0; lane < LANES; lane++) lane_bits[lane] = 1u << lane;
  int32_t start = 0;
  for (; start + LANES <= vocab; start += LANES) {
    uint32_t word = (uint32_t)bits[start / 32] >> start % 32;
    vfloat x = vf_load(logits + start);
    vint stays = (((vuint)vi_set((int32_t)word) & lane_bits) != 0) | (x != x);
    vf_store(logits + start, vf_select(stays, x, vf_set(-INFINITY)));
  }
  for (; start < vocab; start++) {
    int allowed = (uint32_t)bits[start / 32] >> start % 32 & 1;
    if (!allowed && logits[start] == logits[start]) logits[start] = -INFINITY;
  }
}

/* Repetition, then frequency, then presence, each rounded: ``count`` has the bit Q_SEEN for a token of the prompt. */
static float penalised(float x, int32_t count, const float *params) {
  float outputs = (float)(count & (Q_SEEN - 1));
  x = x > 0.0f ? x / params[Q_REPETITION] : x * params[Q_REPETITION];
  x -= params[Q_FREQUENCY] * outputs;
  return x - params[Q_PRESENCE] * (outputs > 0.0f ? 1.0f : 0.0f);
}

static void penalise_row(const int32_t *counts, int32_t vocab, const float *params, float *logits) {
  for (int32_t start = 0; start < vocab; start += LANES) {
    int32_t count = vocab - start < LANES ? vocab - start : LANES;
    vint here;
    /* Most tokens were never seen. */
    if (count == LANES && (memcpy(&here, counts + start, sizeof here), !vi_any(here != 0))) continue;
    for (int32_t at = start; at < start + count; at++)
      if (counts[at]) logits[at] = penalised(logits[at], counts[at], params);
  }
}

/* Changes the logits of one slot. */
void Q_NAME(edit)(const q_edit *edit, int32_t slot) {
  const int32_t *params = edit->params == NULL ? NULL : edit->params + (int64_t)slot * Q_COLUMNS;
  if (params != NULL && !(params[Q_USES] & edit->uses)) return;
  const int32_t *table = edit->table + (edit->rows == NULL ? slot : edit->rows[slot]) * edit->table_stride;
  float *logits = edit->logits + slot * edit->stride;
  if (edit->kind == Q_MASK)
    mask_row(table, edit->vocab, logits);
  else
    penalise_row(table, edit->vocab, (const float *)(const void *)params, logits);
}
