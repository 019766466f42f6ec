/* Runs a program: each operation by all threads that are there, a barrier, the next one.
 *
 * The items of an operation (panels of a weight, tiles of attention, rows) are taken from a counter, so that a thread
 * that lost its core does not hold the others up, and one that comes late takes part from then on. Nothing is allocated
 * here but in q_program_new. */
#include "program.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "linear.h"

/* What a step does, in this order: fill a pass and run the body for each; where hidden states are wanted, tail and keep
 * behind each body, and else tail and head behind the last. */
enum { FILL, BODY, TAIL, KEEP, HEAD, END };

/* One thread in one step. ``at`` is alike in all threads; its ``phase`` counts the barriers. */
typedef struct {
  q_program *program;
  int id, threads;
  q_place at;
} worker;

/* A token of the pass whose result is wanted, and the row of the tail that it gets. */
typedef struct {
  int32_t token, row;
} wanted_token;

struct q_program {
  q_program_parts parts;
  const q_step *step;
  q_place begin;
  int32_t failed; /* what a call returned; the step runs to its end all the same, without further calls */
  struct {
    _Alignas(64) _Atomic int32_t value;
  } taken[2]; /* items of this phase, and of the next */

  /* The pass. */
  q_batch batch, wanted_batch; /* the second has the tiles of wanted tokens alone */
  int32_t split;             /* whether a sequence has several tiles in it */
  int32_t unwanted;          /* tokens whose result is not wanted */
  int32_t next_row;          /* where the next pass begins: in this row of the step, */
  int64_t next_token;        /* so many tokens into it; */
  int64_t step_tokens;
  int64_t tokens_before;     /* as many tokens of the step came before this pass */
  int32_t num_wanted, next_output;
  wanted_token *wanted;      /* [parts.outputs] */
  int32_t ids[Q_PASS], positions[Q_PASS];
  int64_t slots[Q_PASS];
  q_tile tiles[Q_PASS], wanted_tiles[Q_PASS];
  q_adapted_rows adapted[2]; /* the rows of the body, and of the tail and the head, by their adapters */
};

/* ---------------------------------------------------------------- the tokens of a pass */

/* ``count`` tokens of one row from ``position`` on become tokens, slots and tiles of the pass. */
static void add_tokens(q_program *program, int32_t row, int64_t position, int32_t count) {
  const q_program_parts *parts = &program->parts;
  const int32_t *ids = parts->tokens + row * parts->token_stride;
  const int32_t *table = parts->tables + row * parts->table_stride;
  int32_t first = program->batch.tokens, size = parts->block_size;
  for (int32_t at = 0; at < count; at++) {
    int64_t here = position + at;
    program->ids[first + at] = ids[here];
    program->positions[first + at] = (int32_t)here;
    program->slots[first + at] = (int64_t)table[here / size] * size + here % size;
  }
  for (int32_t at = 0; at < count; at += Q_TILE) {
    int32_t left = count - at;
    program->tiles[program->batch.num_tiles++] =
        (q_tile){first + at, left < Q_TILE ? left : Q_TILE, (int32_t)position + at, row};
  }
  program->split |= count > Q_TILE;
  for (int32_t at = 0; parts->adapters != NULL && at < count; at++) parts->body_slots[first + at] = parts->adapters[row];
  program->batch.tokens += count;
}

/* The next Q_PASS tokens of the step, or those that are left. */
static void fill_pass(q_program *program) {
  const q_step *step = program->step;
  program->tokens_before += program->batch.tokens;
  program->batch.tokens = program->batch.num_tiles = program->split = 0;
  while (program->next_row < step->rows && program->batch.tokens < Q_PASS) {
    int32_t row = program->next_row;
    int64_t left = step->count[row] - program->next_token, room = Q_PASS - program->batch.tokens;
    int32_t count = (int32_t)(left < room ? left : room);
    add_tokens(program, (int32_t)step->row[row], step->start[row] + program->next_token, count);
    program->next_token += count;
    if (count == left) {
      program->next_row++;
      program->next_token = 0;
    }
  }
}

