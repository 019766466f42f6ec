/* The table of one instruction set. */
#include "kernels.h"

#define Q_TEXT_(x) #x
#define Q_TEXT(x) Q_TEXT_(x)

void Q_NAME(linear)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first,
                    int32_t last);
void Q_NAME(prepare)(const q_weight *weight, const float *x, void *out, float *scales, int32_t *sums);
void Q_NAME(convert_row)(int32_t type, const void *from, const q_weight *to, int32_t place, float *floats,
                         uint32_t *out);
void Q_NAME(attention)(const q_attention *layer, const q_batch *batch, const q_attention_item *item, const float *q,
                       int64_t q_stride, void *out, int64_t out_stride, int32_t out_type);
void Q_NAME(write_kv)(const q_attention *layer, int64_t slot, const float *k, const float *v);
void Q_NAME(norm)(const q_norm *norm, const float *x, float *out);
void Q_NAME(rotate)(float *x, int32_t heads, int32_t head_dim, const float *cos, const float *sin, int32_t rotary_dim,
                    int32_t interleaved);
void Q_NAME(activate)(int32_t kind, const float *x, float *out, int32_t size);
void Q_NAME(gate)(int32_t kind, const float *gate, const float *up, float *out, int32_t size);
void Q_NAME(embed)(int32_t type, const void *row, float scale, float *out, int32_t size);
void Q_NAME(code_row)(const q_weight *weight, int32_t row, int32_t type, float factor, float *out);
void Q_NAME(add)(const float *x, float scale, float *out, int32_t size);
void Q_NAME(softcap)(float *x, float cap, int32_t size);
void Q_NAME(route)(const struct q_router *router, const float *logits, int32_t *ids, float *weights);
void Q_NAME(combine)(const float *rows, int64_t stride, const int32_t *slots, const float *weights, int32_t count,
                     int32_t add, float *out, int32_t size);
void Q_NAME(shrink)(const struct q_adapter *of, int32_t inputs, int32_t x_type, const void *const *x, int32_t rows,
                    int32_t first, int32_t last, float scale, float *const *out);
void Q_NAME(expand)(const struct q_adapter *of, int32_t outputs, const float *const *t, int32_t rows, int32_t first,
                    int32_t last, float *const *out);
void Q_NAME(activated)(int32_t kind, int32_t gated, const float *x, int32_t size, int32_t out_type, void *out);
void Q_NAME(choose)(const struct q_choice *choice, int32_t slot, float *scratch);
void Q_NAME(edit)(const struct q_edit *edit, int32_t slot);
void Q_NAME(logprobs)(const struct q_logprobs *asked, int32_t at, float *scratch);

const q_kernels Q_NAME(q_kernels) = {
    .name = Q_TEXT(Q_VARIANT),
    .linear = Q_NAME(linear),
    .prepare = Q_NAME(prepare),
    .convert_row = Q_NAME(convert_row),
    .attention = Q_NAME(attention),
    .write_kv = Q_NAME(write_kv),
    .norm = Q_NAME(norm),
    .rotate = Q_NAME(rotate),
    .activate = Q_NAME(activate),
    .gate = Q_NAME(gate),
    .embed = Q_NAME(embed),
    .code_row = Q_NAME(code_row),
    .add = Q_NAME(add),
    .softcap = Q_NAME(softcap),
    .route = Q_NAME(route),
    .combine = Q_NAME(combine),
    .shrink = Q_NAME(shrink),
    .expand = Q_NAME(expand),
    .activated = Q_NAME(activated),
    .choose = Q_NAME(choose),
    .edit = Q_NAME(edit),
    .logprobs = Q_NAME(logprobs),
};
