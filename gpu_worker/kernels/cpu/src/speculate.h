/* Drafted tokens and their verification, each in one call: between two passes of a small model nothing returns to Python. */
#ifndef QUIRE_SPECULATE_H
#define QUIRE_SPECULATE_H

#include "choose.h"
#include "program.h"

/* Rows that a model drafts for, one token after another, each from a pass over the token before it. */
typedef struct {
  q_step first;          /* the first pass; its outputs are the last tokens of its rows */
  q_choice *choice;      /* draws from the logits of ``first.rows`` outputs, at ``positions`` */
  q_team *team;          /* of choices that are worth more threads than one */
  const int64_t *wanted; /* [rows], falling: how many drafts of each row */
  int64_t *positions;    /* [rows]: where the first drafts go; counted on */
  int64_t *starts;       /* [rows], scratch */
  const int64_t *ones, *places; /* [rows]: 1, 1, ...; 0, 1, ... */
  int32_t *tokens;       /* of every row, where drafts are written */
  int64_t token_stride;  /* entries from row to row */
  /* Of a head, which is given hidden states, and at each position reads the token behind it. */
  int32_t head;
  int32_t own;               /* tokens of its vocabulary, or 0: it is the target's */
  const int64_t *vocabulary; /* [own]: the target's ids */
  const float *logits;       /* [rows][own] as the program makes them; choice->logits is -infinity but for those ids */
  q_buffer result;           /* hidden states that a pass makes */
  float *given;              /* [rows][hidden_size], scratch */
  int64_t hidden_size;
} q_draft;

/* Rows that are run over the last token that each has and the drafts behind it. */
typedef struct {
  q_step step;       /* every token of it is an output */
  q_choice *choice;  /* draws from the logits of these; its rows and positions are filled here */
  q_team *team;
  int64_t *rows, *positions; /* [outputs]: what choice points to */
  int32_t *tokens;   /* of every row: drafts are read here, and the token that is drawn behind the last right one is written */
  int64_t token_stride;
  int32_t *right;    /* out, [rows]: how many drafts of each are the tokens that are drawn */
} q_verification;

/* Returns 0, or what a call returned that failed. */
Q_EXPORT int32_t q_draft_tokens(q_program *program, const q_draft *draft);
/* The same. -1: some token cannot be drawn; the logits are there, and nothing was written. */
Q_EXPORT int32_t q_verify_drafts(q_program *program, const q_verification *verification);
/* Bytes of q_choice, q_draft and q_verification, to compare. */
Q_EXPORT void q_speculation_sizes(int32_t sizes[3]);

#endif