/* The outputs among the tokens of this pass. Logits are made of all outputs at once, behind the last pass, in their own
 * order; hidden states after each pass. */
static void find_wanted(q_program *program) {
  const q_step *step = program->step;
  int64_t first = program->tokens_before, end = first + program->batch.tokens;
  program->num_wanted = 0;
  if (step->hidden == NULL) {
    for (int32_t at = 0; at < step->outputs; at++)
      if (step->output[at] >= first && step->output[at] < end)
        program->wanted[program->num_wanted++] = (wanted_token){(int32_t)(step->output[at] - first), at};
    return;
  }
  for (; program->next_output < step->outputs && step->output[program->next_output] < end; program->next_output++) {
    int32_t row = program->num_wanted++;
    program->wanted[row] = (wanted_token){(int32_t)(step->output[program->next_output] - first), row};
  }
}

/* The rows of this pass and of its tail, by their adapters. Behind the last pass all of a step's outputs are known. */
static void sort_adapted(q_program *program) {
  const q_program_parts *parts = &program->parts;
  if (parts->adapters == NULL) return;
  q_sort_by_slot(&program->adapted[0], parts->body_slots, program->batch.tokens);
  for (int32_t at = 0; at < program->num_wanted; at++)
    parts->tail_slots[program->wanted[at].row] = parts->body_slots[program->wanted[at].token];
  int32_t rows = program->step->hidden == NULL ? program->step->outputs : program->num_wanted;
  int64_t done = program->tokens_before + program->batch.tokens;
  if (program->step->hidden != NULL || done == program->step_tokens)
    q_sort_by_slot(&program->adapted[1], parts->tail_slots, rows);
}

/* The tiles of the wanted tokens: those of the pass, or the parts of them that are wanted. */
static void find_wanted_tiles(q_program *program) {
  uint8_t wanted[Q_PASS] = {0};
  for (int32_t at = 0; at < program->num_wanted; at++) wanted[program->wanted[at].token] = 1;
  int32_t found = 0;
  program->unwanted = program->batch.tokens;
  for (const q_tile *tile = program->tiles; tile < program->tiles + program->batch.num_tiles; tile++)
    for (int32_t at = 0, first; at < tile->count; at++) {
      for (first = at; at < tile->count && wanted[tile->token + at];) at++;
      if (at == first) continue;
      program->wanted_tiles[found++] = (q_tile){tile->token + first, at - first, tile->position + first, tile->row};
      program->unwanted -= at - first;
    }
  program->wanted_batch.num_tiles = found;
}

/* ---------------------------------------------------------------- row operations */

static inline char *row_of(const q_buffer *matrix, int64_t row) { return matrix->data + row * matrix->stride; }

static void embed_row(const q_program *program, const q_embed_op *op, int32_t row) {
  float *out = (float *)row_of(&op->out, row);
  if (op->codes != NULL)
    q_kernel->code_row(op->codes, program->ids[row], op->type, op->scale, out);
  else
    q_kernel->embed(op->type, op->table + program->ids[row] * op->table_stride, op->scale, out, op->size);
}

static void position_row(const q_program *program, const q_position_op *op, int32_t row) {
  const char *from = op->table + (program->positions[row] + (int64_t)op->offset) * op->table_stride;
  float *scratch = (float *)row_of(&op->scratch, row);
  q_kernel->embed(op->type, from, 1.0f, scratch, op->size);
  q_kernel->add(scratch, 1.0f, (float *)row_of(&op->out, row), op->size);
}

static void head_norm_row(const q_head_norm_op *op, int32_t row) {
  float *x = (float *)row_of(&op->heads_of, row);
  q_norm norm = op->norm;
  for (int32_t head = 0; head < op->heads; head++, x += norm.size) {
    q_kernel->norm(&norm, x, x);
    if (op->own && norm.weight != NULL) norm.weight += norm.size;
    if (op->own && norm.bias != NULL) norm.bias += norm.size;
  }
}

