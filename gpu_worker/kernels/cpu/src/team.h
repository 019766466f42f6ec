/* A team of threads that works on one step together: awake inside a step, asleep between steps.
 *
 * A task is the caller's, who never waits for a thread to wake: on a machine with other work that takes as long as a
 * small model's step. A helper *joins* the task when it is there, where the others are just then, and does what is left.
 * So a task must be right whoever takes part: its work is taken from counters.
 */
#ifndef QUIRE_TEAM_H
#define QUIRE_TEAM_H

#include <stdatomic.h>
#include <stdint.h>

#include "kernels.h"

typedef struct q_team q_team;
/* ``id`` of ``threads``, which is how many may take part; the caller's own is 0. */
typedef void (*q_task)(void *argument, int id, int threads);

/* Where a task is, in numbers of its own. */
typedef struct {
  int32_t pass, section, op, phase;
} q_place;

/* A team of ``threads``, the caller among them, or NULL where the system gives no more threads. */
Q_EXPORT q_team *q_team_new(int threads);
Q_EXPORT void q_team_free(q_team *team);
Q_EXPORT int q_team_threads(const q_team *team);

/* Runs ``task``, which begins at ``start``, on the caller's thread and on those that join, and returns when all have
 * ended. Callers wait for one another. */
void q_team_run(q_team *team, q_task task, void *argument, q_place start);
/* Within a task: waits until all who take part have come here. Until they meet next, others may join at ``next``; NULL:
 * they may not. */
void q_team_barrier(q_team *team, const q_place *next);
/* Within a task: where a thread that has just begun joined it. */
q_place q_team_place(const q_team *team);

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
