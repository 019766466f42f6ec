/* A model's step as a list of operations on buffers that were made once. models/program.py writes the list.
 *
 * The list has three sections. The *body* is every layer up to the last one's attention, and runs for passes of at most
 * Q_PASS tokens. The *tail* is the rest of the last layer and the final norm, for the tokens whose result is wanted
 * alone. The *head* makes logits of those.
 */
#ifndef QUIRE_PROGRAM_H
#define QUIRE_PROGRAM_H

#include "adapt.h"
#include "kernels.h"
#include "route.h"
#include "team.h"

/* Tokens that go through the body at a time: their activations stay in cache, and buffers stay small. */
enum { Q_PASS = 256 };

/* Rows of float32 or of something else; ``stride`` is in bytes. */
typedef struct {
  char *data;
  int64_t stride;
} q_buffer;

/* What an operation does. Those from Q_EMBED on are *row operations*: row i of the result needs nothing but row i of
 * what goes in, so that neighbours in the list are done one after another for each row, with no barrier between. */
typedef enum {
  Q_LINEAR,
  Q_ATTEND,
  Q_GATHER,
  Q_CALL,
  Q_DISPATCH,
  Q_EXPERTS,
  Q_ADAPT,
  Q_EMBED,
  Q_POSITION,
  Q_NORM,
  Q_HEAD_NORM,
  Q_PREPARE,
  Q_SUM,
  Q_CLAMP,
  Q_GROW,
  Q_SOFTCAP,
  Q_ROUTE,
  Q_COMBINE,
  Q_GATED_SUM,
  Q_ACTIVATE,
  Q_GIVE,
  Q_KINDS
} q_kind;

/* ``arguments`` is the struct below that is named like the kind. */
typedef struct {
  int32_t kind;
  const void *arguments;
} q_op;

/* A product, and what becomes of it. */
typedef struct {
  const q_weight *weight;
  q_rows rows;
  q_epilogue to;
} q_linear_op;

/* Rotates queries and keys in place, writes keys and values to the cache, and attends; with ``wanted_only``, as in the
 * last layer, for the tokens alone whose result is wanted. */
typedef struct {
  q_attention layer;
  q_buffer qkv; /* float32: the heads of queries, of keys, of values */
  q_buffer out; /* [heads][head_dim] of out_type */
  const float *cos, *sin; /* [positions][rotary_dim / 2], or NULL */
  int32_t rotary_dim, interleaved, out_type, wanted_only;
} q_attend_op;

/* The rows whose result is wanted, to the rows of the tail: ``bytes`` of each, of two matrices. */
typedef struct {
  q_buffer from[2], to[2];
  int64_t bytes[2];
} q_gather_op;

/* ``call(number, rows)`` on the caller's own thread, while the others wait: what no operation here can do. Returns 0,
 * or something else where it failed. */
typedef struct {
  int32_t (*call)(int32_t number, int32_t rows);
  int32_t number;
} q_call_op;

/* out = scale * the token's row of a table, or of a weight of codes, with its values rounded to ``type``. */
typedef struct {
  const char *table;
  const q_weight *codes; /* or NULL */
  int64_t table_stride;
  int32_t type, size;
  float scale;
  q_buffer out;
} q_embed_op;

/* out += the row of a table for the token's position, ``offset`` further on. */
typedef struct {
  const char *table;
  int64_t table_stride;
  int32_t type, size, offset;
  q_buffer scratch, out;
} q_position_op;

typedef struct {
  q_norm norm;
  q_buffer in, out;
} q_norm_op;

/* A norm of each of ``heads`` heads, in place; ``own``: each has weights of its own. */
typedef struct {
  q_norm norm;
  q_buffer heads_of;
  int32_t heads, own;
} q_head_norm_op;

/* Rows as a product with ``weight`` reads them: ``each`` neighbours for each row of the operation. */
typedef struct {
  const q_weight *weight;
  int32_t each;
  q_buffer in, out;
  float *scales;
  int32_t *sums;
} q_prepare_op;

/* out += scale * in. */
typedef struct {
  int32_t size;
  float scale;
  q_buffer in, out;
} q_sum_op;

/* Into [-limit, limit]. */
typedef struct {
  int32_t size;
  float limit;
  q_buffer rows;
} q_clamp_op;

/* Times the factor of the token's position. */
typedef struct {
  int32_t size;
  const float *factors;
  q_buffer rows;
} q_grow_op;

typedef struct {
  int32_t size;
  float cap;
  q_buffer rows;
} q_softcap_op;

/* ---------------------------------------------------------------- mixtures of experts (experts.c) */

/* Which experts the rows go to. A row has ``top_k`` *slots*, one for each of its experts. Buffers of slots are in the
 * order of the experts, so that those of one expert lie together. */
typedef struct {
  int32_t experts, top_k;
  int32_t *ids;   /* [rows][top_k]: each row's experts, ascending */
  float *weights; /* [rows][top_k] */
  int32_t *slots; /* [rows][top_k]: the places of the row's slots */
  int32_t *ends;  /* [experts]: where each expert's slots end */
} q_routing;

static inline int32_t q_first_slot(const q_routing *routing, int32_t expert) {
  return expert == 0 ? 0 : routing->ends[expert - 1];
}

static inline int32_t q_slots_of(const q_routing *routing, int32_t expert) {
  return routing->ends[expert] - q_first_slot(routing, expert);
}

