/* A team of threads that works on one step together: awake inside a step, asleep between steps. */
#ifndef QUIRE_TEAM_H
#define QUIRE_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

#include "kernels.h"

typedef struct q_team q_team;
/* ``id`` of ``threads``; the caller's own is 0. */
typedef void (*q_task)(void *argument, int id, int threads);

/* A team of ``threads``, the caller among them, or NULL where the system gives no more threads. */
Q_EXPORT q_team *q_team_new(int threads);
Q_EXPORT void q_team_free(q_team *team);
Q_EXPORT int q_team_threads(const q_team *team);

/* Runs ``task`` on every thread and returns when all have ended. Callers wait for one another. */
void q_team_run(q_team *team, q_task task, void *argument);
/* Within a task: waits until every thread has come here. */
void q_team_barrier(q_team *team);

/* The next ``size`` items of a shared counter, as [start, start + size). */
static inline int32_t q_take(_Atomic int32_t *counter, int32_t size) {
  return atomic_fetch_add_explicit(counter, size, memory_order_relaxed);
}

/* The next of ``items`` on a shared counter, as [first, last): ``most`` of them while there are enough, and fewer toward
 * the end; ``first`` is ``items`` or more where none are left. */
static inline int32_t q_take_fewer(_Atomic int32_t *counter, int32_t items, int32_t most, int32_t threads,
                                   int32_t *last) {
  int32_t first = atomic_load_explicit(counter, memory_order_relaxed), size;
  do {
    if (first >= items) return first;
    size = (items - first) / (2 * threads);
    size = size > most ? most : size < 1 ? 1 : size;
  } while (!atomic_compare_exchange_weak_explicit(counter, &first, first + size, memory_order_relaxed,
                                                  memory_order_relaxed));
  *last = first + size;
  return first;
}

#endif
