/* Packs a weight into panels, once, when a model is loaded. Compiled once: it moves words and is bound by memory. What
 * makes numbers of another type is convert_row (convert.c). */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
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

int32_t q_row_of(const q_weight *weight, int32_t panel, int32_t column) {
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
  const int64_t row_bytes = from->stride * (from->type == Q_BF16 ? 2 : 4);
  for (int32_t column = 0; column < Q_PANEL; column++) {
    int32_t row = q_row_of(to, panel, column);
    const char *source = (const char *)from->data + row * row_bytes;
    uint32_t *own = scratch + to->padded_inputs + (int64_t)column * words;
    rows[column] = own;
    if (row < 0)
      memset(own, 0, (size_t)words * 4);
    else if (from->type == to->type && to->inputs == to->padded_inputs)
      rows[column] = (const uint32_t *)source;
    else
      q_kernel->convert_row(from->type, source, to, panel * Q_PANEL + column, (float *)scratch, own);
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
  q_team_run(team, run_pack, &task, (q_place){0});
  return atomic_load(&task.failed) ? -1 : 0;
}
