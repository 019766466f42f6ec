/* Caches of 8 bits: numbers of a page as float32, and back. kernels/narrow.py has the definition. */
#ifndef QUIRE_ATTENTION_NARROW_H
#define QUIRE_ATTENTION_NARROW_H

#include "kernels.h"
#include "simd.h"

/* Bytes of one head's keys, or values, of a block. */
static inline int64_t page_bytes(const q_attention *layer) {
  int64_t count = (int64_t)layer->block_size * layer->head_dim;
  switch (layer->cache_type) {
    case Q_F32: return count * 4;
    case Q_BF16: return count * 2;
    case Q_KV_INT8: return count + (int64_t)layer->block_size * (int64_t)sizeof(float);
    default: return count;
  }
}

#if !defined(__F16C__)
/* A number of fp8 in each lane, as float32: the bits of a float32's exponent and mantissa, but that those below 2^(1 -
 * bias) have no leading 1, and are made by taking it off again. */
INLINE vfloat widen_float8(int32_t type, vint codes) {
  const int32_t shift = type == Q_KV_E4M3 ? 20 : 21, bias = type == Q_KV_E4M3 ? 120 : 112;
  const int32_t infinity = type == Q_KV_E4M3 ? 0x7f : 0x7c, least = type == Q_KV_E4M3 ? 0x08 : 0x04;
  vint bits = codes & 0x7f, wide = bits << shift;
  vfloat small = (vfloat)(wide | vi_set((bias + 1) << 23)) - (vfloat)vi_set((bias + 1) << 23);
  vfloat value = vf_select(bits < least, small, (vfloat)(wide + (bias << 23)));
  vint special = vi_set(0x7f800000) | ((bits << shift) & 0x007fffff);
  if (type == Q_KV_E4M3) special = vi_set(0x7fc00000);
  value = vf_select(bits >= infinity, (vfloat)special, value);
  return (vfloat)((vint)value | ((codes & 0x80) << 24));
}
#endif

/* LANES numbers of fp8. Their bits, moved, are those of a float16: e5m2's of the same number, e4m3's of a 256th. */
INLINE vfloat load_float8(int32_t type, const uint8_t *at) {
#if defined(__AVX512F__)
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
  if (type == Q_KV_E5M2) return (vfloat)_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
  __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((int16_t)0xbf80));
  __m256i without_sign = _mm256_and_si256(half, _mm256_set1_epi16(0x3fff));
  __m256i is_nan = _mm256_cmpeq_epi16(without_sign, _mm256_set1_epi16(0x3f80));
  half = _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
  return (vfloat)_mm512_cvtph_ps(half) * vf_set(256.0f);
#elif defined(__F16C__)
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)at));
  if (type == Q_KV_E5M2) return (vfloat)_mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
  __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((int16_t)0xbf80));
  __m128i without_sign = _mm_and_si128(half, _mm_set1_epi16(0x3fff));
  __m128i is_nan = _mm_cmpeq_epi16(without_sign, _mm_set1_epi16(0x3f80));
  half = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
  return (vfloat)_mm256_cvtph_ps(half) * vf_set(256.0f);
#else
  vint codes;
  for (int32_t lane = 0; lane < LANES; lane++) codes[lane] = at[lane];
  return widen_float8(type, codes);
#endif
}

INLINE vfloat load_int8(const int8_t *at) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
  vint codes;
  for (int32_t lane = 0; lane < LANES; lane++) codes[lane] = at[lane];
  return __builtin_convertvector(codes, vfloat);
#endif
}

/* Number ``at`` of a page of any type. */
static inline float number_of(int32_t type, const char *page, int32_t at) {
  if (type == Q_F32) return ((const float *)page)[at];
  if (type == Q_BF16) return from_bf16(((const uint16_t *)page)[at]);
  if (type == Q_KV_INT8) return (float)((const int8_t *)page)[at];
  uint8_t bytes[LANES] = {(uint8_t)page[at]};
  return load_float8(type, bytes)[0];
}

