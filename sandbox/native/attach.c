/* Has processes that CRIU has stopped make userfaultfds, by which their written pages are known from then on.
 *
 * Owns: the call in the process, and bringing its descriptor here. Does not own: which processes (the daemon says so in
 * tracked.h's file), what is registered (the daemon, which takes the descriptor from here).
 * Guarantee: the registers, signal mask and restartable sequence of the thread are put back, it runs no instruction of its
 * own, and it is stopped as it was: within the call in which it was found.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "rearm.h"
#include "tracked.h"

#define CODE_64 0x33
#define UFFD_USER_MODE_ONLY 1
#define SIGSET_SIZE 8
#define OPTIONS (1 << 21 | PTRACE_O_TRACESYSGOOD) /* PTRACE_O_SUSPEND_SECCOMP; and the other as CRIU has it */
#define GET_RSEQ 0x420f
#define MAX_VDSO (64 << 10)
struct rseq_configuration {
    uint64_t pointer;
    uint32_t size, signature, flags, pad;
};
enum { RSEQ_CS = 8 }; /* offset in struct rseq */

extern int criu_get_image_dir(void);

/* Where the process has a `syscall` instruction: in its vDSO; 0: nowhere. */
static uint64_t find_instruction(pid_t pid, int memory) {
    char path[64], line[512];
    unsigned char code[MAX_VDSO];
    unsigned long start, end;
    uint64_t found = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    while (maps && !found && fgets(line, sizeof line, maps)) {
        if (!strstr(line, "[vdso]") || sscanf(line, "%lx-%lx", &start, &end) != 2 || end - start > sizeof code) continue;
        ssize_t size = pread(memory, code, end - start, (off_t)start);
        for (ssize_t i = 0; i + 1 < size && !found; i++)
            if (code[i] == 0x0f && code[i + 1] == 0x05) found = start + (uint64_t)i;
    }
    if (maps) fclose(maps);
    return found;
}

static bool set_registers(pid_t tid, const struct user_regs_struct *regs) {
    struct iovec from = {(void *)regs, sizeof *regs};
    return ptrace(PTRACE_SETREGSET, tid, (void *)NT_PRSTATUS, &from) == 0;
}

static bool get_registers(pid_t tid, struct user_regs_struct *regs) {
    struct iovec into = {regs, sizeof *regs};
    return ptrace(PTRACE_GETREGSET, tid, (void *)NT_PRSTATUS, &into) == 0;
}

/* The result of a system call that the thread makes; or -ECHILD when it does not come to it. */
static int64_t call(pid_t tid, const struct user_regs_struct *own, uint64_t at, uint64_t nr, uint64_t argument) {
    struct user_regs_struct regs = *own;
    regs.rip = at;
    regs.rax = nr;
    regs.orig_rax = (uint64_t)-1;
    regs.rdi = argument;
    if (!set_registers(tid, &regs)) return -ECHILD;
    for (int i = 0; i < 2; i++) /* it enters, it leaves */
        if (ptrace(PTRACE_SYSCALL, tid, NULL, NULL) || !wait_stopped(tid)) return -ECHILD;
    return get_registers(tid, &regs) && regs.rip == at + 2 ? (int64_t)regs.rax : -ECHILD;
}

/* A descriptor of the process, here; or -1. */
static int fetch(pid_t pid, int fd) {
    int process = (int)syscall(SYS_pidfd_open, pid, 0);
    int here = process < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, process, fd, 0);
    if (process >= 0) close(process);
    return here;
}

/* Back into the call in which it was found: the interruption comes before the kernel decides how that goes on. */
static bool put_back(pid_t tid, const struct user_regs_struct *own) {
    return set_registers(tid, own) && ptrace(PTRACE_INTERRUPT, tid, NULL, NULL) == 0 &&
           ptrace(PTRACE_CONT, tid, NULL, NULL) == 0 && wait_stopped(tid) && set_registers(tid, own);
}

static uint64_t find_sequence(pid_t tid) {
    struct rseq_configuration found = {0};
    return ptrace(GET_RSEQ, tid, sizeof found, &found) < 0 ? 0 : found.pointer;
}

static int make_descriptor(pid_t pid, int memory) {
    struct user_regs_struct own;
    uint64_t all = ~0ull, mask, under_way = 0, at = find_instruction(pid, memory), sequence = find_sequence(pid);
    if (!at || !get_registers(pid, &own) || own.cs != CODE_64) return -1;
    if (sequence && pread(memory, &under_way, sizeof under_way, (off_t)(sequence + RSEQ_CS)) != sizeof under_way) return -1;
    if (ptrace(PTRACE_SETOPTIONS, pid, NULL, OPTIONS)) return -1;
    if (ptrace(PTRACE_GETSIGMASK, pid, (void *)SIGSET_SIZE, &mask) ||
        ptrace(PTRACE_SETSIGMASK, pid, (void *)SIGSET_SIZE, &all))
        return -1;
    int64_t theirs = call(pid, &own, at, SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    int here = theirs >= 0 ? fetch(pid, (int)theirs) : -1;
    if (theirs >= 0) call(pid, &own, at, SYS_close, (uint64_t)theirs);
    put_back(pid, &own);
    if (sequence) pwrite(memory, &under_way, sizeof under_way, (off_t)(sequence + RSEQ_CS));
    ptrace(PTRACE_SETSIGMASK, pid, (void *)SIGSET_SIZE, &mask);
    return here;
}

static bool is_ordered(pid_t pid) {
    struct order_record one;
    bool found = false;
    int fd = openat(criu_get_image_dir(), ORDERS, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    while (fd >= 0 && !found && read(fd, &one, sizeof one) == sizeof one) found = one.pid == pid && one.what & ATTACH;
    if (fd >= 0) close(fd);
    return found;
}

void attach(pid_t pid) {
    char path[64];
    if (!is_ordered(pid)) return;
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    int memory = open(path, O_RDWR | O_CLOEXEC), made = memory < 0 ? -1 : make_descriptor(pid, memory);
    if (memory >= 0) close(memory);
    if (made < 0) return;
    int into = openat(criu_get_image_dir(), ANSWERS, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    struct answer_record record = {pid, DESCRIPTOR, (uint64_t)made, 0};
    if (into < 0 || write(into, &record, sizeof record) != sizeof record) close(made);
    if (into >= 0) close(into);
}
