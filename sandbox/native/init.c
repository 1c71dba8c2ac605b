/* pid 1 of every sandbox: reaps, and does nothing else.
 *
 * No libc, no descriptors, no threads, no signal handlers: the fewer pages and mappings it has, the
 * faster it is dumped. It sleeps in rt_sigtimedwait, which is simply called again after CRIU
 * interrupted it. Signals without a handler cannot kill a pid 1 from inside its pid namespace.
 */
#define SYS_rt_sigprocmask 14
#define SYS_wait4 61
#define SYS_rt_sigtimedwait 128
#define SIGCHLD 17

static long call(long number, long a, long b, long c, long d) {
    register long r10 __asm__("r10") = d;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

__attribute__((noreturn)) void _start(void) {
    unsigned long child = 1UL << (SIGCHLD - 1);
    call(SYS_rt_sigprocmask, 0, (long)&child, 0, sizeof child);
    for (;;) {
        while (call(SYS_wait4, -1, 0, 1 /* WNOHANG */, 0) > 0) {
        }
        call(SYS_rt_sigtimedwait, (long)&child, 0, 0, sizeof child);
    }
}