static void prepare_row(const q_prepare_op *op, int32_t row) {
  int64_t groups = op->weight->groups;
  for (int64_t at = (int64_t)row * op->each; at < (int64_t)(row + 1) * op->each; at++) {
    float *scale = op->scales == NULL ? NULL : op->scales + at * groups;
    int32_t *sums = op->sums == NULL ? NULL : op->sums + at * groups;
    q_kernel->prepare(op->weight, (const float *)row_of(&op->in, at), row_of(&op->out, at), scale, sums);
  }
}

static void clamp_row(const q_clamp_op *op, int32_t row) {
  float *x = (float *)row_of(&op->rows, row), limit = op->limit;
  for (int32_t at = 0; at < op->size; at++) x[at] = x[at] > limit ? limit : x[at] < -limit ? -limit : x[at];
}

static void grow_row(const q_program *program, const q_grow_op *op, int32_t row) {
  float *x = (float *)row_of(&op->rows, row), factor = op->factors[program->positions[row]];
  for (int32_t at = 0; at < op->size; at++) x[at] *= factor;
}

static void route_row(const q_route_op *op, int32_t row) {
  int64_t first = (int64_t)row * op->to->top_k;
  q_kernel->route(&op->router, (const float *)row_of(&op->logits, row), op->to->ids + first, op->to->weights + first);
}

static void activate_row(const q_activate_op *op, int32_t row) {
  for (int64_t at = (int64_t)row * op->each; at < (int64_t)(row + 1) * op->each; at++)
    q_kernel->activated(op->kind, op->gated, (const float *)row_of(&op->in, at), op->size, op->out_type,
                        row_of(&op->out, at));
}

static void give_row(const q_program *program, const q_give_op *op, int32_t row) {
  const q_step *step = program->step;
  size_t bytes = (size_t)op->size * sizeof(float);
  memcpy(row_of(&op->out, row), step->given + (program->tokens_before + row) * step->given_stride, bytes);
  if (op->zeroed.data != NULL && program->positions[row] == 0) memset(row_of(&op->zeroed, row), 0, bytes);
}

/* One row operation for one row. */
static void run_row(const q_program *program, const q_op *op, int32_t row) {
  const void *of = op->arguments;
  switch (op->kind) {
    case Q_EMBED: embed_row(program, of, row); break;
    case Q_POSITION: position_row(program, of, row); break;
    case Q_HEAD_NORM: head_norm_row(of, row); break;
    case Q_PREPARE: prepare_row(of, row); break;
    case Q_CLAMP: clamp_row(of, row); break;
    case Q_GROW: grow_row(program, of, row); break;
    case Q_ROUTE: route_row(of, row); break;
    case Q_COMBINE: q_combine_row(of, row); break;
    case Q_GATED_SUM: q_gated_sum_row(of, row); break;
    case Q_ACTIVATE: activate_row(of, row); break;
    case Q_GIVE: give_row(program, of, row); break;
    case Q_NORM: {
      const q_norm_op *norm = of;
      q_kernel->norm(&norm->norm, (const float *)row_of(&norm->in, row), (float *)row_of(&norm->out, row));
      break;
    }
    case Q_SUM: {
      const q_sum_op *sum = of;
      q_kernel->add((const float *)row_of(&sum->in, row), sum->scale, (float *)row_of(&sum->out, row), sum->size);
      break;
    }
    case Q_SOFTCAP: {
      const q_softcap_op *cap = of;
      q_kernel->softcap((float *)row_of(&cap->rows, row), cap->cap, cap->size);
      break;
    }
  }
}

/* ---------------------------------------------------------------- phases */

/* Waits for the others; then the next phase's items can be taken, by those who join at ``next`` too. */
static void meet(worker *self, const q_place *next) {
  q_program *program = self->program;
  if (self->threads > 1) q_team_barrier(program->parts.team, next);
  /* Nobody takes from this counter until another barrier is behind everybody. */
  if (self->id == 0) atomic_store_explicit(&program->taken[self->at.phase & 1].value, 0, memory_order_relaxed);
}

/* The next phase of an operation, which begins with those who did the one before. */
static void next_phase(worker *self) {
  meet(self, NULL);
  self->at.phase++;
}

