/* What waits.c and rearm.c share. */
#ifndef PAGURUS_REARM_H
#define PAGURUS_REARM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/user.h>

#include "wait.h"

#define FOREVER INT64_MAX
#define SECOND 1000000000ll /* in nanoseconds, as all times here */
#define MILLISECOND 1000000ll
#define QUICK 50000ll
#define MAX_DESCRIPTOR 64 /* of those that CRIU is started with */

/* A thread in a call that was interrupted. */
struct waiting {
    int32_t process, thread;      /* numbers in the innermost pid namespace */
    pid_t pid, tid;               /* and here */
    int socket;                   /* a descriptor of the socket that it waits for, which has a time-out; or -1 */
    bool receives;                /* which of its two time-outs */
    bool runs;                    /* it is taken up by running for a moment */
    struct user_regs_struct regs; /* as the kernel left the call: its number and its result among them */
    int64_t left;                 /* nanoseconds that it was still to wait when it was stopped; or FOREVER */
    int64_t due;                  /* that instant, of the clock that it waits by; as the host has it */
    int64_t whole;                /* its time-out */
};

/* Memory that a call reads when it is entered. */
struct place {
    uint64_t at, size;
};

/* Whether this result tells that the call was interrupted and is to go on. */
bool is_interrupted(const struct user_regs_struct *regs);

/* Notes how long the thread is still to wait; false: it cannot be told what it waits in. */
bool find_rest(struct waiting *one);

/* It has waited for nothing since it was stopped: what was left then is left now. */
void wait_from_now(struct waiting *one);

/* Where the memory lies that matters when the call is taken up again: two places that it reads, and one that is written
 * (what a register is led to, or what is left of a sleep). Returns the argument that is replaced; or -1. */
int find_places(const struct waiting *one, struct place places[3]);

/* Whether its registers are as the kernel left them. */
bool is_untouched(const struct waiting *one, const struct user_regs_struct *now);

/* The thread is stopped and this process traces it: has it go on waiting when it is let go. */
void take_up(struct waiting *one);

/* The time-out of the socket that the thread waits for, which is noted with it; or FOREVER. */
int64_t find_patience(struct waiting *one, bool receives);

/* Until restore_sockets() the time-out of its socket is what is left. */
bool lend_patience(struct waiting *one, int64_t left);

/* Gives sockets their time-outs back, when the threads that wait for them have entered their calls. */
void restore_sockets(void);

/* What the inspector notes; none without a map. Call it before the rest. */
void use_notes(void);

/* The same, of the map behind this descriptor, in a process of the host. */
void use_notes_of(int fd);

/* Makes the stopped process a userfaultfd, if the daemon has asked for it (attach.c). */
void attach(pid_t pid);

/* Waits until a traced thread has stopped, for so long as that may take on a busy machine. */
bool wait_stopped(pid_t tid);

#endif
