/* The loops of speculate.h. Programs share their work among threads themselves, and so does the choice of tokens. */
#include "speculate.h"

#include <string.h>

/* Where a head has a vocabulary of its own, its logits to the places of the target's tokens. */
static void to_target(const q_draft *draft, int32_t rows) {
  float *wide = (float *)draft->choice->logits;
  for (int32_t row = 0; row < rows; row++) {
    const float *from = draft->logits + (int64_t)row * draft->own;
    float *to = wide + row * draft->choice->stride;
    for (int32_t at = 0; at < draft->own; at++) to[draft->vocabulary[at]] = from[at];
  }
}

/* The tokens that were drawn become the input of the next pass. */
static void take_tokens(const q_draft *draft, const q_step *step) {
  for (int32_t at = 0; at < step->rows; at++) {
    int64_t position = draft->positions[at]++;
    draft->tokens[step->row[at] * draft->token_stride + position] = draft->choice->tokens[at];
    draft->starts[at] = position - draft->head;
    if (draft->head)
      memcpy(draft->given + at * draft->hidden_size, draft->result.data + at * draft->result.stride,
             (size_t)draft->hidden_size * sizeof(float));
  }
}

int32_t q_draft_tokens(q_program *program, const q_draft *draft) {
  q_step step = draft->first;
  for (int32_t made = 1;; made++) {
    int32_t failed = q_program_run(program, &step);
    if (failed) return failed;
    if (draft->own) to_target(draft, step.rows);
    draft->choice->slots = step.rows;
    q_choose(draft->team, draft->choice);
    take_tokens(draft, &step);
    while (step.rows && draft->wanted[step.rows - 1] <= made) step.rows--;
    if (!step.rows) return 0;
    step.start = draft->starts, step.count = draft->ones;
    step.output = draft->places, step.outputs = step.rows;
    step.given = draft->given, step.given_stride = draft->hidden_size;
  }
}

/* What is drawn behind each token, and where. Returns how many. */
static int32_t list_draws(const q_verification *of) {
  int32_t slots = 0;
  for (int32_t at = 0; at < of->step.rows; at++)
    for (int64_t place = 1; place <= of->step.count[at]; place++, slots++) {
      of->rows[slots] = of->step.row[at];
      of->positions[slots] = of->step.start[at] + place;
    }
  return slots;
}

int32_t q_verify_drafts(q_program *program, const q_verification *of) {
  const q_choice *choice = of->choice;
  of->choice->slots = list_draws(of);
  int32_t failed = q_program_run(program, &of->step);
  if (failed) return failed;
  q_choose(of->team, choice);
  for (int32_t slot = 0; slot < choice->slots; slot++)
    if (!(choice->chosen[slot] > -__builtin_inff())) return -1;
  const int32_t *drawn = choice->tokens;
  for (int32_t at = 0; at < of->step.rows; drawn += of->step.count[at++]) {
    int32_t *behind = of->tokens + of->step.row[at] * of->token_stride + of->step.start[at] + 1, right = 0;
    while (right + 1 < of->step.count[at] && drawn[right] == behind[right]) right++;
    behind[right] = drawn[right];
    of->right[at] = right;
  }
  return 0;
}

void q_speculation_sizes(int32_t sizes[3]) {
  sizes[0] = sizeof(q_choice), sizes[1] = sizeof(q_draft), sizes[2] = sizeof(q_verification);
}
