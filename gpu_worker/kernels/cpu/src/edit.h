/* Changes of a step's logits by a table of bits or counts: what sampler.c shares among threads, and edit.c does. */
#ifndef QUIRE_EDIT_H
#define QUIRE_EDIT_H

#include <stdint.h>

/* What a table holds: bits of the tokens that are allowed, or how often a row has each token. */
enum { Q_MASK = 0, Q_PENALISE = 1 };

/* The bit of a count that marks a token of the prompt: kernels/penalties.py's SEEN. */
enum { Q_SEEN = 1 << 30 };

typedef struct q_edit {
  int32_t kind, slots, vocab;
  int32_t uses;          /* the bit of USES (kernels/columns.py) of the rows that are changed */
  float *logits;         /* [slots][stride] */
  int64_t stride;        /* values from row to row */
  const int32_t *table;  /* [rows][table_stride] */
  int64_t table_stride;  /* values from row to row */
  const int64_t *rows;   /* [slots], of the table; NULL: a slot's own */
  const int32_t *params; /* [slots][Q_COLUMNS]; NULL: every row is changed */
} q_edit;

#endif
