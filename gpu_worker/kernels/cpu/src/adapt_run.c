/* Rows sorted by their adapter, and the items that a product's adapters are dealt to threads in. Which item computes a
 * sum never changes its order. */
#include "adapt.h"

#include <stdlib.h>

#include "linear.h"

/* Ranks, and panels of B, of an item where rows are few. */
enum { RANKS_APART = 8, PANELS_APART = 4 };

void q_sort_by_slot(q_adapted_rows *to, const int32_t *slot, int32_t count) {
  to->count = 0;
  for (int32_t at = 0; at < to->slots; at++) to->last[at] = -1;
  for (int32_t row = 0; row < count; row++) {
    if (slot[row] < 0) continue;
    int32_t *last = &to->last[slot[row]];
    if (*last < 0 || to->tiles[*last].count == Q_ADAPTED_ROWS) {
      *last = to->count++;
      to->tiles[*last] = (q_adapted_tile){.slot = slot[row]};
    }
    q_adapted_tile *tile = &to->tiles[*last];
    tile->row[tile->count++] = row;
  }
}

/* Whether tiles alone keep the threads busy. */
static int many(const q_adapt_work *work, int threads) {
  return threads == 1 || work->rows->count * work->of->pieces >= 4 * threads;
}

static int32_t panels_of(const q_piece *piece) { return (piece->outputs + Q_ADAPTER_PANEL - 1) / Q_ADAPTER_PANEL; }

static int32_t rank_parts(const q_adapt_work *work, int threads) {
  return many(work, threads) ? 1 : (work->of->most_rank + RANKS_APART - 1) / RANKS_APART;
}

static int32_t panel_parts(const q_adapt_work *work, int threads) {
  if (many(work, threads)) return 1;
  int32_t most = 0;
  for (int32_t at = 0; at < work->of->pieces; at++)
    if (panels_of(&work->of->piece[at]) > most) most = panels_of(&work->of->piece[at]);
  return (most + PANELS_APART - 1) / PANELS_APART;
}

int32_t q_shrink_items(const q_adapt_work *work, int threads) {
  return work->rows->count * work->of->pieces * rank_parts(work, threads);
}

int32_t q_expand_items(const q_adapt_work *work, int threads) {
  return work->rows->count * work->of->pieces * panel_parts(work, threads);
}

static const q_adapter *adapter_of(const q_adapt_work *work, int32_t slot, int32_t expert, int32_t piece) {
  return &work->of->adapters[((int64_t)slot * work->of->experts + expert) * work->of->pieces + piece];
}

static float *shrunk_of(const q_adapt_work *work, int64_t row, int32_t piece) {
  return work->shrunk + (row * work->of->pieces + piece) * work->of->most_rank;
}

static void look_up(const q_adapt_work *work, const q_adapter *of, int32_t row, float *out) {
  int64_t first = (int64_t)work->ids[row] * of->rank;
  float scale = of->scale * work->scale;
  for (int32_t k = 0; k < of->rank; k++) {
    if (of->type == Q_BF16) {
      uint32_t bits = (uint32_t)((const uint16_t *)of->a)[first + k] << 16;
      union {
        uint32_t bits;
        float value;
      } both = {bits};
      out[k] = both.value * scale;
    } else {
      out[k] = ((const float *)of->a)[first + k] * scale;
    }
  }
}

/* Ranks [first, last) of ``count`` rows, whose inputs are the rows ``from``. */
static void shrink(const q_adapt_work *work, const q_adapter *of, int32_t piece, const int32_t *from,
                   const int32_t *rows, int32_t count, int32_t first, int32_t last) {
  const void *x[Q_ADAPTED_ROWS];
  float *out[Q_ADAPTED_ROWS];
  last = least(last, of->rank);
  if (first >= last) return;
  for (int32_t at = 0; at < count; at++) {
    out[at] = shrunk_of(work, rows[at], piece);
    if (work->in == NULL) {
      if (first == 0) look_up(work, of, from[at], out[at]);
      continue;
    }
    x[at] = work->in + from[at] * work->in_stride;
  }
  if (work->in != NULL)
    q_kernel->shrink(of, work->of->inputs, work->in_type, x, count, first, last, of->scale * work->scale, out);
}

