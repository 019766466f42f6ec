/* Threads spin for some hundred pauses where they wait for each other within a step, because a barrier then takes well
 * under a microsecond, and sleep after that, because a thread that spins while another process needs its core makes
 * both slower. Between steps they sleep at once: an idle server takes no processor time.
 *
 * Nobody waits for a helper to wake. Where the other processes of a server had the other core, at the start of each step
 * that took a third of a millisecond and more, in the mean 0.55 of 2.1 for 64 rows of 5 million parameters. */
#include "team.h"

#include <pthread.h>
#include <stdlib.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SPINS = 800 };

typedef struct {
  _Alignas(64) _Atomic int32_t value; /* what sleepers wait to see changed */
  _Atomic int32_t sleepers;
#ifndef __linux__
  pthread_mutex_t mutex;
  pthread_cond_t changed;
#endif
} signal_word;

struct q_team {
  int threads;
  pthread_mutex_t in_use; /* held while a task runs */
  signal_word start;   /* counts tasks */
  signal_word barrier; /* counts barriers */
  _Alignas(64) _Atomic uint64_t state;
  /* Of the task, set before others may join it: what it is, and where they do. */
  q_task task;
  void *argument;
  q_place place;
  _Atomic int32_t ending; /* the helpers are to end */
  pthread_t *helpers;
};

typedef struct {
  q_team *team;
  int id;
} helper_argument;

static inline void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void word_init(signal_word *word) {
  atomic_init(&word->value, 0);
  atomic_init(&word->sleepers, 0);
#ifndef __linux__
  pthread_mutex_init(&word->mutex, NULL);
  pthread_cond_init(&word->changed, NULL);
#endif
}

static int32_t word_value(signal_word *word) { return atomic_load_explicit(&word->value, memory_order_acquire); }

/* Sleep while the word is ``seen``. */
static void word_sleep(signal_word *word, int32_t seen) {
  atomic_fetch_add(&word->sleepers, 1);
#ifdef __linux__
  while (atomic_load(&word->value) == seen)
    syscall(SYS_futex, &word->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
  pthread_mutex_lock(&word->mutex);
  while (atomic_load(&word->value) == seen) pthread_cond_wait(&word->changed, &word->mutex);
  pthread_mutex_unlock(&word->mutex);
#endif
  atomic_fetch_sub(&word->sleepers, 1);
}

/* Change the word, and wake those that sleep on it. */
static void word_next(signal_word *word) {
#ifdef __linux__
  atomic_fetch_add(&word->value, 1);
  if (atomic_load(&word->sleepers)) syscall(SYS_futex, &word->value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
  pthread_mutex_lock(&word->mutex);
  atomic_fetch_add(&word->value, 1);
  pthread_cond_broadcast(&word->changed);
  pthread_mutex_unlock(&word->mutex);
#endif
}

/* ---------------------------------------------------------------- who takes part */

/* One word says how many take part, how many of them have come to the barrier that is due, and whether others may join
 * them now; and it counts the barriers, so that no change is lost. All but the count is 0 while there is no task. */
enum { COME = 16, MAY_JOIN = 32, OPEN = 33, COUNT = 34 };
#define ONE ((uint64_t)1)

static int32_t members_of(uint64_t state) { return (int32_t)(state & 0xffff); }
static int32_t come_of(uint64_t state) { return (int32_t)(state >> COME & 0xffff); }

/* The state behind a barrier, of ``members``; 0: the task is over. */
static uint64_t next_state(uint64_t state, int32_t members, int may_join) {
  uint64_t count = (state >> COUNT) + 1;
  return count << COUNT | (uint64_t)(members > 0) << OPEN | (uint64_t)may_join << MAY_JOIN | (uint64_t)members;
}

/* Take part in the task that is under way. 0: there is none any more. */
static int join(q_team *team) {
  for (int spin = 0;; spin++) {
    int32_t seen = word_value(&team->barrier);
    uint64_t state = atomic_load(&team->state);
    if (!(state >> OPEN & 1)) return 0;
    /* Where all have come the last of them is about to change the state. */
    if ((state >> MAY_JOIN & 1) && come_of(state) < members_of(state)) {
      if (atomic_compare_exchange_weak(&team->state, &state, state + 1)) return 1;
    } else if (spin < SPINS) {
      pause_briefly();
    } else {
      word_sleep(&team->barrier, seen);
    }
  }
}

/* As q_team_barrier, and with ``members`` 0 at the end of the task. */
static void meet(q_team *team, int last, const q_place *next) {
  int32_t seen = word_value(&team->barrier);
  uint64_t state = atomic_fetch_add(&team->state, ONE << COME);
  if (come_of(state) + 1 == members_of(state)) { /* nobody else changes the state now */
    if (next != NULL) team->place = *next;
    atomic_store(&team->state, next_state(state, last ? 0 : members_of(state), next != NULL));
    word_next(&team->barrier);
    return;
  }
  for (int spin = 0; spin < SPINS; spin++) {
    if (word_value(&team->barrier) != seen) return;
    pause_briefly();
  }
  word_sleep(&team->barrier, seen);
}

void q_team_barrier(q_team *team, const q_place *next) { meet(team, 0, next); }

q_place q_team_place(const q_team *team) { return team->place; }

/* ---------------------------------------------------------------- tasks */

static void *helper_main(void *argument) {
  helper_argument own = *(helper_argument *)argument;
  free(argument);
  q_team *team = own.team;
  for (int32_t seen = 0, now;; seen = now) {
    while ((now = word_value(&team->start)) == seen) word_sleep(&team->start, seen);
    if (atomic_load(&team->ending)) return NULL;
    if (!join(team)) continue;
    team->task(team->argument, own.id, team->threads);
    meet(team, 1, NULL);
  }
}

void q_team_run(q_team *team, q_task task, void *argument, q_place start) {
  pthread_mutex_lock(&team->in_use);
  team->place = start;
  if (team->threads > 1) {
    team->task = task;
    team->argument = argument;
    atomic_store(&team->state, next_state(atomic_load(&team->state), 1, 1));
    word_next(&team->start);
  }
  task(argument, 0, team->threads);
  /* A helper must not be left in a task whose argument the caller takes back. */
  if (team->threads > 1) meet(team, 1, NULL);
  pthread_mutex_unlock(&team->in_use);
}

q_team *q_team_new(int threads) {
  q_team *team = aligned_alloc(64, (sizeof(q_team) + 63) / 64 * 64);
  if (team == NULL) return NULL;
  team->threads = 1;
  pthread_mutex_init(&team->in_use, NULL);
  word_init(&team->start);
  word_init(&team->barrier);
  atomic_init(&team->state, 0);
  atomic_init(&team->ending, 0);
  team->helpers = calloc((size_t)(threads > 1 ? threads - 1 : 1), sizeof(pthread_t));
  for (; team->helpers != NULL && team->threads < threads; team->threads++) {
    helper_argument *own = malloc(sizeof *own);
    if (own == NULL) break;
    *own = (helper_argument){team, team->threads};
    if (pthread_create(&team->helpers[team->threads - 1], NULL, helper_main, own) != 0) {
      free(own);
      break;
    }
  }
  if (team->threads == threads) return team;
  q_team_free(team);
  return NULL;
}

void q_team_free(q_team *team) {
  atomic_store(&team->ending, 1);
  word_next(&team->start);
  for (int helper = 0; helper < team->threads - 1; helper++) pthread_join(team->helpers[helper], NULL);
  free(team->helpers);
  free(team);
}

int q_team_threads(const q_team *team) { return team->threads; }
