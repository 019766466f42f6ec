/* What the CPU kernels share: how values lie in memory, and the table of functions that each instruction set fills.
 *
 * Every file here but team.c and library.c is compiled once for each instruction set (build.py lists them), with
 * Q_VARIANT as the suffix of its functions; library.c picks a table at run time. One row's result never depends on the
 * rows beside it: sums are made in one order, whatever the number of rows, threads or tiles.
 */
#ifndef QUIRE_KERNELS_H
#define QUIRE_KERNELS_H

#include <stdint.h>

#define Q_EXPORT __attribute__((visibility("default")))
#define Q_PASTE_(a, b) a##_##b
#define Q_PASTE(a, b) Q_PASTE_(a, b)
#define Q_NAME(name) Q_PASTE(name, Q_VARIANT) /* linear -> linear_avx2 */

/* How a number is stored. */
enum { Q_F32 = 0, Q_BF16 = 1, Q_I8 = 2, Q_I4 = 3, Q_CODES = 4, Q_F16 = 5 };

/* Columns of a panel: a weight is kept as panels of so many outputs, each with all inputs of its outputs. */
enum { Q_PANEL = 32 };
/* Values of a row are padded with zeros to a multiple of this many, so that no loop needs a tail. */
enum { Q_ROW_UNIT = 64 };
/* Values of a group of int4 weights, which share a scale. */
enum { Q_GROUP = 128 };
/* Inputs whose codes lie together, and inputs that are added up without a look at where groups end. */
enum { Q_UNIT = 32, Q_RUN = 16 };
/* Most query tokens of one sequence that attention takes at a time. */
enum { Q_TILE = 16 };
/* Keys whose softmax is made by itself. Chunks begin at multiples of this many keys of their sequence, and are merged in
 * order: so attention sums in one order, whoever computes a chunk. */
enum { Q_CHUNK = 256 };
/* The largest head_dim of attention. */
enum { Q_HEAD_DIM = 512 };

/* ---------------------------------------------------------------- linear.c */

/* A number for each group and output: base, or base times fine. */
typedef struct {
  const void *base;        /* [panels][groups >> shift][Q_PANEL], or NULL: there are no such numbers */
  const void *fine;        /* [panels][groups][Q_PANEL], or NULL */
  int64_t base_stride;     /* values from panel to panel; 0: all outputs have the same */
  int64_t fine_stride;
  int32_t base_type;       /* Q_F32, Q_BF16, Q_F16 */
  int32_t fine_signed;     /* fine is int8, else uint8 */
  int32_t base_shift;      /* 31: one for all groups */
  int32_t fine_shift;
} q_numbers;

/* How a code becomes a number: it is one; by a table that all outputs share, of up to 16 entries or of any size; by a
 * table of each output; it is a float of 4 bits exponent and 3 bits mantissa; or, of 4 bits, by a table of bytes without
 * sign that all outputs share, which counts steps. */
enum { Q_NUMBER = 0, Q_SMALL_TABLE = 1, Q_TABLE = 2, Q_OWN_TABLE = 3, Q_E4M3 = 4, Q_STEPS = 5, Q_CODE_KINDS = 6 };

/* What a weight of codes has beside its panels. An input's value is (number - zero) * scale - minimum. */
typedef struct {
  int32_t bits;  /* of a code, 2 to 8 */
  int32_t kind;
  int32_t group; /* inputs, a multiple of Q_RUN; the last group may be shorter */
  int32_t groups;
  float zero;             /* of all groups, where zeros is NULL */
  float step;             /* of Q_STEPS, a power of two: 1 of a table's byte; else 1 */
  const uint8_t *zeros;   /* [panels][groups][Q_PANEL] or NULL */
  q_numbers scales, minima;
  const void *table;      /* float32 [16], [2^bits], or of each output [panels][2^bits][Q_PANEL]; uint8 [4][16], four
                             times the same */
  const int32_t *order;   /* [padded inputs]: which input each is, -1: none; or NULL */
} q_codes;

/* A weight [outputs, inputs], packed by pack (linear.c). */
typedef struct {
  int32_t type;    /* Q_F32, Q_BF16, Q_I8, Q_I4, Q_CODES */
  int32_t outputs; /* as the model has them, without padding */
  int32_t inputs;
  int32_t padded_inputs; /* a multiple of Q_ROW_UNIT (int4: of Q_GROUP; codes: of Q_UNIT) */
  int32_t panels;        /* ceil(outputs / Q_PANEL) */
  int32_t gated;         /* 1: a panel is 16 rows of the gate, then the same 16 of up */
  const void *data;      /* panels, 64-byte aligned */
  const float *scales;   /* int8: of each output, [panels * Q_PANEL]; else NULL */
  const int32_t *offsets;       /* int8: takes back the 128 that was added to activations, [panels * Q_PANEL] */
  const uint16_t *group_scales; /* int4: bfloat16 of each group and output, [panels][groups][Q_PANEL] */
  const float *bias;            /* [panels * Q_PANEL] in the panels' order, or NULL */
  const q_codes *codes;         /* of codes, else NULL */
  int64_t groups; /* scales, and sums, of a row that is prepared for it: int8 1, int4 and codes one a group, else 0 */
} q_weight;

