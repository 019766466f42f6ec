/* Products of codes, which become numbers in registers, and float32 rows.
 *
 * A group's numbers times a row's values are added up from the first input to the last. Its scale, zero and minimum
 * count once, behind its last input, when it becomes a part of the output; the groups follow one another. Few rows take
 * the numbers as they are made, and for many a block of a panel is made first and then multiplied by all rows: the sums
 * are the same, in the same order, so that a row has the same bits in any company here too.
 */
#include "codes.h"

enum {
  FEW_ROWS = 3, /* of which each number is made where it is used */
  /* Vectors of a tile of one row, and of more: with one row there have to be as many sums as additions take turns. */
#if defined(__AVX512F__)
  ONE_VECTORS = 4,
#else
  ONE_VECTORS = 8,
#endif
  FEW_VECTORS = 4,
  /* Inputs that go together where rows are many: of a block of rows, and of numbers of a panel, which stay in the
   * second and in the first cache. */
  BLOCK_INPUTS = 512,
  CHUNK_INPUTS = 128,
  CODE_PANELS = 4,
  MOST_TILE = 24, /* vectors */
};

/* Where a tile is: some rows, and some outputs of a panel and those behind it. */
typedef struct {
  const q_weight *weight;
  const float *rows; /* of the first row, from the tile's first input on */
  int64_t row_stride;
  const float *row_sums; /* [rows][groups] */
  int32_t panel, column;
  float *sums; /* of the first output, [panels][rows][Q_PANEL] */
  int32_t sum_panel;
} code_tile;

/* What a group's products [rows][vectors] came to becomes part of the sums. */
INLINE void add_parts(const int stored, const int minima, const int rows, const int vectors, const code_tile *at,
                      int32_t group, const vfloat *products) {
  const q_codes *codes = at->weight->codes;
  UNROLL for (int vector = 0; vector < vectors; vector++) {
    const int32_t column = at->column + vector * LANES, within = column % Q_PANEL;
    float *sum = at->sums + column / Q_PANEL * at->sum_panel + within;
    group_numbers by = group_numbers_at(stored, minima, codes, at->panel + column / Q_PANEL, group, within);
    UNROLL for (int row = 0; row < rows; row++, sum += Q_PANEL) {
      float values = at->row_sums[row * codes->groups + group];
      vf_store(sum, add_group_part(minima, &by, products[row * vectors + vector], values, vf_load(sum)));
    }
  }
}

/* The same of any numbers. No part of the loops that call it: it is long, and rarely done. */
static __attribute__((noinline)) void add_group_parts(int rows, int vectors, const code_tile *at, int32_t group,
                                                      const vfloat *products) {
  if (at->weight->codes->minima.base != NULL)
    add_parts(NUMBERS_ANY, 1, rows, vectors, at, group, products);
  else
    add_parts(NUMBERS_ANY, 0, rows, vectors, at, group, products);
}

/* The same of up to FEW_ROWS rows, for the numbers that weights with short groups have: a group of 16 inputs takes
 * little longer than its end. */
#define KNOWN_PARTS(name, stored, minima) \
  static __attribute__((noinline)) void name(int rows, int vectors, const code_tile *at, int32_t group, \
                                             const vfloat *products) { \
    switch (rows) { \
      case 1: add_parts(stored, minima, 1, ONE_VECTORS, at, group, products); break; \
      case 2: add_parts(stored, minima, 2, FEW_VECTORS, at, group, products); break; \
      case 3: add_parts(stored, minima, 3, FEW_VECTORS, at, group, products); break; \
    } \
  }
KNOWN_PARTS(add_f16_parts, NUMBERS_F16, 0)
KNOWN_PARTS(add_f16_bytes_minima_parts, NUMBERS_F16_BYTES, 1)
KNOWN_PARTS(add_f16_signed_parts, NUMBERS_F16_SIGNED, 0)

typedef void parts_function(int rows, int vectors, const code_tile *at, int32_t group, const vfloat *products);

/* The function above for a weight's numbers. */
static parts_function *parts_of_few(const q_codes *codes) {
  const q_numbers *scales = &codes->scales, *minima = &codes->minima;
  if (scales->base_type != Q_F16) return add_group_parts;
  if (minima->base == NULL)
    return scales->fine == NULL ? add_f16_parts : scales->fine_signed ? add_f16_signed_parts : add_group_parts;
  const int bytes = scales->fine != NULL && !scales->fine_signed && minima->fine != NULL && !minima->fine_signed;
  return bytes && minima->base_type == Q_F16 ? add_f16_bytes_minima_parts : add_group_parts;
}

