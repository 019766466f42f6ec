/* Where the codes of a unit of 32 inputs lie: in as many words of 32 bits as a code has bits.
 *
 * A word has 32 / bits whole codes from its lowest bits on, so 32 inputs have some codes left where bits divide 32 not.
 * These lie, one behind the other, in the bits that are left at the words' tops: of 3 bits words 0, 1 and 2 have ten
 * codes each, and their upper two bits the codes 30 and 31. Of 2, 4 and 8 bits the words are those of a plane. */
#ifndef QUIRE_CODE_PLACES_H
#define QUIRE_CODE_PLACES_H

#include "kernels.h"

/* Codes of a unit that lie whole in a word. */
static inline int q_whole_codes(int bits) { return 32 / bits * bits; }

/* Where in its word the code of ``place`` begins, if it is whole. */
static inline int q_code_shift(int bits, int place) { return place % (32 / bits) * bits; }

/* By how many bits a number is moved up when its code is taken out of the word by a mask alone. */
static inline int q_number_shift(int bits, int place) {
  if (place >= q_whole_codes(bits)) return 0;
  int shift = q_code_shift(bits, place);
  return shift + bits == 32 ? 0 : shift; /* the uppermost would be a sign: it is moved down instead */
}

/* The same of codes of 4 bits that became the bytes of two words, one of the even places and one of the odd ones. */
static inline int q_steps_shift(int place) { return place % 8 < 6 ? place % 8 / 2 * 8 : 0; }

/* A piece of a code that is not whole: ``count`` bits of ``word`` from ``from`` on are the code's from ``to`` on. */
typedef struct {
  int word, from, to, count;
} q_code_piece;

/* The piece in ``word`` of the code at ``place``; of 0 bits where there is none. */
static inline q_code_piece q_piece_of(int bits, int place, int word) {
  int used = 32 / bits * bits, rest = 32 - used, first = (place - q_whole_codes(bits)) * bits;
  int begin = word * rest > first ? word * rest : first;
  int end = (word + 1) * rest < first + bits ? (word + 1) * rest : first + bits;
  return (q_code_piece){word, used + begin - word * rest, begin - first, end > begin ? end - begin : 0};
}

#endif
