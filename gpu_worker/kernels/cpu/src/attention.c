/* Attention over pages in place, and the writes to them.
 *
 * The query tokens of a tile and the query heads of a key head are the rows of one product (as many as BLOCK_ROWS at
 * a time), so a page is read once for all of them. The softmax of each chunk of Q_CHUNK keys is made by itself; the
 * chunks are merged in order (online softmax: Milakov and Gimelshein 2018; in chunks: Dao et al. 2022). A chunk begins
 * at a multiple of Q_CHUNK keys of the sequence, and a key that a row does not see adds exactly nothing: so a token's
 * result has the same bits in a decode, in any tile of a prefill, and whoever computes which chunk.
 */
#include "attention_products.h"
#include "attention_softmax.h"
#include "attention_tile.h"
#include "kernels.h"
#include "simd.h"

/* Values of the largest set of queries, and of results, that one pass over the keys holds: 96 KB each. */
enum { PASS_VALUES = 96 * 256 };

/* Lay LANES keys from ``position`` on side by side, [dims][LANES], where a block holds fewer; zeros from ``end`` on.
 * They are bfloat16 for PAIRS and else float32. */
static void collect_keys(const rows_of_tile *of, int32_t position, int32_t end, int32_t kind, void *out) {
  const q_attention *layer = of->layer;
  int32_t size = layer->block_size, dims = layer->head_dim;
  memset(out, 0, (size_t)(dims * LANES * bytes_of(kind)));
  for (int32_t lane = 0; lane < LANES && position + lane < end; lane++) {
    int32_t at = position + lane;
    const char *page = of->keys + of->blocks[at / size] * of->page;
    for (int32_t dim = 0; dim < dims; dim++) {
      int32_t from = dim * size + at % size, to = dim * LANES + lane;
      if (kind == PAIRS)
        ((uint16_t *)out)[to] = ((const uint16_t *)page)[from];
      else
        ((float *)out)[to] = number_of(layer->cache_type, page, from);
    }
  }
}

/* Where ``vectors`` vectors of keys lie, from vector ``first`` of a chunk on, and their values, which are wanted soon;
 * behind ``last`` the last is taken again, for scores that nobody reads. */
static void find_keys(const rows_of_tile *of, int32_t chunk, int32_t first, int32_t last, int32_t vectors,
                      key_block *keys) {
  int32_t size = of->layer->block_size, position = chunk * Q_CHUNK + first * LANES;
  int32_t index = position / size, within = position % size;
  for (int32_t i = 0; i < vectors; i++) {
    int64_t place = of->blocks[index] * of->page + within * bytes_of(keys->kind);
    keys->at[i] = of->keys + place;
    keys->soon[i] = of->values + place;
    if (first + i + 1 >= last) continue;
    within += LANES;
    if (within == size) within = 0, index++;
  }
}

/* Scores of a block of rows with the keys of a chunk that any of them sees. */
static void score_chunk(const rows_of_tile *of, int32_t chunk, seen any, const float *queries, int32_t rows,
                        float *scores) {
  const q_attention *layer = of->layer;
  int32_t first = any.first / LANES, last = (any.last + LANES - 1) / LANES, vectors = key_vectors(rows);
  key_block keys = {.kind = kind_of(layer), .type = layer->cache_type};
  if (layer->block_size % LANES == 0) {
    keys.stride = layer->block_size * bytes_of(keys.kind);
    for (int32_t i = first; i < last; i += vectors) {
      find_keys(of, chunk, i, last, vectors, &keys);
      scores_of(queries, layer->head_dim / per_word(keys.kind), &keys, scores + i * LANES, rows);
    }
    return;
  }
  _Alignas(64) float collected[Q_HEAD_DIM * LANES];
  if (keys.kind != PAIRS) keys.kind = WIDE_PAGES; /* collect_keys widens them */
  keys.stride = LANES * bytes_of(keys.kind);
  for (int32_t i = 0; i < vectors; i++) keys.at[i] = keys.soon[i] = (const char *)collected;
  _Alignas(64) float each[BLOCK_ROWS * Q_CHUNK];
  for (int32_t i = first; i < last; i++) {
    collect_keys(of, chunk * Q_CHUNK + i * LANES, chunk * Q_CHUNK + any.last, keys.kind, collected);
    scores_of(queries, layer->head_dim / per_word(keys.kind), &keys, each, rows);
    for (int32_t row = 0; row < rows; row++)
      vf_store(scores + row * Q_CHUNK + i * LANES, vf_load(each + row * Q_CHUNK));
  }
}

