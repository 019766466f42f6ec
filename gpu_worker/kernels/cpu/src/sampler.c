/* Changes a step's logits, chooses its tokens and tells their logprobs: rows are shared by a team of threads, one at
 * a time. */
#include <stdatomic.h>

#include "choose.h"
#include "edit.h"
#include "kernels.h"
#include "logprobs.h"
#include "team.h"

/* Fewer logits than these are looked at before another thread has woken up. */
enum { ALONE = 1 << 16 };

typedef struct {
  const q_choice *choice;
  _Atomic int32_t next;
} q_shared_choice;

static void choose_some(void *argument, int id, int threads) {
  (void)threads;
  q_shared_choice *shared = argument;
  const q_choice *choice = shared->choice;
  float *scratch = choice->scratch + id * q_scratch_size(choice->vocab);
  for (int32_t slot; (slot = q_take(&shared->next, 1)) < choice->slots;) q_kernel->choose(choice, slot, scratch);
}

/* Values of the scratch of each thread of a q_choice. */
Q_EXPORT int64_t q_choose_scratch(int32_t vocab) { return q_scratch_size(vocab); }

void q_choose(q_team *team, const q_choice *choice) {
  q_shared_choice shared = {.choice = choice};
  if (choice->slots == 1 || (int64_t)choice->slots * choice->vocab < ALONE)
    choose_some(&shared, 0, 1);
  else
    q_team_run(team, choose_some, &shared, (q_place){0});
}

typedef struct {
  const q_edit *edit;
  _Atomic int32_t next;
} q_shared_edit;

static void edit_some(void *argument, int id, int threads) {
  (void)id, (void)threads;
  q_shared_edit *shared = argument;
  for (int32_t slot; (slot = q_take(&shared->next, 1)) < shared->edit->slots;) q_kernel->edit(shared->edit, slot);
}

/* Changes the logits of all slots. */
Q_EXPORT void q_edit_logits(q_team *team, const q_edit *edit) {
  q_shared_edit shared = {.edit = edit};
  if (edit->slots == 1 || (int64_t)edit->slots * edit->vocab < ALONE)
    edit_some(&shared, 0, 1);
  else
    q_team_run(team, edit_some, &shared, (q_place){0});
}

typedef struct {
  const q_logprobs *asked;
  _Atomic int32_t next;
} q_shared_logprobs;

static void tell_some(void *argument, int id, int threads) {
  (void)threads;
  q_shared_logprobs *shared = argument;
  const q_logprobs *asked = shared->asked;
  float *scratch = asked->scratch + id * q_told_size(asked->vocab);
  for (int32_t at; (at = q_take(&shared->next, 1)) < asked->count;) q_kernel->logprobs(asked, at, scratch);
}

/* Values of the scratch of each thread of a q_logprobs. */
Q_EXPORT int64_t q_logprobs_scratch(int32_t vocab) { return q_told_size(vocab); }

/* Tells the logprobs of all rows that are asked for. */
Q_EXPORT void q_tell_logprobs(q_team *team, const q_logprobs *asked) {
  q_shared_logprobs shared = {.asked = asked};
  if (asked->count == 1 || (int64_t)asked->count * asked->vocab < ALONE)
    tell_some(&shared, 0, 1);
  else
    q_team_run(team, tell_some, &shared, (q_place){0});
}
