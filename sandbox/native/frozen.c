/* SPDX-License-Identifier: Apache-2.0 */
/* frozen.so: has threads that the freezer of control groups stopped continue in their calls when they are thawed.
 *
 * The freezer interrupts a call as a signal would. The kernel enters most calls again; those that signal(7) says are
 * never restarted (epoll_wait, semop, sigtimedwait, io_getevents, sockets with a time-out) would return EINTR.
 *
 * Owns: tracing the threads for that moment, in the process that loads it. Does not own: which threads
 * (sandbox/criu/carried/frozen.py), what is done to one (rearm.c).
 * Guarantee: threads stay frozen. One that cannot be traced, or waits in another call, is not changed.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

#include "rearm.h"

#define EXPORTED __attribute__((visibility("default")))

struct thread {
    pid_t pid, tid;
};

static void continue_call(const struct thread *thread) {
    struct waiting one = {.pid = thread->pid, .tid = thread->tid};
    struct iovec into = {&one.regs, sizeof one.regs};
    if (ptrace(PTRACE_GETREGSET, one.tid, (void *)NT_PRSTATUS, &into)) return;
    if (is_interrupted(&one.regs) && find_rest(&one) && !one.runs) take_up(&one);
}

/* Seize, change, let go: one call of one thread of the caller, who then thaws. `notes`: the inspector's map; or -1. */
EXPORTED void pagurus_continue_calls(int notes, const struct thread *threads, size_t count) {
    use_notes_of(notes);
    for (size_t i = 0; i < count; i++) {
        pid_t tid = threads[i].tid;
        if (ptrace(PTRACE_SEIZE, tid, NULL, NULL)) continue;
        if (ptrace(PTRACE_INTERRUPT, tid, NULL, NULL) == 0 && wait_stopped(tid)) continue_call(&threads[i]);
        ptrace(PTRACE_DETACH, tid, NULL, NULL);
    }
}

/* After the thaw: sockets get their own time-outs back once their threads wait again. */
EXPORTED void pagurus_after_thaw(void) { restore_sockets(); }
