/* Products with float32 and bfloat16 weights, summed in float32. */
#include "linear_tile.h"

void Q_NAME(linear_f32)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                        int32_t last) {
  multiply(Q_F32, &(product){weight, x, to}, rows, first, last);
}

void Q_NAME(linear_bf16)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                         int32_t last) {
  multiply(Q_BF16, &(product){weight, x, to}, rows, first, last);
}
