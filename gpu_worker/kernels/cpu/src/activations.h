/* The activations of an MLP, a vector at a time.
 *
 * Each is written as x times a number between 0 and 1, so that small results keep their precision: 1 + erf(x) or
 * 1 + tanh(x) would lose it where x is well below zero. NaN stays NaN.
 */
#ifndef QUIRE_ACTIVATIONS_H
#define QUIRE_ACTIVATIONS_H

#include "kernels.h"
#include "simd.h"

/* x / (1 + e^-y): x times the logistic function of y. */
INLINE vfloat vf_times_sigmoid(vfloat x, vfloat y) { return x / (vf_set(1.0f) + vf_exp(-y)); }

/* What rounding took from ``squared``, the float32 next to x * x. */
INLINE vfloat vf_square_rest(vfloat x, vfloat squared) {
#if defined(__AVX512F__) || defined(__AVX2__)
  return vf_fma(x, x, -squared);
#else
  /* The upper 12 bits and the rest: products of the two are exact. */
  vfloat high = (vfloat)((vint)x & (int32_t)0xfffff000), low = x - high;
  return ((high * high - squared) + (high + high) * low) + low * low;
#endif
}

/* The normal distribution's mass above ``distance`` >= 0; 0 above 13.2.
 *
 * e^(-d^2 / 2) times a polynomial in t = 1 / (1 + 0.35 d), which was fitted for the smallest relative error (4e-8) over
 * 0 <= d <= 13.3. The exponential of the square's rounding error is 1 plus that error, as small as it is. */
INLINE vfloat vf_normal_tail(vfloat distance) {
  vfloat held = vf_min(distance, vf_set(13.3f));
  vfloat squared = held * held, rest = vf_square_rest(held, squared);
  vfloat t = vf_set(1.0f) / vf_fma(held, vf_set(0.35f), vf_set(1.0f));
  vfloat y = vf_set(-0.02957654329f);
  y = vf_fma(y, t, vf_set(0.1460690329f));
  y = vf_fma(y, t, vf_set(-0.2600329001f));
  y = vf_fma(y, t, vf_set(0.164063495f));
  y = vf_fma(y, t, vf_set(-0.02642269503f));
  y = vf_fma(y, t, vf_set(0.1068764616f));
  y = vf_fma(y, t, vf_set(0.1194981414f));
  y = vf_fma(y, t, vf_set(0.1399059745f));
  y = vf_fma(y, t, vf_set(0.1396190164f)) * t;
  vfloat density = vf_exp(vf_set(-0.5f) * squared);
  return y * vf_fma(density, vf_set(-0.5f) * rest, density);
}

/* x * (1 + erf(x / sqrt 2)) / 2: x times the normal distribution's mass below x. */
INLINE vfloat vf_gelu(vfloat x) {
  vfloat tail = vf_normal_tail(vf_abs(x));
  return x * vf_select(x < vf_set(0.0f), tail, vf_set(1.0f) - tail);
}

/* x * (1 + tanh(y)) / 2 with y = sqrt(2 / pi) * (x + 0.044715 x^3), by (1 + tanh(y)) / 2 = sigmoid(2 y). */
INLINE vfloat vf_gelu_tanh(vfloat x) {
  vfloat inner = vf_fma(x * x, vf_set(0.044715f), vf_set(1.0f));
  return vf_times_sigmoid(x, vf_set(1.5957691216f) * x * inner);
}

/* tanh(x): Cephes' polynomial near zero, (1 - e^-2x) / (1 + e^-2x) away from it. */
INLINE vfloat vf_tanh(vfloat x) {
  vfloat size = vf_abs(x), squared = x * x;
  vfloat y = vf_set(-5.70498872745e-3f);
  y = vf_fma(y, squared, vf_set(2.06390887954e-2f));
  y = vf_fma(y, squared, vf_set(-5.37397155531e-2f));
  y = vf_fma(y, squared, vf_set(1.33314422036e-1f));
  y = vf_fma(y, squared, vf_set(-3.33332819422e-1f));
  vfloat near = vf_fma(y * squared, x, x);
  vfloat decay = vf_exp(vf_set(-2.0f) * size), one = vf_set(1.0f);
  vfloat far = (one - decay) / (one + decay);
  vint sign = (vint)x & vi_set(INT32_MIN);
  return vf_select(size < vf_set(0.625f), near, (vfloat)((vint)far | sign));
}

/* activation(x); ``kind`` is one of kernels.h's but Q_SWIGLU_OAI, which only gates. */
INLINE vfloat vf_activation(int32_t kind, vfloat x) {
  switch (kind) {
    case Q_GELU:
      return vf_gelu(x);
    case Q_GELU_TANH:
      return vf_gelu_tanh(x);
    case Q_RELU:
      return vf_max(vf_set(0.0f), x);
    case Q_RELU2: {
      vfloat positive = vf_max(vf_set(0.0f), x);
      return positive * positive;
    }
    case Q_QUICK_GELU:
      return vf_times_sigmoid(x, x * vf_set(1.702f));
    default:
      return vf_times_sigmoid(x, x);
  }
}

/* activation(gate) * up; Q_SWIGLU_OAI is quick_gelu(min(gate, 7)) * (clamp(up, -7, 7) + 1). */
INLINE vfloat vf_gated(int32_t kind, vfloat gate, vfloat up) {
  if (kind == Q_SWIGLU_OAI) {
    vfloat held = vf_min(vf_set(7.0f), gate);
    vfloat factor = vf_max(vf_set(-7.0f), vf_min(vf_set(7.0f), up)) + vf_set(1.0f);
    return vf_activation(Q_QUICK_GELU, held) * factor;
  }
  return vf_activation(kind, gate) * up;
}

#endif
