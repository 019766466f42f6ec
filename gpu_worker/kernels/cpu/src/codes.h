/* Numbers of codes in registers, a vector of outputs at a time. ``kind``, ``bits`` and ``place`` are constants wherever
 * these functions are inlined. */
#ifndef QUIRE_CODES_H
#define QUIRE_CODES_H

#include "code_places.h"
#include "linear_tile.h"

#define UNROLL_RUN _Pragma("GCC unroll 16")
#define UNROLL_UNIT _Pragma("GCC unroll 32")
#define UNROLL_TILE _Pragma("GCC unroll 24")

/* What a table's numbers are found by. */
typedef struct {
  vfloat low, high;  /* Q_SMALL_TABLE: entries 0 to 7 and 8 to 15, or with 16 lanes all in ``low`` */
  vuint bytes;       /* Q_STEPS: the table in each 16 bytes */
  const float *table;
  int32_t shift;     /* Q_OWN_TABLE: 5, as each entry is there of every output of a panel */
  vint lanes;        /* and which outputs these are */
} number_table;

/* ``panel`` and ``column`` of a vector's first output. */
INLINE number_table table_of(const int kind, const q_codes *codes, int32_t panel, int32_t column) {
  number_table found = {.table = codes->table};
  if (kind == Q_SMALL_TABLE) {
#if defined(__AVX512F__)
    found.low = vf_load(found.table);
#elif defined(__AVX2__)
    found.low = vf_load(found.table);
    found.high = vf_load(found.table + LANES);
#endif
  } else if (kind == Q_STEPS) {
    memcpy(&found.bytes, codes->table, sizeof found.bytes);
  } else if (kind == Q_OWN_TABLE) {
    found.table += ((int64_t)panel << codes->bits) * Q_PANEL + column;
    found.shift = 5;
    for (int lane = 0; lane < LANES; lane++) found.lanes[lane] = lane;
  }
  return found;
}

INLINE vuint vu_load(const uint32_t *at) {
  vuint x;
  memcpy(&x, at, sizeof x);
  return x;
}

/* The code at ``place``, ``words`` being those of a unit and of a vector's first output. */
INLINE vuint code_at(const int bits, const int place, const uint32_t *words) {
  if (place < q_whole_codes(bits)) {
    const int shift = q_code_shift(bits, place);
    vuint word = vu_load(words + place / (32 / bits) * Q_PANEL) >> shift;
    return shift + bits == 32 ? word : word & ((1u << bits) - 1);
  }
  vuint code = {0};
  UNROLL for (int word = 0; word < bits; word++) {
    const q_code_piece piece = q_piece_of(bits, place, word);
    if (piece.count) code |= ((vu_load(words + word * Q_PANEL) >> piece.from) & ((1u << piece.count) - 1)) << piece.to;
  }
  return code;
}

/* Entries of a table that all outputs share, of up to 16. */
INLINE vfloat small_entries(const int bits, const number_table *table, vuint codes) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_permutexvar_ps((__m512i)codes, (__m512)table->low);
#elif defined(__AVX2__)
  __m256 low = _mm256_permutevar8x32_ps((__m256)table->low, (__m256i)codes);
  if (bits < 4) return (vfloat)low;
  __m256 high = _mm256_permutevar8x32_ps((__m256)table->high, (__m256i)codes);
  return (vfloat)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); /* by bit 3, as the sign */
#else
  vfloat out;
  for (int lane = 0; lane < LANES; lane++) out[lane] = table->table[codes[lane]];
  return out;
#endif
}

/* Entries of a table of any size. */
INLINE vfloat entries(const number_table *table, vuint codes) {
  vint at = ((vint)codes << table->shift) + table->lanes;
#if defined(__AVX512F__)
  return (vfloat)_mm512_i32gather_ps((__m512i)at, table->table, 4);
#elif defined(__AVX2__)
  return (vfloat)_mm256_i32gather_ps(table->table, (__m256i)at, 4);
#else
  vfloat out;
  for (int lane = 0; lane < LANES; lane++) out[lane] = table->table[at[lane]];
  return out;
#endif
}

/* A byte of each word as a float of 4 bits exponent and 3 bits mantissa: both are moved to where a float32 has them,
 * which makes it 2^120 times too small. Numbers below 2^-6 have exponent 0 in both. A part of the 2^120 is in the rows
 * and a part in the scales, so that neither these nor the products leave float32's range. */
#define E4M3_ROW_FACTOR 0x1p40f
#define E4M3_SCALE_FACTOR 0x1p80f
INLINE vfloat e4m3_at(const int place, const uint32_t *words) {
  vint word = (vint)(vu_load(words + place / 4 * Q_PANEL) << (24 - place % 4 * 8));
  return (vfloat)((word >> 4) & (int32_t)0x87f00000);
}

#if defined(__AVX2__)
/* The bytes of a table by each byte of ``codes``, 0 to 15. */
INLINE vuint table_bytes(const number_table *table, vuint codes) {
#if defined(__AVX512F__)
  return (vuint)_mm512_shuffle_epi8((__m512i)table->bytes, (__m512i)codes);
#else
  return (vuint)_mm256_shuffle_epi8((__m256i)table->bytes, (__m256i)codes);
#endif
}
#else
/* Not inlined: it is called for each place of each tile, and compilers unroll it. */
static __attribute__((noinline)) vuint table_bytes(const number_table *table, vuint codes) {
  uint8_t bytes[sizeof(vuint)], from[sizeof(vuint)];
  memcpy(bytes, &codes, sizeof bytes);
  memcpy(from, &table->bytes, sizeof from);
  for (size_t at = 0; at < sizeof bytes; at++) bytes[at] = from[bytes[at]];
  memcpy(&codes, bytes, sizeof bytes);
  return codes;
}
#endif

