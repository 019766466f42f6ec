/* How a router's logits become the experts of a token. The twin in torch is layers/moe.py's ``route``. */
#ifndef QUIRE_ROUTE_H
#define QUIRE_ROUTE_H

#include "kernels.h"

/* The most experts of a layer. */
enum { Q_MOST_EXPERTS = 512 };

/* What scores are: softmax of all logits, sigmoids, or the logits, with a softmax of the chosen ones as weights. */
enum { Q_SOFTMAX = 0, Q_SIGMOID, Q_TOPK_SOFTMAX };

typedef struct q_router {
  int32_t experts, top_k;
  int32_t scoring;
  int32_t renormalise;         /* 1: a token's weights are divided by their sum */
  int32_t groups, topk_groups; /* groups 0: none; else experts are chosen from the best topk_groups of so many groups */
  float scale;                 /* factor of the weights */
  const float *correction;     /* [experts], added to the scores for the choice alone, or NULL */
} q_router;

#endif