/* The experts of each row and their weights, from the router's logits. */
typedef struct {
  q_router router;
  q_buffer logits;
  const q_routing *to;
} q_route_op;

/* Places for the slots, and to each the row it belongs to, prepared as products read it. */
typedef struct {
  const q_routing *routing;
  q_rows from, to;
  int64_t bytes;  /* of a row's values */
  int32_t groups; /* scales and sums of a row; 0: it has none */
} q_dispatch_op;

/* The slots of each expert times its own weight. */
typedef struct {
  const q_routing *routing;
  const q_weight *const *weights; /* [experts] */
  q_rows rows;
  q_epilogue to;
} q_experts_op;

/* out = or, with ``add``, += the results of a row's slots times their weights, added up from the lowest expert on. */
typedef struct {
  const q_routing *routing;
  q_buffer results, out;
  int32_t size, add;
} q_combine_op;

/* out += scale * sigmoid(gate) * in; the gate is one value for each row. */
typedef struct {
  int32_t size;
  float scale;
  q_buffer gate, in, out;
} q_gated_sum_op;

/* ---------------------------------------------------------------- adapters (adapt.h) */

/* out += what the rows' adapters make of in. Of ``routing``, NULL or a layer's experts', out has a row for each slot, and
 * in too, unless it is ``dense``. ``tail``: the rows are those of the tail and the head. */
typedef struct {
  const q_adapted *of;
  const q_routing *routing;
  q_buffer in; /* data NULL: the rows of A that the tokens name */
  q_buffer out;
  float *shrunk;
  float scale;
  int32_t in_type, tail, dense;
} q_adapt_op;

/* out = activation(in), or, ``gated``, of in [2 * size] activation(first half) * second half: ``each`` neighbours for
 * each row of the operation. */
typedef struct {
  int32_t kind, gated, size, each, out_type;
  q_buffer in, out;
} q_activate_op;

/* out = the hidden state that the step gives the token. ``zeroed``, or data NULL: as many values that are 0 for a token at
 * position 0. */
typedef struct {
  int32_t size;
  q_buffer out, zeroed;
} q_give_op;

/* Counts the slots of ``rows`` rows and gives them their places. */
void q_sort_by_expert(const q_routing *routing, int32_t rows);
/* These do their operation for one row. */
void q_dispatch_row(const q_dispatch_op *op, int32_t row);
void q_combine_row(const q_combine_op *op, int32_t row);
void q_gated_sum_row(const q_gated_sum_op *op, int32_t row);
/* One expert's slots times the panels [first, last) of its weight. */
void q_expert_product(const q_experts_op *op, int32_t expert, int32_t first, int32_t last);

/* ---------------------------------------------------------------- a step */

/* What a step is: ``count[i]`` tokens of row ``row[i]``, from position ``start[i]`` on. */
typedef struct {
  int32_t rows;
  int32_t outputs;              /* tokens whose result is wanted */
  const int64_t *row, *start, *count; /* [rows] */
  const int64_t *output;        /* [outputs]: numbers of tokens of the step */
  float *hidden;                /* NULL: logits are wanted; else [outputs][hidden_stride], output in ascending order */
  int64_t hidden_stride;        /* values */
  int64_t *nanoseconds;         /* [Q_KINDS], added to, or NULL */
  const float *given;           /* of a head: a hidden state for each token, [tokens][given_stride]; else NULL */
  int64_t given_stride;         /* values */
} q_step;

typedef struct q_program q_program;

/* What a program is made of; the lists stay the caller's. */
typedef struct {
  q_team *team;
  int32_t together; /* a step of so many tokens is for the whole team; a shorter one is the caller's alone */
  const q_op *body, *tail, *head;
  int32_t body_ops, tail_ops, head_ops;
  int32_t block_size, outputs; /* tokens of a block; rows that the tail's buffers have, at least Q_PASS */
  q_buffer result;             /* float32: the tail's, which the head reads */
  int64_t hidden_size;
  const int32_t *tokens, *tables; /* of every row: its token ids, its block table */
  int64_t token_stride, table_stride; /* entries from row to row */
  const int32_t *adapters; /* of every row: the slot of its adapter, -1: none; NULL: no operation adapts */
  int32_t slots;           /* adapters that there are room for */
  int32_t *body_slots, *tail_slots; /* [Q_PASS], [outputs]: of the rows of a section, for calls */
} q_program_parts;

/* NULL where there is no memory. */
Q_EXPORT q_program *q_program_new(const q_program_parts *parts);
Q_EXPORT void q_program_free(q_program *program);
/* How many threads run a step of ``tokens`` tokens. Its result has the same bits with any number. */
Q_EXPORT int32_t q_program_threads(const q_program *program, int64_t tokens);
/* One step. Returns 0, or what the call returned that failed. */
Q_EXPORT int32_t q_program_run(q_program *program, const q_step *step);
/* The head of ``rows`` rows that lie in ``parts.result``; their adapters' slots in ``parts.tail_slots``. */
Q_EXPORT int32_t q_program_head(q_program *program, int32_t rows, int64_t *nanoseconds);
/* Bytes of each struct that kernels/cpu/program.py fills, in the order of program.c, to compare: [count]. */
Q_EXPORT void q_program_sizes(int32_t *sizes, int32_t count);

#endif
