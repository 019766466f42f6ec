/* Packs a weight into panels, once, when a model is loaded. Compiled once: it moves words and is bound by memory. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "simd.h"
#include "team.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

typedef struct {
  const q_matrix *from;
  const q_weight *to;
  _Atomic int32_t next;
  _Atomic int32_t failed;
} pack_task;

/* Ask for large pages for [start, start + size): a product that reads gigabytes else waits for page tables. */
Q_EXPORT void q_use_huge_pages(void *start, int64_t size) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = 1 << 21;
  uintptr_t first = ((uintptr_t)start + page - 1) / page * page, last = ((uintptr_t)start + (uintptr_t)size) / page * page;
  if (last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
#endif
}

/* The row of the matrix that is ``column`` of ``panel``, or -1 where there is none. */
static int32_t row_of(const q_weight *weight, int32_t panel, int32_t column) {
  const int32_t half_panel = Q_PANEL / 2, half = weight->outputs / 2;
  if (!weight->gated) {
    int32_t row = panel * Q_PANEL + column;
    return row < weight->outputs ? row : -1;
  }
  int32_t row = panel * half_panel + column % half_panel;
  if (row >= half) return -1;
  return column < half_panel ? row : half + row;
}

/* Words of 32 bits that a row of the weight takes. */
static int32_t words_of_row(const q_weight *to) {
  static const int32_t values[] = {[Q_F32] = 1, [Q_BF16] = 2, [Q_I8] = 4, [Q_I4] = 8};
  return to->padded_inputs / values[to->type];
}

/* One row of the matrix as float32. */
static void float_row(const q_matrix *from, int32_t row, int32_t size, float *out) {
  const float *floats = (const float *)from->data + row * from->stride;
  const uint16_t *halves = (const uint16_t *)from->data + row * from->stride;
  if (from->type == Q_F32)
    memcpy(out, floats, (size_t)size * sizeof *out);
  else
    for (int32_t at = 0; at < size; at++) out[at] = from_bf16(halves[at]);
}

/* The whole number next to ``x``, which is within 2^22: adding 1.5 * 2^23 puts it into the float's lower bits. */
static inline int32_t nearest(float x) {
  const float shift = 12582912.0f;
  float shifted = x + shift;
  int32_t bits, zero;
  memcpy(&bits, &shifted, sizeof bits);
  memcpy(&zero, &shift, sizeof zero);
  return bits - zero;
}

/* A row as int8, by a scale of its own: its largest magnitude / 127. */
static void pack_int8(const float *x, const q_weight *to, int32_t place, int8_t *out) {
  float largest = 0.0f;
  int32_t sum = 0;
  for (int32_t at = 0; at < to->inputs; at++) largest = fabsf(x[at]) > largest ? fabsf(x[at]) : largest;
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  memset(out, 0, (size_t)to->padded_inputs);
  for (int32_t at = 0; at < to->inputs; at++) {
    int32_t value = nearest(x[at] * inverse);
    out[at] = (int8_t)value;
    sum += value;
  }
  ((float *)to->scales)[place] = largest / 127.0f;
  ((int32_t *)to->offsets)[place] = -128 * sum;
}

/* One group as int4 with 8 added, by a scale that makes the value of the largest magnitude -8. Returns the scale. */
static uint16_t quantize_group(const float *x, int32_t size, uint8_t out[Q_GROUP]) {
  float largest = 0.0f;
  for (int32_t at = 0; at < size; at++)
    if (fabsf(x[at]) > fabsf(largest)) largest = x[at];
  const uint16_t scale = to_bf16(largest / -8.0f);
  const float inverse = largest != 0.0f ? 1.0f / from_bf16(scale) : 0.0f;
  for (int32_t at = 0; at < size; at++) {
    int32_t value = nearest(x[at] * inverse) + 8;
    out[at] = (uint8_t)(value < 0 ? 0 : value > 15 ? 15 : value);
  }
  memset(out + size, 8, (size_t)(Q_GROUP - size));
  return scale;
}