/* The same, and the products begin anew. They are copied, so that they are registers all the while. */
INLINE void end_group(const int rows, const int vectors, const code_tile *at, int32_t group, vfloat *products) {
  vfloat copies[MOST_TILE];
  UNROLL_TILE for (int each = 0; each < rows * vectors; each++) {
    copies[each] = products[each];
    products[each] = (vfloat){0};
  }
  add_group_parts(rows, vectors, at, group, copies);
}

/* ---------------------------------------------------------------- few rows */

/* Add the 8 inputs of word ``word`` of a unit of Q_STEPS to ``products``. */
INLINE void add_steps(const int rows, const int vectors, const int word, const number_table *table,
                      const uint32_t *words, int64_t panel_words, const float *x, int64_t row_stride,
                      vfloat *products) {
  vuint bytes[2][ONE_VECTORS]; /* in the first cache: there are fewer registers */
  UNROLL for (int vector = 0; vector < vectors; vector++) {
    const uint32_t *own = words + vector * LANES / Q_PANEL * panel_words + vector * LANES % Q_PANEL + word * Q_PANEL;
    if (vector * LANES % LINE_WORDS == 0) __builtin_prefetch(own + FETCH_AHEAD, 0, 3);
    bytes[0][vector] = step_bytes(0, table, vu_load(own));
    bytes[1][vector] = step_bytes(1, table, vu_load(own));
  }
  UNROLL for (int place = 0; place < 8; place++) {
    vfloat values[FEW_ROWS];
    UNROLL for (int row = 0; row < rows; row++) values[row] = vf_set(x[row * row_stride + word * 8 + place]);
    __asm__ volatile("" : "+m"(bytes));
    UNROLL for (int vector = 0; vector < vectors; vector++) {
      vfloat number = steps_at(place, bytes[place % 2][vector]);
      UNROLL for (int row = 0; row < rows; row++)
        products[row * vectors + vector] = vf_fma(values[row], number, products[row * vectors + vector]);
    }
  }
}

/* Add ``count`` inputs from ``place`` of a unit on to ``products`` [rows][vectors]. ``words`` are the unit's. */
INLINE void add_places(const int kind, const int bits, const int rows, const int vectors, const int place,
                       const int count, const number_table *table, const uint32_t *words, int64_t panel_words,
                       const float *x, int64_t row_stride, vfloat *products) {
  if (kind == Q_STEPS) {
    UNROLL for (int word = place / 8; word < (place + count) / 8; word++)
      add_steps(rows, vectors, word, table, words, panel_words, x, row_stride, products);
    return;
  }
  UNROLL_UNIT for (int next = place; next < place + count; next++) {
    vfloat values[FEW_ROWS];
    UNROLL for (int row = 0; row < rows; row++) values[row] = vf_set(x[row * row_stride + next]);
    UNROLL for (int vector = 0; vector < vectors; vector++) {
      const uint32_t *own = words + vector * LANES / Q_PANEL * panel_words + vector * LANES % Q_PANEL;
      if (next % (Q_UNIT / bits) == 0 && next / (Q_UNIT / bits) < bits && vector * LANES % LINE_WORDS == 0)
        __builtin_prefetch(own + next / (Q_UNIT / bits) * Q_PANEL + FETCH_AHEAD, 0, 3);
      vfloat number = number_at(kind, bits, next, table, own);
      UNROLL for (int row = 0; row < rows; row++)
        products[row * vectors + vector] = vf_fma(values[row], number, products[row * vectors + vector]);
    }
    /* Words are read from the first cache again for each place: there are fewer registers than words. */
    __asm__ volatile("" ::: "memory");
  }
}

/* All inputs of ``rows`` rows and ``vectors`` vectors of outputs to their sums. ``count``: Q_UNIT, or Q_RUN where groups
 * have no whole units. */
