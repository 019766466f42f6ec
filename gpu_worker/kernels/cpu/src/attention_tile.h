/* The rows of one tile and key head: which keys each of them sees. */
#ifndef QUIRE_ATTENTION_TILE_H
#define QUIRE_ATTENTION_TILE_H

#include "kernels.h"
#include "simd.h"

/* Rows [first, first + rows) of one tile and key head; row = token * group + head within the group. */
typedef struct {
  const q_attention *layer;
  const q_tile *tile;
  const int32_t *blocks;      /* of the sequence */
  const char *keys, *values;  /* of the key head */
  int64_t page;               /* bytes of a block of keys, or of values, with its scales */
  int32_t head, group;        /* the first query head, and how many */
  int32_t first, rows;
  int32_t partial;            /* q_partial_size */
  /* What the thread reads next: keys of a chunk in so many blocks; 0: none are known. */
  const char *next_keys;
  const int32_t *next_blocks;
  int32_t next_known;
} rows_of_tile;

/* The keys [first, last) that a row sees of a chunk, from the chunk's start; none where last <= first. */
typedef struct {
  int32_t first, last;
} seen;

/* The position in its sequence of a row's token. */
static inline int32_t position_of(const rows_of_tile *of, int32_t row) {
  return of->tile->position + row / of->group;
}

static inline seen seen_of(const rows_of_tile *of, int32_t row, int32_t chunk) {
  int32_t position = position_of(of, row), start = chunk * Q_CHUNK;
  int32_t first = of->layer->window ? position - of->layer->window + 1 - start : 0;
  int32_t last = position + 1 - start;
  return (seen){first > 0 ? first : 0, last < Q_CHUNK ? last : Q_CHUNK};
}

#endif
