/* Products with float32 and bfloat16 weights, summed in float32. */
#include "linear_tile.h"

/* Hand the sums [rows][panels * Q_PANEL] to the epilogue. */
static void finish(const q_weight *weight, const q_epilogue *to, int32_t row, int32_t rows, int32_t panel,
                   int32_t panels, float *sums) {
  for (int32_t at = 0; at < rows; at++)
    for (int32_t next = 0; next < panels; next++)
      Q_NAME(finish_panel)(weight, to, row + at, panel + next, sums + (at * panels + next) * Q_PANEL);
}

INLINE void linear_float(const int type, const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to,
                         int32_t first, int32_t last) {
  _Alignas(64) int32_t sums[MOST_ROWS * Q_PANEL];
  for (int32_t row = 0; row < rows; row += MOST_ROWS) {
    int32_t count = rows - row < MOST_ROWS ? rows - row : MOST_ROWS, panels;
    for (int32_t panel = first; panel < last; panel += panels) {
      if (count <= WIDE_ROWS && last - panel >= SPAN_PANELS) {
        panels = SPAN_PANELS;
        sum_wide(type, weight, x, row, count, panel, sums);
      } else {
        panels = 1;
        sum_tall(type, weight, x, row, count, panel, sums);
      }
      finish(weight, to, row, count, panel, panels, (float *)sums);
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
