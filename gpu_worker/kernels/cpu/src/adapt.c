/* Low-rank products beside those of a weight: t = A x, then y += B t, for rows that have an adapter. */
#include "activations.h"
#include "adapt.h"
#include "kernels.h"
#include "simd.h"

#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
enum { TILE = 4 }; /* rows that share what is read of an adapter */
#else
enum { TILE = 2 };
#endif
enum { RANKS = 4 };

/* LANES values of ``type`` from value ``at`` on, as float32. */
INLINE vfloat load(const int type, const void *values, int64_t at) {
  return type == Q_BF16 ? vf_load_bf16((const uint16_t *)values + at) : vf_load((const float *)values + at);
}

INLINE float load_one(const int type, const void *values, int64_t at) {
  return type == Q_BF16 ? from_bf16(((const uint16_t *)values)[at]) : ((const float *)values)[at];
}

/* Products of ``rows`` rows with ``ranks`` rows of A from ``rank`` on. Each has one accumulator, which goes through the
 * inputs from the first to the last: its bits do not depend on the tile. */
INLINE void shrink_tile(const int type, const int x_type, const int rows, const int ranks, const q_adapter *of,
                        int32_t inputs, const void *const *x, int32_t rank, float scale, float *const *out) {
  vfloat sums[TILE][RANKS];
  UNROLL for (int row = 0; row < rows; row++) UNROLL for (int k = 0; k < ranks; k++) sums[row][k] = vf_set(0.0f);
  int64_t first = (int64_t)rank * inputs;
  int32_t at = 0;
  for (; at + LANES <= inputs; at += LANES) {
    vfloat values[TILE];
    UNROLL for (int row = 0; row < rows; row++) values[row] = load(x_type, x[row], at);
    UNROLL for (int k = 0; k < ranks; k++) {
      vfloat a = load(type, of->a, first + (int64_t)k * inputs + at);
      UNROLL for (int row = 0; row < rows; row++) sums[row][k] = vf_fma(values[row], a, sums[row][k]);
    }
  }
  for (int row = 0; row < rows; row++)
    for (int k = 0; k < ranks; k++) {
      float total = vf_sum(sums[row][k]);
      for (int32_t rest = at; rest < inputs; rest++)
        total += load_one(x_type, x[row], rest) * load_one(type, of->a, first + (int64_t)k * inputs + rest);
      out[row][rank + k] = total * scale;
    }
}

INLINE void shrink_rows(const int type, const int x_type, const int rows, const q_adapter *of, int32_t inputs,
                        const void *const *x, int32_t first, int32_t last, float scale, float *const *out) {
  for (; first + RANKS <= last; first += RANKS)
    shrink_tile(type, x_type, rows, RANKS, of, inputs, x, first, scale, out);
  for (; first < last; first++) shrink_tile(type, x_type, rows, 1, of, inputs, x, first, scale, out);
}

INLINE void shrink_all(const int type, const int x_type, const q_adapter *of, int32_t inputs, const void *const *x,
                       int32_t rows, int32_t first, int32_t last, float scale, float *const *out) {
  for (; rows >= TILE; rows -= TILE, x += TILE, out += TILE)
    shrink_rows(type, x_type, TILE, of, inputs, x, first, last, scale, out);
  for (; rows > 0; rows--, x++, out++) shrink_rows(type, x_type, 1, of, inputs, x, first, last, scale, out);
}

void Q_NAME(shrink)(const q_adapter *of, int32_t inputs, int32_t x_type, const void *const *x, int32_t rows,
                    int32_t first, int32_t last, float scale, float *const *out) {
  if (of->type == Q_BF16 && x_type == Q_BF16)
    shrink_all(Q_BF16, Q_BF16, of, inputs, x, rows, first, last, scale, out);
  else if (of->type == Q_BF16)
    shrink_all(Q_BF16, Q_F32, of, inputs, x, rows, first, last, scale, out);
  else if (x_type == Q_BF16)
    shrink_all(Q_F32, Q_BF16, of, inputs, x, rows, first, last, scale, out);
  else
    shrink_all(Q_F32, Q_F32, of, inputs, x, rows, first, last, scale, out);
}

