/* The two products of attention over pages: queries with keys, and weights with values.
 *
 * Both hold their sums in registers, for some rows (query tokens x heads) at a time, and read a key or value once for
 * all of these rows. A sum is one chain of additions, over the dims of a key or over the keys in their order, so its
 * bits do not depend on how many rows and vectors share a block.
 *
 * What is multiplied are words of 32 bits: a float32, or a pair of bfloat16 where the processor multiplies these. Such
 * a word has two dims of one key, or of two keys the same dim; in the pages these lie apart, and are paired in
 * registers. Queries and weights are then rounded to bfloat16. A pair of keys begins at an even place in its block.
 */
#ifndef QUIRE_ATTENTION_PRODUCTS_H
#define QUIRE_ATTENTION_PRODUCTS_H

#include "attention_narrow.h"
#include "kernels.h"
#include "simd.h"

/* Rows of a block: their sums for two vectors of keys, the keys and one query fill the registers. */
enum { BLOCK_ROWS = LANES == 16 ? 12 : 6 };
/* Most vectors of keys, or of a value's dims, at a time. */
enum { MOST_KEYS = 4, MOST_DIMS = LANES == 16 ? 8 : 4 };

/* How a layer's words are made: float32 as it is in the pages, from bfloat16, pairs of bfloat16, from fp8, from int8. */
enum { WIDE_PAGES, WIDENED, PAIRS, FLOAT8, INT8 };

static inline int32_t kind_of(const q_attention *layer) {
  if (layer->cache_type == Q_F32) return WIDE_PAGES;
  if (layer->cache_type == Q_KV_INT8) return INT8;
  if (layer->cache_type != Q_BF16) return FLOAT8;
#if defined(__AVX512BF16__)
  if (layer->head_dim % 2 == 0 && layer->block_size % 2 == 0) return PAIRS;
#endif
  return WIDENED;
}

/* Dims, or keys, of a word. */
INLINE int32_t per_word(int32_t kind) { return kind == PAIRS ? 2 : 1; }
/* Bytes of a number in the pages. */
INLINE int32_t bytes_of(int32_t kind) { return kind == WIDE_PAGES ? 4 : kind == FLOAT8 || kind == INT8 ? 1 : 2; }

/* sum + a * b, of pairs the sum of both products. */
INLINE vfloat add_word(int32_t kind, vfloat a, vfloat b, vfloat sum) {
#if defined(__AVX512BF16__)
  if (kind == PAIRS) return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  return vf_fma(a, b, sum);
}

/* LANES numbers of a page as float32; ``type`` is the cache's. */
INLINE vfloat load_wide(int32_t kind, int32_t type, const char *at) {
  if (kind == FLOAT8) return load_float8(type, (const uint8_t *)at);
  if (kind == INT8) return load_int8((const int8_t *)at);
  return kind == WIDENED ? vf_load_bf16((const uint16_t *)at) : vf_load((const float *)at);
}

/* ``count`` < LANES numbers of a page as float32, zeros in the other lanes; nothing behind them is read. */
INLINE vfloat load_some(int32_t kind, int32_t type, const char *at, int32_t count) {
  if (kind == FLOAT8 || kind == INT8) {
    char bytes[LANES] = {0};
    memcpy(bytes, at, (size_t)count);
    return load_wide(kind, type, bytes);
  }
#if defined(__AVX512F__)
  __mmask16 mask = (__mmask16)((1u << count) - 1);
  if (kind == WIDE_PAGES) return (vfloat)_mm512_maskz_loadu_ps(mask, at);
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at)), 16);
#else
  vfloat x = {0};
  for (int32_t lane = 0; lane < count; lane++)
    x[lane] = kind == WIDENED ? from_bf16(((const uint16_t *)at)[lane]) : ((const float *)at)[lane];
  return x;
#endif
}

#if defined(__AVX512BF16__)
/* The numbers of LANES keys at ``first`` and at ``second``, as LANES pairs. */
INLINE vfloat load_key_pairs(const char *first, const char *second) {
  typedef int16_t vshort __attribute__((vector_size(64)));
  const vshort order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
  both = _mm512_inserti64x4(both, _mm256_loadu_si256((const __m256i *)second), 1);
  return (vfloat)_mm512_permutexvar_epi16((__m512i)order, both);
}

/* ``count`` <= 2 * LANES numbers at ``first`` and at ``second``, as two vectors of pairs, zeros behind them. Pairs are
 * made within each 16 bytes: of eight dims the first four are in the first vector. */
