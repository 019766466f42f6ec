/* The threshold of a row: the lowest logit / temperature that min_p, top_k and top_p leave. kernels/sampling.py says
 * what each keeps. */
#include <math.h>

#include "choose.h"
#include "kernels.h"
#include "select.h"
#include "simd.h"

enum {
  BUCKETS = 1024,   /* of a pool, by value */
  FEW = 48,         /* values that are sorted */
  HEAD_CHUNKS = 256 /* top_p looks first at what the largest chunks hold */
};
/* What lies so far below the top has no share in where top_p ends: 2^31 tokens of e^-40 are under 2^-24 of the mass. */
static const float DEEPEST = 40.0f;
/* Values that differ by less have the same exponential, to the last bit of a float32. This also bounds how often the
 * range from the deepest value to the top is divided into buckets: by 2^10, four times. */
static const float SAME_MASS = 0x1p-26f;

/* Gathers the scaled logits from ``lowest`` to ``highest`` in the pool. How many there are; in ``above``, how many are
 * larger. */
static int32_t gather_between(const q_row *row, float lowest, float highest, int32_t *above) {
  vfloat low = vf_set(lowest), high = vf_set(highest), inv_t = vf_set(row->inv_t);
  vint larger = {0};
  int32_t count = 0;
  for (int32_t chunk = 0; chunk < row->chunks; chunk++) {
    if (!(row->peaks[chunk] * row->inv_t >= lowest)) continue;
    float room[Q_SPAN];
    const float *logits = q_chunk(row, chunk, room);
    for (int32_t at = 0; at < Q_SPAN; at += LANES) {
      vfloat scaled = vf_load(logits + at) * inv_t;
      vint over = scaled > high;
      larger -= over; /* a comparison gives -1 where it holds */
      count += vf_store_chosen(row->pool + count, scaled, (scaled >= low) & ~over);
    }
  }
  *above = 0;
  for (int lane = 0; lane < LANES; lane++) *above += larger[lane];
  return count;
}

/* Gathers the scaled logits >= ``lowest`` in the pool. How many there are. */
static int32_t gather(const q_row *row, float lowest) {
  int32_t above;
  return gather_between(row, lowest, INFINITY, &above);
}

/* The ``rank``-th largest of a sample of the scaled logits, one of each chunk; infinities for ranks outside it. */
static float kth_sampled(const q_row *row, int32_t rank) {
  if (rank < 1) return INFINITY;
  if (rank > row->chunks) return -INFINITY;
  for (int32_t chunk = 0; chunk < row->chunks; chunk++) row->spare[chunk] = row->logits[chunk * Q_SPAN] * row->inv_t;
  return kth_largest(row->spare, row->chunks, rank);
}

/* The k-th largest scaled logit: among what is no lower than the k-th largest of the chunks' peaks. Where there are not
 * as many chunks, it lies most likely between two values of a sample; else it is looked for among all. */
static float kth_scaled(const q_row *row, int32_t k) {
  if (k <= row->chunks) return kth_largest(row->pool, gather(row, kth_peak(row, k) * row->inv_t), k);
  int32_t rank = k / Q_SPAN, rest = row->chunks - rank, above;
  int32_t slack = 8 + (int32_t)(4.0 * sqrt(rank < rest ? rank : rest)); /* four standard deviations and more */
  float highest = kth_sampled(row, rank - slack);
  int32_t count = gather_between(row, kth_sampled(row, rank + slack), highest, &above);
  if (above < k && k <= above + count) return kth_largest(row->pool, count, k - above);
  /* The padding of the last chunk comes along; it is never among the k. */
  return kth_largest(row->pool, gather(row, -INFINITY), k);
}

/* The sum of e^(s - top) over the scaled logits >= ``lowest``. Chunks are added in float64. */
static double mass_above(const q_row *row, float lowest) {
  vfloat bound = vf_set(lowest), inv_t = vf_set(row->inv_t), top = vf_set(row->top);
  double total = 0;
  for (int32_t chunk = 0; chunk < row->chunks; chunk++) {
    if (!(row->peaks[chunk] * row->inv_t >= lowest)) continue;
    float room[Q_SPAN];
    const float *logits = q_chunk(row, chunk, room);
    vfloat sum = {0};
    for (int32_t at = 0; at < Q_SPAN; at += LANES) {
      vfloat scaled = vf_load(logits + at) * inv_t;
      sum += vf_select(scaled >= bound, vf_exp(scaled - top), vf_set(0.0f));
    }
    total += vf_sum(sum);
  }
  return total;
}

/* Sorts from the largest down. */
static void sort_few(float *values, int32_t count) {
  for (int32_t next = 1; next < count; next++) {
    float value = values[next];
    int32_t at = next;
    for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1];
    values[at] = value;
  }
}

