/* Products of rows with panels, for the types whose values fill words of 32 bits: 1 float32, 2 bfloat16 or 4 int8.
 *
 * A panel holds, for each word of the inputs in turn, that word of each of its 32 outputs. One load then has the same
 * inputs of LANES outputs, a row's word is broadcast over them, and nothing is ever summed across lanes. Each output of
 * a row has one accumulator, to which the inputs are added from the first to the last. Nothing else decides its bits:
 * not the tile that it is computed in, and not the rows beside it.
 *
 * An accumulator is a vector of 32-bit words, float32 or int32 by the type. ``type`` and the sizes of a tile are
 * constants wherever these functions are inlined, so that a tile's accumulators are registers.
 */
#ifndef QUIRE_LINEAR_TILE_H
#define QUIRE_LINEAR_TILE_H

#include "linear.h"
#include "simd.h"

#define UNROLL _Pragma("GCC unroll 12")

/* Two shapes of a tile, by the registers that there are: wide where few rows share a weight that comes from memory, so
 * that it is read in long runs; tall where many rows do, so that a weight is used often. */
#if defined(__AVX512F__)
enum { WIDE_ROWS = 6, WIDE_VECTORS = 4, TALL_ROWS = 12, TALL_VECTORS = 2 };
#else
enum { WIDE_ROWS = 3, WIDE_VECTORS = 4, TALL_ROWS = 6, TALL_VECTORS = 2 };
#endif
enum {
  WIDE_COLUMNS = WIDE_VECTORS * LANES,
  TALL_COLUMNS = TALL_VECTORS * LANES,
  /* Columns that a call's innermost loops go through together: whole panels. */
  SPAN = WIDE_COLUMNS > Q_PANEL ? WIDE_COLUMNS : Q_PANEL,
  SPAN_PANELS = SPAN / Q_PANEL,
  /* Words of rows and panels, rows and panels that go together where there are many: a block of a panel and a tile's rows
   * stay in the first cache, and the blocks of all rows in the second. */
  BLOCK_WORDS = 128,
  SMALL_WORDS = 192, /* a row of so few is one block */
  MOST_ROWS = 96,
  MOST_PANELS = 8,
  /* Words between what is multiplied and what is fetched from memory. */
  FETCH_AHEAD = 512,
  RUN_AHEAD = 2048, /* the same, of rows that take longer */
  LINE_WORDS = 16, /* of a line of the caches */
};

/* Where a tile's words are. Strides are in words. */
typedef struct {
  const uint32_t *rows;   /* the first word of the first row */
  const uint32_t *weight; /* the first word of the first column */
  int64_t row_stride;
  int64_t panel_stride;
  int32_t words;     /* to add up, a multiple of 4 */
  int32_t first;     /* whether these are a row's first words: sums begin at 0 */
  int32_t *sums;     /* of the first row and column, [panels][rows][Q_PANEL] */
  int32_t sum_panel; /* from panel to panel of the sums */
  /* What a tall tile fetches from memory meanwhile: so many lines for each 4 words, up to the end. */
  const uint32_t *fetch, *fetch_end;
  int32_t fetch_lines;
  int32_t rows_follow; /* other rows come behind a tile's */
} tile_place;

/* Without instructions for pairs of bfloat16 a word of them is added in two parts, each made float32. */
INLINE int parts_of(const int type) {
#if defined(__AVX512BF16__)
  return 1;
#else
  return type == Q_BF16 ? 2 : 1;
#endif
}

/* Part ``part`` of words, as add_words takes it. */
INLINE vint part_of(const int type, const int part, vint words) {
  if (parts_of(type) == 1) return words;
  return part == 0 ? words << 16 : words & (int32_t)0xffff0000;
}

/* sums + the products of the four bytes of each word: unsigned (value + 128) of a row, signed of a weight. */
INLINE vint add_bytes(vint row, vint weight, vint sums) {
#if defined(__AVX512VNNI__)
  return (vint)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)row, (__m512i)weight);
