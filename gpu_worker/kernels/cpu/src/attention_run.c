/* One layer's attention, and its writes to the cache, over a team of threads: for layers that run outside a program. */
#include "attention_run.h"

#include <stdlib.h>
#include <string.h>

/* The chunks of keys that a tile sees. */
static int32_t chunks_of(const q_attention *layer, const q_tile *tile) {
  int32_t oldest = layer->window ? tile->position - layer->window + 1 : 0;
  return (tile->position + tile->count - 1) / Q_CHUNK + 1 - (oldest > 0 ? oldest / Q_CHUNK : 0);
}

int32_t q_choose_splits(const q_attention *layer, const q_batch *batch, int32_t threads, q_splits *splits) {
  *splits = (q_splits){.count = 1};
  int32_t items = batch->num_tiles * layer->kv_heads;
  if (items == 0 || items >= threads) return 1;
  for (int32_t tile = 0; tile < batch->num_tiles; tile++) {
    int32_t chunks = chunks_of(layer, batch->tiles + tile), tokens = batch->tiles[tile].count;
    if (chunks > splits->chunks) splits->chunks = chunks;
    if (tokens > splits->tokens) splits->tokens = tokens;
  }
  /* Two parts a thread, so that one that ends early takes another. */
  int32_t wanted = (2 * threads + items - 1) / items;
  splits->count = wanted < splits->chunks ? wanted : splits->chunks;
  return splits->count;
}

int64_t q_split_values(const q_attention *layer, const q_batch *batch, const q_splits *splits) {
  int64_t rows = (int64_t)splits->tokens * (layer->heads / layer->kv_heads);
  return (int64_t)batch->num_tiles * layer->kv_heads * splits->chunks * rows * q_partial_size(layer->head_dim);
}

typedef struct {
  const q_attention *layer;
  const q_batch *batch;
  const float *q;
  void *out;
  int64_t q_stride, out_stride;
  int32_t out_type, parts;
  _Atomic int32_t next;
} attention_task;

static void attention_main(void *argument, int id, int threads) {
  (void)id;
  attention_task *of = argument;
  int32_t heads = of->layer->kv_heads, count = of->batch->num_tiles * heads * of->parts;
  for (int32_t item; (item = q_take(&of->next, 1)) < count;) {
    int32_t next = item + threads, known = of->parts == 1 && next < count;
    q_attention_item own = {item / of->parts / heads, item / of->parts % heads, item % of->parts,
                            known ? next / heads : -1, next % heads};
    q_kernel->attention(of->layer, of->batch, &own, of->q, of->q_stride, of->out, of->out_stride, of->out_type);
  }
}

/* Every tile of the batch; q and out as in q_kernels.attention. Returns 0, or -1 where there is no memory. */
Q_EXPORT int32_t q_attention_run(q_team *team, const q_attention *layer, const q_batch *batch, const float *q,
                                 int64_t q_stride, void *out, int64_t out_stride, int32_t out_type) {
  q_splits splits;
  q_batch split = *batch;
  int32_t parts = q_choose_splits(layer, batch, q_team_threads(team), &splits);
  if (parts > 1) {
    size_t items = (size_t)batch->num_tiles * (size_t)layer->kv_heads;
    splits.partials = malloc((size_t)q_split_values(layer, batch, &splits) * sizeof(float));
    splits.arrived = calloc(items, sizeof(int32_t));
    if (splits.partials == NULL || splits.arrived == NULL) {
      free(splits.partials), free(splits.arrived);
      return -1;
    }
    split.splits = &splits;
  }
  attention_task task = {layer, &split, q, out, q_stride, out_stride, out_type, parts, 0};
  q_team_run(team, attention_main, &task, (q_place){0});
  if (parts > 1) free(splits.partials), free(splits.arrived);
  return 0;
}

typedef struct {
  const q_attention *layer;
  const int64_t *slots;
  const float *k, *v;
  int64_t k_stride, v_stride;
  int32_t tokens;
  _Atomic int32_t next;
} write_task;

static void write_main(void *argument, int id, int threads) {
  enum { TOKENS = 32 };
  (void)id, (void)threads;
  write_task *of = argument;
  for (int32_t first; (first = q_take(&of->next, TOKENS)) < of->tokens;)
    for (int32_t token = first; token < first + TOKENS && token < of->tokens; token++) {
      const float *k = (const float *)((const char *)of->k + token * of->k_stride);
      const float *v = (const float *)((const char *)of->v + token * of->v_stride);
      q_kernel->write_kv(of->layer, of->slots[token], k, v);
    }
}

/* Keys and values [tokens][kv_heads][head_dim], strides in bytes, to their slots. */
Q_EXPORT void q_write_run(q_team *team, const q_attention *layer, int32_t tokens, const int64_t *slots, const float *k,
                          int64_t k_stride, const float *v, int64_t v_stride) {
  write_task task = {layer, slots, k, v, k_stride, v_stride, tokens, 0};
  q_team_run(team, write_main, &task, (q_place){0});
}

/* Bytes of a struct that Python mirrors, by place: q_attention, q_tile, q_batch. */
Q_EXPORT int32_t q_attention_size(int32_t which) {
  static const size_t sizes[] = {sizeof(q_attention), sizeof(q_tile), sizeof(q_batch)};
  return (int32_t)sizes[which];
}
