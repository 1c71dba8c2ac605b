/* Has a stopped thread go on waiting in the call in which it was interrupted, for what is left of it.
 *
 * Owns: how each call is taken up again, what is left of its time. Does not own: which threads (waits.c).
 *
 *   how the kernel left it                        how it goes on
 *   ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND   the same registers: the kernel enters it again, or a signal ends it
 *   of these select, pselect6, ppoll              the kernel has told the program what is left, and reads it there again:
 *                                                 a program that lives is told less, by how long it stood still
 *   ERESTART_RESTARTBLOCK: nanosleep, poll,       the kernel has forgotten the rest, which it keeps outside the program.
 *   futex                                         The thread enters the call with what is left and is interrupted at
 *                                                 once: then the kernel knows it again
 *   EINTR: epoll_wait, semtimedop, sigtimedwait,  as ERESTARTNOHAND. A time-out is replaced by what is left: the register
 *   io_getevents                                  that holds it, or leads to it, stays changed
 *   EINTR: sockets with a time-out                as ERESTARTNOHAND. Until the call is entered, what is left is the
 *                                                 socket's time-out
 *
 * Guarantee: beside what is told and the register of a replaced time-out nothing of the program is changed. Other memory
 * that is written for a call to read is written back; what a register is led to lies below the red zone of the stack, where nobody may have anything.
 * A signal that came meanwhile is delivered when the thread is let go, and ends the call as it would have without us.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <linux/bpf.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rearm.h"

#define RESTARTSYS 512
#define RESTARTNOINTR 513
#define RESTARTNOHAND 514
#define RESTART_BLOCK 516
#define CODE_64 0x33	   /* selector of 64-bit code */
#define RED_ZONE 128
#define TIMEOUT (30 * SECOND) /* for a call that is interrupted at once, on a busy machine */
#define SIGSET_SIZE 8

enum form { NONE, TIMESPEC, MILLISECONDS, TO_RECEIVE, TO_SEND };

/* A call that cannot simply be entered again: its time-out, by number of argument, and its result when interrupted. */
static const struct timed {
    short nr, result, argument;
    enum form form;
} table[] = {
    {SYS_nanosleep, -RESTART_BLOCK, 0, TIMESPEC},
    {SYS_clock_nanosleep, -RESTART_BLOCK, 2, TIMESPEC},
    {SYS_poll, -RESTART_BLOCK, 2, MILLISECONDS},
    {SYS_futex, -RESTART_BLOCK, 3, TIMESPEC},
    {SYS_epoll_wait, -EINTR, 3, MILLISECONDS},
    {SYS_epoll_pwait, -EINTR, 3, MILLISECONDS},
    {SYS_epoll_pwait2, -EINTR, 3, TIMESPEC},
    {SYS_semop, -EINTR, 0, NONE},
    {SYS_semtimedop, -EINTR, 3, TIMESPEC},
    {SYS_rt_sigtimedwait, -EINTR, 2, TIMESPEC},
    {SYS_io_getevents, -EINTR, 4, TIMESPEC},
    {SYS_io_pgetevents, -RESTARTNOHAND, 4, TIMESPEC},
    {SYS_read, -EINTR, 0, TO_RECEIVE},
    {SYS_readv, -EINTR, 0, TO_RECEIVE},
    {SYS_recvfrom, -EINTR, 0, TO_RECEIVE},
    {SYS_recvmsg, -EINTR, 0, TO_RECEIVE},
    {SYS_accept, -EINTR, 0, TO_RECEIVE},
    {SYS_accept4, -EINTR, 0, TO_RECEIVE},
    {SYS_write, -EINTR, 0, TO_SEND},
    {SYS_writev, -EINTR, 0, TO_SEND},
    {SYS_sendto, -EINTR, 0, TO_SEND},
    {SYS_sendmsg, -EINTR, 0, TO_SEND},
    {SYS_connect, -EINTR, 0, TO_SEND},
};

