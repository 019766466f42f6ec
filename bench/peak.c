/* What this processor can do at most: reading memory, and multiplying in registers. Compiled by ceilings.py with
 * -march=native, so that a vector is as wide as the processor has them; each function keeps one thread busy. */
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Sums in flight: a product's latency times the number of units that make them, and some. */
enum { SUMS = 12 };

/* The compiler takes the register for changed, or it would compute the products once and for all. */
#if defined(__AVX512F__)
#define OPAQUE(vector) __asm__ volatile("" : "+v"(vector))
#else
#define OPAQUE(vector) __asm__ volatile("" : "+m"(vector))
#endif

typedef float floats __attribute__((vector_size(64)));
typedef int64_t words __attribute__((vector_size(64)));

/* Reads ``bytes`` (a multiple of 512) at ``data``, 64-byte aligned, ``times`` over. */
int64_t read_bytes(const void *data, int64_t bytes, int64_t times) {
  words sums[8] = {{0}};
  for (int64_t turn = 0; turn < times; turn++) {
    const words *at = data;
    const words *end = at + bytes / (int64_t)sizeof(words);
    for (; at < end; at += 8)
      for (int each = 0; each < 8; each++) sums[each] += at[each];
  }
  int64_t total = 0;
  for (int each = 0; each < 8; each++) total += sums[each][0] + sums[each][7];
  return total;
}

/* ``turns`` times SUMS sums of 16 floats, multiplied and added to: 2 * 16 * SUMS operations a turn. */
float multiply_f32(int64_t turns) {
  floats sums[SUMS];
  for (int each = 0; each < SUMS; each++) sums[each] = (floats){(float)each}; /* equal ones would be computed once */
  floats x = {1.0f};
  for (int64_t turn = 0; turn < turns; turn++) {
    OPAQUE(x);
    for (int each = 0; each < SUMS; each++) sums[each] = sums[each] * x + x;
  }
  float total = 0;
  for (int each = 0; each < SUMS; each++) total += sums[each][0];
  return total;
}

/* The same with pairs of bfloat16, 2 * 32 * SUMS operations a turn; -1 where the processor has no such instruction. */
float multiply_bf16(int64_t turns) {
#if defined(__AVX512BF16__)
  __m512 sums[SUMS];
  for (int each = 0; each < SUMS; each++) sums[each] = _mm512_set1_ps((float)each);
  __m512i ones = _mm512_set1_epi16(0x3f80);
  for (int64_t turn = 0; turn < turns; turn++) {
    OPAQUE(ones);
    for (int each = 0; each < SUMS; each++) sums[each] = _mm512_dpbf16_ps(sums[each], (__m512bh)ones, (__m512bh)ones);
  }
  float total = 0;
  for (int each = 0; each < SUMS; each++) total += _mm512_reduce_add_ps(sums[each]);
  return total;
#else
  (void)turns;
  return -1.0f;
#endif
}

/* The same with four int8 at a time, 2 * 64 * SUMS operations a turn; -1 where the processor has no such instruction. */
float multiply_int8(int64_t turns) {
#if defined(__AVX512VNNI__)
  __m512i sums[SUMS];
  for (int each = 0; each < SUMS; each++) sums[each] = _mm512_set1_epi32(each);
  __m512i ones = _mm512_set1_epi8(1);
  for (int64_t turn = 0; turn < turns; turn++) {
    OPAQUE(ones);
    for (int each = 0; each < SUMS; each++) sums[each] = _mm512_dpbusd_epi32(sums[each], ones, ones);
  }
  int64_t total = 0;
  for (int each = 0; each < SUMS; each++) total += _mm512_reduce_add_epi32(sums[each]);
  return (float)total;
#else
  (void)turns;
  return -1.0f;
#endif
}
