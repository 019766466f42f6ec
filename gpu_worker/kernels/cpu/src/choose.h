/* The choice of a step's tokens: what sampler.c shares among threads, and choose.c does for one row. */
#ifndef QUIRE_CHOOSE_H
#define QUIRE_CHOOSE_H

#include "kernels.h"

struct q_team; /* team.h */

/* The columns of a row's parameters: kernels/columns.py, which a test compares. */
enum { Q_INV_T = 0, Q_LOG_MIN_P, Q_TOP_P, Q_TOP_K, Q_SEED_LOW, Q_SEED_HIGH, Q_COLUMNS = 16 };
enum { Q_REPETITION = 6, Q_FREQUENCY, Q_PRESENCE, Q_USES };

/* Logits of which the largest is kept, so that later passes skip what lies too low. */
enum { Q_SPAN = 64 };

typedef struct q_choice {
  int32_t slots, vocab;
  int32_t first;            /* the token that a row's first logit is of */
  const float *logits;      /* [slots][stride] */
  int64_t stride;           /* values from row to row */
  const int32_t *params;    /* [rows][Q_COLUMNS]; NULL: every row is greedy */
  const int64_t *rows;      /* [slots], of params; NULL: a slot's own */
  const int64_t *positions; /* [slots], of the tokens that are drawn */
  int32_t *tokens;          /* out, [slots] */
  float *chosen;            /* out, [slots]: the tokens' logits */
  float *values;            /* out or NULL, [slots]: what was largest, logit / temperature + noise, or the logit */
  float *thresholds;        /* out or NULL, [slots]: the lowest logit / temperature that may be drawn */
  float *scratch;           /* of each thread, scratch_size(vocab) values */
} q_choice;

/* Chooses the tokens of all slots. */
Q_EXPORT void q_choose(struct q_team *team, const q_choice *choice);

/* A row that is looked at. ``peaks`` are the largest logits of its chunks. */
typedef struct {
  const float *logits;
  int32_t vocab, chunks;
  float inv_t, top; /* top: the largest logit * inv_t */
  float *peaks;     /* [chunks] */
  float *pool;      /* room for the values of all chunks, and a vector more */
  float *spare;     /* [chunks] */
} q_row;

/* Values of a thread's scratch. */
static inline int64_t q_scratch_size(int32_t vocab) {
  int64_t chunks = ((int64_t)vocab + Q_SPAN - 1) / Q_SPAN;
  return (chunks * (Q_SPAN + 2) + 16 + 15) / 16 * 16;
}

/* A chunk's logits: in place, or where the row ends within it a copy in ``room`` with -infinity after the end. */
static inline const float *q_chunk(const q_row *row, int32_t chunk, float room[Q_SPAN]) {
  int32_t start = chunk * Q_SPAN;
  if (start + Q_SPAN <= row->vocab) return row->logits + start;
  for (int32_t at = 0; at < Q_SPAN; at++)
    room[at] = start + at < row->vocab ? row->logits[start + at] : -__builtin_inff();
  return room;
}

#endif
