/* Packs a weight of codes into panels, once, when a model is loaded: from planes (kernels/codes.py) to units of 32
 * inputs (code_places.h). */
#include <string.h>

#include "code_places.h"
#include "eight_codes.h"
#include "linear.h"
#include "team.h"

/* Codes of a weight as torch has them: planes of 8, 4, 2 or 1 bits, each [rows][stride] words. */
typedef struct {
  const uint32_t *planes[3];
  int64_t strides[3]; /* words from row to row */
  int32_t widths[3];  /* as the weight's bits have them; 0: no such plane */
  int32_t flip;       /* exclusive-ored to each code */
  int32_t units;      /* of a row of the planes; what the weight has beyond is 0 */
} q_planes;

typedef struct {
  const q_planes *from;
  const q_weight *to;
  _Atomic int32_t next;
} pack_codes_task;

/* Put the codes' bits of one plane, from bit ``shift`` on, to those of the planes before. */
static inline __attribute__((always_inline)) void add_plane(const q_planes *from, int plane, int32_t row, int32_t unit,
                                                            const int width, int shift, uint8_t out[Q_UNIT]) {
  const uint8_t *bytes = (const uint8_t *)(from->planes[plane] + row * from->strides[plane] + (int64_t)unit * width);
  for (int at = 0; at < Q_UNIT; at += 8, bytes += width) {
    uint64_t eight = q_load_bytes(out + at, 8) ^ q_widened(q_load_bytes(bytes, width), width) << shift;
    memcpy(out + at, &eight, 8);
  }
}

/* The codes of one unit of a row. */
static inline __attribute__((always_inline)) void unit_codes(const q_planes *from, int32_t row, int32_t unit,
                                                             const int bits, uint8_t out[Q_UNIT]) {
  memset(out, from->flip, Q_UNIT);
  int plane = 0;
  if (bits & 8) add_plane(from, plane++, row, unit, 8, 0, out);
  if (bits & 4) add_plane(from, plane++, row, unit, 4, bits & 8, out);
  if (bits & 2) add_plane(from, plane++, row, unit, 2, bits & 12, out);
  if (bits & 1) add_plane(from, plane++, row, unit, 1, bits & 14, out);
}

/* The words of a unit, ``Q_PANEL`` apart. */
static inline __attribute__((always_inline)) void unit_words(const int bits, const uint8_t codes[Q_UNIT],
                                                             uint32_t *out) {
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

/* With ``bits`` known to the compiler, which then knows each place. */
static inline __attribute__((always_inline)) void pack_units(const q_planes *from, const q_weight *to, int32_t panel,
                                                             const int bits) {
  const int32_t units = to->padded_inputs / Q_UNIT;
  const int as_they_are = from->widths[0] == bits && 32 % bits == 0;
  const uint32_t flip = (uint32_t)from->flip * 0x01010101u; /* of codes of 8 bits alone */
  uint32_t *out = (uint32_t *)to->data + (int64_t)panel * units * bits * Q_PANEL;
  for (int32_t unit = 0; unit < units; unit++, out += bits * Q_PANEL)
    for (int32_t column = 0; column < Q_PANEL; column++) {
      int32_t row = q_row_of(to, panel, column);
      uint8_t codes[Q_UNIT];
      if (row < 0 || unit >= from->units) {
        for (int word = 0; word < bits; word++) out[word * Q_PANEL + column] = 0;
      } else if (as_they_are) {
        const uint32_t *words = from->planes[0] + row * from->strides[0] + (int64_t)unit * bits;
        for (int word = 0; word < bits; word++) out[word * Q_PANEL + column] = words[word] ^ flip;
      } else {
        unit_codes(from, row, unit, bits, codes);
        unit_words(bits, codes, out + column);
      }
    }
}

static void pack_code_panel(const q_planes *from, const q_weight *to, int32_t panel) {
  switch (to->codes->bits) {
    case 2: pack_units(from, to, panel, 2); return;
    case 3: pack_units(from, to, panel, 3); return;
    case 4: pack_units(from, to, panel, 4); return;
    case 5: pack_units(from, to, panel, 5); return;
    case 6: pack_units(from, to, panel, 6); return;
    case 7: pack_units(from, to, panel, 7); return;
    default: pack_units(from, to, panel, 8);
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
  q_team_run(team, run_pack_codes, &task, (q_place){0});
}

/* The size of q_planes, for structs.py. */
Q_EXPORT int64_t q_planes_size(void) { return sizeof(q_planes); }
