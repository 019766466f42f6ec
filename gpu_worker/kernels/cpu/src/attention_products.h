/* The two products of attention over pages: queries with keys, and weights with values.
 *
 * Both hold their sums in registers, for some rows (query tokens x heads) at a time, and read a key or value once for
 * all of these rows. A sum is one chain of additions, over the dims of a key or over the keys in their order, so its
 * bits do not depend on how many rows and vectors share a block.
 */
#ifndef QUIRE_ATTENTION_PRODUCTS_H
#define QUIRE_ATTENTION_PRODUCTS_H

#include "kernels.h"
#include "simd.h"

/* Rows of a block: their sums for two vectors of keys, the keys and one query fill the registers. */
enum { BLOCK_ROWS = LANES == 16 ? 12 : 6 };
/* Most vectors of keys, or of a value's dims, at a time. */
enum { MOST_KEYS = 4, MOST_DIMS = LANES == 16 ? 8 : 4 };

/* LANES numbers of a cache. */
INLINE vfloat load_cached(const char *at, int32_t type) {
  return type == Q_BF16 ? vf_load_bf16((const uint16_t *)at) : vf_load((const float *)at);
}

/* ``count`` < LANES numbers of a cache, zeros in the other lanes; nothing behind them is read. */
INLINE vfloat load_some(const char *at, int32_t count, int32_t type) {
#if defined(__AVX512F__)
  __mmask16 mask = (__mmask16)((1u << count) - 1);
  if (type == Q_F32) return (vfloat)_mm512_maskz_loadu_ps(mask, at);
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at)), 16);
#else
  vfloat x = {0};
  for (int32_t lane = 0; lane < count; lane++)
    x[lane] = type == Q_BF16 ? from_bf16(((const uint16_t *)at)[lane]) : ((const float *)at)[lane];
  return x;
#endif
}

/* Bring a line into the second-level cache. While the keys of a chunk are read its values are fetched, and while these
 * are read the keys of the next chunk: both fit there, and a whole chunk's work hides the latency. */
INLINE void fetch_soon(const char *at) { __builtin_prefetch(at, 0, 2); }

/* Vectors of keys that a block of so many rows takes at a time: enough sums to keep the multipliers busy. */
static inline int32_t key_vectors(int32_t rows) { return rows <= 2 ? MOST_KEYS : 2; }

/* Some vectors of keys: vector i of dim d lies at at[i] + d * stride. What is wanted soon lies alike at soon[i]. */
typedef struct {
  const char *at[MOST_KEYS], *soon[MOST_KEYS];
  int64_t stride;
} key_block;

/* scores[row][key] = sum over dims of query x key; queries [dims][rows], scores [rows][Q_CHUNK]. */
INLINE void score_block(const float *queries, int32_t dims, const key_block *keys, int32_t type, float *scores,
                        const int32_t rows, const int32_t vectors) {
  vfloat sums[BLOCK_ROWS][MOST_KEYS];
#pragma GCC unroll 12
  for (int32_t row = 0; row < rows; row++)
#pragma GCC unroll 4
    for (int32_t i = 0; i < vectors; i++) sums[row][i] = vf_set(0.0f);
  for (int32_t dim = 0; dim < dims; dim++) {
    vfloat key[MOST_KEYS];
#pragma GCC unroll 4
    for (int32_t i = 0; i < vectors; i++) {
      key[i] = load_cached(keys->at[i] + dim * keys->stride, type);
      fetch_soon(keys->soon[i] + dim * keys->stride);
    }
#pragma GCC unroll 12
    for (int32_t row = 0; row < rows; row++) {
      vfloat query = vf_set(queries[dim * rows + row]);
#pragma GCC unroll 4
      for (int32_t i = 0; i < vectors; i++) sums[row][i] = vf_fma(query, key[i], sums[row][i]);
    }
  }
#pragma GCC unroll 12
  for (int32_t row = 0; row < rows; row++)
#pragma GCC unroll 4
    for (int32_t i = 0; i < vectors; i++) vf_store(scores + row * Q_CHUNK + i * LANES, sums[row][i]);
}

INLINE void score_rows(const float *queries, int32_t dims, const key_block *keys, int32_t type, float *scores,
                       int32_t rows) {
  switch (rows) {
    case 1: score_block(queries, dims, keys, type, scores, 1, MOST_KEYS); break;
    case 2: score_block(queries, dims, keys, type, scores, 2, MOST_KEYS); break;
    case 3: score_block(queries, dims, keys, type, scores, 3, 2); break;
    case 4: score_block(queries, dims, keys, type, scores, 4, 2); break;
    case 5: score_block(queries, dims, keys, type, scores, 5, 2); break;
    case 6: score_block(queries, dims, keys, type, scores, 6, 2); break;
#if defined(__AVX512F__)
    case 7: score_block(queries, dims, keys, type, scores, 7, 2); break;
    case 8: score_block(queries, dims, keys, type, scores, 8, 2); break;
    default: score_block(queries, dims, keys, type, scores, 12, 2); break;
#endif
  }
}

/* The scores of ``rows`` rows with one block of keys; rows is of block_rows, queries [dims][rows]. */
static void scores_of(const float *queries, int32_t dims, const key_block *keys, int32_t type, float *scores,
                      int32_t rows) {
  if (type == Q_BF16)
    score_rows(queries, dims, keys, Q_BF16, scores, rows);
  else
    score_rows(queries, dims, keys, Q_F32, scores, rows);
}

