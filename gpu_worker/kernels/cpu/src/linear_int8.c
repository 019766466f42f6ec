/* Products of int8 weights and int8 activations, summed exactly in int32. */
#include "linear_tile.h"

void Q_NAME(linear_int8)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                         int32_t last) {
  multiply(Q_I8, &(product){weight, x, to}, rows, first, last);
}