INLINE void add_codes(const int kind, const int bits, const int rows, const int vectors, const int count,
                      const code_tile *at) {
  const q_weight *weight = at->weight;
  const int32_t inputs = weight->padded_inputs, group_inputs = weight->codes->group;
  const int64_t panel_words = (int64_t)(inputs / Q_UNIT) * bits * Q_PANEL, row_stride = at->row_stride;
  const uint32_t *words = (const uint32_t *)weight->data + at->panel * panel_words + at->column;
  const float *x = at->rows;
  const number_table table = table_of(kind, weight->codes, at->panel, at->column);
  parts_function *const add_their_parts = parts_of_few(weight->codes);
  for (int32_t group = 0, input = 0; input < inputs; group++) {
    const int32_t stop = least(input + group_inputs, inputs);
    vfloat products[MOST_TILE], sums[MOST_TILE];
    UNROLL_TILE for (int each = 0; each < rows * vectors; each++) products[each] = (vfloat){0};
    for (; input < stop; input += count) {
      if (count == Q_UNIT || input % Q_UNIT == 0)
        add_places(kind, bits, rows, vectors, 0, count, &table, words, panel_words, x, row_stride, products);
      else
        add_places(kind, bits, rows, vectors, Q_RUN, count, &table, words, panel_words, x, row_stride, products);
      if (count == Q_RUN && input % Q_UNIT == 0) continue;
      words += bits * Q_PANEL;
      x += Q_UNIT;
    }
    UNROLL_TILE for (int each = 0; each < rows * vectors; each++) sums[each] = products[each];
    add_their_parts(rows, vectors, at, group, sums);
  }
}

/* ---------------------------------------------------------------- many rows */

/* The numbers of ``units`` units of a panel from ``unit`` on: [inputs][Q_PANEL]. */
INLINE void make_numbers(const int kind, const int bits, const q_weight *weight, int32_t panel, int32_t unit,
                         int32_t units, float *out) {
  const int64_t panel_words = (int64_t)(weight->padded_inputs / Q_UNIT) * bits * Q_PANEL;
  const uint32_t *words = (const uint32_t *)weight->data + panel * panel_words + (int64_t)unit * bits * Q_PANEL;
  for (int32_t column = 0; column < Q_PANEL; column += LANES) {
    const number_table table = table_of(kind, weight->codes, panel, column);
    const uint32_t *own = words + column;
    float *to = out + column;
    for (int32_t at = 0; at < units; at++, own += bits * Q_PANEL, to += Q_UNIT * Q_PANEL)
      UNROLL for (int half = 0; half < Q_UNIT; half += Q_RUN)
        UNROLL_RUN for (int next = 0; next < Q_RUN; next++)
          vf_store(to + (half + next) * Q_PANEL, number_at(kind, bits, half + next, &table, own));
  }
}

/* Add ``inputs`` inputs from ``first`` on, a multiple of Q_UNIT, to a tile's sums, and the products of a group that is
 * not at its end to ``products`` [rows][Q_PANEL], where they wait for the next inputs. */
INLINE void add_numbers(const int rows, const code_tile *at, const float *numbers, int32_t first, int32_t inputs,
                        float *waiting) {
  const q_codes *codes = at->weight->codes;
  const int32_t runs = codes->group / Q_RUN;
  const int64_t row_stride = at->row_stride;
  int32_t group = first / codes->group, left = runs - first % codes->group / Q_RUN;
  const float *third[(TALL_ROWS + 2) / 3];
  vfloat products[MOST_TILE];
  numbers += at->column;
  waiting += at->column;
  UNROLL for (int row = 0; row < rows; row++) {
    if (row % 3 == 0) third[row / 3] = at->rows + row * row_stride;
    UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++)
      products[row * TALL_VECTORS + vector] = vf_load(waiting + row * Q_PANEL + vector * LANES);
  }
  for (int32_t input = 0; input < inputs; input += Q_RUN) {
    for (int32_t run = input; run < input + Q_RUN; run += 4)
      UNROLL for (int next = 0; next < 4; next++) {
        vfloat number[TALL_VECTORS];
        UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++)
          number[vector] = vf_load(numbers + (run + next) * Q_PANEL + vector * LANES);
        UNROLL for (int row = 0; row < rows; row++) {
          vfloat value = vf_set(third[row / 3][row % 3 * row_stride + run + next]);
          UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++)
            products[row * TALL_VECTORS + vector] = vf_fma(value, number[vector], products[row * TALL_VECTORS + vector]);
        }
      }
    if (--left == 0) {
      end_group(rows, TALL_VECTORS, at, group++, products);
      left = runs;
    }
  }
  if (left != runs && first + inputs == at->weight->padded_inputs) end_group(rows, TALL_VECTORS, at, group, products);
  UNROLL for (int row = 0; row < rows; row++)
    UNROLL for (int vector = 0; vector < TALL_VECTORS; vector++)
      vf_store(waiting + row * Q_PANEL + vector * LANES, products[row * TALL_VECTORS + vector]);
}