/* A row as int4 in words of eight: the first four in the low halves of the bytes, the next four in the high ones. */
static void pack_int4(const float *x, const q_weight *to, int32_t place, uint8_t *out) {
  const int32_t groups = to->padded_inputs / Q_GROUP, panel = place / Q_PANEL, column = place % Q_PANEL;
  for (int32_t group = 0; group < groups; group++) {
    uint8_t values[Q_GROUP];
    int32_t left = to->inputs - group * Q_GROUP;
    uint16_t scale = quantize_group(x + group * Q_GROUP, left < Q_GROUP ? left : Q_GROUP, values);
    ((uint16_t *)to->group_scales)[((int64_t)panel * groups + group) * Q_PANEL + column] = scale;
    for (int32_t at = 0; at < Q_GROUP; at += 8)
      for (int32_t byte = 0; byte < 4; byte++) *out++ = (uint8_t)(values[at + byte] | values[at + 4 + byte] << 4);
  }
}

/* One row of the matrix in the weight's type, for column ``place`` of all panels'. ``floats`` [padded inputs] is
 * scratch. */
static void convert_row(const q_matrix *from, int32_t row, const q_weight *to, int32_t place, float *floats,
                        uint32_t *out) {
  float_row(from, row, to->inputs, floats);
  if (to->type == Q_I8) {
    pack_int8(floats, to, place, (int8_t *)out);
  } else if (to->type == Q_I4) {
    pack_int4(floats, to, place, (uint8_t *)out);
  } else {
    memset(out, 0, (size_t)words_of_row(to) * sizeof *out);
    if (to->type == Q_F32)
      memcpy(out, floats, (size_t)to->inputs * sizeof *floats);
    else
      for (int32_t at = 0; at < to->inputs; at++) ((uint16_t *)out)[at] = to_bf16(floats[at]);
  }
}

/* out[word][column] = rows[column][word], both of 32-bit words. A block of words at a time stays in the first cache. */
static void interleave(const uint32_t *const rows[Q_PANEL], int32_t words, uint32_t *out) {
  enum { BLOCK = 16 };
  for (int32_t start = 0; start < words; start += BLOCK)
    for (int32_t column = 0; column < Q_PANEL; column++)
      for (int32_t word = start; word < start + BLOCK; word++) out[(int64_t)word * Q_PANEL + column] = rows[column][word];
}

/* One panel; ``scratch`` has room for a row of float32 and 32 rows in the weight's type. */
static void pack_panel(const q_matrix *from, const q_weight *to, int32_t panel, uint32_t *scratch) {
  const int32_t words = words_of_row(to);
  const uint32_t *rows[Q_PANEL];
  for (int32_t column = 0; column < Q_PANEL; column++) {
    int32_t row = row_of(to, panel, column);
    uint32_t *own = scratch + to->padded_inputs + (int64_t)column * words;
    rows[column] = own;
    if (row < 0)
      memset(own, 0, (size_t)words * 4);
    else if (from->type == to->type && to->inputs == to->padded_inputs)
      rows[column] = (const uint32_t *)((const char *)from->data + row * from->stride * (to->type == Q_BF16 ? 2 : 4));
    else
      convert_row(from, row, to, panel * Q_PANEL + column, (float *)scratch, own);
  }
  interleave(rows, words, (uint32_t *)to->data + (int64_t)panel * words * Q_PANEL);
}

static void run_pack(void *argument, int id, int threads) {
  pack_task *task = argument;
  size_t words = (size_t)task->to->padded_inputs + (size_t)words_of_row(task->to) * Q_PANEL;
  uint32_t *scratch = malloc(words * sizeof *scratch);
  if (scratch == NULL) atomic_store(&task->failed, 1);
  for (int32_t panel; scratch != NULL && (panel = q_take(&task->next, 1)) < task->to->panels;)
    pack_panel(task->from, task->to, panel, scratch);
  free(scratch);
}

/* Fill the memory of ``to`` (data, and what its type has beside) from ``from``. 0, or -1 where memory is short. */
Q_EXPORT int q_pack(q_team *team, const q_matrix *from, const q_weight *to) {
  pack_task task = {from, to, 0, 0};
  q_team_run(team, run_pack, &task);
  return atomic_load(&task.failed) ? -1 : 0;
}
