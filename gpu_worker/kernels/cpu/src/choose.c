/* The token of one row: the largest logit, or the largest of logit / temperature + noise among those at or above the
 * threshold. kernels/sampling.py defines the draw.
 *
 * One pass finds the largest logit of each chunk. Noise is bounded, so that chunks which cannot reach the best sum so
 * far are passed over, and in the others a cheap bound of the noise says which few tokens get it computed. */
#include <math.h>
#include <stddef.h>

#include "choose.h"
#include "kernels.h"
#include "philox.h"
#include "simd.h"

/* No noise is larger: v >= 2^-33. */
static const float MAX_NOISE = 22.9f;

/* The best sum so far and its place in the row; the first of equals. */
typedef struct {
  float sum;
  int32_t place;
} q_best;

float Q_NAME(row_threshold)(const q_row *row, const int32_t *params);

/* Fills the peaks of the row's chunks. Whether there is a NaN, which no peak shows. */
static int find_peaks(const q_row *row) {
  vint nan = {0};
  for (int32_t chunk = 0; chunk < row->chunks; chunk++) {
    float room[Q_SPAN];
    const float *logits = q_chunk(row, chunk, room);
    vfloat largest = vf_set(-INFINITY);
    for (int32_t at = 0; at < Q_SPAN; at += LANES) {
      vfloat part = vf_load(logits + at);
      nan |= part != part;
      largest = vf_max(part, largest);
    }
    row->peaks[chunk] = vf_largest(largest);
  }
  return vi_any(nan);
}

/* The place of the first NaN, else of the first of the largest logits. */
static int32_t largest_place(const q_row *row) {
  if (find_peaks(row))
    for (int32_t place = 0; place < row->vocab; place++)
      if (row->logits[place] != row->logits[place]) return place;
  int32_t best = 0, place;
  for (int32_t chunk = 1; chunk < row->chunks; chunk++)
    if (row->peaks[chunk] > row->peaks[best]) best = chunk;
  for (place = best * Q_SPAN; row->logits[place] != row->peaks[best]; place++) continue;
  return place;
}

/* Looks at the sums of the vector of tokens from ``place`` on, of which ``hits`` may be the best. */
static void look_at_hits(vfloat scaled, vint hits, vuint words, int32_t place, q_best *best) {
  vfloat sums = scaled + vf_noise(words);
  for (int lane = 0; lane < LANES; lane++) {
    if (!hits[lane]) continue;
    int better = sums[lane] > best->sum || (sums[lane] == best->sum && place + lane < best->place);
    if (better) *best = (q_best){sums[lane], place + lane};
  }
}

/* Looks at a chunk's tokens, the first of which is token ``token``, for a sum better than the best. */
INLINE void look_at_chunk(const q_row *row, int32_t chunk, uint32_t token, const q_stream *stream, float lowest,
                          q_best *best) {
  /* Words come by blocks of four tokens; a share of the vocabulary may begin within such four. */
  uint32_t words[Q_SPAN + PHILOX_TOKENS], skip = token % 4;
  float room[Q_SPAN];
  const float *logits = q_chunk(row, chunk, room);
  vfloat inv_t = vf_set(row->inv_t), bound = vf_set(lowest);
  for (uint32_t made = 0; made < Q_SPAN + skip; made += PHILOX_TOKENS)
    philox_words(stream, (token + made) / 4, words + made);
  for (int32_t at = 0; at < Q_SPAN; at += LANES) {
    vuint here = vu_load(words + skip + at);
    vfloat scaled = vf_load(logits + at) * inv_t;
    vint hits = (scaled + vf_noise_bound(here) >= vf_set(best->sum)) & (scaled >= bound);
    if (vi_any(hits)) look_at_hits(scaled, hits, here, chunk * Q_SPAN + at, best);
  }
}

/* The winner of the draw; ``top`` is the place of the largest logit. */
static q_best draw(const q_row *row, int32_t top, uint32_t first, const q_stream *stream, float lowest) {
  q_best best = {-INFINITY, 0};
  int32_t top_chunk = top / Q_SPAN;
  /* The most likely tokens first: their best sum is a bar that most other chunks do not reach. */
  look_at_chunk(row, top_chunk, first + (uint32_t)(top_chunk * Q_SPAN), stream, lowest, &best);
  for (int32_t chunk = 0; chunk < row->chunks; chunk++) {
    float peak = row->peaks[chunk] * row->inv_t;
    if (peak < lowest || peak + MAX_NOISE < best.sum || chunk == top_chunk) continue;
    look_at_chunk(row, chunk, first + (uint32_t)(chunk * Q_SPAN), stream, lowest, &best);
  }
  return best;
}

/* Chooses the token of one slot. ``scratch`` has q_scratch_size(vocab) values, aligned to 64 bytes. */
void Q_NAME(choose)(const q_choice *choice, int32_t slot, float *scratch) {
  int64_t own = choice->rows == NULL ? slot : choice->rows[slot];
  const int32_t *params = choice->params == NULL ? NULL : choice->params + own * Q_COLUMNS;
  int32_t chunks = (choice->vocab + Q_SPAN - 1) / Q_SPAN;
  q_row row = {
      .logits = choice->logits + slot * choice->stride, .vocab = choice->vocab, .chunks = chunks,
      .peaks = scratch, .spare = scratch + chunks, .pool = scratch + 2 * (int64_t)chunks,
  };
  if (params != NULL) memcpy(&row.inv_t, params + Q_INV_T, sizeof row.inv_t);
  int32_t top = largest_place(&row);
  q_best best = {row.logits[top], top};
  float lowest = -INFINITY;
  if (row.inv_t != 0.0f) {
    best.sum = row.top = row.logits[top] * row.inv_t;
    /* Of a row whose top is not a number, or infinite, nothing is drawn. */
    if (row.top - row.top == 0.0f) {
      q_stream stream = {{(uint32_t)params[Q_SEED_LOW], (uint32_t)params[Q_SEED_HIGH]},
                         (uint32_t)choice->positions[slot]};
      lowest = Q_NAME(row_threshold)(&row, params);
      best = draw(&row, top, (uint32_t)choice->first, &stream, lowest);
    }
  }
  choice->tokens[slot] = choice->first + best.place;
  choice->chosen[slot] = row.logits[best.place];
  if (choice->values != NULL) choice->values[slot] = best.sum;
  if (choice->thresholds != NULL) choice->thresholds[slot] = lowest;
}