static int32_t take(worker *self, int32_t size) {
  return q_take(&self->program->taken[self->at.phase & 1].value, size);
}

/* Items that are taken at a time: few enough that the threads end together. */
static int32_t share(int32_t items, int threads, int32_t most) {
  int32_t size = threads == 1 ? items : items / (threads * 8);
  return size < 1 ? 1 : threads > 1 && size > most ? most : size;
}

/* ``count`` neighbouring row operations on ``rows`` rows. */
static void run_rows(worker *self, const q_op *ops, int32_t count, int32_t rows) {
  int32_t size = share(rows, self->threads, 16);
  for (int32_t first; (first = take(self, size)) < rows;) {
    int32_t last = first + size < rows ? first + size : rows;
    for (int32_t row = first; row < last; row++)
      for (int32_t at = 0; at < count; at++) run_row(self->program, &ops[at], row);
  }
}

/* A product: each item is some panels of the weight with all rows. Pairs of panels are multiplied together where rows
 * are few (linear.c). */
static void run_linear(worker *self, const q_linear_op *op, int32_t rows) {
  _Atomic int32_t *counter = &self->program->taken[self->at.phase & 1].value;
  int32_t panels = op->weight->panels;
  for (int32_t first, last; (first = q_take_panels(counter, op->weight, rows, self->threads, &last)) < panels;)
    q_kernel->linear(op->weight, &op->rows, rows, &op->to, first, last);
}

/* Rotates the queries and the key of one key head, for the tokens of one tile, and writes key and value. */
static void write_tile(const q_program *program, const q_attend_op *op, const q_tile *tile, int32_t kv_head) {
  const q_attention *layer = &op->layer;
  int32_t dim = layer->head_dim, group = layer->heads / layer->kv_heads, half = op->rotary_dim / 2;
  q_attention head = *layer;
  head.kv_heads = 1;
  head.keys = (char *)layer->keys + kv_head * layer->head_stride;
  head.values = (char *)layer->values + kv_head * layer->head_stride;
  for (int32_t token = tile->token; token < tile->token + tile->count; token++) {
    float *q = (float *)row_of(&op->qkv, token) + (int64_t)kv_head * group * dim;
    float *k = (float *)row_of(&op->qkv, token) + (int64_t)(layer->heads + kv_head) * dim;
    if (op->cos != NULL) {
      int64_t at = (int64_t)program->positions[token] * half;
      q_kernel->rotate(q, group, dim, op->cos + at, op->sin + at, op->rotary_dim, op->interleaved);
      q_kernel->rotate(k, 1, dim, op->cos + at, op->sin + at, op->rotary_dim, op->interleaved);
    }
    q_kernel->write_kv(&head, program->slots[token], k, k + (int64_t)layer->kv_heads * dim);
  }
}

/* Item number ``item`` of a batch; ``next`` is likely to be the thread's next. The last tiles of a prompt see most keys:
 * first come those that take longest, so that the threads end together. */
static q_attention_item item_of(const q_batch *batch, int32_t heads, int32_t item, int32_t next) {
  int32_t last = batch->num_tiles - 1, items = batch->num_tiles * heads;
  return (q_attention_item){last - item / heads, item % heads, 0, next < items ? last - next / heads : -1, next % heads};
}

/* Attention: each item is a tile and a key head with its queries. An item writes its own keys first. Where a sequence
 * has several tiles the later ones read the keys of the earlier, and all are written before any is read; so they are
 * where not every token attends. */