/* Rows of activations as a product with a weight reads them (prepare makes them). */
typedef struct {
  const void *data;     /* float32, bfloat16; int8 + 128 as uint8 for an int8 weight, int8 for an int4 weight; float32
                           times powers of two for codes */
  int64_t stride;       /* bytes from row to row, a multiple of 64 */
  const float *scales;  /* int8: of each row; int4: of each row and group, [rows][groups]; codes: the sums of the
                           groups' values, alike */
  const int32_t *sums;  /* int4: of each row and group, as scales */
} q_rows;

/* What becomes of the sums. */
enum { Q_STORE = 0, Q_ADD = 1, Q_GATED = 2, Q_ACTIVATED = 3 };
typedef struct {
  int32_t kind;       /* Q_STORE: out = scale * (sum + bias); Q_ADD: out += that; Q_ACTIVATED: activation(that);
                         Q_GATED: activation(gate) * up, each being that */
  int32_t out_type;   /* Q_F32, or Q_BF16 where kind is not Q_ADD */
  int32_t activation; /* of Q_GATED and Q_ACTIVATED */
  float scale;
  void *out;          /* [rows, outputs], of Q_GATED [rows, outputs / 2] */
  int64_t stride;     /* bytes from row to row */
} q_epilogue;

/* ---------------------------------------------------------------- elementwise.c */

enum { Q_SILU = 0, Q_GELU, Q_GELU_TANH, Q_RELU, Q_RELU2, Q_QUICK_GELU, Q_SWIGLU_OAI };

enum { Q_RMS = 0, Q_LAYER = 1 };
typedef struct {
  int32_t kind; /* Q_RMS or Q_LAYER */
  int32_t size;
  float eps;
  const float *weight; /* [size], Gemma's 1 + w already added, or NULL */
  const float *bias;   /* [size] or NULL */
} q_norm;

/* ---------------------------------------------------------------- attention.c */

/* Types of a cache of 8 bits, beside Q_F32 and Q_BF16 (kernels/narrow.py defines them). Of Q_KV_INT8 each key and value has
 * a scale of its own, which lie, float32, behind the numbers of their page. */
enum { Q_KV_E4M3 = 16, Q_KV_E5M2 = 17, Q_KV_INT8 = 18 };

/* One layer's attention. The cache is [kv_heads][blocks][head_dim][block_size] for keys, so that a vector holds one
 * dim of many keys, and [kv_heads][blocks][block_size][head_dim] for values. Sums and the softmax are float32; where the
 * instruction set multiplies pairs of bfloat16, queries and weights are rounded to it for a bfloat16 cache. */
typedef struct {
  int32_t heads, kv_heads, head_dim, block_size;
  int32_t window; /* keys that a query sees, itself included; 0: all */
  int32_t cache_type; /* Q_F32, Q_BF16 or one of those above */
  float scale, softcap; /* softcap 0: none */
  float k_scale, v_scale; /* fp8: by what stored numbers are multiplied; else 1 */
  const float *slopes;  /* ALiBi, [heads], or NULL */
  const float *sinks;   /* [heads] or NULL */
  void *keys, *values;
  int64_t head_stride; /* bytes from one key head to the next, in keys and in values */
} q_attention;

/* ``count`` <= Q_TILE tokens of one sequence, one after another. */
typedef struct {
  int32_t token;    /* the first, among those of the batch */
  int32_t count;
  int32_t position; /* of the first, in its sequence */
  int32_t row;      /* of the block tables */
} q_tile;

/* How the chunks of a tile are dealt to several threads, where there are fewer tiles and key heads than threads. */
typedef struct {
  int32_t count;    /* parts of each tile and key head */
  int32_t chunks;   /* most chunks of a tile */
  int32_t tokens;   /* most tokens of a tile */
  float *partials;  /* results of chunks: [tiles][kv_heads][chunks][rows of a tile][q_partial_size] */
  int32_t *arrived; /* parts that are done: [tiles][kv_heads], zeros before and after */
} q_splits;

/* Values of a partial result: a head's sum of values, padded, then its largest score, times log2(e), and its sum of weights. */
static inline int32_t q_partial_size(int32_t head_dim) { return (head_dim + 15) / 16 * 16 + 16; }

/* The tokens of one pass through the model. */
typedef struct {
  int32_t tokens, num_tiles;
  const int32_t *ids;
  const int32_t *positions;
  const int64_t *slots;  /* block * block_size + offset, where its key and value go; -1: nowhere */
  const int32_t *tables; /* block tables */
  int64_t table_stride;  /* entries from row to row */
  const q_tile *tiles;
  const q_splits *splits; /* NULL: each tile is one part */
} q_batch;