static int notes = -1;
static int64_t offsets[2]; /* of this process's time namespace: monotonic and since boot */

/* ------------------------------------------------------------------ time and notes */

static void read_offsets(void) {
    FILE *file = fopen("/proc/self/timens_offsets", "re");
    char name[32];
    long long seconds, nanoseconds;
    offsets[0] = offsets[1] = 0;
    if (!file) return;
    while (fscanf(file, "%31s %lld %lld", name, &seconds, &nanoseconds) == 3) {
        if (strcmp(name, "monotonic") == 0) offsets[0] = seconds * SECOND + nanoseconds;
        if (strcmp(name, "boottime") == 0) offsets[1] = seconds * SECOND + nanoseconds;
    }
    fclose(file);
}

/* As the host has it, whatever namespace we are in. */
static int64_t now_on(clockid_t clock) {
    struct timespec now;
    if (clock_gettime(clock, &now)) return 0;
    int64_t offset = clock == CLOCK_BOOTTIME ? offsets[1] : clock == CLOCK_MONOTONIC ? offsets[0] : 0;
    return now.tv_sec * SECOND + now.tv_nsec - offset;
}

/* The inspector's map is among the descriptors that we were started with. */
static int find_notes(void) {
    for (int fd = 3; fd < MAX_DESCRIPTOR; fd++) {
        struct bpf_map_info info = {0};
        union bpf_attr attr = {0};
        attr.info.bpf_fd = (unsigned)fd;
        attr.info.info_len = sizeof info;
        attr.info.info = (uint64_t)(uintptr_t)&info;
        if (syscall(SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &attr, sizeof attr) == 0 && strcmp(info.name, "waits") == 0 &&
            info.key_size == sizeof(uint32_t) && info.value_size == sizeof(struct wait))
            return fd;
    }
    return -1;
}

void use_notes(void) {
    notes = find_notes();
    read_offsets();
}

void use_notes_of(int fd) {
    notes = fd;
    offsets[0] = offsets[1] = 0; /* whose caller is in the host's time namespace */
}

static bool access_note(int command, pid_t tid, struct wait *value) {
    uint32_t key = (uint32_t)tid;
    union bpf_attr attr = {0};
    attr.map_fd = (unsigned)notes;
    attr.key = (uint64_t)(uintptr_t)&key;
    attr.value = (uint64_t)(uintptr_t)value;
    return notes >= 0 && syscall(SYS_bpf, command, &attr, sizeof attr) == 0;
}

/* ------------------------------------------------------------------ the memory of a thread */

static bool peek(pid_t tid, uint64_t at, void *into, size_t size) { /* whole words */
    for (size_t done = 0; done < size; done += sizeof(long)) {
        long word;
        if (syscall(SYS_ptrace, PTRACE_PEEKDATA, tid, at + done, &word)) return false;
        memcpy((char *)into + done, &word, sizeof word);
    }
    return true;
}

/* Also where the program itself may not write. */
static bool poke(pid_t tid, uint64_t at, const void *from, size_t size) {
    for (size_t done = 0; done < size; done += sizeof(long)) {
        long word;
        memcpy(&word, (const char *)from + done, sizeof word);
        if (ptrace(PTRACE_POKEDATA, tid, (void *)(uintptr_t)(at + done), (void *)word)) return false;
    }
    return true;
}

static uint64_t below_red_zone(const struct user_regs_struct *regs) {
    return (regs->rsp - RED_ZONE - sizeof(struct timespec)) & ~15ull;
}

/* ------------------------------------------------------------------ what a thread waits in */

static unsigned long long *argument(struct user_regs_struct *regs, int number) {
    unsigned long long *all[] = {&regs->rdi, &regs->rsi, &regs->rdx, &regs->r10, &regs->r8, &regs->r9};
    return all[number];
}

static const struct timed *timed_call(const struct user_regs_struct *regs) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if ((uint64_t)table[i].nr == regs->orig_rax) return &table[i];
    return NULL;
}