/* The size of block that score_rows has for ``rows`` rows. */
static inline int32_t block_rows(int32_t rows) { return rows <= 8 && rows <= BLOCK_ROWS ? rows : BLOCK_ROWS; }

/* The values of keys [first, last) of a chunk: key 0 is ``offset`` keys into the block blocks[0]. */
typedef struct {
  const char *values, *keys;
  const int32_t *blocks;
  int32_t known; /* blocks that the sequence has, from blocks[0] on */
  int64_t page;  /* bytes of a block */
  int32_t block_size, offset, first, last, dims, type;
} value_range;

/* out[row] = sum over keys of weight x value, for dims [dim, dim + vectors * LANES), of the last vector only ``some``
 * where that is not 0; weights [rows][Q_CHUNK], out [rows][stride]. */
INLINE void value_block(const float *weights, const value_range *range, int32_t dim, int32_t some, int32_t type,
                        float *out, int32_t stride, const int32_t rows, const int32_t vectors) {
  const int32_t size = type == Q_BF16 ? 2 : 4;
  const int32_t chunk = Q_CHUNK / range->block_size; /* blocks to the same place in the next chunk */
  vfloat sums[6][MOST_DIMS];
#pragma GCC unroll 6
  for (int32_t row = 0; row < rows; row++)
#pragma GCC unroll 8
    for (int32_t i = 0; i < vectors; i++) sums[row][i] = vf_set(0.0f);
  for (int32_t key = range->first; key < range->last;) {
    int32_t place = range->offset + key, index = place / range->block_size, within = place % range->block_size;
    int32_t end = key + range->block_size - within;
    if (end > range->last) end = range->last;
    int64_t start = ((int64_t)within * range->dims + dim) * size;
    const char *at = range->values + range->blocks[index] * range->page + start;
    const char *soon = at;
    if (index + chunk < range->known) soon = range->keys + range->blocks[index + chunk] * range->page + start;
    for (; key < end; key++, at += range->dims * size, soon += range->dims * size) {
      vfloat value[MOST_DIMS];
#pragma GCC unroll 8
      for (int32_t i = 0; i < vectors; i++) {
        value[i] = some ? load_some(at, some, type) : load_cached(at + i * LANES * size, type);
        if (i * LANES * size % 64 == 0) fetch_soon(soon + i * LANES * size);
      }
#pragma GCC unroll 6
      for (int32_t row = 0; row < rows; row++) {
        vfloat weight = vf_set(weights[row * Q_CHUNK + key]);
#pragma GCC unroll 8
        for (int32_t i = 0; i < vectors; i++) sums[row][i] = vf_fma(weight, value[i], sums[row][i]);
      }
    }
  }
#pragma GCC unroll 6
  for (int32_t row = 0; row < rows; row++)
#pragma GCC unroll 8
    for (int32_t i = 0; i < vectors; i++) vf_store(out + row * stride + dim + i * LANES, sums[row][i]);
}

/* All dims of ``rows`` rows, as many vectors at a time as there are registers for. */
INLINE void value_dims(const float *weights, const value_range *range, int32_t type, float *out, int32_t stride,
                       const int32_t rows) {
  const int32_t most = rows <= 3 ? MOST_DIMS : MOST_DIMS / 2;
  int32_t dim = 0, full = range->dims / LANES * LANES;
  for (; dim + most * LANES <= full; dim += most * LANES)
    value_block(weights, range, dim, 0, type, out, stride, rows, most);
  if (most == 8 && dim + 4 * LANES <= full) {
    value_block(weights, range, dim, 0, type, out, stride, rows, 4);
    dim += 4 * LANES;
  }
  if (most >= 4 && dim + 2 * LANES <= full) {
    value_block(weights, range, dim, 0, type, out, stride, rows, 2);
    dim += 2 * LANES;
  }
  for (; dim < full; dim += LANES) value_block(weights, range, dim, 0, type, out, stride, rows, 1);
  if (dim < range->dims) value_block(weights, range, dim, range->dims - dim, type, out, stride, rows, 1);
}

INLINE void value_rows(const float *weights, const value_range *range, int32_t type, float *out, int32_t stride,
                       int32_t rows) {
  switch (rows) {
    case 1: value_dims(weights, range, type, out, stride, 1); break;
    case 2: value_dims(weights, range, type, out, stride, 2); break;
    case 3: value_dims(weights, range, type, out, stride, 3); break;
    case 4: value_dims(weights, range, type, out, stride, 4); break;
    default: value_dims(weights, range, type, out, stride, 6); break;
  }
}

/* How many of ``rows`` rows go into the next block of values. */
static inline int32_t value_block_rows(int32_t rows) {
  if (rows % 6 == 0) return 6;
  return rows > 4 ? (rows == 5 ? 3 : 4) : rows;
}

/* out[row] = sum over the range's keys of weight x value, for ``rows`` rows; weights [rows][Q_CHUNK]. */
static void values_of(const float *weights, const value_range *range, float *out, int32_t stride, int32_t rows) {
  for (int32_t row = 0; row < rows;) {
    int32_t count = value_block_rows(rows - row);
    if (range->type == Q_BF16)
      value_rows(weights + row * Q_CHUNK, range, Q_BF16, out + (int64_t)row * stride, stride, count);
    else
      value_rows(weights + row * Q_CHUNK, range, Q_F32, out + (int64_t)row * stride, stride, count);
    row += count;
  }
}

#endif
