/* Makes planes (kernels/codes.py) of the words that checkpoints pack codes in, once, when a model is loaded: codes of
 * several outputs in a word, codes across words, and inputs in another order. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "eight_codes.h"
#include "kernels.h"
#include "team.h"

enum { ROWS = 8, WORD_OUTPUTS = 8 };

/* Rows of words: a stream of bits with one output's codes, or of 4 bits with those of eight outputs in each word. */
typedef struct {
  const uint32_t *words;  /* [rows][stride] */
  const int32_t *order;   /* [width]: the code that goes to each place, or ``columns`` for 0; NULL: its own */
  uint32_t *planes[3];    /* from the lowest bits on, [rows, or rows * 8][width * its bits / 32] */
  int64_t stride;
  int32_t rows, columns, width, bits;
  int32_t outputs;              /* 1 or 8 */
  int32_t shifts[WORD_OUTPUTS]; /* of 8: where each output's code is in a word */
} q_words;

typedef struct {
  const q_words *job;
  _Atomic int32_t next, failed;
} words_task;

static inline __attribute__((always_inline)) void widen(const uint8_t *from, int32_t columns, int bits, uint8_t *out) {
  int32_t at = 0;
  for (; at + 8 <= columns; at += 8, from += bits) {
    uint64_t eight = q_widened(q_load_bytes(from, bits), bits);
    memcpy(out + at, &eight, 8);
  }
  if (at < columns) {
    uint64_t rest = q_widened(q_load_bytes(from, ((columns - at) * bits + 7) / 8), bits);
    memcpy(out + at, &rest, (size_t)(columns - at));
  }
}

/* The codes of one output, a byte each. */
static void read_codes(const q_words *job, int32_t row, int32_t output, uint8_t *out) {
  const uint32_t *words = job->words + row * job->stride;
  if (job->outputs > 1) {
    const int shift = job->shifts[output];
    for (int32_t at = 0; at < job->columns; at++) out[at] = (uint8_t)(words[at] >> shift & 15);
    return;
  }
  const uint8_t *bytes = (const uint8_t *)words;
  switch (job->bits) {
    case 2: widen(bytes, job->columns, 2, out); return;
    case 3: widen(bytes, job->columns, 3, out); return;
    case 4: widen(bytes, job->columns, 4, out); return;
    default: memcpy(out, bytes, (size_t)job->columns);
  }
}

static inline __attribute__((always_inline)) void narrow(const uint8_t *codes, int32_t width, int shift, int bits,
                                                         uint8_t *out) {
  for (int32_t at = 0; at < width; at += 8, out += bits) {
    uint64_t eight = q_narrowed(q_load_bytes(codes + at, 8) >> shift, bits);
    memcpy(out, &eight, (size_t)bits);
  }
}

/* Of the codes of one output its row of each plane. */
static void write_planes(const q_words *job, const uint8_t *codes, int64_t row) {
  int shift = 0, plane = 0;
  for (int bits = 8; bits; bits >>= 1) {
    if (!(job->bits & bits)) continue;
    uint8_t *out = (uint8_t *)job->planes[plane++] + row * (job->width / 8) * bits;
    switch (bits) {
      case 8: memcpy(out, codes, (size_t)job->width); break;
      case 4: narrow(codes, job->width, shift, 4, out); break;
      case 2: narrow(codes, job->width, shift, 2, out); break;
      default: narrow(codes, job->width, shift, 1, out);
    }
    shift += bits;
  }
}

static void run_words(void *argument, int id, int threads) {
  words_task *task = argument;
  const q_words *job = task->job;
  /* Beyond the columns all is 0: what fills up a row, and what an entry ``columns`` of the order names. */
  const size_t size = (size_t)(job->columns > job->width ? job->columns : job->width) + 1;
  uint8_t *codes = calloc(2, size), *placed = job->order == NULL ? codes : codes + size;
  if (codes == NULL) atomic_store(&task->failed, 1);
  for (int32_t start; codes != NULL && (start = q_take(&task->next, ROWS)) < job->rows;)
    for (int32_t row = start; row < job->rows && row < start + ROWS; row++)
      for (int32_t output = 0; output < job->outputs; output++) {
        read_codes(job, row, output, codes);
        if (job->order != NULL)
          for (int32_t at = 0; at < job->width; at++) placed[at] = codes[job->order[at]];
        write_planes(job, placed, (int64_t)row * job->outputs + output);
      }
  free(codes);
}

/* Fill the planes of ``job``. 0, or -1 where memory is short. */
Q_EXPORT int q_word_planes(q_team *team, const q_words *job) {
  words_task task = {job, 0, 0};
  q_team_run(team, run_words, &task, (q_place){0});
  return atomic_load(&task.failed) ? -1 : 0;
}

/* The size of q_words, for structs.py. */
Q_EXPORT int64_t q_words_size(void) { return sizeof(q_words); }
