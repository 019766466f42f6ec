/* What the products of all types share (linear.c, linear_float.c, linear_int8.c, linear_int4.c). */
#ifndef QUIRE_LINEAR_H
#define QUIRE_LINEAR_H

#include "kernels.h"
#include "team.h"

/* A matrix as torch has it. */
typedef struct {
  int32_t type;   /* Q_F32 or Q_BF16 */
  int64_t stride; /* values from row to row */
  const void *data;
} q_matrix;

/* The row of the matrix that is ``column`` of ``panel``, or -1 where there is none (pack.c). */
int32_t q_row_of(const q_weight *weight, int32_t panel, int32_t column);

static inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* Panels that a thread takes at a time from a product's counter. Even with few rows, because two panels go together
 * then; many with many rows, because a block of the rows is then read once for all of them. */
static inline int32_t q_linear_share(const q_weight *weight, int32_t rows) {
  if (weight->panels >= 256) return 8;
  if (rows < 64) return rows <= 6 ? 4 : 2;
  return weight->panels >= 64 ? 8 : weight->panels >= 16 ? 4 : 2;
}

/* The same for a team that does nothing beside, and few rows: fewer where all of its threads then end sooner. Seven
 * shares of four panels keep one of two threads for 16 panels, fourteen of two both for 14. */
static inline int32_t q_team_share(const q_weight *weight, int32_t rows, int32_t threads) {
  int32_t panels = weight->panels, share = q_linear_share(weight, rows), best = share;
  if (threads == 1 || panels >= 256) return share;
  for (int32_t least_time = panels; share >= 2; share -= 2) {
    int32_t shares = (panels + share - 1) / share, time = (shares + threads - 1) / threads * share;
    if (time < least_time) least_time = time, best = share;
  }
  return best;
}

/* The next panels of a weight for one of a team's threads, [first, last), from a counter; ``first`` is ``panels`` or more
 * where none are left. With many rows a share takes long: the last are smaller, so that the threads end together. */
static inline int32_t q_take_panels(_Atomic int32_t *counter, const q_weight *weight, int32_t rows, int32_t threads,
                                    int32_t *last) {
  if (rows >= 64 && threads > 1)
    return q_take_fewer(counter, weight->panels, q_linear_share(weight, rows), threads, last);
  int32_t share = q_team_share(weight, rows, threads), first = q_take(counter, share);
  *last = least(first + share, weight->panels);
  return first;
}

/* The products of one type, all as ``linear`` in q_kernels. */
typedef void q_linear_function(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to,
                               int32_t first, int32_t last);
q_linear_function Q_NAME(linear_f32), Q_NAME(linear_bf16), Q_NAME(linear_int8), Q_NAME(linear_int4),
    Q_NAME(linear_codes);

/* float32 [size] as int8, with zeros up to ``padded``: each group of ``group`` values by a scale of its own, its largest
 * value / 127. ``scales`` and ``sums`` (or NULL) are each group's; ``flip`` is exclusive-ored to each value. */
void Q_NAME(quantize_row)(const float *x, int32_t size, int32_t padded, int32_t group, int8_t flip, int8_t *out,
                          float *scales, int32_t *sums);

/* As in q_kernels. */
void Q_NAME(prepare)(const q_weight *weight, const float *x, void *out, float *scales, int32_t *sums);
/* Of a weight of codes: a row in the codes' order, each value times what its code was not moved down by, and the sums of
 * the groups' values. */
void Q_NAME(prepare_codes)(const q_weight *weight, const float *x, float *out, float *sums);

/* Bring ``sums`` [rows][Q_PANEL] of the rows from ``row`` on and one panel to where ``to`` says; they are changed on the
 * way. */
void Q_NAME(finish_rows)(const q_weight *weight, const q_epilogue *to, int32_t row, int32_t rows, int32_t panel,
                         float *sums);

#endif
