/* Logprobs of a step's rows: what sampler.c shares among threads, and logprobs.c does for one row. */
#ifndef QUIRE_LOGPROBS_H
#define QUIRE_LOGPROBS_H

#include <stdint.h>

#include "choose.h"

typedef struct q_logprobs {
  int32_t count, vocab;
  int32_t k;               /* the best that are told beside the token itself, 0 <= k <= vocab */
  int32_t softmax;         /* whether log-probabilities are told, else logits */
  const float *logits;     /* [slots][stride] */
  int64_t stride;          /* values from row to row */
  const int64_t *slots;    /* [count], of the logits, params and thresholds */
  const int32_t *params;   /* [slots][Q_COLUMNS]; NULL: logits are taken as they are */
  const float *thresholds; /* [slots], with params; NULL: nothing is left out */
  const int64_t *tokens;   /* [count] */
  int32_t *ids;            /* out, [count][k + 1]: the token itself, then the best */
  float *values;           /* out, [count][k + 1] */
  int32_t *ranks;          /* out, [count]: 1 + the number of values strictly greater than the token's */
  float *scratch;          /* of each thread, q_told_size(vocab) values */
} q_logprobs;

/* Values of a list with room for those of all chunks, and a vector more. */
static inline int64_t q_list_size(int32_t vocab) { return ((int64_t)vocab + Q_SPAN - 1) / Q_SPAN * Q_SPAN + 16; }

/* Values of a thread's scratch: two of each chunk, and two lists of values with their ids. */
static inline int64_t q_told_size(int32_t vocab) {
  int64_t list = q_list_size(vocab), chunks = list / Q_SPAN;
  return (2 * chunks + 4 * list + 15) / 16 * 16;
}

#endif
