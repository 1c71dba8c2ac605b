/* pid 1 of every sandbox: reaps, notes how commands ended, and does nothing else.
 *
 * Before Linux 6.15 nobody but a parent learns an exit code. Commands must be pid 1's children, or CRIU would not see
 * them, so the daemon reads the last of these notes out of our memory (sandbox/container/endings.py). Only those of
 * session leaders, as each command is one: orphans of other kinds could come in any number.
 *
 * No libc, no descriptors, no threads, no signal handlers: the fewer pages and mappings it has, the
 * faster it is dumped. It sleeps in rt_sigtimedwait, which is simply called again after CRIU
 * interrupted it. Signals without a handler cannot kill a pid 1 from inside its pid namespace.
 */
#define SYS_rt_sigprocmask 14
#define SYS_wait4 61
#define SYS_getsid 124
#define SYS_rt_sigtimedwait 128
#define SYS_waitid 247
#define SIGCHLD 17
#define WNOHANG 1
#define WEXITED 4
#define WNOWAIT 0x01000000
#define CLD_EXITED 1
#define CLD_DUMPED 3
#define ENDINGS_MAX 511

/* A page at an address of its own (build.sh), which stays as it is for checkpoints of this layer. */
static volatile struct {
    unsigned count, unused;
    struct { int pid, status; } last[ENDINGS_MAX];
} endings;

struct info { int signal, error, code, unused, pid, uid, status, rest[25]; };

static long call(long number, long a, long b, long c, long d) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = 0;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

static void note(const struct info *info) {
    unsigned next = endings.count % ENDINGS_MAX;
    endings.last[next].pid = info->pid;
    endings.last[next].status =
        info->code == CLD_EXITED ? info->status << 8 : info->status | (info->code == CLD_DUMPED ? 0x80 : 0);
    endings.count++;
}

/* Noted before it is reaped: once its pidfd says that it is gone, the note is there. */
static int reap(void) {
    struct info info;
    info.pid = 0;
    if (call(SYS_waitid, 0, 0, (long)&info, WEXITED | WNOHANG | WNOWAIT) < 0 || !info.pid) return 0;
    if (call(SYS_getsid, info.pid, 0, 0, 0) == info.pid) note(&info);
    return call(SYS_wait4, info.pid, 0, WNOHANG, 0) > 0;
}

__attribute__((noreturn)) void _start(void) {
    unsigned long child = 1UL << (SIGCHLD - 1);
    call(SYS_rt_sigprocmask, 0, (long)&child, 0, sizeof child);
    for (;;) {
        while (reap()) {
        }
        call(SYS_rt_sigtimedwait, (long)&child, 0, 0, sizeof child);
    }
}