/* Which of BUCKETS equal steps from ``high`` down each value is in. */
INLINE vint bucket_of(vfloat values, float high, float scale) {
  vfloat step = (vf_set(high) - values) * vf_set(scale);
  return __builtin_convertvector(vf_min(step, vf_set(BUCKETS - 1)), vint);
}

/* The mass of each bucket. */
static void bucket_masses(const float *values, int32_t count, float high, float scale, float top, double *masses) {
  memset(masses, 0, BUCKETS * sizeof(double));
  for (int32_t at = 0; at < count; at += LANES) {
    int32_t here = count - at < LANES ? count - at : LANES, buckets[LANES];
    float mass[LANES];
    vfloat part = here == LANES ? vf_load(values + at) : vf_load_part(values + at, here);
    vint bucket = bucket_of(part, high, scale);
    memcpy(buckets, &bucket, sizeof buckets);
    vf_store(mass, vf_exp(part - vf_set(top)));
    for (int lane = 0; lane < here; lane++) masses[buckets[lane]] += mass[lane];
  }
}

/* Keeps the values of one bucket, in place. How many there are; what lies after them is lost. */
static int32_t keep_bucket(float *values, int32_t count, float high, float scale, int32_t wanted) {
  int32_t kept = 0;
  for (int32_t at = 0; at < count; at += LANES) {
    vfloat part = vf_load(values + at); /* the pool has room for a vector more */
    vint chosen = bucket_of(part, high, scale) == wanted;
    if (at + LANES > count)
      for (int32_t lane = count - at; lane < LANES; lane++) chosen[lane] = 0;
    kept += vf_store_chosen(values + kept, part, chosen);
  }
  return kept;
}

/* ``value_at_mass`` where every value of the pool has the mass of the first. */
static float value_among_equals(const q_row *row, int32_t count, double need) {
  double rank = ceil(need / vf_exp(vf_set(row->pool[0] - row->top))[0]);
  return rank > count ? NAN : kth_largest(row->pool, count, rank < 1 ? 1 : (int32_t)rank);
}

/* The value of the pool, from the largest down, at which the mass reaches ``need``; NaN where it does not.
 *
 * The bucket in which it does is found by a histogram of the mass, then looked into in the same way, until few values
 * are left, or their differences are so small that all have the same mass. */
static float value_at_mass(const q_row *row, int32_t count, double need) {
  float *pool = row->pool;
  double above = 0;
  while (count > FEW) {
    float high, low;
    range_of(pool, count, &high, &low);
    if (high - low < SAME_MASS) return value_among_equals(row, count, need - above);
    float scale = BUCKETS / (high - low);
    double masses[BUCKETS];
    bucket_masses(pool, count, high, scale, row->top, masses);
    int32_t bucket = 0;
    while (bucket < BUCKETS && above + masses[bucket] < need) above += masses[bucket++];
    if (bucket == BUCKETS) return NAN;
    count = keep_bucket(pool, count, high, scale, bucket);
  }
  sort_few(pool, count);
  for (int32_t at = 0; at < count; at++) {
    above += vf_exp(vf_set(pool[at] - row->top))[0];
    if (above >= need) return pool[at];
  }
  return NAN;
}

/* The lowest value that top_p keeps among those >= ``lowest``. */
static float nucleus(const q_row *row, float lowest, float top_p) {
  double need = (double)top_p * mass_above(row, lowest);
  float deepest = row->top - DEEPEST > lowest ? row->top - DEEPEST : lowest;
  float found = NAN;
  float head = row->chunks > 2 * HEAD_CHUNKS ? kth_peak(row, HEAD_CHUNKS) * row->inv_t : deepest;
  if (head > deepest) found = value_at_mass(row, gather(row, head), need);
  if (found != found) found = value_at_mass(row, gather(row, deepest), need);
  if (found == found) return found;
  /* Sums in another order missed the target by a last bit: the lowest of all. */
  int32_t count = gather(row, deepest);
  return kth_largest(row->pool, count, count);
}

/* The threshold of a row that draws and whose top is finite; -infinity where every token may be drawn. */
float Q_NAME(row_threshold)(const q_row *row, const int32_t *params) {
  const float *floats = (const float *)(const void *)params;
  float lowest = row->top + floats[Q_LOG_MIN_P];
  int32_t k = params[Q_TOP_K];
  if (k > 0 && k < row->vocab) {
    float kth = kth_scaled(row, k);
    lowest = kth > lowest ? kth : lowest;
  }
  return floats[Q_TOP_P] < 1.0f ? nucleus(row, lowest, floats[Q_TOP_P]) : lowest;
}