static void run_attend(worker *self, const q_attend_op *op) {
  const q_program *program = self->program;
  const q_batch *batch = op->wanted_only ? &program->wanted_batch : &program->batch;
  int32_t heads = op->layer.kv_heads, written = program->batch.num_tiles * heads, items = batch->num_tiles * heads;
  int write_first = program->split || (op->wanted_only && program->unwanted);
  if (write_first) {
    for (int32_t item; (item = take(self, 1)) < written;)
      write_tile(program, op, &program->tiles[item / heads], item % heads);
    next_phase(self);
  }
  /* Where there are many tiles a thread takes all heads of one, and knows what it reads next. */
  int32_t size = batch->num_tiles < 4 * self->threads ? 1 : heads;
  for (int32_t first; (first = take(self, size)) < items;) {
    for (int32_t item = first, last = first + size; item < last; item++) {
      q_attention_item own = item_of(batch, heads, item, item + 1 < last ? item + 1 : first + size * self->threads);
      if (!write_first) write_tile(program, op, &batch->tiles[own.tile], own.kv_head);
      q_kernel->attention(&op->layer, batch, &own, (const float *)op->qkv.data, op->qkv.stride, op->out.data,
                          op->out.stride, op->out_type);
    }
  }
}

static void run_gather(worker *self, const q_gather_op *op) {
  const q_program *program = self->program;
  for (int32_t item; (item = take(self, 1)) < program->num_wanted;) {
    const wanted_token *wanted = &program->wanted[item];
    for (int which = 0; which < 2; which++)
      memcpy(row_of(&op->to[which], wanted->row), row_of(&op->from[which], wanted->token), (size_t)op->bytes[which]);
  }
}

/* Experts' inputs: one thread sorts, all copy. */
static void run_dispatch(worker *self, const q_dispatch_op *op, int32_t rows) {
  if (self->id == 0) q_sort_by_expert(op->routing, rows);
  next_phase(self);
  int32_t size = share(rows, self->threads, 16);
  for (int32_t first; (first = take(self, size)) < rows;)
    for (int32_t row = first; row < first + size && row < rows; row++) q_dispatch_row(op, row);
}

/* Experts' products: each item is some panels of one expert with all its slots. The items are numbered through all
 * experts that have slots, and every thread counts along. */
static void run_experts(worker *self, const q_experts_op *op) {
  int32_t item = take(self, 1), before = 0;
  for (int32_t expert = 0; expert < op->routing->experts; expert++) {
    int32_t slots = q_slots_of(op->routing, expert), panels = op->weights[expert]->panels;
    if (slots == 0) continue;
    int32_t size = q_linear_share(op->weights[expert], slots), items = (panels + size - 1) / size;
    for (; item < before + items; item = take(self, 1)) {
      int32_t first = (item - before) * size;
      q_expert_product(op, expert, first, least(first + size, panels));
    }
    before += items;
  }
}