#elif defined(__AVX2__)
  /* The instruction for bytes wants one side without sign, and its sums of two products must stay below 2^15: so the
   * row's value without its 128, which is within 127, with the weight's sign, and the weight without it, up to 128. */
  __m256i value = _mm256_xor_si256((__m256i)row, _mm256_set1_epi8(-128));
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weight), _mm256_sign_epi8(value, (__m256i)weight));
  return sums + (vint)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  row ^= (int32_t)0x80808080;
  UNROLL for (int shift = 24; shift >= 0; shift -= 8) sums += ((row << shift) >> 24) * ((weight << shift) >> 24);
  return sums;
#endif
}

/* sums + row * weight, both being parts of words. */
INLINE vint add_words(const int type, vint row, vint weight, vint sums) {
  if (type == Q_I8) return add_bytes(row, weight, sums);
#if defined(__AVX512BF16__)
  if (type == Q_BF16) return (vint)_mm512_dpbf16_ps((__m512)sums, (__m512bh)row, (__m512bh)weight);
#endif
  return (vint)vf_fma((vfloat)row, (vfloat)weight, (vfloat)sums);
}

INLINE vint vi_load(const void *at) {
  vint x;
  memcpy(&x, at, sizeof x);
  return x;
}

/* Word number ``word`` of each column of a vector; vectors go on in the next panel. */
INLINE const uint32_t *words_of(const tile_place *at, const int vector, int32_t word) {
  const int column = vector * LANES;
  return at->weight + (column / Q_PANEL) * at->panel_stride + column % Q_PANEL + (int64_t)word * Q_PANEL;
}

/* The sums of a tile's row and vector. */
INLINE int32_t *sums_of(const tile_place *at, const int row, const int vector) {
  const int column = vector * LANES;
  return at->sums + column / Q_PANEL * at->sum_panel + row * Q_PANEL + column % Q_PANEL;
}

/* Fetch the words of the rows behind a tile's: in four calls, each 4 words on, 16 words of 12 rows. Many rows come from
 * the second or third cache, and the processor alone does not ask for them early enough. */
INLINE void fetch_next_rows(const tile_place *at, const int rows, int32_t word) {
  const uint32_t *next = at->rows + (rows + word / 4 % 4 * 3) * at->row_stride + word;
  __builtin_prefetch(next, 0, 2);
  __builtin_prefetch(next + at->row_stride, 0, 2);
  __builtin_prefetch(next + 2 * at->row_stride, 0, 2);
}

/* Fetch the next lines of the weight that a tall tile fetches. Returns those after them. */
INLINE const uint32_t *fetch_weight(const tile_place *at, const uint32_t *next) {
  for (int32_t line = 0; line < at->fetch_lines && next < at->fetch_end; line++, next += LINE_WORDS)
    __builtin_prefetch(next, 0, 3);
  return next;
}

/* Add the words of a tile of ``rows`` rows and ``vectors`` * LANES columns to its sums. */
INLINE void add_tile(const int type, const int rows, const int vectors, const tile_place *at) {
  vint sums[TALL_ROWS][WIDE_VECTORS];
  /* Every third row has a pointer: the rows between are at its one and two strides, which the processor adds itself. */
  const uint32_t *third[(TALL_ROWS + 2) / 3];
  UNROLL for (int row = 0; row < rows; row++) {
    if (row % 3 == 0) third[row / 3] = at->rows + row * at->row_stride;
    UNROLL for (int vector = 0; vector < vectors; vector++)
      sums[row][vector] = at->first ? vi_set(0) : vi_load(sums_of(at, row, vector));
  }
  const int64_t row_stride = at->row_stride;
  const uint32_t *fetch = at->fetch;
  for (int32_t word = 0; word < at->words; word += 4) {
    if (vectors == TALL_VECTORS) fetch = fetch_weight(at, fetch);
    if (rows > WIDE_ROWS && at->rows_follow) fetch_next_rows(at, rows, word);
    UNROLL for (int next = 0; next < 4; next++) {
      UNROLL for (int vector = 0; vector < vectors; vector++)
        if (vectors == WIDE_VECTORS && vector * LANES % LINE_WORDS == 0)
          __builtin_prefetch(words_of(at, vector, word + next) + FETCH_AHEAD, 0, 3);
      UNROLL for (int part = 0; part < parts_of(type); part++) {
        vint weight[WIDE_VECTORS];
        UNROLL for (int vector = 0; vector < vectors; vector++)
          weight[vector] = part_of(type, part, vi_load(words_of(at, vector, word + next)));
        UNROLL for (int row = 0; row < rows; row++) {
          uint32_t own = third[row / 3][row % 3 * row_stride + word + next];
          vint values = part_of(type, part, vi_set((int32_t)own));
          UNROLL for (int vector = 0; vector < vectors; vector++)
            sums[row][vector] = add_words(type, values, weight[vector], sums[row][vector]);
        }
      }
    }
  }
  UNROLL for (int row = 0; row < rows; row++)
    UNROLL for (int vector = 0; vector < vectors; vector++)
      memcpy(sums_of(at, row, vector), &sums[row][vector], sizeof(vint));
}

