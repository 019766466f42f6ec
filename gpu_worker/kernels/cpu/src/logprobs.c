/* Logprobs of one row: the log of its sum of exponentials, one token's value and rank, and the k best tokens.
 * kernels/logprobs.py defines them.
 *
 * One pass finds the largest value of each chunk and counts the rank; the next adds the exponentials. Of the best, a
 * bound that at least k values reach is found first, so that only these are gathered and sorted. */
#include <math.h>
#include <stddef.h>

#include "kernels.h"
#include "logprobs.h"
#include "select.h"
#include "simd.h"

enum { CHUNKS_AT_ONCE = 16 /* whose exponentials are added in float32; longer sums are float64 */ };
/* 2^31 exponentials so far below the largest are under 2^-24 of the sum. */
static const float DEEPEST = 40.0f;

/* A row as it is told: logit * inv_t, -infinity where that is below ``lowest``. */
typedef struct {
  q_row row;
  float lowest;
} q_told;

/* Values with the ids of their tokens. */
typedef struct {
  float *values;
  int32_t *ids;
} q_list;

/* Logits as they are told; NaN counts as -infinity. */
INLINE vfloat told_of(const q_told *told, vfloat logits) {
  vfloat least = vf_set(-INFINITY), values = vf_max(logits * vf_set(told->row.inv_t), least);
  return vf_select(values >= vf_set(told->lowest), values, least);
}

/* Fills the peaks of the row's chunks and its top. How many values are greater than ``mark``. */
static int32_t find_peaks(q_told *told, float mark) {
  q_row *row = &told->row;
  vint greater = {0};
  int32_t count = 0;
  row->top = -INFINITY;
  for (int32_t chunk = 0; chunk < row->chunks; chunk++) {
    float room[Q_SPAN];
    const float *logits = q_chunk(row, chunk, room);
    vfloat largest = vf_set(-INFINITY);
    for (int32_t at = 0; at < Q_SPAN; at += LANES) {
      vfloat values = told_of(told, vf_load(logits + at));
      greater -= values > vf_set(mark); /* a comparison gives -1 where it holds */
      largest = vf_max(values, largest);
    }
    row->peaks[chunk] = vf_largest(largest);
    row->top = row->peaks[chunk] > row->top ? row->peaks[chunk] : row->top;
  }
  for (int lane = 0; lane < LANES; lane++) count += greater[lane];
  return count;
}

/* The log of the sum of e^value: 0 where every value is -infinity. */
static float log_sum(const q_told *told) {
  const q_row *row = &told->row;
  if (row->top - row->top != 0.0f) return row->top < 0.0f ? 0.0f : row->top;
  vfloat top = vf_set(row->top);
  double total = 0;
  for (int32_t start = 0; start < row->chunks; start += CHUNKS_AT_ONCE) {
    int32_t end = start + CHUNKS_AT_ONCE < row->chunks ? start + CHUNKS_AT_ONCE : row->chunks;
    vfloat sum = {0};
    for (int32_t chunk = start; chunk < end; chunk++) {
      if (row->peaks[chunk] < row->top - DEEPEST) continue;
      float room[Q_SPAN];
      const float *logits = q_chunk(row, chunk, room);
      for (int32_t at = 0; at < Q_SPAN; at += LANES) {
        vfloat below = told_of(told, vf_load(logits + at)) - top;
        sum += vf_exp2(below * vf_set(1.44269504f));
      }
    }
    total += vf_sum(sum);
  }
  return (float)(row->top + log(total));
}

/* Gathers the values >= ``bound`` in the order of their tokens; the padding of the last chunk comes last. How many. */
static int32_t gather(const q_told *told, float bound, q_list *list) {
  const q_row *row = &told->row;
  int32_t count = 0;
  for (int32_t chunk = 0; chunk < row->chunks; chunk++) {
    if (!(row->peaks[chunk] >= bound)) continue;
    float room[Q_SPAN];
    const float *logits = q_chunk(row, chunk, room);
    for (int32_t at = 0; at < Q_SPAN; at += LANES) {
      vfloat values = told_of(told, vf_load(logits + at)) + vf_set(0.0f); /* -0 and 0 are equal: both become 0 */
      vint chosen = values >= vf_set(bound);
      if (!vi_any(chosen)) continue;
      for (int lane = 0; lane < LANES; lane++) {
        list->values[count] = values[lane];
        list->ids[count] = chunk * Q_SPAN + at + lane;
        count -= chosen[lane];
      }
    }
  }
  return count;
}

