/* Vectors of float32 in the width of the instruction set that a file is compiled for.
 *
 * Plain code uses the compiler's vectors, which become SSE or NEON. Every function here gives the same bits wherever
 * it is inlined: products and sums are fused only where fma says so (the build turns contraction off).
 */
#ifndef QUIRE_SIMD_H
#define QUIRE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));

#define INLINE static inline __attribute__((always_inline))

INLINE vfloat vf_load(const float *at) {
  vfloat x;
  memcpy(&x, at, sizeof x);
  return x;
}

INLINE void vf_store(float *at, vfloat x) { memcpy(at, &x, sizeof x); }

/* The first ``count`` <= LANES values, zeros after them. */
INLINE vfloat vf_load_part(const float *at, int32_t count) {
  vfloat x = {0};
  memcpy(&x, at, (size_t)count * sizeof(float));
  return x;
}

INLINE void vf_store_part(float *at, vfloat x, int32_t count) { memcpy(at, &x, (size_t)count * sizeof(float)); }

INLINE vfloat vf_set(float x) { return x - (vfloat){0}; }

INLINE vint vi_set(int32_t x) { return x - (vint){0}; }

/* a * b + c, rounded once where the processor can. */
INLINE vfloat vf_fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

/* ``a`` where a lane of ``mask`` is all ones, else ``b``. */
INLINE vfloat vf_select(vint mask, vfloat a, vfloat b) { return (vfloat)(((vint)a & mask) | ((vint)b & ~mask)); }

INLINE vfloat vf_abs(vfloat x) { return (vfloat)((vint)x & 0x7fffffff); }

/* The larger; b where either is NaN. */
INLINE vfloat vf_max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return vf_select(a > b, a, b);
#endif
}

/* The smaller; b where either is NaN. */
INLINE vfloat vf_min(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vfloat)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return vf_select(a < b, a, b);
#endif
}

/* The sum of all lanes: halves are added until one is left. */
INLINE float vf_sum(vfloat x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float lanes[LANES];
  vf_store(lanes, x);
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

/* The largest lane. */
INLINE float vf_largest(vfloat x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lanes[LANES];
  vf_store(lanes, x);
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
  return lanes[0];
#endif
}

/* Whether some lane of a comparison's result is set. */
INLINE int vi_any(vint mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint64_t halves[2];
  memcpy(halves, &mask, sizeof halves);
  return (halves[0] | halves[1]) != 0;
#endif
}

/* Writes the lanes that ``mask`` names one after another, and garbage after them, LANES values in all. How many. */
INLINE int32_t vf_store_chosen(float *at, vfloat x, vint mask) {
#if defined(__AVX512F__)
  /* Compressed in a register: some processors take long to store a part of one. */
  __mmask16 bits = _mm512_movepi32_mask((__m512i)mask);
  _mm512_storeu_ps(at, _mm512_maskz_compress_ps(bits, (__m512)x));
  return __builtin_popcount(bits);
#else
  int32_t count = 0;
  for (int lane = 0; lane < LANES; lane++) {
    at[count] = x[lane];
    count -= mask[lane]; /* -1 where it is set */
  }
  return count;
#endif
}

/* LANES bfloat16 as float32: their bits are a float32's upper half. */
INLINE vfloat vf_load_bf16(const uint16_t *at) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#elif defined(__AVX2__)
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#else
  vuint bits;
  for (int lane = 0; lane < LANES; lane++) bits[lane] = (uint32_t)at[lane] << 16;
  return (vfloat)bits;
#endif
}

/* To bfloat16, to the nearest, ties to even; NaN stays NaN. */
INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* LANES numbers to bfloat16 as to_bf16; the processor's own instruction makes 0 of numbers below 2^-126. */
INLINE void vf_store_bf16(uint16_t *at, vfloat x) {
#if defined(__AVX512BF16__)
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  memcpy(at, &rounded, sizeof rounded);
#else
  vuint bits = (vuint)x;
  vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vuint nan = (bits >> 16) | 0x40;
  vint is_nan = (vint)((bits & 0x7fffffff) > 0x7f800000);
  vuint both = (nan & (vuint)is_nan) | (rounded & ~(vuint)is_nan);
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16((__m512i)both));
#else
  for (int lane = 0; lane < LANES; lane++) at[lane] = (uint16_t)both[lane];
#endif
#endif
}

/* ``size`` numbers to bfloat16. */
INLINE void round_row(const float *x, int32_t size, uint16_t *out) {
  int32_t at = 0;
  for (; at + LANES <= size; at += LANES) vf_store_bf16(out + at, vf_load(x + at));
  for (; at < size; at++) out[at] = to_bf16(x[at]);
}

/* e^(x - whole ln 2), by the polynomial of Cephes' expf, for x within ln 2 / 2 of whole ln 2. */
INLINE vfloat vf_exp_rest(vfloat whole, vfloat x) {
  const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  vfloat rest = vf_fma(whole, vf_set(-ln2_high), x);
  rest = vf_fma(whole, vf_set(-ln2_low), rest);
  vfloat y = vf_set(1.9875691500e-4f);
  y = vf_fma(y, rest, vf_set(1.3981999507e-3f));
  y = vf_fma(y, rest, vf_set(8.3334519073e-3f));
  y = vf_fma(y, rest, vf_set(4.1665795894e-2f));
  y = vf_fma(y, rest, vf_set(1.6666665459e-1f));
  y = vf_fma(y, rest, vf_set(5.0000001201e-1f));
  return vf_fma(y, rest * rest, rest) + vf_set(1.0f);
}