/* What the adapters of the rows add to a product: each item is some ranks, then some outputs, of a few rows. */
static void run_adapt(worker *self, const q_adapt_op *op) {
  const q_routing *routing = op->routing;
  q_adapt_work work = {
      .of = op->of, .rows = &self->program->adapted[op->tail], .in = op->in.data, .in_stride = op->in.stride,
      .ids = self->program->ids, .out = op->out.data, .out_stride = op->out.stride, .shrunk = op->shrunk,
      .scale = op->scale, .in_type = op->in_type, .dense = op->dense,
  };
  if (routing != NULL) work.top_k = routing->top_k, work.places = routing->slots, work.experts = routing->ids;
  int32_t items = q_shrink_items(&work, self->threads);
  if (items == 0 || op->of->most_rank == 0) return; /* as all threads find */
  for (int32_t item; (item = take(self, 1)) < items;) q_shrink_item(&work, self->threads, item);
  next_phase(self);
  items = q_expand_items(&work, self->threads);
  for (int32_t item; (item = take(self, 1)) < items;) q_expand_item(&work, self->threads, item);
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Operation ``at`` of a section for ``rows`` rows, with those behind it that go together. Returns where these end. */
static int32_t run_operations(worker *self, const q_op *ops, int32_t count, int32_t at, int32_t rows) {
  const void *of = ops[at].arguments;
  int32_t end = at + 1;
  switch (ops[at].kind) {
    case Q_LINEAR: run_linear(self, of, rows); break;
    case Q_ATTEND: run_attend(self, of); break;
    case Q_GATHER: run_gather(self, of); break;
    case Q_DISPATCH: run_dispatch(self, of, rows); break;
    case Q_EXPERTS: run_experts(self, of); break;
    case Q_ADAPT: run_adapt(self, of); break;
    case Q_CALL: {
      const q_call_op *call = of;
      q_program *program = self->program;
      if (self->id == 0 && !program->failed) program->failed = call->call(call->number, rows);
      break;
    }
    default:
      while (end < count && ops[end].kind >= Q_EMBED) end++;
      run_rows(self, ops + at, end - at, rows);
  }
  return end;
}

/* ---------------------------------------------------------------- a step */

typedef struct {
  const q_op *ops; /* NULL: it is what one thread does at once */
  int32_t count;
} section;

static section section_of(const q_program *program, int32_t which) {
  const q_program_parts *parts = &program->parts;
  switch (which) {
    case BODY: return (section){parts->body, parts->body_ops};
    case TAIL: return (section){parts->tail, parts->tail_ops};
    case HEAD: return (section){parts->head, parts->head_ops};
    default: return (section){NULL, 1};
  }
}

/* The rows that the operations of a section are for. */
static int32_t rows_of(const q_program *program, int32_t which) {
  if (which == BODY) return program->batch.tokens;
  return which == TAIL && program->step->hidden != NULL ? program->num_wanted : program->step->outputs;
}

/* The tokens of the next pass, by one thread. */
static void begin_pass(q_program *program) {
  fill_pass(program);
  find_wanted(program);
  find_wanted_tiles(program);
  sort_adapted(program);
}

/* The hidden states of a pass to where they are wanted, by one thread. */
static void keep_hidden(const q_program *program) {
  const q_step *step = program->step;
  int32_t rows = program->num_wanted, first = program->next_output - rows;
  for (int32_t row = 0; row < rows; row++)
    memcpy(step->hidden + (first + row) * step->hidden_stride, row_of(&program->parts.result, row),
           (size_t)program->parts.hidden_size * sizeof(float));
}

/* The start of the section after ``at``'s. */
static q_place next_section(const q_program *program, q_place at) {
  const q_step *step = program->step;
  int hidden = step->hidden != NULL;
  at.op = 0;
  switch (at.section) {
    case FILL: at.section = BODY; return at;
    case TAIL: at.section = hidden ? KEEP : HEAD; return at;
    case HEAD: at.section = END; return at;
    case BODY:
      if (hidden && program->num_wanted) {
        at.section = TAIL;
        return at;
      }
  }
  int more = (int64_t)(at.pass + 1) * Q_PASS < program->step_tokens;
  at.pass += more;
  at.section = more ? FILL : hidden || !step->outputs ? END : TAIL;
  return at;
}

/* Where a step goes on when the operations of ``at``'s section before ``end`` are done. To be asked before all have met,
 * for then the next pass may be filled. */
static q_place place_after(const q_program *program, q_place at, int32_t end) {
  at.op = end;
  at.phase++;
  while (at.section != END && at.op >= section_of(program, at.section).count) at = next_section(program, at);
  return at;
}

/* A thread's part of a step, from where it joins. */
static void run_step(void *argument, int id, int threads) {
  q_program *program = argument;
  int64_t *nanoseconds = id == 0 ? program->step->nanoseconds : NULL;
  worker self = {program, id, threads, id == 0 ? program->begin : q_team_place(program->parts.team)};
  while (self.at.section != END) {
    section own = section_of(program, self.at.section);
    int64_t before = own.ops != NULL && nanoseconds != NULL ? now() : 0;
    int32_t at = self.at.op, end = at + 1;
    if (own.ops != NULL)
      end = run_operations(&self, own.ops, own.count, at, rows_of(program, self.at.section));
    else if (id == 0 && self.at.section == FILL)
      begin_pass(program);
    else if (id == 0)
      keep_hidden(program);
    q_place next = place_after(program, self.at, end);
    if (next.section != END) meet(&self, &next); /* there the team meets */
    self.at = next;
    if (before) nanoseconds[own.ops[at].kind] += now() - before;
  }
}

int32_t q_program_threads(const q_program *program, int64_t tokens) {
  return tokens < program->parts.together ? 1 : q_team_threads(program->parts.team);
}

/* The step from ``section`` on, on as many threads as ``tokens`` tokens are worth. */
static void run_from(q_program *program, int32_t section, int64_t tokens) {
  program->begin = (q_place){.section = section};
  program->failed = 0;
  atomic_store(&program->taken[0].value, 0);
  atomic_store(&program->taken[1].value, 0);
  if (q_program_threads(program, tokens) == 1)
    run_step(program, 0, 1);
  else
    q_team_run(program->parts.team, run_step, program, program->begin);
}

/* The tokens of a step. */
static int64_t tokens_of(const q_step *step) {
  int64_t tokens = 0;
  for (int32_t row = 0; row < step->rows; row++) tokens += step->count[row];
  return tokens;
}

int32_t q_program_run(q_program *program, const q_step *step) {
  program->step = step;
  program->next_row = program->next_output = program->batch.tokens = 0;
  program->next_token = program->tokens_before = 0;
  program->step_tokens = tokens_of(step);
  if (program->step_tokens == 0) return 0;
  run_from(program, FILL, program->step_tokens);
  return program->failed;
}

int32_t q_program_head(q_program *program, int32_t rows, int64_t *nanoseconds) {
  q_step step = {.outputs = rows, .nanoseconds = nanoseconds};
  program->step = &step;
  if (program->parts.adapters != NULL) q_sort_by_slot(&program->adapted[1], program->parts.tail_slots, rows);
  run_from(program, HEAD, rows);
  return program->failed;
}

q_program *q_program_new(const q_program_parts *parts) {
  q_program *program = aligned_alloc(64, (sizeof *program + 63) / 64 * 64);
  if (program == NULL) return NULL;
  memset(program, 0, sizeof *program);
  program->parts = *parts;
  program->wanted = calloc((size_t)parts->outputs, sizeof *program->wanted);
  int failed = program->wanted == NULL;
  for (int section = 0; parts->adapters != NULL && section < 2; section++) {
    q_adapted_rows *rows = &program->adapted[section];
    rows->slots = parts->slots;
    rows->tiles = calloc((size_t)(section ? parts->outputs : Q_PASS), sizeof *rows->tiles);
    rows->last = calloc((size_t)parts->slots, sizeof *rows->last);
    failed |= rows->tiles == NULL || rows->last == NULL;
  }
  if (failed) {
    q_program_free(program);
    return NULL;
  }
  program->batch = (q_batch){
      .ids = program->ids,
      .positions = program->positions,
      .slots = program->slots,
      .tables = parts->tables,
      .table_stride = parts->table_stride,
      .tiles = program->tiles,
  };
  program->wanted_batch = program->batch;
  program->wanted_batch.tiles = program->wanted_tiles;
  return program;
}

void q_program_free(q_program *program) {
  for (int section = 0; section < 2; section++) {
    free(program->adapted[section].tiles);
    free(program->adapted[section].last);
  }
  free(program->wanted);
  free(program);
}

void q_program_sizes(int32_t *sizes, int32_t count) {
  const int32_t found[] = {
      sizeof(q_op), sizeof(q_linear_op), sizeof(q_attend_op), sizeof(q_gather_op), sizeof(q_call_op),
      sizeof(q_dispatch_op), sizeof(q_experts_op), sizeof(q_adapt_op), sizeof(q_embed_op), sizeof(q_position_op), sizeof(q_norm_op),
      sizeof(q_head_norm_op), sizeof(q_prepare_op), sizeof(q_sum_op), sizeof(q_clamp_op), sizeof(q_grow_op),
      sizeof(q_softcap_op), sizeof(q_route_op), sizeof(q_combine_op), sizeof(q_gated_sum_op), sizeof(q_activate_op), sizeof(q_give_op),
      sizeof(q_routing),
      sizeof(q_step), sizeof(q_program_parts),
  };
  for (int32_t at = 0; at < count && at < (int32_t)(sizeof found / sizeof *found); at++) sizes[at] = found[at];
}