/* add_numbers for up to TALL_ROWS rows. */
static void add_tall_numbers(int32_t rows, const code_tile *at, const float *numbers, int32_t first, int32_t inputs,
                             float *waiting) {
  switch (rows) {
    case 1: add_numbers(1, at, numbers, first, inputs, waiting); break;
    case 2: add_numbers(2, at, numbers, first, inputs, waiting); break;
    case 3: add_numbers(3, at, numbers, first, inputs, waiting); break;
    case 4: add_numbers(4, at, numbers, first, inputs, waiting); break;
    case 5: add_numbers(5, at, numbers, first, inputs, waiting); break;
    case 6: add_numbers(6, at, numbers, first, inputs, waiting); break;
#if defined(__AVX512F__)
    case 7: add_numbers(7, at, numbers, first, inputs, waiting); break;
    case 8: add_numbers(8, at, numbers, first, inputs, waiting); break;
    case 9: add_numbers(9, at, numbers, first, inputs, waiting); break;
    case 10: add_numbers(10, at, numbers, first, inputs, waiting); break;
    case 11: add_numbers(11, at, numbers, first, inputs, waiting); break;
    case 12: add_numbers(12, at, numbers, first, inputs, waiting); break;
#endif
  }
}

/* ---------------------------------------------------------------- each kind of codes */

/* The functions of one kind and number of bits. ``few``, for up to FEW_ROWS rows and groups of whole units, may be
 * missing, and so may ``one``, for one row and other groups. */
typedef struct {
  void (*few)(int32_t rows, const code_tile *at);
  void (*one)(int32_t rows, const code_tile *at);
  void (*make)(const q_weight *weight, int32_t panel, int32_t unit, int32_t units, float *out);
} code_functions;

#define MAKE(kind, bits) \
  static void make_##kind##_##bits(const q_weight *weight, int32_t panel, int32_t unit, int32_t units, float *out) { \
    make_numbers(kind, bits, weight, panel, unit, units, out); \
  }
#define FEW_AND_MAKE(kind, bits) \
  MAKE(kind, bits) \
  static void few_##kind##_##bits(int32_t rows, const code_tile *at) { \
    switch (rows) { \
      case 1: add_codes(kind, bits, 1, ONE_VECTORS, Q_UNIT, at); break; \
      case 2: add_codes(kind, bits, 2, FEW_VECTORS, Q_UNIT, at); break; \
      case 3: add_codes(kind, bits, 3, FEW_VECTORS, Q_UNIT, at); break; \
    } \
  }

#define ONE(kind, bits) \
  static void one_##kind##_##bits(int32_t rows, const code_tile *at) { \
    add_codes(kind, bits, 1, ONE_VECTORS, Q_RUN, at); \
  }

FEW_AND_MAKE(Q_NUMBER, 2)
FEW_AND_MAKE(Q_NUMBER, 3)
FEW_AND_MAKE(Q_NUMBER, 4)
FEW_AND_MAKE(Q_NUMBER, 5)
FEW_AND_MAKE(Q_NUMBER, 6)
FEW_AND_MAKE(Q_NUMBER, 7)
FEW_AND_MAKE(Q_NUMBER, 8)
FEW_AND_MAKE(Q_SMALL_TABLE, 2)
FEW_AND_MAKE(Q_SMALL_TABLE, 3)
FEW_AND_MAKE(Q_SMALL_TABLE, 4)
FEW_AND_MAKE(Q_E4M3, 8)
FEW_AND_MAKE(Q_STEPS, 4)
ONE(Q_NUMBER, 2)
ONE(Q_NUMBER, 3)
ONE(Q_NUMBER, 6)
MAKE(Q_TABLE, 5)
MAKE(Q_TABLE, 6)
MAKE(Q_TABLE, 7)
MAKE(Q_TABLE, 8)
MAKE(Q_OWN_TABLE, 2)
MAKE(Q_OWN_TABLE, 3)
MAKE(Q_OWN_TABLE, 4)
MAKE(Q_OWN_TABLE, 5)
MAKE(Q_OWN_TABLE, 6)
MAKE(Q_OWN_TABLE, 7)
MAKE(Q_OWN_TABLE, 8)

