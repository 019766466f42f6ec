/* Products with float32 and bfloat16 weights, summed in float32. */
#include "linear_tile.h"

INLINE void linear_float(const int type, const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to,
                         int32_t first, int32_t last) {
  _Alignas(64) int32_t sums[MOST_PANELS * MOST_ROWS * Q_PANEL];
  for (int32_t row = 0; row < rows; row += MOST_ROWS) {
    int32_t count = least(MOST_ROWS, rows - row), panels;
    for (int32_t panel = first; panel < last; panel += panels) {
      const int wide = count <= WIDE_ROWS && last - panel >= SPAN_PANELS;
      panels = wide ? SPAN_PANELS : least(MOST_PANELS, last - panel);
      if (wide)
        sum_wide(type, weight, x, row, count, panel, sums);
      else
        sum_tall(type, weight, x, row, count, panel, panels, sums);
      for (int32_t next = 0; next < panels; next++)
        for (int32_t at = 0; at < count; at++) {
          int32_t *own = sums + (wide ? at * SPAN + next * Q_PANEL : (next * count + at) * Q_PANEL);
          Q_NAME(finish_panel)(weight, to, row + at, panel + next, (float *)own);
        }
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