/* What attention does at a time: one key head of a tile, or ``part`` of its chunks, one of batch->splits->count (0 without
 * splits). The same thread is about to do ``next_head`` of ``next_tile``, whose keys are fetched meanwhile; -1: none. */
typedef struct {
  int32_t tile, kv_head, part;
  int32_t next_tile, next_head;
} q_attention_item;

/* ---------------------------------------------------------------- route.c, choose.c, edit.c */

struct q_router;   /* route.h */
struct q_choice;   /* choose.h */
struct q_edit;     /* edit.h */
struct q_logprobs; /* logprobs.h */
struct q_adapter;  /* adapt.h */

/* ---------------------------------------------------------------- the table of one instruction set */

typedef struct {
  const char *name;

  /* out of ``rows`` rows, panels [first, last). */
  void (*linear)(const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to, int32_t first, int32_t last);
  /* One row of float32 [inputs], padded with zeros, as ``weight`` reads it, with its [groups] scales and sums. */
  void (*prepare)(const q_weight *weight, const float *x, void *out, float *scales, int32_t *sums);

  /* One row [inputs] of a matrix of ``type`` (Q_F32 or Q_BF16) as ``to`` keeps it, with its scales, which go to
   * ``place`` of all panels' columns. ``floats`` [padded inputs] is scratch. */
  void (*convert_row)(int32_t type, const void *from, const q_weight *to, int32_t place, float *floats, uint32_t *out);

  /* Query heads of an item's key head and tile: out = softmax(scores) values. q is [tokens][q_stride] with the heads of
   * a token one after another, rotated and not scaled; out alike, of out_type. Strides are in bytes. Whoever is the
   * last of a tile's parts writes out. */
  void (*attention)(const q_attention *layer, const q_batch *batch, const q_attention_item *item, const float *q,
                    int64_t q_stride, void *out, int64_t out_stride, int32_t out_type);
  /* One token's keys and values [kv_heads][head_dim] to its slot, rounded to the cache's type. */
  void (*write_kv)(const q_attention *layer, int64_t slot, const float *k, const float *v);

  /* One row; out may be x. */
  void (*norm)(const q_norm *norm, const float *x, float *out);
  /* ``heads`` heads in place; cos, sin [rotary_dim / 2] of the token's position. */
  void (*rotate)(float *x, int32_t heads, int32_t head_dim, const float *cos, const float *sin, int32_t rotary_dim,
                 int32_t interleaved);
  /* out = activation(x), and out = activation(gate) * up, each [size]. */
  void (*activate)(int32_t kind, const float *x, float *out, int32_t size);
  void (*gate)(int32_t kind, const float *gate, const float *up, float *out, int32_t size);
  /* out = scale * row of a table of ``type``. */
  void (*embed)(int32_t type, const void *row, float scale, float *out, int32_t size);
  /* out = factor * output ``row`` of a weight of codes that is not gated, its values rounded to ``type``. */
  void (*code_row)(const q_weight *weight, int32_t row, int32_t type, float factor, float *out);
  /* out += scale * x. */
  void (*add)(const float *x, float scale, float *out, int32_t size);
  /* x = cap * tanh(x / cap). */
  void (*softcap)(float *x, float cap, int32_t size);

  /* The experts of one token by its logits [experts], in ascending order, and their weights: [top_k] each. */
  void (*route)(const struct q_router *router, const float *logits, int32_t *ids, float *weights);
  /* out = or, with ``add``, += the sum of weights[i] * row slots[i] of ``rows``, in order: [count] of ``size`` values.
   * ``stride`` is in bytes. */
  void (*combine)(const float *rows, int64_t stride, const int32_t *slots, const float *weights, int32_t count,
                  int32_t add, float *out, int32_t size);

  /* Of ``rows`` rows [inputs] of ``x_type``, ranks [first, last): out[row][k] = scale * (row k of A times x). */
  void (*shrink)(const struct q_adapter *of, int32_t inputs, int32_t x_type, const void *const *x, int32_t rows,
                 int32_t first, int32_t last, float scale, float *const *out);
  /* out[row] += B t[row], for panels [first, last) of B. */
  void (*expand)(const struct q_adapter *of, int32_t outputs, const float *const *t, int32_t rows, int32_t first,
                 int32_t last, float *const *out);
  /* One row: out = activation(x), or, ``gated``, of x [2 * size] activation(first half) * second half; of out_type. */
  void (*activated)(int32_t kind, int32_t gated, const float *x, int32_t size, int32_t out_type, void *out);

  /* The token of one slot (choose.h). */
  void (*choose)(const struct q_choice *choice, int32_t slot, float *scratch);
  /* Masks or penalties of one slot (edit.h). */
  void (*edit)(const struct q_edit *edit, int32_t slot);
  /* Logprobs of one row (logprobs.h). */
  void (*logprobs)(const struct q_logprobs *asked, int32_t at, float *scratch);
} q_kernels;

extern const q_kernels q_kernels_plain, q_kernels_avx2, q_kernels_avx512, q_kernels_avx512bf16;
/* What library.c chose. */
extern const q_kernels *q_kernel;

#endif
