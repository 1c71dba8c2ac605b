/* SPDX-License-Identifier: Apache-2.0 */
/* Signals and timers. */
#include "states.h"

#include <signal.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>

static void say_set(const sigset_t *set)
{
	for (int number = 1; number < 65; number++)
		if (sigismember(set, number) == 1)
			say("%d,", number);
	say(" ");
}

static void block(int first, int second)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, first);
	if (second)
		sigaddset(&set, second);
	must(syscall(SYS_rt_sigprocmask, SIG_BLOCK, &set, NULL, 8));
}

static void say_mask(void)
{
	sigset_t set;

	sigemptyset(&set);
	syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &set, 8);
	say_set(&set);
}

/* Which signals are pending. */
static void say_pending(void) { say_lines("/proc/self/status", "Pnd"); }

static void handler(int number) { (void)number; }
static void say_action(int number)
{
	struct { void *handler; unsigned long flags; void *restorer; uint64_t mask; } action;

	say_call("action", syscall(SYS_rt_sigaction, number, NULL, &action, 8));
	say("%d %lx %lx ", (long)action.handler > 1 ? 2 : (int)(long)action.handler, action.flags, (long)action.mask);
}

struct action { int number, flags; void (*handler)(int); };
static void make_action(const void *data)
{
	const struct action *a = data;
	struct sigaction action = {.sa_flags = a->flags};
	action.sa_handler = a->handler ? a->handler : handler;
	sigaddset(&action.sa_mask, SIGHUP);
	must(sigaction(a->number, &action, NULL));
}
static void look_action(const void *data) { say_action(((const struct action *)data)->number); }
#define ACTION(name, how, ...)                                                                     \
	static const struct action action_##name = {__VA_ARGS__};                                  \
	ENTRY(name, "signals", "sigaction(" how ")", make_action, look_action, &action_##name)
ACTION(action_information, "SA_SIGINFO with a mask", SIGUSR1, SA_SIGINFO);
ACTION(action_restart, "SA_RESTART, SA_NODEFER, SA_ONSTACK", SIGUSR2, SA_RESTART | SA_NODEFER | SA_ONSTACK);
ACTION(action_once, "SA_RESETHAND", SIGWINCH, SA_RESETHAND);
ACTION(action_children, "SA_NOCLDSTOP, SA_NOCLDWAIT", SIGCHLD, SA_NOCLDSTOP | SA_NOCLDWAIT);
ACTION(action_ignored, "SIG_IGN", SIGPIPE, 0, SIG_IGN);
ACTION(action_real_time, "of a real-time signal", 40, SA_SIGINFO);
ACTION(action_tags, "SA_EXPOSE_TAGBITS", SIGSEGV, 0x800);

STATE(signal_mask, "signals", "sigprocmask");
MAKE(signal_mask) { block(SIGUSR1, 50); }
OBSERVE(signal_mask) { say_mask(); }
static void block_one(void) { block(SIGHUP, SIGTERM); }
STATE(thread_signal_mask, "signals", "pthread_sigmask in a second thread");
MAKE(thread_signal_mask) { start_thread(false, false); in_thread(block_one); }
OBSERVE(thread_signal_mask) { in_thread(say_mask); say_mask(); }

/* Takes pending signals out, says them and puts them back. */
static void say_values(bool thread)
{
	sigset_t set;
	siginfo_t found[16];
	int count = 0;
	struct timespec none = {0};

	sigfillset(&set);
	while (count < 16 && sigtimedwait(&set, &found[count], &none) > 0)
		count++;
	for (int i = 0; i < count; i++) {
		say("%d code %d from %d value %d|", found[i].si_signo, found[i].si_code, found[i].si_pid, found[i].si_value.sival_int);
		if (thread)
			syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), found[i].si_signo, &found[i]);
		else
			syscall(SYS_rt_sigqueueinfo, getpid(), found[i].si_signo, &found[i]);
	}
}
STATE(pending_value, "signals", "sigqueue with a value, blocked");
MAKE(pending_value) { block(SIGUSR1, 0); must(sigqueue(getpid(), SIGUSR1, (union sigval){.sival_int = 4242})); }
OBSERVE(pending_value) { say_pending(); say_values(false); }
STATE(pending_queue, "signals", "several real-time signals queued in order");
MAKE(pending_queue) { block(41, 42); for (int i = 0; i < 5; i++) must(sigqueue(getpid(), 41 + i % 2, (union sigval){.sival_int = i})); }
OBSERVE(pending_queue) { say_pending(); say_values(false); }
STATE(pending_in_thread, "signals", "a signal pending for one thread");
MAKE(pending_in_thread)
{
	siginfo_t info = {.si_signo = 43, .si_code = SI_QUEUE};
	block(43, 0);
	info.si_value.sival_int = 99;
	must(syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), 43, &info));
}
OBSERVE(pending_in_thread) { say_pending(); say_values(true); }