INLINE void load_value_pairs(const char *first, const char *second, int32_t count, vfloat *pairs) {
  __mmask32 mask = (__mmask32)(0xffffffffu >> (32 - count));
  __m512i low = count < 32 ? _mm512_maskz_loadu_epi16(mask, first) : _mm512_loadu_si512(first);
  __m512i high = count < 32 ? _mm512_maskz_loadu_epi16(mask, second) : _mm512_loadu_si512(second);
  pairs[0] = (vfloat)_mm512_unpacklo_epi16(low, high);
  pairs[1] = (vfloat)_mm512_unpackhi_epi16(low, high);
}

/* Two vectors of sums in the order of load_value_pairs, in the order of the dims. */
INLINE void order_dims(vfloat *sums) {
  const vint first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
  vfloat low = (vfloat)_mm512_permutex2var_ps((__m512)sums[0], (__m512i)first, (__m512)sums[1]);
  sums[1] = (vfloat)_mm512_permutex2var_ps((__m512)sums[0], (__m512i)(first + 8), (__m512)sums[1]);
  sums[0] = low;
}
#endif

/* Fetch a line. While the keys of a chunk are read its values are fetched, and while these are read the keys of the next
 * chunk, or of what the thread does next: a whole chunk's work hides the latency. Lines are asked for in the order in
 * which memory has them, which it delivers at one and a half times the rate of lines here and there. */
INLINE void fetch_soon(const char *at) { __builtin_prefetch(at, 0, 3); }

/* Vectors of keys that a block of so many rows takes at a time: enough sums to keep the multipliers busy. */
static inline int32_t key_vectors(int32_t rows) { return rows <= 2 ? MOST_KEYS : 2; }

/* Some vectors of keys: vector i of dim d lies at at[i] + d * stride. The values of the same keys, as many bytes, lie from
 * soon[i] on. */
typedef struct {
  const char *at[MOST_KEYS], *soon[MOST_KEYS];
  int64_t stride;
  int32_t kind, type;
} key_block;

/* Word ``word`` of LANES keys whose first dim is at ``at``. */
INLINE vfloat load_keys(int32_t kind, int32_t type, const char *at, int64_t stride, int32_t word) {
#if defined(__AVX512BF16__)
  if (kind == PAIRS) return load_key_pairs(at + 2 * word * stride, at + (2 * word + 1) * stride);
#endif
  return load_wide(kind, type, at + word * stride);
}

/* scores[row][key] = sum over words of query x key; queries [words][rows], scores [rows][Q_CHUNK]. */
INLINE void score_block(const float *queries, int32_t words, const key_block *keys, int32_t kind, float *scores,
                        const int32_t rows, const int32_t vectors) {
  const int64_t stride = keys->stride;
  const int32_t type = keys->type;
  vfloat sums[BLOCK_ROWS][MOST_KEYS];
#pragma GCC unroll 12
  for (int32_t row = 0; row < rows; row++)
#pragma GCC unroll 4
    for (int32_t i = 0; i < vectors; i++) sums[row][i] = vf_set(0.0f);
  const char *const *block = keys->soon, *soon = *block; /* values are fetched block by block */
  int32_t left = words;                                   /* lines of the block */
  for (int32_t word = 0; word < words; word++) {
    vfloat key[MOST_KEYS];
#pragma GCC unroll 4
    for (int32_t i = 0; i < vectors; i++) {
      key[i] = load_keys(kind, type, keys->at[i], stride, word);
      fetch_soon(soon + per_word(kind) * i * stride);
    }
    soon += vectors * per_word(kind) * stride;
    left -= vectors;
    if (left <= 0 && word + 1 < words) soon = *++block, left = words;
#pragma GCC unroll 12
    for (int32_t row = 0; row < rows; row++) {
      vfloat query = vf_set(queries[word * rows + row]);
#pragma GCC unroll 4
      for (int32_t i = 0; i < vectors; i++) sums[row][i] = add_word(kind, query, key[i], sums[row][i]);
    }
  }
#pragma GCC unroll 12
  for (int32_t row = 0; row < rows; row++)
#pragma GCC unroll 4
    for (int32_t i = 0; i < vectors; i++) vf_store(scores + row * Q_CHUNK + i * LANES, sums[row][i]);
}

