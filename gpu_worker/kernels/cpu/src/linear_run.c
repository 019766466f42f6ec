/* One linear layer on a team, for who calls it from Python. */
#include "linear.h"
#include "team.h"

/* The sizes of the structs that Python mirrors (structs.py), in the order of linear.py's _STRUCTS. */
Q_EXPORT void q_linear_sizes(int64_t sizes[5]) {
  sizes[0] = sizeof(q_weight);
  sizes[1] = sizeof(q_rows);
  sizes[2] = sizeof(q_epilogue);
  sizes[3] = sizeof(q_matrix);
  sizes[4] = sizeof(q_codes);
}

typedef struct {
  const q_weight *weight;
  const q_rows *x;
  int32_t rows;
  const q_epilogue *to;
  _Atomic int32_t next;
} linear_task;

static void run_linear(void *argument, int id, int threads) {
  linear_task *task = argument;
  int32_t panels = task->weight->panels;
  for (int32_t first, last; (first = q_take_panels(&task->next, task->weight, task->rows, threads, &last)) < panels;)
    q_kernel->linear(task->weight, task->x, task->rows, task->to, first, last);
}

/* rows [rows, padded inputs] times ``weight``, as ``to`` says. */
Q_EXPORT void q_linear(q_team *team, const q_weight *weight, const q_rows *x, int32_t rows, const q_epilogue *to) {
  linear_task task = {weight, x, rows, to, 0};
  q_team_run(team, run_linear, &task, (q_place){0});
}

typedef struct {
  const q_weight *weight;
  int32_t rows;
  const float *x;
  int64_t x_stride; /* values */
  q_rows out;
  _Atomic int32_t next;
} prepare_task;

static void run_prepare(void *argument, int id, int threads) {
  prepare_task *task = argument;
  int64_t groups = task->weight->groups;
  for (int32_t row; (row = q_take(&task->next, 1)) < task->rows;)
    q_kernel->prepare(task->weight, task->x + row * task->x_stride, (char *)task->out.data + row * task->out.stride,
                      (float *)task->out.scales + row * groups, (int32_t *)task->out.sums + row * groups);
}

/* float32 rows [rows, inputs], ``x_stride`` values apart, as a product with ``weight`` reads them. */
Q_EXPORT void q_prepare(q_team *team, const q_weight *weight, int32_t rows, const float *x, int64_t x_stride,
                        const q_rows *out) {
  prepare_task task = {weight, rows, x, x_stride, *out, 0};
  q_team_run(team, run_prepare, &task, (q_place){0});
}

typedef struct {
  const q_weight *weight;
  const int64_t *ids;
  int32_t rows;
  float *out;
  _Atomic int32_t next;
} code_rows_task;

static void run_code_rows(void *argument, int id, int threads) {
  code_rows_task *task = argument;
  for (int32_t row; (row = q_take(&task->next, 1)) < task->rows;)
    q_kernel->code_row(task->weight, (int32_t)task->ids[row], Q_F32, 1.0f,
                       task->out + (int64_t)row * task->weight->inputs);
}

/* out float32 [rows, inputs]: outputs ``ids`` of a weight of codes that is not gated. */
Q_EXPORT void q_code_rows(q_team *team, const q_weight *weight, const int64_t *ids, int32_t rows, float *out) {
  code_rows_task task = {weight, ids, rows, out, 0};
  q_team_run(team, run_code_rows, &task, (q_place){0});
}