/* add_tile for up to WIDE_ROWS rows and WIDE_COLUMNS columns. */
INLINE void add_wide(const int type, int32_t rows, const tile_place *at) {
  switch (rows) {
    case 1: add_tile(type, 1, WIDE_VECTORS, at); break;
    case 2: add_tile(type, 2, WIDE_VECTORS, at); break;
    case 3: add_tile(type, 3, WIDE_VECTORS, at); break;
#if defined(__AVX512F__)
    case 4: add_tile(type, 4, WIDE_VECTORS, at); break;
    case 5: add_tile(type, 5, WIDE_VECTORS, at); break;
    case 6: add_tile(type, 6, WIDE_VECTORS, at); break;
#endif
  }
}

/* add_tile for up to TALL_ROWS rows and TALL_COLUMNS columns. */
INLINE void add_tall(const int type, int32_t rows, const tile_place *at) {
  switch (rows) {
    case 1: add_tile(type, 1, TALL_VECTORS, at); break;
    case 2: add_tile(type, 2, TALL_VECTORS, at); break;
    case 3: add_tile(type, 3, TALL_VECTORS, at); break;
    case 4: add_tile(type, 4, TALL_VECTORS, at); break;
    case 5: add_tile(type, 5, TALL_VECTORS, at); break;
    case 6: add_tile(type, 6, TALL_VECTORS, at); break;
#if defined(__AVX512F__)
    case 7: add_tile(type, 7, TALL_VECTORS, at); break;
    case 8: add_tile(type, 8, TALL_VECTORS, at); break;
    case 9: add_tile(type, 9, TALL_VECTORS, at); break;
    case 10: add_tile(type, 10, TALL_VECTORS, at); break;
    case 11: add_tile(type, 11, TALL_VECTORS, at); break;
    case 12: add_tile(type, 12, TALL_VECTORS, at); break;
#endif
  }
}

/* Words of a row, each of 4 bytes. */
INLINE int32_t words_in(const q_weight *weight) {
  return weight->type == Q_F32 ? weight->padded_inputs
         : weight->type == Q_BF16 ? weight->padded_inputs / 2 : weight->padded_inputs / 4;
}

/* Words of a row that go together. */
INLINE int32_t block_words(const q_weight *weight) {
  return words_in(weight) <= SMALL_WORDS ? SMALL_WORDS : BLOCK_WORDS;
}

/* Where the words of ``row``, from ``word`` on, meet those of ``panel``. */
INLINE tile_place place_of(const q_weight *weight, const q_rows *x, int32_t row, int32_t panel, int32_t word) {
  tile_place at;
  at.panel_stride = (int64_t)words_in(weight) * Q_PANEL;
  at.row_stride = x->stride / 4;
  at.rows = (const uint32_t *)x->data + row * at.row_stride + word;
  at.weight = (const uint32_t *)weight->data + panel * at.panel_stride + (int64_t)word * Q_PANEL;
  at.words = words_in(weight) - word;
  at.first = word == 0;
  at.sums = NULL;
  at.sum_panel = 0;
  at.rows_follow = 0;
  return at;
}