INLINE void score_rows(const float *queries, int32_t words, const key_block *keys, int32_t kind, float *scores,
                       int32_t rows) {
  switch (rows) {
    case 1: score_block(queries, words, keys, kind, scores, 1, MOST_KEYS); break;
    case 2: score_block(queries, words, keys, kind, scores, 2, MOST_KEYS); break;
    case 3: score_block(queries, words, keys, kind, scores, 3, 2); break;
    case 4: score_block(queries, words, keys, kind, scores, 4, 2); break;
    case 5: score_block(queries, words, keys, kind, scores, 5, 2); break;
    case 6: score_block(queries, words, keys, kind, scores, 6, 2); break;
#if defined(__AVX512F__)
    case 7: score_block(queries, words, keys, kind, scores, 7, 2); break;
    case 8: score_block(queries, words, keys, kind, scores, 8, 2); break;
    default: score_block(queries, words, keys, kind, scores, 12, 2); break;
#endif
  }
}

/* The scores of ``rows`` rows with one block of keys; rows is of block_rows, queries [words][rows]. */
static void scores_of(const float *queries, int32_t words, const key_block *keys, float *scores, int32_t rows) {
  switch (keys->kind) {
    case WIDE_PAGES: score_rows(queries, words, keys, WIDE_PAGES, scores, rows); break;
    case FLOAT8: score_rows(queries, words, keys, FLOAT8, scores, rows); break;
    case INT8: score_rows(queries, words, keys, INT8, scores, rows); break;
#if defined(__AVX512BF16__)
    case PAIRS: score_rows(queries, words, keys, PAIRS, scores, rows); break;
#endif
    default: score_rows(queries, words, keys, WIDENED, scores, rows); break;
  }
}

/* The size of block that score_rows has for ``rows`` rows. */
static inline int32_t block_rows(int32_t rows) { return rows <= 8 && rows <= BLOCK_ROWS ? rows : BLOCK_ROWS; }

/* The values of keys [first, last) of a chunk: key 0 is ``offset`` keys into the block blocks[0]. */
typedef struct {
  const char *values;
  const int32_t *blocks;
  int64_t page; /* bytes of a block */
  /* Keys that are wanted next: of the block soon[i] while the values of blocks[i] are read, for i below ``known``. */
  const char *keys;
  const int32_t *soon;
  int32_t known;
  int32_t block_size, offset, first, last, dims, kind, type;
} value_range;

/* Read in place of a value that nobody sees, beside one in its pair. */
static const uint16_t NO_VALUE[Q_HEAD_DIM] = {0};

/* The words of a key's value, or of a pair's, from dim ``dim`` on: ``vectors`` of them, or ``some`` dims where that is
 * not 0. ``key`` is the first key, whose value from that dim on is at ``at``. */
INLINE void load_values(int32_t kind, const value_range *range, int32_t key, const char *at, const int32_t vectors,
                        int32_t some, vfloat *value) {
#if defined(__AVX512BF16__)
  if (kind == PAIRS) {
    const char *none = (const char *)NO_VALUE;
    const char *first = key >= range->first ? at : none, *second = key + 1 < range->last ? at + range->dims * 2 : none;
#pragma GCC unroll 4
    for (int32_t i = 0; i < vectors; i += 2)
      load_value_pairs(first + i * LANES * 2, second + i * LANES * 2, some ? some : 2 * LANES, value + i);
    return;
  }
#endif
#pragma GCC unroll 8
  for (int32_t i = 0; i < vectors; i++)
    value[i] = some ? load_some(kind, range->type, at, some)
                    : load_wide(kind, range->type, at + i * LANES * bytes_of(kind));
}

/* The sums of a row, [vectors], to ``out``; ``some`` dims of them where that is not 0. */
INLINE void store_sums(int32_t kind, vfloat *sums, const int32_t vectors, int32_t some, float *out) {
#pragma GCC unroll 8
  for (int32_t i = 0; i < vectors; i++) {
#if defined(__AVX512BF16__)
    if (kind == PAIRS && i % 2 == 0) order_dims(sums + i);
#endif
    if (some == 0 || i * LANES < some) vf_store(out + i * LANES, sums[i]);
  }
}

/* out[row] = sum over keys of weight x value, for dims [dim, dim + vectors * LANES), or ``some`` dims where that is not
 * 0; weights [rows][Q_CHUNK] words from key 0 on, out [rows][stride]. */