/* e^x within 2 units in the last place; 0 below -87.3 (so also at -infinity), infinity above 88.7,
 * NaN of NaN. */
INLINE vfloat vf_exp(vfloat x) {
  const float log2e = 1.44269504f;
#if defined(__AVX512F__)
  /* scalef multiplies by 2^whole, and makes infinity of what is too large. */
  __mmask16 large_enough = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.33f), _CMP_NLT_UQ); /* or NaN */
  vfloat held = vf_min(vf_set(89.0f), vf_max(vf_set(-88.0f), x)); /* in this order NaN goes through */
  vfloat whole = vf_fma(held, vf_set(log2e), vf_set(12582912.0f)) - vf_set(12582912.0f);
  return (vfloat)_mm512_maskz_scalef_ps(large_enough, (__m512)vf_exp_rest(whole, held), (__m512)whole);
#else
  vint too_small = x < vf_set(-87.33f), too_large = x > vf_set(88.72f);
  vfloat held = vf_min(vf_set(88.72f), vf_max(vf_set(-87.33f), x)); /* in this order NaN goes through */
  /* Adding and taking away 1.5 * 2^23 rounds to a whole number. */
  vfloat whole = vf_fma(held, vf_set(log2e), vf_set(12582912.0f)) - vf_set(12582912.0f);
  vfloat y = vf_exp_rest(whole, held);
  /* 2^whole in two factors, so that 2^128 is never made. */
  vint power = __builtin_convertvector(whole, vint), half = power >> 1;
  vfloat first = (vfloat)((half + 127) << 23), second = (vfloat)((power - half + 127) << 23);
  y = y * first * second;
  y = vf_select(too_small, vf_set(0.0f), y);
  return vf_select(too_large, vf_set(INFINITY), y);
#endif
}

/* 2^x within 2 units in the last place, for x <= 1; NaN of NaN.
 *
 * The polynomial was fitted for the smallest relative error (8e-8) over 0 <= rest <= 1, with 2^0 exactly 1. */
INLINE vfloat vf_exp2(vfloat x) {
#if defined(__AVX512F__)
  vfloat rest = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF); /* x less the next lower whole number */
#else
  vfloat held = vf_max(vf_set(-126.0f), x); /* in this order NaN goes through */
  vfloat shifted = held - vf_set(0.5f) + vf_set(12582912.0f); /* 1.5 * 2^23: rounds to a whole number */
  vfloat rest = held - (shifted - vf_set(12582912.0f));
#endif
  vfloat y = vf_set(1.8671302e-3f);
  y = vf_fma(y, rest, vf_set(9.01703e-3f));
  y = vf_fma(y, rest, vf_set(5.5799913e-2f));
  y = vf_fma(y, rest, vf_set(2.4016444e-1f));
  y = vf_fma(y, rest, vf_set(6.931513e-1f));
  y = vf_fma(y, rest, vf_set(1.0f));
#if defined(__AVX512F__)
  return (vfloat)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
  /* The lowest bits of ``shifted`` are the whole number: moved into the exponent they multiply by 2^whole. */
  y = y * (vfloat)(((vuint)shifted + 127) << 23);
  return vf_select(x < vf_set(-126.0f), vf_set(0.0f), y);
#endif
}

/* log(x) of normal numbers above 0, within 2 units in the last place: Cephes' logf. */
INLINE vfloat vf_log(vfloat x) {
  /* x = 2^power * rest with rest in [sqrt(1/2), sqrt(2)): what is added moves sqrt(1/2) to where the exponent steps. */
  vint bits = (vint)x + (0x3f800000 - 0x3f3504f3);
  vfloat power = __builtin_convertvector((bits >> 23) - 127, vfloat);
  vfloat rest = (vfloat)((bits & 0x007fffff) + 0x3f3504f3) - vf_set(1.0f), squared = rest * rest;
  vfloat y = vf_set(7.0376836292e-2f);
  y = vf_fma(y, rest, vf_set(-1.1514610310e-1f));
  y = vf_fma(y, rest, vf_set(1.1676998740e-1f));
  y = vf_fma(y, rest, vf_set(-1.2420140846e-1f));
  y = vf_fma(y, rest, vf_set(1.4249322787e-1f));
  y = vf_fma(y, rest, vf_set(-1.6668057665e-1f));
  y = vf_fma(y, rest, vf_set(2.0000714765e-1f));
  y = vf_fma(y, rest, vf_set(-2.4999993993e-1f));
  y = vf_fma(y, rest, vf_set(3.3333331174e-1f)) * rest * squared;
  y = vf_fma(power, vf_set(-2.12194440e-4f), y);
  y = vf_fma(squared, vf_set(-0.5f), y);
  return vf_fma(power, vf_set(0.693359375f), rest + y);
}

#endif