static bool is_of_socket(const struct timed *call) { return call->form == TO_RECEIVE || call->form == TO_SEND; }

/* The time-out that is in the registers, or of the socket: nanoseconds, or FOREVER. */
static int64_t time_out(struct waiting *one, const struct timed *call) {
    struct user_regs_struct regs = one->regs;
    struct timespec time;
    if (is_of_socket(call)) return find_patience(one, call->form == TO_RECEIVE);
    if (call->nr == SYS_futex && (regs.rsi & FUTEX_CMD_MASK) != FUTEX_WAIT) return FOREVER; /* it is an instant */
    if (call->nr == SYS_clock_nanosleep && regs.rsi & TIMER_ABSTIME) return FOREVER;
    if (call->form == NONE) return FOREVER;
    uint64_t value = *argument(&regs, call->argument);
    if (call->form == MILLISECONDS) return (int)value < 0 ? FOREVER : (int)value * MILLISECOND;
    if (!value || !peek(one->tid, value, &time, sizeof time)) return FOREVER;
    if (time.tv_sec < 0 || time.tv_nsec < 0 || time.tv_nsec >= SECOND || time.tv_sec > FOREVER / SECOND - 1)
        return FOREVER;
    return time.tv_sec * SECOND + time.tv_nsec;
}

bool is_interrupted(const struct user_regs_struct *regs) {
    if ((int64_t)regs->orig_rax < 0 || regs->cs != CODE_64) return false;
    int64_t result = (int64_t)regs->rax;
    const struct timed *call = timed_call(regs);
    return (result <= -RESTARTSYS && result >= -RESTART_BLOCK) || (result == -EINTR && call && call->result == -EINTR);
}

/* The clock that a call waits by which the kernel takes up again. */
static clockid_t clock_of(const struct user_regs_struct *regs) {
    clockid_t clock = regs->orig_rax == SYS_clock_nanosleep ? (clockid_t)regs->rdi : CLOCK_MONOTONIC;
    return clock == CLOCK_REALTIME ? CLOCK_MONOTONIC : clock;
}

/* Where the kernel tells the program what is left of its sleep. */
static uint64_t place_of_rest(const struct user_regs_struct *regs) {
    if (regs->orig_rax == SYS_nanosleep) return regs->rsi;
    return regs->orig_rax == SYS_clock_nanosleep ? regs->r10 : 0;
}

static int64_t told_rest(struct waiting *one, int64_t whole) {
    uint64_t place = place_of_rest(&one->regs);
    struct timespec time;
    if (!place || !peek(one->tid, place, &time, sizeof time)) return whole;
    return time.tv_sec * SECOND + time.tv_nsec;
}

/* Where the kernel has told what is left of a call that it enters again; 0: it has not. */
static uint64_t place_told(const struct user_regs_struct *regs) {
    if ((int64_t)regs->rax != -RESTARTNOHAND) return 0;
    if (regs->orig_rax == SYS_select || regs->orig_rax == SYS_pselect6) return regs->r8;
    return regs->orig_rax == SYS_ppoll ? regs->rdx : 0;
}

/* How many nanoseconds the second word of what is told counts. */
static int64_t unit_told(const struct user_regs_struct *regs) { return regs->orig_rax == SYS_select ? 1000 : 1; }

static int64_t due_as_told(const struct waiting *one, int64_t interrupted) {
    struct timespec told;
    uint64_t place = place_told(&one->regs);
    if (!place || !peek(one->tid, place, &told, sizeof told)) return FOREVER;
    if (told.tv_sec < 0 || told.tv_sec > FOREVER / SECOND / 2) return FOREVER;
    return interrupted + told.tv_sec * SECOND + told.tv_nsec * unit_told(&one->regs);
}

