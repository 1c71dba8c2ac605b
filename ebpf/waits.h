/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When do waits end? Noted for whoever takes them up again after a dump (sandbox/native/waits.c), by the number of the
 * thread. Included by inspector.bpf.c. A lost entry, or one that an earlier inspector had, costs precision only: a wait
 * that is not taken up by the kernel itself begins anew.
 */
#ifndef PAGURUS_WAITS_H
#define PAGURUS_WAITS_H

#include "../sandbox/native/wait.h"

#define NR_POLL 7
#define NR_SELECT 23
#define NR_NANOSLEEP 35
#define NR_RT_SIGTIMEDWAIT 128
#define NR_FUTEX 202
#define NR_IO_GETEVENTS 208
#define NR_SEMTIMEDOP 220
#define NR_CLOCK_NANOSLEEP 230
#define NR_EPOLL_WAIT 232
#define NR_PSELECT6 270
#define NR_PPOLL 271
#define NR_EPOLL_PWAIT 281
#define NR_IO_PGETEVENTS 333
#define NR_EPOLL_PWAIT2 441
#define FIRST_ADDRESS 4096 /* below it no program has anything */
#define CLOCK_MONOTONIC 1
#define ERESTARTNOHAND 514
#define ERESTART_RESTARTBLOCK 516

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, struct wait);
} waits SEC(".maps");

/* The number of a thread where the inspector runs. */
static __always_inline u32 thread_number(struct task_struct *p)
{
	u32 host = 0;
	struct sandbox *own = bpf_map_lookup_elem(&sandboxes, &host);

	return own ? number_at(p->thread_pid, own->init_level - 1) : 0;
}

#define NR_READ 0
#define NR_WRITE 1
#define NR_READV 19
#define NR_WRITEV 20
#define NR_CONNECT 42
#define NR_ACCEPT 43
#define NR_SENDTO 44
#define NR_RECVFROM 45
#define NR_SENDMSG 46
#define NR_RECVMSG 47
#define NR_SETSOCKOPT 54
#define NR_ACCEPT4 288

/* Which calls are looked at when they begin, one bit each by their number: that is asked at every call of the host. */
#define CALLS 512
#define BIT_OF(nr) (1ull << (nr) % 64)

static const u64 calls_with_time[CALLS / 64] = {
	[NR_SETSOCKOPT / 64] = BIT_OF(NR_SETSOCKOPT),
	[NR_RT_SIGTIMEDWAIT / 64] = BIT_OF(NR_RT_SIGTIMEDWAIT),
	[NR_IO_GETEVENTS / 64] = BIT_OF(NR_IO_GETEVENTS) | BIT_OF(NR_SEMTIMEDOP) | BIT_OF(NR_EPOLL_WAIT),
	[NR_EPOLL_PWAIT / 64] = BIT_OF(NR_EPOLL_PWAIT),
	[NR_IO_PGETEVENTS / 64] = BIT_OF(NR_IO_PGETEVENTS),
	[NR_EPOLL_PWAIT2 / 64] = BIT_OF(NR_EPOLL_PWAIT2),
};
/* Only once a sandbox has a socket with a time-out (`patience`). */
static const u64 calls_of_sockets[CALLS / 64] = {
	BIT_OF(NR_READ) | BIT_OF(NR_WRITE) | BIT_OF(NR_READV) | BIT_OF(NR_WRITEV) | BIT_OF(NR_CONNECT) |
		BIT_OF(NR_ACCEPT) | BIT_OF(NR_SENDTO) | BIT_OF(NR_RECVFROM) | BIT_OF(NR_SENDMSG) | BIT_OF(NR_RECVMSG),
	[NR_ACCEPT4 / 64] = BIT_OF(NR_ACCEPT4),
};

static __always_inline bool has_bit(const u64 *bits, u64 nr)
{
	return bits[nr / 64 % (CALLS / 64)] & BIT_OF(nr);
}

static __always_inline bool is_of_socket(u64 nr)
{
	return has_bit(calls_of_sockets, nr);
}

static __always_inline bool sets_patience(u64 nr, struct pt_regs *regs)
{
	u32 option = regs->dx;

	/* SOL_SOCKET, SO_RCVTIMEO and SO_SNDTIMEO, and the same for 64-bit times */
	return nr == NR_SETSOCKOPT && (u32)regs->si == 1 && (option == 20 || option == 21 || option == 66 || option == 67);
}

static __always_inline struct sandbox *sandbox_with(struct task_struct *p)
{
	struct task *t = task_of(p);

	return t ? sandbox_of(t) : NULL;
}

/* A wait with a time-out that ends with EINTR, or begins anew, whenever it is interrupted. */
static __always_inline bool forgets_its_end(u64 nr, struct pt_regs *regs)
{
	switch (nr) {
	case NR_EPOLL_WAIT:
	case NR_EPOLL_PWAIT:
		return (int)regs->r10 > 0;
	case NR_EPOLL_PWAIT2:
	case NR_SEMTIMEDOP:
		return regs->r10;
	case NR_RT_SIGTIMEDWAIT:
		return regs->dx;
	case NR_IO_GETEVENTS:
	case NR_IO_PGETEVENTS:
		return regs->r8;
	}
	return false;
}