/* Multiplies, in each of ``rows`` rows [Q_CHUNK], what belongs to a key of the chunk by that key's scale in ``pages``. */
static void scale_rows(const rows_of_tile *of, const char *pages, int32_t chunk, seen any, int32_t rows, float *x) {
  int32_t size = of->layer->block_size;
  _Alignas(64) float scales[Q_CHUNK] = {0};
  for (int32_t key = any.first; key < any.last; key++) {
    int32_t place = chunk * Q_CHUNK + key;
    const char *page = pages + of->blocks[place / size] * of->page;
    memcpy(scales + key, page + (int64_t)size * of->layer->head_dim + place % size * sizeof(float), sizeof(float));
  }
  for (int32_t row = 0; row < rows; row++, x += Q_CHUNK)
    for (int32_t key = any.first / LANES * LANES; key < any.last; key += LANES)
      vf_store(x + key, vf_load(x + key) * vf_load(scales + key));
}

/* The partial results of ``rows`` rows from ``row`` on with one chunk; queries are [words][width]. */
static void attend_chunk(const rows_of_tile *of, int32_t row, int32_t rows, int32_t chunk, const float *queries,
                         int32_t width, float *partials) {
  const q_attention *layer = of->layer;
  int32_t sums = of->partial - 16;
  seen any = {seen_of(of, row, chunk).first, seen_of(of, row + rows - 1, chunk).last};
  if (any.last <= any.first) {
    for (int32_t i = 0; i < rows; i++) partials[i * of->partial + sums + 1] = 0.0f;
    return;
  }
  /* The last vectors of keys may reach behind a row: into the next one's start, which then nobody sees either, for
   * vectors are taken from any.first on. */
  _Alignas(64) float scores[BLOCK_ROWS * Q_CHUNK + MOST_KEYS * LANES];
  score_chunk(of, chunk, any, queries, width, scores);
  int32_t start = chunk * Q_CHUNK, size = layer->block_size, soon = start + Q_CHUNK;
  int32_t newest = of->tile->position + of->tile->count - 1;
  value_range range = {
      .values = of->values, .blocks = of->blocks + start / size, .page = of->page,
      .keys = of->keys, .soon = of->blocks + soon / size, .known = newest / size - soon / size + 1,
      .block_size = size, .offset = start % size, .first = any.first, .last = any.last,
      .dims = layer->head_dim, .kind = kind_of(layer), .type = layer->cache_type,
  };
  if (soon > newest) range.keys = of->next_keys, range.soon = of->next_blocks, range.known = of->next_known;
  if (layer->cache_type == Q_KV_INT8) scale_rows(of, of->keys, chunk, any, rows, scores);
  for (int32_t i = 0; i < rows; i++)
    softmax_row(of, row + i, chunk, any, range.kind, scores + i * Q_CHUNK, partials + i * of->partial + sums);
  if (layer->cache_type == Q_KV_INT8) scale_rows(of, of->values, chunk, any, rows, scores);
  values_of(scores, &range, partials, of->partial, rows);
}

/* out = sums / sum of weights, with the head's sink in that sum. */
static void finish(const rows_of_tile *of, int32_t row, const float *result, void *out, int32_t type) {
  int32_t dims = of->layer->head_dim, dim = 0;
  float factor = normalizer(of, row, result + of->partial - 16);
  for (; dim + LANES <= dims; dim += LANES) {
    vfloat x = vf_load(result + dim) * vf_set(factor);
    if (type == Q_BF16)
      vf_store_bf16((uint16_t *)out + dim, x);
    else
      vf_store((float *)out + dim, x);
  }
  for (; dim < dims; dim++) {
    if (type == Q_BF16)
      ((uint16_t *)out)[dim] = to_bf16(result[dim] * factor);
    else
      ((float *)out)[dim] = result[dim] * factor;
  }
}