/* fp8 of each lane in its lowest byte: to the nearest, ties to even; what is too large becomes the largest. NaN stays. */
INLINE vint round_float8(int32_t type, vfloat x) {
  const int32_t shift = type == Q_KV_E4M3 ? 20 : 21, bias = type == Q_KV_E4M3 ? 120 : 112;
  const float largest = type == Q_KV_E4M3 ? 448.0f : 57344.0f;
  const float least = type == Q_KV_E4M3 ? 0x1p-6f : 0x1p-14f;
  const vint magic = vi_set((type == Q_KV_E4M3 ? 127 + 14 : 127 + 7) << 23); /* its last bit is worth the least number */
  vint sign = ((vint)x >> 24) & 0x80, is_nan = (vint)x & 0x7fffffff;
  is_nan = is_nan > 0x7f800000;
  vfloat size = vf_min(vf_set(largest), vf_abs(x));
  vint bits = (vint)size;
  vint normal = ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift) - (bias << (23 - shift));
  vint small = (vint)(size + (vfloat)magic) - magic;
  vint code = (vint)vf_select(size < vf_set(least), (vfloat)small, (vfloat)normal);
  code = (vint)vf_select(is_nan, (vfloat)vi_set(0x7f), (vfloat)code);
  return code | sign;
}

/* ``size`` numbers / scale as fp8. */
static inline void round_float8_row(int32_t type, const float *x, float scale, int32_t size, uint8_t *out) {
  for (int32_t at = 0; at < size; at += LANES) {
    int32_t count = size - at < LANES ? size - at : LANES;
    vfloat some = count == LANES ? vf_load(x + at) : vf_load_part(x + at, count);
    vint codes = round_float8(type, some / vf_set(scale));
    for (int32_t lane = 0; lane < count; lane++) out[at + lane] = (uint8_t)codes[lane];
  }
}

/* ``size`` numbers as int8; the scale. Of a row with NaN or infinity the scale is that. */
static inline float round_int8_row(const float *x, int32_t size, int8_t *out) {
  float largest = 0.0f;
  for (int32_t i = 0; i < size; i++) {
    float magnitude = fabsf(x[i]);
    largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
  }
  float scale = largest / 127.0f, divisor = scale > 0.0f && scale <= 0x1.fffffep127f ? scale : 1.0f;
  for (int32_t i = 0; i < size; i++) {
    float code = x[i] / divisor;
    code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code == code ? code : 0.0f;
    out[i] = (int8_t)(code + 12582912.0f - 12582912.0f); /* 1.5 * 2^23: to the nearest whole number, ties to even */
  }
  return scale;
}

/* One token's keys and values [kv_heads][head_dim] to its slot of a cache of 8 bits. */
static inline void write_narrow(const q_attention *layer, int64_t slot, const float *k, const float *v) {
  int32_t dims = layer->head_dim, size = layer->block_size, type = layer->cache_type;
  int64_t place = slot / size * page_bytes(layer), offset = slot % size, scales = (int64_t)size * dims;
  uint8_t codes[Q_HEAD_DIM];
  for (int32_t head = 0; head < layer->kv_heads; head++, k += dims, v += dims) {
    char *keys = (char *)layer->keys + head * layer->head_stride + place;
    char *values = (char *)layer->values + head * layer->head_stride + place;
    if (type == Q_KV_INT8) {
      float k_scale = round_int8_row(k, dims, (int8_t *)codes);
      float v_scale = round_int8_row(v, dims, (int8_t *)values + offset * dims);
      memcpy(keys + scales + offset * (int64_t)sizeof(float), &k_scale, sizeof(float));
      memcpy(values + scales + offset * (int64_t)sizeof(float), &v_scale, sizeof(float));
    } else {
      round_float8_row(type, k, layer->k_scale, dims, codes);
      round_float8_row(type, v, layer->v_scale, dims, (uint8_t *)values + offset * dims);
    }
    for (int32_t dim = 0; dim < dims; dim++) keys[(int64_t)dim * size + offset] = (char)codes[dim];
  }
}

#endif