/* One of the calls above begins. */
static __noinline int wait_begins(struct pt_regs *regs, u64 nr)
{
	struct task_struct *p = bpf_get_current_task_btf();
	bool sets = sets_patience(nr, regs);
	struct wait *w, fresh = {};
	struct sandbox *s;
	u32 number;

	if (sets || is_of_socket(nr)) {
		s = p->bpf_storage ? sandbox_with(p) : NULL;
		if (s && sets)
			s->has_patience = patience = 1;
		if (!s || !s->has_patience || sets)
			return 0;
	} else if (!forgets_its_end(nr, regs) || !p->bpf_storage) {
		return 0;
	}
	number = thread_number(p);
	w = bpf_map_lookup_elem(&waits, &number);
	if (!w)
		w = &fresh;
	w->nr = nr;
	w->ip = regs->ip;
	w->sp = regs->sp;
	w->entered = bpf_ktime_get_ns();
	w->entries++;
	if (w == &fresh)
		bpf_map_update_elem(&waits, &number, &fresh, BPF_ANY);
	return 0;
}

SEC("tp_btf/sys_enter")
int BPF_PROG(on_sys_enter, struct pt_regs *regs, long nr)
{
	if ((u64)nr < CALLS && (has_bit(calls_with_time, nr) || (is_of_socket(nr) && patience)))
		wait_begins(regs, nr);
	return 0;
}

/* 7.2 put the two halves of poll's end into one structure. */
struct restart_block___halves {
	struct {
		unsigned long tv_sec, tv_nsec;
	} poll;
} __attribute__((preserve_access_index));
struct restart_block___whole {
	struct {
		struct timespec64 end_time;
	} poll;
} __attribute__((preserve_access_index));

static __always_inline u64 end_of_poll(void *block)
{
	struct restart_block___halves *halves = block;
	struct restart_block___whole *complete = block;

	if (bpf_core_field_exists(complete->poll.end_time))
		return BPF_CORE_READ(complete, poll.end_time.tv_sec) * 1000000000ull +
		       BPF_CORE_READ(complete, poll.end_time.tv_nsec);
	return BPF_CORE_READ(halves, poll.tv_sec) * 1000000000ull + BPF_CORE_READ(halves, poll.tv_nsec);
}

/* When the call ends that this task is to take up again; 0: never. */
static __always_inline u64 end_of(struct task_struct *p, u64 nr)
{
	switch (nr) {
	case NR_NANOSLEEP:
	case NR_CLOCK_NANOSLEEP:
		return BPF_CORE_READ(p, restart_block.nanosleep.expires);
	case NR_FUTEX:
		return BPF_CORE_READ(p, restart_block.futex.time);
	case NR_POLL:
		if (BPF_CORE_READ(p, restart_block.poll.has_timeout))
			return end_of_poll((void *)p + bpf_core_field_offset(struct task_struct, restart_block));
		break;
	case NR_SELECT:
	case NR_PSELECT6:
	case NR_PPOLL: /* whoever waits has been told what is left of it now */
		return bpf_ktime_get_ns();
	}
	return 0;
}

/* Functions of the kernel that take a call up again. One that this kernel does not have is of no call. */
extern const void hrtimer_nanosleep_restart __ksym __weak;
extern const void posix_cpu_nsleep_restart __ksym __weak;
extern const void futex_wait_restart __ksym __weak;
extern const void do_restart_poll __ksym __weak;

/* The call that restart_syscall has taken up, of a wait that was interrupted while no inspector was there. Its arguments
 * are still in the registers, and nanosleep is the one of the two whose first argument is an address. */
static __always_inline u64 taken_up(struct task_struct *p, struct pt_regs *regs)
{
	u64 how = (u64)BPF_CORE_READ(p, restart_block.fn);

	if (!how)
		return NR_RESTART_SYSCALL;
	if (how == (u64)&do_restart_poll)
		return NR_POLL;
	if (how == (u64)&futex_wait_restart)
		return NR_FUTEX;
	if (how == (u64)&posix_cpu_nsleep_restart)
		return NR_CLOCK_NANOSLEEP;
	if (how == (u64)&hrtimer_nanosleep_restart)
		return regs->di < FIRST_ADDRESS || BPF_CORE_READ(p, restart_block.nanosleep.clockid) != CLOCK_MONOTONIC ?
			       NR_CLOCK_NANOSLEEP :
			       NR_NANOSLEEP;
	return NR_RESTART_SYSCALL;
}

static __always_inline bool goes_on_later(u64 nr, long result)
{
	return result == -ERESTART_RESTARTBLOCK ||
	       (result == -ERESTARTNOHAND && (nr == NR_SELECT || nr == NR_PSELECT6 || nr == NR_PPOLL));
}

/* A call was interrupted that the kernel takes up again: by restart_syscall, which tells no number of its own, or with
 * what it told the program. */
static __noinline int interrupted_wait(struct task_struct *p, struct pt_regs *regs)
{
	u32 number = thread_number(p);
	struct wait *w = bpf_map_lookup_elem(&waits, &number), fresh = {};
	u64 nr = regs->orig_ax;

	if (!w)
		w = &fresh;
	if (nr == NR_RESTART_SYSCALL)
		nr = w->ip == regs->ip && w->sp == regs->sp ? w->nr : taken_up(p, regs);
	w->nr = nr;
	w->ip = regs->ip;
	w->sp = regs->sp;
	w->ends = end_of(p, nr);
	if (w == &fresh)
		bpf_map_update_elem(&waits, &number, &fresh, BPF_ANY);
	return 0;
}

#endif