/* Sums of int8 products as float32, in place: times the scales of the outputs and of the row. */
static void scale_sums(const q_weight *weight, const q_rows *x, int32_t row, int32_t panel, int32_t *sums) {
  vfloat row_scale = vf_set(x->scales[row]);
  for (int at = 0; at < Q_PANEL; at += LANES) {
    vint sum = vi_load(sums + at);
#if defined(__AVX512VNNI__)
    /* The rows' values have 128 added, so that they have no sign; elsewhere add_bytes took it off before. */
    sum += vi_load(weight->offsets + panel * Q_PANEL + at);
#endif
    vfloat scale = vf_load(weight->scales + panel * Q_PANEL + at);
    vf_store((float *)sums + at, __builtin_convertvector(sum, vfloat) * scale * row_scale);
  }
}

/* A product: what is multiplied, and what becomes of the sums. */
typedef struct {
  const q_weight *weight;
  const q_rows *x;
  const q_epilogue *to;
} product;

/* What becomes of the sums [rows][Q_PANEL] of one panel, for the rows from ``row`` on. */
INLINE void finish(const int type, const product *of, int32_t row, int32_t rows, int32_t panel, int32_t *sums) {
  if (type == Q_I8)
    for (int32_t at = 0; at < rows; at++) scale_sums(of->weight, of->x, row + at, panel, sums + at * Q_PANEL);
  Q_NAME(finish_rows)(of->weight, of->to, row, rows, panel, (float *)sums);
}

/* One panel, or SPAN_PANELS of them, with 1 to WIDE_ROWS rows from ``row`` on. */
INLINE void multiply_wide(const int type, const product *of, int32_t row, int32_t rows, int32_t panel) {
  _Alignas(64) int32_t sums[WIDE_ROWS * SPAN];
  for (int32_t column = 0; column < SPAN; column += WIDE_COLUMNS) {
    tile_place at = place_of(of->weight, of->x, row, panel, 0);
    at.weight += column;
    at.sums = sums + column;
    at.sum_panel = rows * Q_PANEL;
    add_wide(type, rows, &at);
  }
  for (int32_t at = 0; at < SPAN_PANELS; at++) finish(type, of, row, rows, panel + at, sums + at * rows * Q_PANEL);
}

/* One panel with WIDE_ROWS + 1 to TALL_ROWS rows from ``row`` on: all of its words in one run, as memory has them. */
INLINE void multiply_run(const int type, const product *of, int32_t row, int32_t rows, int32_t panel) {
  _Alignas(64) int32_t sums[TALL_ROWS * Q_PANEL];
  tile_place at = place_of(of->weight, of->x, row, panel, 0);
  at.sums = sums;
  at.fetch = at.weight + RUN_AHEAD;
  at.fetch_end = (const uint32_t *)of->weight->data + of->weight->panels * at.panel_stride;
  at.fetch_lines = 4 * Q_PANEL / LINE_WORDS;
  add_tall(type, rows, &at);
  finish(type, of, row, rows, panel, sums);
}

/* Fetch where the results of some rows and a panel go, which is done when their sums are: memory takes as long as
 * hundreds of products. */
INLINE void fetch_outputs(const product *of, int32_t row, int32_t rows, int32_t panel) {
  int64_t width = of->to->kind == Q_GATED ? Q_PANEL / 2 : Q_PANEL, size = of->to->out_type == Q_BF16 ? 2 : 4;
  const char *out = (const char *)of->to->out + row * of->to->stride + panel * width * size;
  for (int32_t at = 0; at < rows; at++, out += of->to->stride)
    for (int64_t byte = 0; byte < width * size; byte += 64) __builtin_prefetch(out + byte, 1, 3);
}