/* One panel of B, Q_ADAPTER_PANEL outputs, with ``rows`` rows: ranks are added from the first to the last, and the sum
 * to what is there. */
INLINE void expand_tile(const int type, const int rows, const q_adapter *of, int32_t panel, int32_t count,
                        const float *const *t, float *const *out) {
  enum { VECTORS = 4, WIDTH = VECTORS * LANES };
  for (int32_t column = 0; column < count; column += WIDTH) {
    vfloat sums[TILE][VECTORS];
    UNROLL for (int row = 0; row < rows; row++) UNROLL for (int v = 0; v < VECTORS; v++) sums[row][v] = vf_set(0.0f);
    int64_t at = (int64_t)panel * of->rank * Q_ADAPTER_PANEL + column;
    for (int32_t k = 0; k < of->rank; k++, at += Q_ADAPTER_PANEL) {
      vfloat b[VECTORS];
      UNROLL for (int v = 0; v < VECTORS; v++) b[v] = load(type, of->b, at + v * LANES);
      UNROLL for (int row = 0; row < rows; row++) {
        vfloat value = vf_set(t[row][k]);
        UNROLL for (int v = 0; v < VECTORS; v++) sums[row][v] = vf_fma(value, b[v], sums[row][v]);
      }
    }
    for (int row = 0; row < rows; row++)
      for (int v = 0; v < VECTORS; v++) {
        int32_t place = column + v * LANES, left = count - place;
        float *to = out[row] + (int64_t)panel * Q_ADAPTER_PANEL + place;
        if (left >= LANES)
          vf_store(to, vf_load(to) + sums[row][v]);
        else if (left > 0)
          vf_store_part(to, vf_load_part(to, left) + sums[row][v], left);
      }
  }
}

INLINE void expand_all(const int type, const q_adapter *of, int32_t outputs, const float *const *t, int32_t rows,
                       int32_t first, int32_t last, float *const *out) {
  for (int32_t at = 0, tile; at < rows; at += tile) {
    tile = rows - at >= TILE ? TILE : 1;
    for (int32_t panel = first; panel < last; panel++) {
      int32_t left = outputs - panel * Q_ADAPTER_PANEL, count = left < Q_ADAPTER_PANEL ? left : Q_ADAPTER_PANEL;
      if (tile == TILE)
        expand_tile(type, TILE, of, panel, count, t + at, out + at);
      else
        expand_tile(type, 1, of, panel, count, t + at, out + at);
    }
  }
}

void Q_NAME(expand)(const q_adapter *of, int32_t outputs, const float *const *t, int32_t rows, int32_t first,
                    int32_t last, float *const *out) {
  if (of->type == Q_BF16)
    expand_all(Q_BF16, of, outputs, t, rows, first, last, out);
  else
    expand_all(Q_F32, of, outputs, t, rows, first, last, out);
}

/* The same values as an epilogue of ``linear`` gives. */
void Q_NAME(activated)(int32_t kind, int32_t gated, const float *x, int32_t size, int32_t out_type, void *out) {
  float *wide = out;
  uint16_t *narrow = out;
  int32_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    vfloat own = vf_load(x + at);
    vfloat y = gated ? vf_gated(kind, own, vf_load(x + size + at)) : vf_activation(kind, own);
    if (out_type == Q_BF16)
      vf_store_bf16(narrow + at, y);
    else
      vf_store(wide + at, y);
  }
  if (at == size) return;
  vfloat own = vf_load_part(x + at, size - at);
  vfloat y = gated ? vf_gated(kind, own, vf_load_part(x + size + at, size - at)) : vf_activation(kind, own);
  for (int32_t lane = 0; at < size; at++, lane++) {
    if (out_type == Q_BF16)
      narrow[at] = to_bf16(y[lane]);
    else
      wide[at] = y[lane];
  }
}