INLINE void value_block(const float *weights, const value_range *range, int32_t dim, int32_t some, int32_t kind,
                        float *out, int32_t stride, const int32_t rows, const int32_t vectors) {
  const int32_t size = bytes_of(kind), per = per_word(kind);
  vfloat sums[6][MOST_DIMS];
#pragma GCC unroll 6
  for (int32_t row = 0; row < rows; row++)
#pragma GCC unroll 8
    for (int32_t i = 0; i < vectors; i++) sums[row][i] = vf_set(0.0f);
  for (int32_t key = range->first / per * per; key < range->last;) {
    int32_t place = range->offset + key, index = place / range->block_size, within = place % range->block_size;
    int32_t end = key + range->block_size - within;
    if (end > range->last) end = range->last;
    int64_t start = ((int64_t)within * range->dims + dim) * size;
    const char *at = range->values + range->blocks[index] * range->page + start;
    const char *soon = at;
    if (index < range->known) soon = range->keys + range->soon[index] * range->page + start;
    for (; key < end; key += per, at += per * range->dims * size, soon += per * range->dims * size) {
      vfloat value[MOST_DIMS];
      load_values(kind, range, key, at, vectors, some, value);
#pragma GCC unroll 2
      for (int32_t beside = 0; beside < per; beside++)
#pragma GCC unroll 8
        for (int32_t i = 0; i < vectors; i++)
          if (i * LANES * size % 64 == 0) fetch_soon(soon + (beside * range->dims + i * LANES) * size);
#pragma GCC unroll 6
      for (int32_t row = 0; row < rows; row++) {
        vfloat weight = vf_set(weights[row * Q_CHUNK + key / per]);
#pragma GCC unroll 8
        for (int32_t i = 0; i < vectors; i++) sums[row][i] = add_word(kind, weight, value[i], sums[row][i]);
      }
    }
  }
#pragma GCC unroll 6
  for (int32_t row = 0; row < rows; row++) store_sums(kind, sums[row], vectors, some, out + row * stride + dim);
}

/* All dims of ``rows`` rows, as many vectors at a time as there are registers for. */
INLINE void value_dims(const float *weights, const value_range *range, int32_t kind, float *out, int32_t stride,
                       const int32_t rows) {
  const int32_t most = rows <= 3 ? MOST_DIMS : MOST_DIMS / 2, least = per_word(kind);
  int32_t dim = 0, full = range->dims / (least * LANES) * (least * LANES);
  for (; dim + most * LANES <= full; dim += most * LANES)
    value_block(weights, range, dim, 0, kind, out, stride, rows, most);
  if (most == 8 && dim + 4 * LANES <= full) {
    value_block(weights, range, dim, 0, kind, out, stride, rows, 4);
    dim += 4 * LANES;
  }
  if (most >= 4 && dim + 2 * LANES <= full) {
    value_block(weights, range, dim, 0, kind, out, stride, rows, 2);
    dim += 2 * LANES;
  }
  for (; dim < full; dim += least * LANES) value_block(weights, range, dim, 0, kind, out, stride, rows, least);
  if (dim < range->dims) value_block(weights, range, dim, range->dims - dim, kind, out, stride, rows, least);
}

INLINE void value_rows(const float *weights, const value_range *range, int32_t kind, float *out, int32_t stride,
                       int32_t rows) {
  switch (rows) {
    case 1: value_dims(weights, range, kind, out, stride, 1); break;
    case 2: value_dims(weights, range, kind, out, stride, 2); break;
    case 3: value_dims(weights, range, kind, out, stride, 3); break;
    case 4: value_dims(weights, range, kind, out, stride, 4); break;
    default: value_dims(weights, range, kind, out, stride, 6); break;
  }
}

/* How many of ``rows`` rows go into the next block of values. */
static inline int32_t value_block_rows(int32_t rows) {
  if (rows % 6 == 0) return 6;
  return rows > 4 ? (rows == 5 ? 3 : 4) : rows;
}

/* out[row] = sum over the range's keys of weight x value, for ``rows`` rows; weights [rows][Q_CHUNK] words, the first
 * being key 0's. */
static void values_of(const float *weights, const value_range *range, float *out, int32_t stride, int32_t rows) {
  for (int32_t row = 0, count; row < rows; row += count, weights += count * Q_CHUNK, out += (int64_t)count * stride) {
    count = value_block_rows(rows - row);
    switch (range->kind) {
      case WIDE_PAGES: value_rows(weights, range, WIDE_PAGES, out, stride, count); break;
      case FLOAT8: value_rows(weights, range, FLOAT8, out, stride, count); break;
      case INT8: value_rows(weights, range, INT8, out, stride, count); break;
#if defined(__AVX512BF16__)
      case PAIRS: value_rows(weights, range, PAIRS, out, stride, count); break;
#endif
      default: value_rows(weights, range, WIDENED, out, stride, count); break;
    }
  }
}

#endif