static char stack[65536];
static void say_stack(void) { stack_t now; sigaltstack(NULL, &now); say("%p %x %zu", now.ss_sp, now.ss_flags, now.ss_size); }
STATE(alternate_stack, "signals", "sigaltstack");
MAKE(alternate_stack) { stack_t one = {stack, 0, sizeof stack}; must(sigaltstack(&one, NULL)); }
OBSERVE(alternate_stack) { say_stack(); }
STATE(disarming_stack, "signals", "sigaltstack(SS_AUTODISARM)");
MAKE(disarming_stack) { stack_t one = {stack, 1 << 31, sizeof stack}; must(sigaltstack(&one, NULL)); }
OBSERVE(disarming_stack) { say_stack(); }

/* ------------------------------------------------------------------ timers */

/* What is left, to a thousand seconds, so that time may go on. */
#define LONG 1000000
static void say_left(long left, long interval) { say("left %ld interval %ld ", (left + 999) / 1000, interval); }

struct interval { int which; };
static void make_interval(const void *data)
{
	struct itimerval value = {{77, 5}, {LONG, 0}};
	must(setitimer(((const struct interval *)data)->which, &value, NULL));
}
static void look_interval(const void *data)
{
	struct itimerval value;
	getitimer(((const struct interval *)data)->which, &value);
	say_left(value.it_value.tv_sec, value.it_interval.tv_sec * 1000000 + value.it_interval.tv_usec);
}
#define INTERVAL(name, which)                                                                      \
	static const struct interval interval_##name = {which};                                    \
	ENTRY(name, "timers", "setitimer(" #which ")", make_interval, look_interval, &interval_##name)
INTERVAL(interval_real, ITIMER_REAL);
INTERVAL(interval_virtual, ITIMER_VIRTUAL);
INTERVAL(interval_profile, ITIMER_PROF);

static timer_t timer;
struct posix { clockid_t clock; int notify; bool absolute; };
static void make_posix(const void *data)
{
	const struct posix *p = data;
	struct sigevent event = {.sigev_notify = p->notify, .sigev_signo = 44, .sigev_value.sival_int = 31337};
	struct itimerspec value = {{55, 7}, {LONG, 0}};

	signal(44, SIG_IGN);
	if (p->notify == SIGEV_THREAD_ID) {
		start_thread(false, false);
		((int *)&event)[4] = thread_id; /* sigev_notify_thread_id, which the C library hides */
	}
	if (p->absolute) {
		clock_gettime(p->clock, &value.it_value);
		value.it_value.tv_sec += LONG;
	}
	must(syscall(SYS_timer_create, p->clock, &event, &timer));
	must(syscall(SYS_timer_settime, timer, p->absolute ? TIMER_ABSTIME : 0, &value, NULL));
}
static void say_timer(void)
{
	struct itimerspec value = {0};
	say_call("get", syscall(SYS_timer_gettime, timer, &value));
	say_left(value.it_value.tv_sec, value.it_interval.tv_sec * 1000000000 + value.it_interval.tv_nsec);
	say_lines("/proc/self/timers", "");
}
static void look_posix(const void *data) { (void)data; say_timer(); }
#define POSIX(name, how, ...)                                                                      \
	static const struct posix posix_##name = {__VA_ARGS__};                                    \
	ENTRY(name, "timers", "timer_create(" how ")", make_posix, look_posix, &posix_##name)
POSIX(timer_signal, "CLOCK_REALTIME, SIGEV_SIGNAL", CLOCK_REALTIME, SIGEV_SIGNAL);
POSIX(timer_silent, "CLOCK_MONOTONIC, SIGEV_NONE", CLOCK_MONOTONIC, SIGEV_NONE);
POSIX(timer_thread, "CLOCK_MONOTONIC, SIGEV_THREAD_ID", CLOCK_MONOTONIC, SIGEV_THREAD_ID);
POSIX(timer_boot, "CLOCK_BOOTTIME", CLOCK_BOOTTIME, SIGEV_SIGNAL);
POSIX(timer_tai, "CLOCK_TAI", CLOCK_TAI, SIGEV_SIGNAL);
POSIX(timer_absolute, "CLOCK_REALTIME, absolute", CLOCK_REALTIME, SIGEV_SIGNAL, true);
POSIX(timer_process, "CLOCK_PROCESS_CPUTIME_ID", CLOCK_PROCESS_CPUTIME_ID, SIGEV_SIGNAL);
POSIX(timer_thread_time, "CLOCK_THREAD_CPUTIME_ID", CLOCK_THREAD_CPUTIME_ID, SIGEV_SIGNAL);

STATE(timer_number, "timers", "a POSIX timer with number 3, the first ones deleted");
MAKE(timer_number)
{
	static const struct posix one = {CLOCK_MONOTONIC, SIGEV_NONE, false};
	int numbers[4];
	for (int i = 0; i < 4; i++) {
		make_posix(&one);
		numbers[i] = (int)(long)timer;
	}
	for (int i = 0; i < 3; i++)
		syscall(SYS_timer_delete, numbers[i]);
}
OBSERVE(timer_number) { say_timer(); }

STATE(timer_overrun, "timers", "a POSIX timer whose blocked signal overran");
MAKE(timer_overrun)
{
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = 45};
	struct itimerspec value = {{0, 1000000}, {0, 1000000}};
	block(45, 0);
	must(syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer));
	must(syscall(SYS_timer_settime, timer, 0, &value, NULL));
	usleep(100000);
}
OBSERVE(timer_overrun) { say_pending(); say("%d", syscall(SYS_timer_getoverrun, timer) >= 0); }

