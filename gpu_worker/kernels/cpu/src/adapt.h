/* LoRA: what an adapter adds to a product, y += scale * B (A x), in a program and by itself (adapt.c, adapt_run.c).
 *
 * The twin in torch is lora/slots.py. */
#ifndef QUIRE_ADAPT_H
#define QUIRE_ADAPT_H

#include "kernels.h"
#include "team.h"

/* Outputs of a panel of B. */
enum { Q_ADAPTER_PANEL = 64 };
/* Most rows of a tile. */
enum { Q_ADAPTED_ROWS = 4 };

/* One adapter's part of one product, or of one of the modules that lie side by side in it. */
typedef struct q_adapter {
  const void *a; /* [rank][inputs]; where rows are looked up, [inputs][rank] */
  const void *b; /* [panels][rank][Q_ADAPTER_PANEL], zeros behind the last output */
  float scale;
  int32_t rank; /* 0: it leaves this product alone */
  int32_t type; /* Q_F32 or Q_BF16 */
} q_adapter;

/* The outputs of a product that one module has. */
typedef struct {
  int32_t first, outputs;
} q_piece;

/* A product to which adapters add. */
typedef struct {
  int32_t pieces, experts, inputs;
  int32_t most_rank;         /* of the adapters that are there now */
  const q_piece *piece;      /* [pieces] */
  const q_adapter *adapters; /* [slots][experts][pieces]; experts is 1 where there are none */
} q_adapted;

/* Rows with the adapter of ``slot``. */
typedef struct {
  int32_t slot, count;
  int32_t row[Q_ADAPTED_ROWS];
} q_adapted_tile;

/* The rows that have an adapter, those of one together. */
typedef struct {
  int32_t count, slots;
  q_adapted_tile *tiles; /* as many as there may be rows */
  int32_t *last;         /* [slots]: a slot's unfinished tile */
} q_adapted_rows;

/* A product's adapters at work on ``rows`` of a buffer. */
typedef struct {
  const q_adapted *of;
  const q_adapted_rows *rows;
  const char *in; /* rows of in_type, or NULL: rows of A are looked up by ``ids`` */
  int64_t in_stride; /* bytes */
  const int32_t *ids;
  char *out; /* rows of float32 */
  int64_t out_stride;
  float *shrunk; /* [rows][pieces * most_rank], of each row's slots where there are experts */
  float scale;
  int32_t in_type;
  /* Of experts: a row has top_k places in the buffers, of these experts; else top_k is 0. dense: in has the rows
   * themselves. */
  int32_t top_k, dense;
  const int32_t *places, *experts;
} q_adapt_work;

/* How many items the two halves of the work are for ``threads`` threads, and one of them. All of the first half come
 * before any of the second. */
int32_t q_shrink_items(const q_adapt_work *work, int threads);
void q_shrink_item(const q_adapt_work *work, int threads, int32_t item);
int32_t q_expand_items(const q_adapt_work *work, int threads);
void q_expand_item(const q_adapt_work *work, int threads, int32_t item);

/* Sorts rows [0, count) by their slots; -1 is none. */
void q_sort_by_slot(q_adapted_rows *to, const int32_t *slot, int32_t count);

#endif