/* Panels [first, last) of ``count`` rows. */
static void expand(const q_adapt_work *work, const q_adapter *of, int32_t piece, const int32_t *from,
                   const int32_t *rows, int32_t count, int32_t first, int32_t last) {
  const q_piece *place = &work->of->piece[piece];
  const float *t[Q_ADAPTED_ROWS];
  float *out[Q_ADAPTED_ROWS];
  last = least(last, panels_of(place));
  if (of->rank == 0 || first >= last) return;
  for (int32_t at = 0; at < count; at++) {
    t[at] = shrunk_of(work, rows[at], piece);
    out[at] = (float *)(work->out + rows[at] * work->out_stride) + place->first;
  }
  q_kernel->expand(of, place->outputs, t, count, first, last, out);
}

typedef void half(const q_adapt_work *work, const q_adapter *of, int32_t piece, const int32_t *from,
                  const int32_t *rows, int32_t count, int32_t first, int32_t last);

/* Item ``item`` of one half, whose pieces are in ``parts`` parts of ``size``. */
static void run_item(const q_adapt_work *work, int32_t item, int32_t parts, int32_t size, half *run) {
  int32_t part = item % parts, piece = item / parts % work->of->pieces;
  const q_adapted_tile *tile = &work->rows->tiles[item / parts / work->of->pieces];
  int32_t first = part * size, last = parts == 1 ? INT32_MAX : first + size;
  if (work->top_k == 0) {
    run(work, adapter_of(work, tile->slot, 0, piece), piece, tile->row, tile->row, tile->count, first,
        last);
    return;
  }
  for (int32_t at = 0; at < tile->count; at++)
    for (int32_t rank = 0; rank < work->top_k; rank++) {
      int64_t place = (int64_t)tile->row[at] * work->top_k + rank;
      int32_t row = work->places[place];
      const q_adapter *of = adapter_of(work, tile->slot, work->experts[place], piece);
      run(work, of, piece, work->dense ? &tile->row[at] : &row, &row, 1, first, last);
    }
}

void q_shrink_item(const q_adapt_work *work, int threads, int32_t item) {
  run_item(work, item, rank_parts(work, threads), RANKS_APART, shrink);
}

void q_expand_item(const q_adapt_work *work, int threads, int32_t item) {
  run_item(work, item, panel_parts(work, threads), PANELS_APART, expand);
}

/* ---------------------------------------------------------------- by itself */

typedef struct {
  const q_adapt_work *work;
  _Atomic int32_t next;
} adapt_task;

static void run_shrink(void *argument, int id, int threads) {
  adapt_task *task = argument;
  int32_t items = q_shrink_items(task->work, threads);
  for (int32_t item; (item = q_take(&task->next, 1)) < items;) q_shrink_item(task->work, threads, item);
}

static void run_expand(void *argument, int id, int threads) {
  adapt_task *task = argument;
  int32_t items = q_expand_items(task->work, threads);
  for (int32_t item; (item = q_take(&task->next, 1)) < items;) q_expand_item(task->work, threads, item);
}

/* ``work`` on a team, on ``count`` rows whose adapters are ``slot``; -1 is none. ``rows`` of the work is made here.
 * Returns 0, or 1 where there is no memory. */
Q_EXPORT int32_t q_adapt(q_team *team, q_adapt_work *work, const int32_t *slot, int32_t count, int32_t slots) {
  q_adapted_rows rows = {.slots = slots};
  rows.tiles = malloc((size_t)count * sizeof *rows.tiles);
  rows.last = malloc((size_t)slots * sizeof *rows.last);
  int32_t failed = rows.tiles == NULL || rows.last == NULL;
  if (!failed) {
    q_sort_by_slot(&rows, slot, count);
    work->rows = &rows;
    adapt_task shrink = {work, 0}, expand = {work, 0};
    if (rows.count) q_team_run(team, run_shrink, &shrink, (q_place){0});
    if (rows.count) q_team_run(team, run_expand, &expand, (q_place){0});
  }
  free(rows.tiles);
  free(rows.last);
  return failed;
}

/* Bytes of the structs that kernels/cpu/adapt.py fills, in its order. */
Q_EXPORT void q_adapt_sizes(int64_t sizes[4]) {
  sizes[0] = sizeof(q_adapter);
  sizes[1] = sizeof(q_piece);
  sizes[2] = sizeof(q_adapted);
  sizes[3] = sizeof(q_adapt_work);
}
