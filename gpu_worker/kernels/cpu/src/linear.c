/* Linear layers: rows times a packed weight, and what becomes of the sums. The products themselves are linear_*.c's. */
#include "linear.h"

#include "activations.h"
#include "simd.h"

/* The sums with bias, times the layer's factor. */
static void add_bias(const q_weight *weight, float scale, int32_t panel, float *sums) {
  for (int at = 0; at < Q_PANEL; at += LANES) {
    vfloat values = vf_load(sums + at);
    if (weight->bias) values += vf_load(weight->bias + panel * Q_PANEL + at);
    vf_store(sums + at, values * vf_set(scale));
  }
}

/* The first ``count`` of ``values`` [a multiple of LANES], as ``type``, to ``out``. */
static void store(int32_t type, const float *values, int32_t count, void *out) {
  int32_t whole = count / LANES * LANES;
  for (int32_t at = 0; at < whole; at += LANES) {
    if (type == Q_BF16)
      vf_store_bf16((uint16_t *)out + at, vf_load(values + at));
    else
      vf_store((float *)out + at, vf_load(values + at));
  }
  for (int32_t at = whole; at < count; at++) {
    if (type == Q_BF16)
      ((uint16_t *)out)[at] = to_bf16(values[at]);
    else
      ((float *)out)[at] = values[at];
  }
}

/* out += values, for the first ``count``. */
static void add(const float *values, int32_t count, float *out) {
  int32_t at = 0;
  for (; at + LANES <= count; at += LANES) vf_store(out + at, vf_load(out + at) + vf_load(values + at));
  for (; at < count; at++) out[at] += values[at];
}

/* The first ``count`` of ``values`` to the columns from ``column`` on of ``row``. */
static void put(const q_epilogue *to, int32_t row, int32_t column, int32_t count, const float *values) {
  char *out = (char *)to->out + row * to->stride + (int64_t)column * (to->out_type == Q_BF16 ? 2 : 4);
  if (to->kind == Q_ADD)
    add(values, count, (float *)out);
  else
    store(to->out_type, values, count, out);
}

/* What becomes of the sums [Q_PANEL] of one row and panel. */
static inline void finish_panel(const q_weight *weight, const q_epilogue *to, int32_t row, int32_t panel, float *sums) {
  enum { HALF = Q_PANEL / 2 };
  if (weight->bias || to->scale != 1.0f) add_bias(weight, to->scale, panel, sums);
  for (int at = 0; to->kind == Q_ACTIVATED && at < Q_PANEL; at += LANES)
    vf_store(sums + at, vf_activation(to->activation, vf_load(sums + at)));
  for (int at = 0; to->kind == Q_GATED && at < HALF; at += LANES)
    vf_store(sums + at, vf_gated(to->activation, vf_load(sums + at), vf_load(sums + HALF + at)));
  if (!weight->gated) {
    put(to, row, panel * Q_PANEL, least(Q_PANEL, weight->outputs - panel * Q_PANEL), sums);
    return;
  }
  int32_t half = weight->outputs / 2, column = panel * HALF, count = least(HALF, half - column);
  put(to, row, column, count, sums);
  if (to->kind != Q_GATED) put(to, row, half + column, count, sums + HALF);
}

void Q_NAME(finish_rows)(const q_weight *weight, const q_epilogue *to, int32_t row, int32_t rows, int32_t panel,
                         float *sums) {
  const q_weight own = *weight;
  const q_epilogue own_to = *to;
  for (int32_t at = 0; at < rows; at++) finish_panel(&own, &own_to, row + at, panel, sums + at * Q_PANEL);
}

void Q_NAME(linear)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                    int32_t last) {
  switch (weight->type) {
    case Q_F32: Q_NAME(linear_f32)(weight, x, rows, to, first, last); break;
    case Q_BF16: Q_NAME(linear_bf16)(weight, x, rows, to, first, last); break;
    case Q_I8: Q_NAME(linear_int8)(weight, x, rows, to, first, last); break;
    case Q_I4: Q_NAME(linear_int4)(weight, x, rows, to, first, last); break;
    case Q_CODES: Q_NAME(linear_codes)(weight, x, rows, to, first, last); break;
  }
}

/* The row with zeros behind it; in place only the zeros are written. */
static void prepare_f32(const float *x, int32_t size, int32_t padded, float *out) {
  if (out != x) memcpy(out, x, (size_t)size * sizeof *x);
  memset(out + size, 0, (size_t)(padded - size) * sizeof *x);
}

static void prepare_bf16(const float *x, int32_t size, int32_t padded, uint16_t *out) {
  round_row(x, size, out);
  memset(out + size, 0, (size_t)(padded - size) * sizeof *out);
}

void Q_NAME(prepare)(const q_weight *weight, const float *x, void *out, float *scales, int32_t *sums) {
  int32_t size = weight->inputs, padded = weight->padded_inputs;
  switch (weight->type) {
    case Q_F32: prepare_f32(x, size, padded, out); break;
    case Q_BF16: prepare_bf16(x, size, padded, out); break;
    case Q_I8: Q_NAME(quantize_row)(x, size, padded, padded, -128, out, scales, NULL); break;
    case Q_I4: Q_NAME(quantize_row)(x, size, padded, Q_GROUP, 0, out, scales, sums); break;
    case Q_CODES: Q_NAME(prepare_codes)(weight, x, out, scales); break;
  }
}