#define ALL(kind, bits) {few_##kind##_##bits, one_##kind##_##bits, make_##kind##_##bits}
#define BOTH(kind, bits) {few_##kind##_##bits, NULL, make_##kind##_##bits}
#define ONLY(kind, bits) {NULL, NULL, make_##kind##_##bits}

static const code_functions FUNCTIONS[Q_CODE_KINDS][9] = {
    [Q_NUMBER] = {[2] = ALL(Q_NUMBER, 2), ALL(Q_NUMBER, 3), BOTH(Q_NUMBER, 4), BOTH(Q_NUMBER, 5), ALL(Q_NUMBER, 6),
                  BOTH(Q_NUMBER, 7), BOTH(Q_NUMBER, 8)},
    [Q_SMALL_TABLE] = {[2] = BOTH(Q_SMALL_TABLE, 2), BOTH(Q_SMALL_TABLE, 3), BOTH(Q_SMALL_TABLE, 4)},
    [Q_TABLE] = {[5] = ONLY(Q_TABLE, 5), ONLY(Q_TABLE, 6), ONLY(Q_TABLE, 7), ONLY(Q_TABLE, 8)},
    [Q_OWN_TABLE] = {[2] = ONLY(Q_OWN_TABLE, 2), ONLY(Q_OWN_TABLE, 3), ONLY(Q_OWN_TABLE, 4), ONLY(Q_OWN_TABLE, 5),
                     ONLY(Q_OWN_TABLE, 6), ONLY(Q_OWN_TABLE, 7), ONLY(Q_OWN_TABLE, 8)},
    [Q_E4M3] = {[8] = BOTH(Q_E4M3, 8)},
    [Q_STEPS] = {[4] = BOTH(Q_STEPS, 4)},
};

/* ---------------------------------------------------------------- products */

INLINE code_tile tile_at(const q_weight *weight, const q_rows *x, int32_t row, int32_t panel, int32_t input) {
  return (code_tile){
      .weight = weight,
      .rows = (const float *)((const char *)x->data + row * x->stride) + input,
      .row_stride = x->stride / 4,
      .row_sums = x->scales + (int64_t)row * weight->codes->groups,
      .panel = panel,
  };
}

/* Up to FEW_ROWS rows from ``row`` on, and as many panels as fill a tile's vectors. Returns how many these are. */
static int32_t multiply_few(void (*function)(int32_t rows, const code_tile *at), const q_weight *weight, const q_rows *x,
                            const q_epilogue *to, int32_t row, int32_t rows, int32_t panel) {
  _Alignas(64) float sums[FEW_ROWS * ONE_VECTORS * LANES];
  const int32_t columns = (rows == 1 ? ONE_VECTORS : FEW_VECTORS) * LANES;
  const int32_t panels = columns > Q_PANEL ? columns / Q_PANEL : 1;
  code_tile at = tile_at(weight, x, row, panel, 0);
  memset(sums, 0, (size_t)(panels * rows * Q_PANEL) * sizeof *sums);
  at.sums = sums;
  at.sum_panel = rows * Q_PANEL;
  for (; at.column < panels * Q_PANEL; at.column += columns) function(rows, &at);
  for (int32_t own = 0; own < panels; own++)
    Q_NAME(finish_rows)(weight, to, row, rows, panel + own, sums + own * rows * Q_PANEL);
  return panels;
}

/* Add some inputs of one panel to the sums of all rows from ``row`` on. */
static void add_chunk(const code_functions *functions, const q_weight *weight, const q_rows *x, int32_t row,
                      int32_t rows, int32_t panel, int32_t input, int32_t inputs, float *sums, float *waiting) {
  _Alignas(64) float numbers[CHUNK_INPUTS * Q_PANEL];
  functions->make(weight, panel, input / Q_UNIT, inputs / Q_UNIT, numbers);
  int32_t tiles = (rows + TALL_ROWS - 1) / TALL_ROWS;
  for (int32_t tile = 0; tile < tiles; tile++) {
    int32_t start = rows * tile / tiles, count = rows * (tile + 1) / tiles - start;
    code_tile at = tile_at(weight, x, row + start, panel, input);
    at.sums = sums + start * Q_PANEL;
    for (; at.column < Q_PANEL; at.column += TALL_COLUMNS)
      add_tall_numbers(count, &at, numbers, input, inputs, waiting + start * Q_PANEL);
  }
}

