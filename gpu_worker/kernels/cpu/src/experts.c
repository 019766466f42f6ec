/* Experts in a program: tokens in the order of their experts, and each expert's product. */
#include <math.h>
#include <string.h>

#include "program.h"

void q_sort_by_expert(const q_routing *routing, int32_t rows) {
  int32_t count = rows * routing->top_k, *ends = routing->ends;
  memset(ends, 0, (size_t)routing->experts * sizeof *ends);
  for (int32_t at = 0; at < count; at++) ends[routing->ids[at]]++;
  for (int32_t expert = 0, start = 0; expert < routing->experts; expert++) {
    int32_t own = ends[expert];
    ends[expert] = start; /* each of its slots moves this on, to its end at last */
    start += own;
  }
  for (int32_t at = 0; at < count; at++) routing->slots[at] = ends[routing->ids[at]]++;
}

void q_dispatch_row(const q_dispatch_op *op, int32_t row) {
  const int32_t *slots = op->routing->slots + (int64_t)row * op->routing->top_k;
  const q_rows *from = &op->from, *to = &op->to;
  int64_t groups = op->groups;
  for (int32_t rank = 0; rank < op->routing->top_k; rank++) {
    int64_t slot = slots[rank];
    memcpy((char *)to->data + slot * to->stride, (const char *)from->data + row * from->stride, (size_t)op->bytes);
    if (groups == 0) continue;
    memcpy((float *)to->scales + slot * groups, from->scales + row * groups, (size_t)groups * sizeof(float));
    if (from->sums == NULL) continue;
    memcpy((int32_t *)to->sums + slot * groups, from->sums + row * groups, (size_t)groups * sizeof(int32_t));
  }
}

void q_expert_product(const q_experts_op *op, int32_t expert, int32_t first, int32_t last) {
  const q_weight *weight = op->weights[expert];
  int64_t start = q_first_slot(op->routing, expert);
  int64_t groups = weight->groups;
  q_rows x = op->rows;
  x.data = (const char *)x.data + start * x.stride;
  if (x.scales != NULL) x.scales += start * groups;
  if (x.sums != NULL) x.sums += start * groups;
  q_epilogue to = op->to;
  to.out = (char *)to.out + start * to.stride;
  q_kernel->linear(weight, &x, q_slots_of(op->routing, expert), &to, first, last);
}

void q_combine_row(const q_combine_op *op, int32_t row) {
  int64_t first = (int64_t)row * op->routing->top_k;
  q_kernel->combine((const float *)op->results.data, op->results.stride, op->routing->slots + first,
                    op->routing->weights + first, op->routing->top_k, op->add,
                    (float *)(op->out.data + row * op->out.stride), op->size);
}

void q_gated_sum_row(const q_gated_sum_op *op, int32_t row) {
  float gate = *(const float *)(op->gate.data + row * op->gate.stride);
  q_kernel->add((const float *)(op->in.data + row * op->in.stride), op->scale / (1.0f + expf(-gate)),
                (float *)(op->out.data + row * op->out.stride), op->size);
}