/* The codes of a word's even places (``odd`` 0) or odd ones by a table of bytes: a byte for each, in their order. */
INLINE vuint step_bytes(const int odd, const number_table *table, vuint word) {
  return table_bytes(table, (word >> 4 * odd) & 0x0f0f0f0f);
}

/* The number at ``place`` of what step_bytes made of its word, times 2^q_steps_shift. */
INLINE vfloat steps_at(const int place, vuint bytes) {
  const int shift = q_steps_shift(place);
  return __builtin_convertvector((vint)(place % 8 < 6 ? bytes & (0xffu << shift) : bytes >> 24), vfloat);
}

/* The number at ``place``, of Q_NUMBER and Q_STEPS times 2^ the shift of code_places.h. */
INLINE vfloat number_at(const int kind, const int bits, const int place, const number_table *table,
                        const uint32_t *words) {
  if (kind == Q_E4M3) return e4m3_at(place, words);
  if (kind == Q_STEPS) return steps_at(place, step_bytes(place % 2, table, vu_load(words + place / 8 * Q_PANEL)));
  if (kind == Q_SMALL_TABLE) return small_entries(bits, table, code_at(bits, place, words));
  if (kind != Q_NUMBER) return entries(table, code_at(bits, place, words));
  const int shift = q_number_shift(bits, place);
  if (shift == 0) return __builtin_convertvector((vint)code_at(bits, place, words), vfloat);
  vuint word = vu_load(words + place / (32 / bits) * Q_PANEL) & (((1u << bits) - 1) << shift);
  return __builtin_convertvector((vint)word, vfloat);
}

/* ---------------------------------------------------------------- scales */

INLINE float from_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
  float value;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + (112u << 23));
  } else { /* a whole number of 2^-24 */
    value = (float)rest * 0x1p-24f;
    return sign ? -value : value;
  }
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE vfloat vf_load_f16(const uint16_t *at) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__AVX2__)
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
  vfloat out;
  for (int lane = 0; lane < LANES; lane++) out[lane] = from_f16(at[lane]);
  return out;
#endif
}

/* Compilers make long detours of vectors of so few bytes, so that these are widened by hand. */
INLINE vfloat vf_load_bytes(const uint8_t *at) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
  vfloat out;
  for (int lane = 0; lane < LANES; lane++) out[lane] = at[lane];
  return out;
#endif
}

INLINE vfloat vf_load_signed(const uint8_t *at) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
  vfloat out;
  for (int lane = 0; lane < LANES; lane++) out[lane] = (int8_t)at[lane];
  return out;
#endif
}

/* How numbers of groups are stored, where this is known when a function is compiled; else NUMBERS_ANY. */
enum { NUMBERS_ANY, NUMBERS_F16, NUMBERS_F16_BYTES, NUMBERS_F16_SIGNED };

/* The numbers of a group and the outputs from ``column`` of ``panel`` on. */
INLINE vfloat numbers_at(const int stored, const q_numbers *numbers, int32_t panel, int32_t group, int32_t column) {
  int64_t at = panel * numbers->base_stride + (int64_t)(group >> numbers->base_shift) * Q_PANEL + column;
  vfloat value;
  switch (stored == NUMBERS_ANY ? numbers->base_type : Q_F16) {
    case Q_F16: value = vf_load_f16((const uint16_t *)numbers->base + at); break;
    case Q_BF16: value = vf_load_bf16((const uint16_t *)numbers->base + at); break;
    default: value = vf_load((const float *)numbers->base + at);
  }
  if (stored == NUMBERS_F16 || (stored == NUMBERS_ANY && numbers->fine == NULL)) return value;
  const uint8_t *fine = numbers->fine;
  fine += panel * numbers->fine_stride + (int64_t)(group >> numbers->fine_shift) * Q_PANEL + column;
  const int is_signed = stored == NUMBERS_ANY ? numbers->fine_signed : stored == NUMBERS_F16_SIGNED;
  return value * (is_signed ? vf_load_signed(fine) : vf_load_bytes(fine));
}

/* What a group's sums become a part of an output by. */
typedef struct {
  vfloat scale, zero, minimum;
} group_numbers;

/* ``stored``: of scales and minima; ``minima``: whether there are some. */
INLINE group_numbers group_numbers_at(const int stored, const int minima, const q_codes *codes, int32_t panel,
                                      int32_t group, int32_t column) {
  group_numbers found = {.scale = numbers_at(stored, &codes->scales, panel, group, column),
                         .zero = vf_set(codes->zero)};
  if (codes->kind == Q_E4M3) found.scale *= vf_set(E4M3_SCALE_FACTOR);
  if (codes->zeros != NULL)
    found.zero = vf_load_bytes(codes->zeros + ((int64_t)panel * codes->groups + group) * Q_PANEL + column);
  if (minima) found.minimum = numbers_at(stored, &codes->minima, panel, group, column);
  return found;
}

/* sum + a group's part: ``products`` is the sum of its numbers times the row's values, ``values`` that of the values. */
INLINE vfloat add_group_part(const int minima, const group_numbers *by, vfloat products, float values, vfloat sum) {
  products = vf_fma(-by->zero, vf_set(values), products);
  sum = vf_fma(products, by->scale, sum);
  return !minima ? sum : vf_fma(-by->minimum, vf_set(values), sum);
}

#endif
