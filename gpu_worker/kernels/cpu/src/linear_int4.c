/* Products of int4 weights, in groups of 128 inputs with a scale, and int8 activations in the same groups.
 *
 * A word of a panel holds eight inputs of an output: the low halves of its bytes are the first four, the high halves
 * the next four, each with 8 added. A group is summed exactly in int32; the groups' sums, times both scales, are added
 * up in float32 from the first to the last, so that a row has the same bits in any company here too.
 */
#include "linear_tile.h"

enum {
  GROUP_WORDS = Q_GROUP / 8,
  /* Words between what is multiplied and what is fetched: a group takes less time than memory takes to answer, so that
   * several groups have to be on their way. */
  GROUPS_AHEAD = 4 * GROUP_WORDS * Q_PANEL,
};

/* Where a tile's groups are. */
typedef struct {
  const uint32_t *rows; /* int8 values of the first row */
  int64_t row_stride;   /* words */
  const uint32_t *weight;
  const uint16_t *scales;     /* of the first column */
  const float *row_scales;    /* [rows][groups] */
  const int32_t *row_sums;    /* [rows][groups] */
  int32_t groups;
  float *sums; /* of the first row and column, [rows][Q_PANEL] */
} group_place;

/* sums + the products of the four bytes of each word: 0 to 15 of a weight, signed of a row. */
INLINE vint add_small_bytes(vint row, vint weight, vint sums) {
#if defined(__AVX512VNNI__)
  return (vint)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, (__m512i)row);
#elif defined(__AVX2__)
  __m256i pairs = _mm256_maddubs_epi16((__m256i)weight, (__m256i)row); /* 2 * 15 * 127 at most */
  return sums + (vint)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  UNROLL for (int shift = 24; shift >= 0; shift -= 8) sums += ((row << shift) >> 24) * ((weight << shift) >> 24);
  return sums;
#endif
}

/* Add one group's products to ``sums``. */
INLINE void add_group(const int rows, const group_place *at, int32_t group, vint sums[TALL_ROWS][TALL_VECTORS]) {
  const uint32_t *weight = at->weight + (int64_t)group * GROUP_WORDS * Q_PANEL;
  const uint32_t *third[(TALL_ROWS + 2) / 3];
  const int64_t row_stride = at->row_stride;
  UNROLL for (int row = 0; row < rows; row += 3)
    third[row / 3] = at->rows + row * row_stride + group * (Q_GROUP / 4);
  for (int word = 0; word < GROUP_WORDS; word += 2)
    UNROLL for (int next = 0; next < 2; next++) {
      vint low[TALL_VECTORS], high[TALL_VECTORS];
      UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++) {
        const uint32_t *words = weight + (word + next) * Q_PANEL + vector * LANES;
        __builtin_prefetch(words + GROUPS_AHEAD, 0, 3);
        low[vector] = vi_load(words) & 0x0f0f0f0f;
        high[vector] = (vi_load(words) >> 4) & 0x0f0f0f0f;
      }
      UNROLL for (int row = 0; row < rows; row++) {
        const uint32_t *own = third[row / 3] + row % 3 * row_stride + 2 * (word + next);
        vint first = vi_set((int32_t)own[0]), second = vi_set((int32_t)own[1]);
        UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++) {
          sums[row][vector] = add_small_bytes(first, low[vector], sums[row][vector]);
          sums[row][vector] = add_small_bytes(second, high[vector], sums[row][vector]);
        }
      }
    }
}

/* Add all groups of a tile of ``rows`` rows and TALL_COLUMNS columns to its sums. */
INLINE void add_groups(const int rows, const group_place *at) {
  for (int32_t group = 0; group < at->groups; group++) {
    vint sums[TALL_ROWS][TALL_VECTORS];
    UNROLL for (int row = 0; row < rows; row++)
      UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++)
        sums[row][vector] = vi_set(-8 * at->row_sums[row * at->groups + group]); /* the 8 that weights have added */
    add_group(rows, at, group, sums);
    UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++) {
      vfloat scale = vf_load_bf16(at->scales + group * Q_PANEL + vector * LANES);
      UNROLL for (int row = 0; row < rows; row++) {
        float *sum = at->sums + row * Q_PANEL + vector * LANES;
        vfloat values = __builtin_convertvector(sums[row][vector], vfloat);
        values *= vf_set(at->row_scales[row * at->groups + group]);
        vf_store(sum, vf_fma(values, scale, vf_load(sum)));
      }
    }
  }
}

/* add_groups for up to TALL_ROWS rows. */
static void add_tile_groups(int32_t rows, const group_place *at) {
  switch (rows) {
    case 1: add_groups(1, at); break;
    case 2: add_groups(2, at); break;
    case 3: add_groups(3, at); break;
    case 4: add_groups(4, at); break;
    case 5: add_groups(5, at); break;
    case 6: add_groups(6, at); break;
#if defined(__AVX512F__)
    case 7: add_groups(7, at); break;
    case 8: add_groups(8, at); break;
    case 9: add_groups(9, at); break;
    case 10: add_groups(10, at); break;
    case 11: add_groups(11, at); break;
    case 12: add_groups(12, at); break;
#endif
  }
}

/* sums [rows][Q_PANEL] of one panel, for rows from ``row`` on. */
static void sum_groups(const q_weight *weight, const q_rows *x, int32_t row, int32_t rows, int32_t panel, float *sums) {
  int32_t groups = weight->padded_inputs / Q_GROUP, tiles = (rows + TALL_ROWS - 1) / TALL_ROWS;
  memset(sums, 0, (size_t)rows * Q_PANEL * sizeof *sums);
  for (int32_t tile = 0; tile < tiles; tile++) {
    int32_t start = rows * tile / tiles, stop = rows * (tile + 1) / tiles;
    for (int32_t column = 0; column < Q_PANEL; column += TALL_COLUMNS) {
      group_place at = {
          .rows = (const uint32_t *)((const char *)x->data + (row + start) * x->stride),
          .row_stride = x->stride / 4,
          .weight = (const uint32_t *)weight->data + (int64_t)panel * groups * GROUP_WORDS * Q_PANEL + column,
          .scales = weight->group_scales + (int64_t)panel * groups * Q_PANEL + column,
          .row_scales = x->scales + (int64_t)(row + start) * groups,
          .row_sums = x->sums + (int64_t)(row + start) * groups,
          .groups = groups,
          .sums = sums + start * Q_PANEL + column,
      };
      add_tile_groups(stop - start, &at);
    }
  }
}

void Q_NAME(linear_int4)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                         int32_t last) {
  _Alignas(64) float sums[MOST_ROWS * Q_PANEL];
  int32_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int32_t part = 0; part < parts; part++) {
    int32_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
    for (int32_t panel = first; panel < last; panel++) {
      sum_groups(weight, x, row, count, panel, sums);
      Q_NAME(finish_rows)(weight, to, row, count, panel, sums);
    }
  }
}
