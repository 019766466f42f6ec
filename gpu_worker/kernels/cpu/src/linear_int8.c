/* Products of int8 weights and int8 activations, summed exactly in int32. */
#include "linear_tile.h"

/* Sums as float32: times the scales of the outputs and of the row. */
static void scale_sums(const q_weight *weight, const q_rows *x, int32_t row, int32_t panel, const int32_t *sums,
                       float *out) {
  vfloat row_scale = vf_set(x->scales[row]);
  for (int at = 0; at < Q_PANEL; at += LANES) {
    vint sum = vi_load(sums + at);
#if defined(__AVX512VNNI__)
    /* The rows' values have 128 added, so that they have no sign; elsewhere add_bytes took it off before. */
    sum += vi_load(weight->offsets + panel * Q_PANEL + at);
#endif
    vfloat scale = vf_load(weight->scales + panel * Q_PANEL + at);
    vf_store(out + at, __builtin_convertvector(sum, vfloat) * scale * row_scale);
  }
}

void Q_NAME(linear_int8)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                         int32_t last) {
  _Alignas(64) int32_t sums[MOST_PANELS * MOST_ROWS * Q_PANEL];
  int32_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int32_t part = 0; part < parts; part++) {
    int32_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
    for (int32_t panel = first, panels; panel < last; panel += panels) {
      panels = sum_panels(Q_I8, weight, x, row, count, panel, last, sums);
      for (int32_t at = 0; at < count; at++)
        for (int32_t next = 0; next < panels; next++) {
          _Alignas(64) float values[Q_PANEL];
          scale_sums(weight, x, row + at, panel + next, sums + (next * count + at) * Q_PANEL, values);
          Q_NAME(finish_panel)(weight, to, row + at, panel + next, values);
        }
    }
  }
}