bool find_rest(struct waiting *one) {
    struct wait note = {0};
    bool noted = access_note(BPF_MAP_LOOKUP_ELEM, one->tid, &note) && note.ip == one->regs.rip && note.sp == one->regs.rsp;
    if (one->regs.orig_rax == SYS_restart_syscall) {
        if (!noted || note.nr == SYS_restart_syscall) return false;
        one->regs.orig_rax = note.nr;
    }
    one->left = FOREVER;
    one->socket = -1;
    one->runs = (int64_t)one->regs.rax == -RESTART_BLOCK;
    const struct timed *call = timed_call(&one->regs);
    int64_t whole = call ? time_out(one, call) : FOREVER;
    bool knows_when = noted && note.nr == one->regs.orig_rax && note.ends;
    one->due = due_as_told(one, knows_when ? (int64_t)note.ends : now_on(CLOCK_MONOTONIC));
    /* A socket that has none, or no socket at all, is no reason for EINTR: that is what the program was told. */
    if (whole == FOREVER) return !call || !is_of_socket(call) || (int64_t)one->regs.rax != -EINTR;
    noted = noted && note.nr == one->regs.orig_rax;
    int64_t left = whole, now = now_on(clock_of(&one->regs));
    if (call->result != -RESTART_BLOCK) {
        bool due = noted && note.due && (note.of == note.entries || note.of == note.entries + 1);
        if (due && is_of_socket(call)) whole = (int64_t)note.whole; /* it may not have it back yet */
        if (noted && note.entered)
            left = (int64_t)(due ? note.due : note.entered + (uint64_t)whole) - now;
    } else if (noted && note.ends) {
        left = (int64_t)(note.due && note.of == note.ends ? note.due : note.ends) - now;
    } else {
        left = told_rest(one, whole);
    }
    one->left = left < 0 ? 0 : left > whole ? whole : left;
    one->due = now + one->left;
    one->whole = whole;
    return true;
}

void wait_from_now(struct waiting *one) {
    one->due = FOREVER; /* what was told holds */
    int64_t now = now_on(clock_of(&one->regs));
    const struct timed *call = timed_call(&one->regs);
    one->socket = -1;
    one->whole = call && is_of_socket(call) ? find_patience(one, call->form == TO_RECEIVE) : FOREVER;
    if (call && is_of_socket(call) && one->socket < 0) one->left = FOREVER;
    if (one->left < 0) one->left = 0;
    if (one->left != FOREVER) one->due = one->left > FOREVER - now ? FOREVER : now + one->left;
}

int find_places(const struct waiting *one, struct place places[3]) {
    struct user_regs_struct regs = one->regs;
    const struct timed *call = timed_call(&regs);
    memset(places, 0, 3 * sizeof *places);
    if (!call || one->left == FOREVER) return -1;
    if (regs.orig_rax == SYS_poll) places[1] = (struct place){regs.rdi, (regs.rsi & 0xffffffff) * sizeof(struct pollfd)};
    if (regs.orig_rax == SYS_futex) places[1] = (struct place){regs.rdi, sizeof(uint32_t)};
    if (call->result == -RESTART_BLOCK) {
        if (call->form == TIMESPEC) places[0] = (struct place){*argument(&regs, call->argument), sizeof(struct timespec)};
        if (place_of_rest(&regs)) places[2] = (struct place){place_of_rest(&regs), sizeof(struct timespec)};
        return -1;
    }
    if (call->form == TIMESPEC) places[2] = (struct place){below_red_zone(&regs), sizeof(struct timespec)};
    return is_of_socket(call) ? -1 : call->argument;
}

/* ------------------------------------------------------------------ taking it up */

static bool set_registers(pid_t tid, struct user_regs_struct *regs) {
    struct iovec from = {regs, sizeof *regs};
    return ptrace(PTRACE_SETREGSET, tid, (void *)NT_PRSTATUS, &from) == 0;
}

static bool get_registers(pid_t tid, struct user_regs_struct *regs) {
    struct iovec into = {regs, sizeof *regs};
    return ptrace(PTRACE_GETREGSET, tid, (void *)NT_PRSTATUS, &into) == 0;
}