/* The queries of ``rows`` rows as words, [words][width]; zeros in the rows that are not there. */
static void pack_queries(const rows_of_tile *of, int32_t row, int32_t rows, int32_t width, const float *q,
                         int64_t stride, float *out) {
  int32_t dims = of->layer->head_dim, kind = kind_of(of->layer), words = dims / per_word(kind);
  uint16_t rounded[Q_HEAD_DIM];
  for (int32_t i = 0; i < width; i++) {
    if (i >= rows) {
      for (int32_t word = 0; word < words; word++) out[word * width + i] = 0.0f;
      continue;
    }
    int32_t token = of->tile->token + (row + i) / of->group, head = of->head + (row + i) % of->group;
    const float *query = (const float *)((const char *)q + token * stride) + (int64_t)head * dims;
    if (kind == PAIRS) round_row(query, dims, rounded);
    const char *from = kind == PAIRS ? (const char *)rounded : (const char *)query;
    for (int32_t word = 0; word < words; word++) memcpy(out + word * width + i, from + word * 4, 4);
  }
}

/* How many of ``rows`` rows go into each block but the last: as even as possible where score_rows has that size. */
static int32_t rows_per_block(int32_t rows) {
  int32_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, even = (rows + blocks - 1) / blocks;
  return block_rows(even) == even ? even : BLOCK_ROWS;
}

/* Chunks [first, last) of the rows, block by block. With ``partials`` [chunks][rows of the tile][partial] each chunk's
 * result goes there; without, they are merged into results [rows][partial]. */
static void attend_rows(const rows_of_tile *of, int32_t first, int32_t last, const float *q, int64_t stride,
                        float *partials, int64_t partial_stride, float *results) {
  _Alignas(64) float queries[PASS_VALUES];
  _Alignas(64) float chunk_results[BLOCK_ROWS * (Q_HEAD_DIM + 16)];
  int32_t rows = rows_per_block(of->rows), words = of->layer->head_dim / per_word(kind_of(of->layer));
  for (int32_t row = 0; row < of->rows; row += rows) {
    int32_t count = of->rows - row < rows ? of->rows - row : rows;
    pack_queries(of, of->first + row, count, block_rows(count), q, stride, queries + (int64_t)row * words);
  }
  for (int32_t i = 0; i < of->rows && results; i++) results[(int64_t)i * of->partial + of->partial - 15] = 0.0f;
  for (int32_t chunk = first; chunk < last; chunk++) {
    for (int32_t row = 0; row < of->rows; row += rows) {
      int32_t count = of->rows - row < rows ? of->rows - row : rows;
      float *out = chunk_results;
      if (partials) out = partials + (chunk - first) * partial_stride + (int64_t)(of->first + row) * of->partial;
      attend_chunk(of, of->first + row, count, chunk, queries + (int64_t)row * words, block_rows(count), out);
      for (int32_t i = 0; i < count && results; i++)
        merge(results + (int64_t)(row + i) * of->partial, out + i * of->partial, of->partial);
    }
  }
}

/* The address of a row's result. */
static inline void *out_of(const rows_of_tile *of, int32_t row, void *out, int64_t stride, int32_t type) {
  int64_t token = of->tile->token + row / of->group, head = of->head + row % of->group;
  return (char *)out + token * stride + head * of->layer->head_dim * (type == Q_BF16 ? 2 : 4);
}

/* One part of a tile: its share of the chunks [first, last). True for the last part to end, when all are done. */
static int attend_part(rows_of_tile *of, const q_splits *splits, int32_t first, int32_t last, int32_t part,
                       const float *q, int64_t q_stride, float *partials, int64_t stride, int32_t *arrived) {
  int32_t rows = of->rows, pass = PASS_VALUES / (BLOCK_ROWS * of->partial) * BLOCK_ROWS, chunks = last - first;
  int32_t begin = first + (int32_t)((int64_t)chunks * part / splits->count);
  int32_t end = first + (int32_t)((int64_t)chunks * (part + 1) / splits->count);
  for (of->first = 0; of->first < rows; of->first += pass) {
    of->rows = rows - of->first < pass ? rows - of->first : pass;
    attend_rows(of, begin, end, q, q_stride, partials + (begin - first) * stride, stride, NULL);
  }
  of->first = 0;
  of->rows = rows;
  if (__atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL) < splits->count) return 0;
  __atomic_store_n(arrived, 0, __ATOMIC_RELAXED);
  return 1;
}

/* The first chunk of keys that a tile sees. */
static inline int32_t first_chunk(const q_attention *layer, const q_tile *tile) {
  int32_t oldest = layer->window ? tile->position - layer->window + 1 : 0;
  return oldest > 0 ? oldest / Q_CHUNK : 0;
}

