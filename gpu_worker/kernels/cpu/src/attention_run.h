/* Attention over a team of threads. */
#ifndef QUIRE_ATTENTION_RUN_H
#define QUIRE_ATTENTION_RUN_H

#include "kernels.h"
#include "team.h"

/* Into how many parts each tile and key head goes, so that every one of ``threads`` has work; 1: do not split. Fills in
 * ``splits`` but for partials and arrived, which need q_split_values floats and num_tiles * kv_heads zeros. */
int32_t q_choose_splits(const q_attention *layer, const q_batch *batch, int32_t threads, q_splits *splits);
/* Floats of ``partials`` for a layer. */
int64_t q_split_values(const q_attention *layer, const q_batch *batch, const q_splits *splits);

#endif
