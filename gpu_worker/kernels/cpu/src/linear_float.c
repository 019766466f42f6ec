/* Products with float32 and bfloat16 weights, summed in float32. */
#include "linear_tile.h"

INLINE void linear_float(const int type, const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to,
                         int32_t first, int32_t last) {
  _Alignas(64) int32_t sums[MOST_PANELS * MOST_ROWS * Q_PANEL];
  int32_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int32_t part = 0; part < parts; part++) {
    int32_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
    for (int32_t panel = first, panels; panel < last; panel += panels) {
      panels = sum_panels(type, weight, x, row, count, panel, last, sums);
      for (int32_t at = 0; at < count; at++)
        for (int32_t next = 0; next < panels; next++)
          Q_NAME(finish_panel)(weight, to, row + at, panel + next, (float *)sums + (next * count + at) * Q_PANEL);
    }
  }
}

void Q_NAME(linear_f32)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                        int32_t last) {
  linear_float(Q_F32, weight, x, rows, to, first, last);
}

void Q_NAME(linear_bf16)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                         int32_t last) {
  linear_float(Q_BF16, weight, x, rows, to, first, last);
}
