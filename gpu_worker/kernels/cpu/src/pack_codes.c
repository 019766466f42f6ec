/* Packs a weight of codes into panels, once, when a model is loaded: from planes (kernels/codes.py) to units of 32
 * inputs (code_places.h). */
#include <string.h>

#include "code_places.h"
#include "linear.h"
#include "team.h"

/* Codes of a weight as torch has them: planes of 8, 4, 2 or 1 bits, each [rows][stride] words. */
typedef struct {
  const uint32_t *planes[3];
  int64_t strides[3]; /* words from row to row */
  int32_t widths[3];  /* 0: no such plane */
  int32_t flip;       /* exclusive-ored to each code */
  int32_t units;      /* of a row of the planes; what the weight has beyond is 0 */
} q_planes;

typedef struct {
  const q_planes *from;
  const q_weight *to;
  _Atomic int32_t next;
} pack_codes_task;

/* The codes of one unit of a row. */
static void unit_codes(const q_planes *from, int32_t row, int32_t unit, uint8_t out[Q_UNIT]) {
  memset(out, from->flip, Q_UNIT);
  int shift = 0;
  for (int plane = 0; plane < 3 && from->widths[plane]; plane++) {
    const int width = from->widths[plane], mask = (1 << width) - 1, each = 32 / width;
    const uint32_t *words = from->planes[plane] + row * from->strides[plane] + (int64_t)unit * width;
    for (int at = 0; at < Q_UNIT; at++) out[at] ^= (uint8_t)((words[at / each] >> at % each * width & mask) << shift);
    shift += width;
  }
}

/* The words of a unit, ``Q_PANEL`` apart. */
static void unit_words(int bits, const uint8_t codes[Q_UNIT], uint32_t *out) {
  uint32_t words[8] = {0};
  const int whole = q_whole_codes(bits), each = 32 / bits;
  for (int place = 0; place < whole; place++) words[place / each] |= (uint32_t)codes[place] << q_code_shift(bits, place);
  for (int place = whole; place < Q_UNIT; place++)
    for (int word = 0; word < bits; word++) {
      q_code_piece piece = q_piece_of(bits, place, word);
      if (piece.count) words[word] |= ((uint32_t)codes[place] >> piece.to & ((1u << piece.count) - 1)) << piece.from;
    }
  for (int word = 0; word < bits; word++) out[word * Q_PANEL] = words[word];
}

static void pack_code_panel(const q_planes *from, const q_weight *to, int32_t panel) {
  const int bits = to->codes->bits;
  const int32_t units = to->padded_inputs / Q_UNIT;
  const int as_they_are = from->widths[0] == bits && from->flip == 0 && 32 % bits == 0;
  uint32_t *out = (uint32_t *)to->data + (int64_t)panel * units * bits * Q_PANEL;
  for (int32_t unit = 0; unit < units; unit++, out += bits * Q_PANEL)
    for (int32_t column = 0; column < Q_PANEL; column++) {
      int32_t row = q_row_of(to, panel, column);
      uint8_t codes[Q_UNIT] = {0};
      if (row < 0 || unit >= from->units) {
        for (int word = 0; word < bits; word++) out[word * Q_PANEL + column] = 0;
      } else if (as_they_are) {
        const uint32_t *words = from->planes[0] + row * from->strides[0] + (int64_t)unit * bits;
        for (int word = 0; word < bits; word++) out[word * Q_PANEL + column] = words[word];
      } else {
        unit_codes(from, row, unit, codes);
        unit_words(bits, codes, out + column);
      }
    }
}

static void run_pack_codes(void *argument, int id, int threads) {
  pack_codes_task *task = argument;
  for (int32_t panel; (panel = q_take(&task->next, 1)) < task->to->panels;)
    pack_code_panel(task->from, task->to, panel);
}

/* Fill the panels of ``to`` from ``from``. */
Q_EXPORT void q_pack_codes(q_team *team, const q_planes *from, const q_weight *to) {
  pack_codes_task task = {from, to, 0};
  q_team_run(team, run_pack_codes, &task);
}

/* The size of q_planes, for structs.py. */
Q_EXPORT int64_t q_planes_size(void) { return sizeof(q_planes); }