/* Say where the first keys of the thread's next item lie. */
static void find_next(rows_of_tile *of, const q_batch *batch, const q_attention_item *item) {
  if (item->next_tile < 0) return;
  const q_tile *tile = batch->tiles + item->next_tile;
  int32_t size = of->layer->block_size, first = first_chunk(of->layer, tile) * Q_CHUNK / size;
  of->next_keys = (const char *)of->layer->keys + item->next_head * of->layer->head_stride;
  of->next_blocks = batch->tables + tile->row * batch->table_stride + first;
  of->next_known = (tile->position + tile->count - 1) / size - first + 1;
}

void Q_NAME(attention)(const q_attention *layer, const q_batch *batch, const q_attention_item *item, const float *q,
                       int64_t q_stride, void *out, int64_t out_stride, int32_t out_type) {
  const q_tile *own = batch->tiles + item->tile;
  int32_t kv_head = item->kv_head;
  const q_splits *splits = batch->splits;
  int32_t group = layer->heads / layer->kv_heads, rows = own->count * group;
  rows_of_tile of = {
      .layer = layer, .tile = own, .blocks = batch->tables + own->row * batch->table_stride,
      .keys = (const char *)layer->keys + kv_head * layer->head_stride,
      .values = (const char *)layer->values + kv_head * layer->head_stride,
      .page = page_bytes(layer),
      .head = kv_head * group, .group = group, .rows = rows, .partial = q_partial_size(layer->head_dim),
  };
  find_next(&of, batch, item);
  int32_t first = first_chunk(layer, own), last = (own->position + own->count - 1) / Q_CHUNK + 1;
  _Alignas(64) float results[PASS_VALUES];
  if (splits) {
    int64_t place = (int64_t)item->tile * layer->kv_heads + kv_head;
    int64_t stride = (int64_t)splits->tokens * group * of.partial;
    float *partials = splits->partials + place * splits->chunks * stride;
    int32_t *arrived = splits->arrived + place;
    if (!attend_part(&of, splits, first, last, item->part, q, q_stride, partials, stride, arrived)) return;
    for (int32_t row = 0; row < rows; row++) {
      results[of.partial - 15] = 0.0f;
      for (int32_t chunk = 0; chunk < last - first; chunk++)
        merge(results, partials + chunk * stride + (int64_t)row * of.partial, of.partial);
      finish(&of, row, results, out_of(&of, row, out, out_stride, out_type), out_type);
    }
    return;
  }
  int32_t pass = PASS_VALUES / (BLOCK_ROWS * of.partial) * BLOCK_ROWS;
  for (of.first = 0; of.first < rows; of.first += pass) {
    of.rows = rows - of.first < pass ? rows - of.first : pass;
    attend_rows(&of, first, last, q, q_stride, NULL, 0, results);
    for (int32_t row = 0; row < of.rows; row++) {
      void *at = out_of(&of, of.first + row, out, out_stride, out_type);
      finish(&of, of.first + row, results + (int64_t)row * of.partial, at, out_type);
    }
  }
}

void Q_NAME(write_kv)(const q_attention *layer, int64_t slot, const float *k, const float *v) {
  if (slot < 0) return;
  int32_t dims = layer->head_dim, size = layer->block_size;
  if (bytes_of(kind_of(layer)) == 1) {
    write_narrow(layer, slot, k, v);
    return;
  }
  int64_t key_at = slot / size * size * dims + slot % size, value_at = slot * dims;
  for (int32_t head = 0; head < layer->kv_heads; head++, k += dims, v += dims) {
    char *keys = (char *)layer->keys + head * layer->head_stride;
    char *values = (char *)layer->values + head * layer->head_stride;
    if (layer->cache_type == Q_BF16) {
      uint16_t rounded[Q_HEAD_DIM];
      round_row(k, dims, rounded);
      for (int32_t dim = 0; dim < dims; dim++) ((uint16_t *)keys)[key_at + (int64_t)dim * size] = rounded[dim];
      round_row(v, dims, (uint16_t *)values + value_at);
    } else {
      for (int32_t dim = 0; dim < dims; dim++) ((float *)keys)[key_at + (int64_t)dim * size] = k[dim];
      memcpy((float *)values + value_at, v, (size_t)dims * sizeof(float));
    }
  }
}