bool wait_stopped(pid_t tid) {
    int64_t began = now_on(CLOCK_MONOTONIC), waited = 0;
    int status;
    for (pid_t seen; (seen = waitpid(tid, &status, __WALL | WNOHANG)) != tid;) {
        if ((seen < 0 && errno != EINTR) || waited > TIMEOUT) return false;
        if (waited > QUICK) usleep(QUICK / 1000);
        waited = now_on(CLOCK_MONOTONIC) - began;
    }
    return WIFSTOPPED(status);
}

/* Replaces the time-out of a call; what a register leads to is written to `place`, where that may be. */
static bool put_time(pid_t tid, const struct timed *call, struct user_regs_struct *regs, uint64_t place, int64_t left) {
    unsigned long long *time = argument(regs, call->argument);
    if (call->form == MILLISECONDS) {
        *time = (unsigned long long)((left + MILLISECOND - 1) / MILLISECOND);
        return true;
    }
    struct timespec value = {left / SECOND, left % SECOND};
    *time = place;
    return poke(tid, place, &value, sizeof value);
}

/* Has the thread enter a system call, at the instruction at which it waits. */
static bool begin_call(const struct waiting *one, struct user_regs_struct *regs, uint64_t nr) {
    regs->rip = one->regs.rip - 2;
    regs->rax = nr;
    regs->orig_rax = (uint64_t)-1;
    return set_registers(one->tid, regs) && ptrace(PTRACE_SYSCALL, one->tid, NULL, NULL) == 0 && wait_stopped(one->tid);
}

/* Enters the call with what is left, and interrupts it at once. `result`: the call's. */
static bool enter(struct waiting *one, const struct timed *call, int64_t left, uint64_t place, int64_t *result) {
    struct user_regs_struct regs = one->regs;
    if (!put_time(one->tid, call, &regs, place, left) || !begin_call(one, &regs, regs.orig_rax)) return false;
    if (ptrace(PTRACE_INTERRUPT, one->tid, NULL, NULL) || ptrace(PTRACE_CONT, one->tid, NULL, NULL)) return false;
    if (!wait_stopped(one->tid) || !get_registers(one->tid, &regs)) return false;
    *result = (int64_t)regs.rax;
    return regs.orig_rax == one->regs.orig_rax && regs.rip == one->regs.rip;
}

/* Signals wait, with `mask` in the place of its own; which that then is. */
static bool change_mask(pid_t tid, uint64_t *mask) {
    uint64_t own;
    if (ptrace(PTRACE_GETSIGMASK, tid, (void *)SIGSET_SIZE, &own)) return false;
    bool changed = ptrace(PTRACE_SETSIGMASK, tid, (void *)SIGSET_SIZE, mask) == 0;
    *mask = own;
    return changed;
}

/* A process that has changed its user keeps its memory from tracers that may do less than everything, as a CRIU that
 * restores: it shows it for a moment. Returns whether it had to. */
static bool show_memory(const struct waiting *one, bool shown) {
    struct user_regs_struct regs = one->regs;
    uint64_t mask = ~0ull;
    long word;
    if (shown && peek(one->tid, one->regs.rsp, &word, sizeof word)) return false;
    regs.rdi = PR_SET_DUMPABLE;
    regs.rsi = shown;
    if (!change_mask(one->tid, &mask)) return false;
    bool done = begin_call(one, &regs, SYS_prctl) && ptrace(PTRACE_SYSCALL, one->tid, NULL, NULL) == 0 &&
                wait_stopped(one->tid);
    change_mask(one->tid, &mask);
    return done;
}

/* A place from which the call can read its time-out, and what it holds: its own, or one that nobody can have. */
static bool find_place(struct waiting *one, const struct timed *call, uint64_t *place, struct timespec *before) {
    *place = *argument(&one->regs, call->argument);
    if (peek(one->tid, *place, before, sizeof *before) && poke(one->tid, *place, before, sizeof *before)) return true;
    *place = below_red_zone(&one->regs);
    return peek(one->tid, *place, before, sizeof *before);
}

