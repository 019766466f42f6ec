/* Threads spin for some hundred pauses where they wait for each other within a step, because a barrier then takes well
 * under a microsecond, and sleep after that, because a thread that spins while another process needs its core makes
 * both slower. Between steps they sleep at once: an idle server takes no processor time. */
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
  _Alignas(64) _Atomic int32_t arrived; /* at the barrier that is due */
  q_task task;         /* NULL: end */
  void *argument;
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

void q_team_barrier(q_team *team) {
  if (team->threads == 1) return;
  int32_t seen = word_value(&team->barrier);
  if (atomic_fetch_add(&team->arrived, 1) == team->threads - 1) {
    atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
    word_next(&team->barrier);
    return;
  }
  for (int spin = 0; spin < SPINS; spin++) {
    if (word_value(&team->barrier) != seen) return;
    pause_briefly();
  }
  word_sleep(&team->barrier, seen);
}

static void *helper_main(void *argument) {
  helper_argument own = *(helper_argument *)argument;
  free(argument);
  q_team *team = own.team;
  for (int32_t seen = 0;; seen++) {
    if (word_value(&team->start) == seen) word_sleep(&team->start, seen);
    if (team->task == NULL) return NULL;
    team->task(team->argument, own.id, team->threads);
    q_team_barrier(team);
  }
}

void q_team_run(q_team *team, q_task task, void *argument) {
  pthread_mutex_lock(&team->in_use);
  if (team->threads > 1) {
    team->task = task;
    team->argument = argument;
    word_next(&team->start);
  }
  task(argument, 0, team->threads);
  q_team_barrier(team); /* a helper must not be left in a task whose argument the caller takes back */
  pthread_mutex_unlock(&team->in_use);
}

q_team *q_team_new(int threads) {
  q_team *team = aligned_alloc(64, (sizeof(q_team) + 63) / 64 * 64);
  if (team == NULL) return NULL;
  team->threads = 1;
  team->task = NULL;
  pthread_mutex_init(&team->in_use, NULL);
  word_init(&team->start);
  word_init(&team->barrier);
  atomic_init(&team->arrived, 0);
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
  team->task = NULL;
  word_next(&team->start);
  for (int helper = 0; helper < team->threads - 1; helper++) pthread_join(team->helpers[helper], NULL);
  free(team->helpers);
  free(team);
}

int q_team_threads(const q_team *team) { return team->threads; }