/* Sorts from the largest down, equals as they were: by one byte after the other, the lowest first. */
static void sort_list(q_list *list, q_list *room, int32_t count) {
  for (int shift = 0; shift < 32; shift += 8) {
    int32_t places[256] = {0}, place = 0;
    for (int32_t at = 0; at < count; at++) places[255 - (ordered(list->values[at]) >> shift & 255)]++;
    for (int digit = 0; digit < 256; digit++) {
      int32_t found = places[digit];
      places[digit] = place;
      place += found;
    }
    for (int32_t at = 0; at < count; at++) {
      int32_t to = places[255 - (ordered(list->values[at]) >> shift & 255)]++;
      room->values[to] = list->values[at];
      room->ids[to] = list->ids[at];
    }
    q_list sorted = *room;
    *room = *list;
    *list = sorted;
  }
}

/* A value that k values of the row reach, and not many more: surely where it is one of the few highest peaks, else most
 * likely, by one value of each chunk. */
static float bound_of(const q_told *told, int32_t k) {
  const q_row *row = &told->row;
  if (k <= row->chunks / 8) return kth_peak(row, k);
  int32_t rank = 2 * (k / Q_SPAN) + 8;
  if (rank > row->chunks) return -INFINITY;
  for (int32_t chunk = 0; chunk < row->chunks; chunk++)
    row->spare[chunk] = told_of(told, vf_set(row->logits[chunk * Q_SPAN]))[0];
  return kth_largest(row->spare, row->chunks, rank);
}

/* The k best tokens and their values, best first. ``memory`` has room for two lists. */
static void find_best(const q_told *told, int32_t k, float *memory, int32_t *ids, float *values) {
  int64_t size = q_list_size(told->row.vocab);
  q_list list = {memory, (int32_t *)(void *)(memory + size)};
  q_list room = {memory + 2 * size, (int32_t *)(void *)(memory + 3 * size)};
  int32_t count = gather(told, bound_of(told, k), &list);
  if (count < k) count = gather(told, -INFINITY, &list);
  sort_list(&list, &room, count);
  memcpy(ids, list.ids, (size_t)k * sizeof *ids);
  memcpy(values, list.values, (size_t)k * sizeof *values);
}

/* Row ``at`` of what is asked for. ``scratch`` has q_told_size(vocab) values, aligned to 64 bytes. */
void Q_NAME(logprobs)(const q_logprobs *asked, int32_t at, float *scratch) {
  int64_t slot = asked->slots[at], width = (int64_t)asked->k + 1;
  int32_t chunks = (asked->vocab + Q_SPAN - 1) / Q_SPAN;
  q_told told = {
      {.logits = asked->logits + slot * asked->stride, .vocab = asked->vocab, .chunks = chunks, .inv_t = 0.0f,
       .peaks = scratch, .spare = scratch + chunks},
      -INFINITY,
  };
  if (asked->params != NULL) memcpy(&told.row.inv_t, asked->params + slot * Q_COLUMNS + Q_INV_T, sizeof(float));
  if (told.row.inv_t != 0.0f && asked->thresholds != NULL) told.lowest = asked->thresholds[slot];
  if (told.row.inv_t == 0.0f) told.row.inv_t = 1.0f; /* greedy rows are told as they are */
  int32_t *ids = asked->ids + at * width;
  float *values = asked->values + at * width;
  ids[0] = (int32_t)asked->tokens[at];
  values[0] = told_of(&told, vf_set(told.row.logits[ids[0]]))[0];
  asked->ranks[at] = 1 + find_peaks(&told, values[0]);
  if (asked->k > 0) find_best(&told, asked->k, scratch + 2 * (int64_t)chunks, ids + 1, values + 1);
  if (!asked->softmax) return;
  float sum = log_sum(&told);
  for (int64_t place = 0; place < width; place++) {
    float value = values[place] - sum;
    values[place] = value == value ? value : -INFINITY; /* infinity - infinity */
  }
}