static int64_t rest(const struct waiting *one) {
    int64_t left = one->due - now_on(clock_of(&one->regs));
    return left < 0 ? 0 : left;
}

/* Has the kernel know again when the call ends. Signals wait meanwhile. */
static void arm(struct waiting *one, const struct timed *call) {
    uint64_t mask = ~0ull, place = 0;
    struct timespec before;
    int64_t result = -EINTR;
    bool memory = call->form == TIMESPEC;
    if (memory && !find_place(one, call, &place, &before)) return;
    if (!change_mask(one->tid, &mask)) return;
    if (!enter(one, call, rest(one), place, &result)) result = -EINTR;
    if (memory) poke(one->tid, place, &before, sizeof before);
    change_mask(one->tid, &mask);
    one->regs.rax = (uint64_t)result;
    if (result != -RESTART_BLOCK) one->regs.orig_rax = (uint64_t)-1; /* it has ended */
    struct wait note;
    if (result == -RESTART_BLOCK && access_note(BPF_MAP_LOOKUP_ELEM, one->tid, &note)) {
        note.due = (uint64_t)one->due;
        note.of = note.ends;
        access_note(BPF_MAP_UPDATE_ELEM, one->tid, &note);
    }
}

/* The kernel will enter the call again, for less time than it was entered for. */
static void shorten(struct waiting *one, const struct timed *call) {
    struct wait note = {0};
    if (is_of_socket(call) ? !lend_patience(one, rest(one))
                           : !put_time(one->tid, call, &one->regs, below_red_zone(&one->regs), rest(one)))
        return;
    if (!access_note(BPF_MAP_LOOKUP_ELEM, one->tid, &note)) memset(&note, 0, sizeof note);
    note.due = (uint64_t)one->due;
    note.of = note.entries + 1;
    note.whole = (uint64_t)one->whole;
    note.nr = one->regs.orig_rax;
    note.ip = one->regs.rip;
    note.sp = one->regs.rsp;
    access_note(BPF_MAP_UPDATE_ELEM, one->tid, &note);
}

/* The kernel will read again what it told: that it is less by now. */
static void tell_less(const struct waiting *one) {
    int64_t left = rest(one), unit = unit_told(&one->regs);
    struct timespec told = {left / SECOND, (left % SECOND + unit - 1) / unit};
    if (told.tv_nsec * unit == SECOND) told = (struct timespec){told.tv_sec + 1, 0};
    poke(one->tid, place_told(&one->regs), &told, sizeof told);
}

bool is_untouched(const struct waiting *one, const struct user_regs_struct *now) {
    return now->rip == one->regs.rip && now->rsp == one->regs.rsp && now->rax == one->regs.rax &&
           (int64_t)now->orig_rax >= 0;
}

void take_up(struct waiting *one) {
    const struct timed *call = timed_call(&one->regs);
    struct user_regs_struct now;
    bool forgotten = (int64_t)one->regs.rax == -RESTART_BLOCK; /* by a kernel that would else know the rest */
    bool timed = call && one->left != FOREVER;
    if (!get_registers(one->tid, &now) || (forgotten && is_untouched(one, &now))) return;
    bool memory = timed && call->form == TIMESPEC, shown = memory && show_memory(one, true);
    if (forgotten && timed) arm(one, call);
    if (timed && call->result != -RESTART_BLOCK) shorten(one, call);
    if (place_told(&one->regs) && one->due != FOREVER) tell_less(one);
    if (shown) show_memory(one, false);
    if (forgotten && timed) {
        set_registers(one->tid, &one->regs);
        return;
    }
    if (forgotten || (int64_t)one->regs.rax == -EINTR) one->regs.rax = (uint64_t)-RESTARTNOHAND;
    set_registers(one->tid, &one->regs);
}
