/* Chooses the instruction set, once, when the library is opened for use. */
#include <stddef.h>
#include <string.h>

#include "kernels.h"
#include "team.h"

const q_kernels *q_kernel = &q_kernels_plain;

/* Whether this processor, and the system, can run the table of that name; and NULL where it was not compiled. */
static const q_kernels *found(const char *name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#ifdef Q_HAVE_avx512bf16
  if (!strcmp(name, "avx512bf16") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return &q_kernels_avx512bf16;
#endif
#ifdef Q_HAVE_avx512
  if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return &q_kernels_avx512;
#endif
#ifdef Q_HAVE_avx2
  /* What has AVX2 has F16C too, by which not every compiler lets one ask. */
  if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return &q_kernels_avx2;
#endif
#endif
  return strcmp(name, "plain") ? NULL : &q_kernels_plain;
}

/* Use the table called ``name`` ("auto": the best there is). Returns its name, or NULL where it cannot run here. */
Q_EXPORT const char *q_use(const char *name) {
  static const char *const best_first[] = {"avx512bf16", "avx512", "avx2", "plain"};
  const q_kernels *table = strcmp(name, "auto") ? found(name) : NULL;
  for (size_t at = 0; !strcmp(name, "auto") && table == NULL; at++) table = found(best_first[at]);
  if (table == NULL) return NULL;
  q_kernel = table;
  return table->name;
}

/* The table in use. */
Q_EXPORT const q_kernels *q_table(void) { return q_kernel; }
