/* Gumbel noise of (seed, position, token) by Philox4x32-10: kernels/sampling.py defines it.
 *
 * A block of Philox gives the words of four tokens. State words lie in lanes of 64 bits, whose lower half counts: the
 * product of two lower halves is one instruction, and what the upper halves hold does no harm. */
#ifndef QUIRE_PHILOX_H
#define QUIRE_PHILOX_H

#include "simd.h"

typedef uint64_t vulong __attribute__((vector_size(LANES * 4)));
/* Blocks, and tokens, for which words are made at a time. */
enum { PHILOX_BLOCKS = LANES / 2, PHILOX_TOKENS = 2 * LANES };

/* Where a row's noise comes from. */
typedef struct {
  uint32_t key[2];
  uint32_t position;
} q_stream;

INLINE vulong vl_set(uint64_t x) { return x - (vulong){0}; }

/* The products of the lanes' lower halves. */
INLINE vulong vl_multiply(vulong a, vulong b) {
#if defined(__AVX512F__)
  return (vulong)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vulong)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vulong)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

/* The even lanes of ``a`` and ``b`` in turns; with ``odd`` 1 the odd ones. */
INLINE vulong vl_pairs(vulong a, vulong b, int odd) {
#if defined(__AVX512F__)
  __m512i x = (__m512i)a, y = (__m512i)b;
  return (vulong)(odd ? _mm512_unpackhi_epi64(x, y) : _mm512_unpacklo_epi64(x, y));
#elif defined(__AVX2__)
  __m256i x = (__m256i)a, y = (__m256i)b;
  return (vulong)(odd ? _mm256_unpackhi_epi64(x, y) : _mm256_unpacklo_epi64(x, y));
#else
  return (vulong){a[odd], b[odd]};
#endif
}

/* The words of tokens 4 * ``block``, ... in their order, PHILOX_TOKENS of them. */
INLINE void philox_words(const q_stream *stream, uint32_t block, uint32_t *words) {
#if defined(__AVX512F__)
  /* In this order the pairs of even lanes are blocks 0 to 3, one after another. */
  const vulong order = {0, 4, 1, 5, 2, 6, 3, 7};
#elif defined(__AVX2__)
  const vulong order = {0, 2, 1, 3};
#else
  const vulong order = {0, 1};
#endif
  vulong c0 = vl_set(stream->position), c1 = order + block, c2 = {0}, c3 = {0};
  uint32_t key0 = stream->key[0], key1 = stream->key[1];
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    vulong p = vl_multiply(c0, vl_set(0xD2511F53)), q = vl_multiply(c2, vl_set(0xCD9E8D57));
    c0 = (q >> 32) ^ c1 ^ vl_set(key0);
    c1 = q;
    c2 = (p >> 32) ^ c3 ^ vl_set(key1);
    c3 = p;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  vulong first = (c0 & 0xffffffff) | (c1 << 32), second = (c2 & 0xffffffff) | (c3 << 32);
  vulong low = vl_pairs(first, second, 0), high = vl_pairs(first, second, 1);
  memcpy(words, &low, sizeof low);
  memcpy(words + LANES, &high, sizeof high);
}

INLINE vuint vu_load(const uint32_t *at) {
  vuint x;
  memcpy(&x, at, sizeof x);
  return x;
}

/* The noise -log(-log1p(-v)), v = (word + 1/2) / 2^32 held below 1; -log1p(-v) is log(u) v / (u - 1) of u = 1 - v. */
INLINE vfloat vf_noise(vuint words) {
  vfloat v = (__builtin_convertvector(words, vfloat) + vf_set(0.5f)) * vf_set(0x1p-32f);
  v = vf_min(v, vf_set(1.0f - 0x1p-24f));
  vfloat u = vf_set(1.0f) - v, below = u - vf_set(1.0f);
  vfloat minus_log = vf_log(u) * (v / below);
  return -vf_log(vf_select(below == vf_set(0.0f), v, minus_log));
}

/* No less than the noise, and near it where it is large: -log(v) >= -log1p(-v), by a line below log2 that the bits of
 * a float32 give (2^e (1 + f): e + f <= e + log2(1 + f)). What is added covers the rounding. */
INLINE vfloat vf_noise_bound(vuint words) {
  vfloat bits = __builtin_convertvector((vint)__builtin_convertvector(words, vfloat), vfloat);
  return vf_fma(bits, vf_set(-0x1.62e43p-24f), vf_set((32 + 127) * 0.69314718f + 1e-3f));
}

#endif
