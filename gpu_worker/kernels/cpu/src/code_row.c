/* One output of a weight of codes as float32: the row of a token, where a table of embeddings is kept as codes. */
#include "codes.h"

/* The codes of one output's unit, whose words are ``Q_PANEL`` apart. ``bits`` is a constant. */
INLINE void codes_of(const int bits, const uint32_t *words, uint32_t out[Q_UNIT]) {
  const uint32_t mask = (1u << bits) - 1;
  const int whole = q_whole_codes(bits), each = 32 / bits;
  for (int word = 0; word < bits; word++)
    for (int at = 0; at < each; at++) out[word * each + at] = words[word * Q_PANEL] >> at * bits & mask;
  for (int place = whole; place < Q_UNIT; place++) {
    out[place] = 0;
    for (int word = 0; word < bits; word++) {
      const q_code_piece piece = q_piece_of(bits, place, word);
      if (piece.count) out[place] |= (words[word * Q_PANEL] >> piece.from & ((1u << piece.count) - 1)) << piece.to;
    }
  }
}

static void unit_of(int bits, const uint32_t *words, uint32_t out[Q_UNIT]) {
  switch (bits) {
    case 2: codes_of(2, words, out); break;
    case 3: codes_of(3, words, out); break;
    case 4: codes_of(4, words, out); break;
    case 5: codes_of(5, words, out); break;
    case 6: codes_of(6, words, out); break;
    case 7: codes_of(7, words, out); break;
    case 8: codes_of(8, words, out); break;
  }
}

/* What entry ``at`` of ``table`` stands for; a number stands for itself. */
INLINE float number_of(const q_codes *codes, const float *table, uint32_t at) {
  if (codes->kind == Q_NUMBER) return (float)at;
  return codes->kind == Q_STEPS ? codes->step * ((const uint8_t *)codes->table)[at] : table[at];
}

void Q_NAME(code_row)(const q_weight *weight, int32_t row, int32_t type, float factor, float *out) {
  const q_codes *codes = weight->codes;
  const int32_t panel = row / Q_PANEL, column = row % Q_PANEL, first = column / LANES * LANES, lane = column - first;
  const int own_table = codes->kind == Q_OWN_TABLE, apart = own_table ? Q_PANEL : 1;
  const float *table = codes->table;
  if (own_table) table += ((int64_t)panel << codes->bits) * Q_PANEL + column;
  const uint32_t *words =
      (const uint32_t *)weight->data + (int64_t)panel * (weight->padded_inputs / Q_UNIT) * codes->bits * Q_PANEL + column;
  uint32_t found[Q_UNIT];
  float scale = 0, zero = 0, minimum = 0;
  for (int32_t input = 0, group = -1; input < weight->padded_inputs; input++) {
    if (input % Q_UNIT == 0) {
      unit_of(codes->bits, words, found);
      words += codes->bits * Q_PANEL;
    }
    if (input % Q_RUN == 0 && input / codes->group != group) {
      group = input / codes->group;
      scale = numbers_at(NUMBERS_ANY, &codes->scales, panel, group, first)[lane];
      zero = codes->zero;
      if (codes->zeros != NULL) zero = codes->zeros[((int64_t)panel * codes->groups + group) * Q_PANEL + column];
      if (codes->minima.base != NULL) minimum = numbers_at(NUMBERS_ANY, &codes->minima, panel, group, first)[lane];
    }
    const int32_t place = codes->order == NULL ? input : codes->order[input];
    if (place < 0 || place >= weight->inputs) continue;
    const uint32_t code = found[input % Q_UNIT];
    float value = (number_of(codes, table, code * apart) - zero) * scale;
    if (codes->minima.base != NULL) value -= minimum;
    out[place] = factor * (type == Q_BF16 ? from_bf16(to_bf16(value)) : value);
  }
}