/* Up to MOST_ROWS rows from ``row`` on and ``panels`` <= CODE_PANELS panels: a block of the rows stays in the second
 * cache while the panels go by. */
static void multiply_many(const code_functions *functions, const q_weight *weight, const q_rows *x,
                          const q_epilogue *to, int32_t row, int32_t rows, int32_t panel, int32_t panels) {
  _Alignas(64) float sums[CODE_PANELS * MOST_ROWS * Q_PANEL], waiting[CODE_PANELS * MOST_ROWS * Q_PANEL];
  const int32_t inputs = weight->padded_inputs, size = rows * Q_PANEL;
  memset(sums, 0, (size_t)(panels * size) * sizeof *sums);
  memset(waiting, 0, (size_t)(panels * size) * sizeof *waiting);
  for (int32_t block = 0; block < inputs; block += BLOCK_INPUTS)
    for (int32_t at = 0; at < panels; at++)
      for (int32_t input = block; input < least(block + BLOCK_INPUTS, inputs); input += CHUNK_INPUTS)
        add_chunk(functions, weight, x, row, rows, panel + at, input, least(CHUNK_INPUTS, inputs - input),
                  sums + at * size, waiting + at * size);
  for (int32_t at = 0; at < panels; at++) Q_NAME(finish_rows)(weight, to, row, rows, panel + at, sums + at * size);
}

void Q_NAME(linear_codes)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                          int32_t last) {
  const code_functions *functions = &FUNCTIONS[weight->codes->kind][weight->codes->bits];
  const int whole_units = weight->codes->group % Q_UNIT == 0;
  int32_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int32_t part = 0; part < parts; part++) {
    int32_t row = rows * part / parts, count = rows * (part + 1) / parts - row;
    int32_t together = (count == 1 ? ONE_VECTORS : FEW_VECTORS) * LANES / Q_PANEL;
    void (*function)(int32_t rows, const code_tile *at) = NULL;
    if (count <= FEW_ROWS && whole_units) function = functions->few;
    if (count == 1 && !whole_units) function = functions->one;
    for (int32_t panel = first, panels; panel < last; panel += panels) {
      if (function != NULL && last - panel >= together) {
        panels = multiply_few(function, weight, x, to, row, count, panel);
      } else {
        panels = least(CODE_PANELS, last - panel);
        multiply_many(functions, weight, x, to, row, count, panel, panels);
      }
    }
  }
}

/* ---------------------------------------------------------------- rows */

/* The row in the order of the codes, with zeros where they have no input. */
static void arrange(const q_weight *weight, const float *x, float *out) {
  const int32_t *order = weight->codes->order;
  if (order == NULL) {
    if (out != x) memcpy(out, x, (size_t)weight->inputs * sizeof *x);
    memset(out + weight->inputs, 0, (size_t)(weight->padded_inputs - weight->inputs) * sizeof *x);
    return;
  }
  for (int32_t at = 0; at < weight->padded_inputs; at++) out[at] = order[at] < 0 ? 0.0f : x[order[at]];
}

void Q_NAME(prepare_codes)(const q_weight *weight, const float *x, float *out, float *sums) {
  const q_codes *codes = weight->codes;
  const int32_t padded = weight->padded_inputs;
  arrange(weight, x, out);
  for (int32_t group = 0; group < codes->groups; group++) {
    int32_t start = group * codes->group, stop = least(start + codes->group, padded);
    vfloat sum = {0};
    for (int32_t at = start; at < stop; at += LANES) sum += vf_load(out + at);
    sums[group] = vf_sum(sum);
  }
  if (codes->kind != Q_NUMBER && codes->kind != Q_STEPS && codes->kind != Q_E4M3) return;
  float factors[Q_UNIT];
  for (int place = 0; place < Q_UNIT; place++) {
    int shift = codes->kind == Q_STEPS ? q_steps_shift(place) : q_number_shift(codes->bits, place);
    int32_t power = (127 - shift) << 23; /* 2^-shift */
    memcpy(&factors[place], &power, sizeof power);
    if (codes->kind == Q_STEPS) factors[place] *= codes->step;
    if (codes->kind == Q_E4M3) factors[place] = E4M3_ROW_FACTOR;
  }
  for (int32_t at = 0; at < padded; at += LANES) vf_store(out + at, vf_load(out + at) * vf_load(factors + at % Q_UNIT));
}