/* Add to sums [rows][Q_PANEL] the words from ``word`` on, block_words at most, of one panel, for rows from ``row`` on;
 * behind the last words, finish them. Its tiles fetch the block that comes ``next``, each a part, so that memory
 * delivers all the while. */
INLINE void add_block(const int type, const product *of, int32_t row, int32_t rows, int32_t panel, int32_t word,
                      const uint32_t *next, int32_t *sums) {
  enum { LINES = 4 * Q_PANEL / LINE_WORDS, COLUMN_TILES = Q_PANEL / TALL_COLUMNS }; /* lines of 4 words */
  int32_t left = words_in(of->weight) - word, words = least(block_words(of->weight), left);
  int32_t tiles = (rows + TALL_ROWS - 1) / TALL_ROWS;
  int32_t lines = (LINES + tiles * COLUMN_TILES - 1) / (tiles * COLUMN_TILES);
  const uint32_t *end = next + words * Q_PANEL;
  for (int32_t tile = 0; tile < tiles; tile++) {
    int32_t start = rows * tile / tiles, count = rows * (tile + 1) / tiles - start;
    int32_t *own = word == 0 && words == left ? sums : sums + start * Q_PANEL;
    if (words == left) fetch_outputs(of, row + start, count, panel);
    for (int32_t column = 0; column < Q_PANEL; column += TALL_COLUMNS) {
      tile_place at = place_of(of->weight, of->x, row + start, panel, word);
      at.weight += column;
      at.words = words;
      at.sums = own + column;
      at.fetch = next;
      at.fetch_end = end;
      at.fetch_lines = lines;
      at.rows_follow = tile + 1 < tiles;
      add_tall(type, count, &at);
      next += words / 4 * lines * LINE_WORDS;
    }
    if (words == left) finish(type, of, row + start, count, panel, own);
  }
}

/* What comes after the block at ``word`` of panel ``at`` of ``panels`` from ``panel`` on: the same words of the next
 * panel; behind the last panel the next words of the first; behind all of them the panel that follows. */
INLINE const uint32_t *block_after(const q_weight *weight, int32_t panel, int32_t panels, int32_t at, int32_t word) {
  if (at + 1 < panels) {
    at += 1;
  } else {
    word += block_words(weight);
    at = word < words_in(weight) ? 0 : panels;
    if (at == panels) word = 0;
  }
  return (const uint32_t *)weight->data + ((int64_t)(panel + at) * words_in(weight) + word) * Q_PANEL;
}

/* Up to MOST_PANELS panels with up to MOST_ROWS rows from ``row`` on: a block of the rows stays in the second cache
 * while the panels go by. ``sums`` is room for [panels][rows][Q_PANEL]. */
INLINE void multiply_tall(const int type, const product *of, int32_t row, int32_t rows, int32_t panel, int32_t panels,
                          int32_t *sums) {
  for (int32_t word = 0; word < words_in(of->weight); word += block_words(of->weight))
    for (int32_t at = 0; at < panels; at++)
      add_block(type, of, row, rows, panel + at, word, block_after(of->weight, panel, panels, at, word),
                sums + at * rows * Q_PANEL);
}

/* ``rows`` rows times the panels [first, last). */
INLINE void multiply(const int type, const product *of, int32_t rows, int32_t first, int32_t last) {
  _Alignas(64) int32_t sums[MOST_PANELS * MOST_ROWS * Q_PANEL];
  int32_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int32_t part = 0; part < parts; part++) {
    int32_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
    for (int32_t panel = first, panels; panel < last; panel += panels) {
      if (count <= WIDE_ROWS && last - panel >= SPAN_PANELS) {
        panels = SPAN_PANELS;
        multiply_wide(type, of, row, count, panel);
      } else if (count <= TALL_ROWS && TALL_COLUMNS == Q_PANEL) {
        panels = 1;
        multiply_run(type, of, row, count, panel);
      } else {
        panels = least(MOST_PANELS, last - panel);
        multiply_tall(type, of, row, count, panel, panels, sums);
      }
    }
  }
}

#endif