struct clockfd { clockid_t clock; int flags; };
static void make_clockfd(const void *data)
{
	const struct clockfd *c = data;
	struct itimerspec value = {{66, 0}, {LONG, 0}};
	fd[0] = must(timerfd_create(c->clock, TFD_NONBLOCK));
	if (c->flags) {
		clock_gettime(c->clock, &value.it_value);
		value.it_value.tv_sec += LONG;
	}
	must(timerfd_settime(fd[0], c->flags, &value, NULL));
}
static void look_clockfd(const void *data)
{
	struct itimerspec value = {0};
	char path[64];
	(void)data;
	say_call("get", timerfd_gettime(fd[0], &value));
	say_left(value.it_value.tv_sec, value.it_interval.tv_sec);
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd[0]);
	say_lines(path, "clockid"), say_lines(path, "ticks"), say_lines(path, "flags");
}
#define CLOCKFD(name, how, ...)                                                                    \
	static const struct clockfd clockfd_##name = {__VA_ARGS__};                                \
	ENTRY(name, "timers", "timerfd(" how ")", make_clockfd, look_clockfd, &clockfd_##name)
CLOCKFD(timerfd_monotonic, "CLOCK_MONOTONIC", CLOCK_MONOTONIC, 0);
CLOCKFD(timerfd_real, "CLOCK_REALTIME, absolute", CLOCK_REALTIME, TFD_TIMER_ABSTIME);
CLOCKFD(timerfd_boot, "CLOCK_BOOTTIME", CLOCK_BOOTTIME, 0);
CLOCKFD(timerfd_cancel, "CLOCK_REALTIME, TFD_TIMER_CANCEL_ON_SET", CLOCK_REALTIME, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET);
STATE(timerfd_ticks, "timers", "a timerfd that expired and was not read");
MAKE(timerfd_ticks)
{
	struct itimerspec value = {{0, 0}, {0, 1000000}};
	fd[0] = must(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
	must(timerfd_settime(fd[0], 0, &value, NULL));
	usleep(20000);
}
OBSERVE(timerfd_ticks) { look_clockfd(NULL); }
STATE(timerfd_often, "timers", "a timerfd that expires every millisecond");
MAKE(timerfd_often)
{
	struct itimerspec value = {{0, 1000000}, {0, 1000000}};
	fd[0] = must(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
	must(timerfd_settime(fd[0], 0, &value, NULL));
}
OBSERVE(timerfd_often)
{
	struct itimerspec value = {0};
	uint64_t ticks = 0;
	say_call("get", timerfd_gettime(fd[0], &value));
	usleep(5000);
	say("interval %ld ticks %d ", value.it_interval.tv_nsec, read(fd[0], &ticks, sizeof ticks) == sizeof ticks && ticks > 0);
}
