/* SPDX-License-Identifier: Apache-2.0 */
/* Did a task that is older than the mark run? Included by inspector.bpf.c. */
#ifndef PAGURUS_PROGRESS_H
#define PAGURUS_PROGRESS_H

static __always_inline bool at_stash(struct task *t, u64 nr, u64 ip, u64 sp)
{
	return t->stashed && (t->at_nr == nr || t->at_nr == NR_RESTART_SYSCALL || nr == NR_RESTART_SYSCALL) &&
	       t->at_ip == ip && t->at_sp == sp;
}

static __always_inline void stash(struct task *t, u64 nr, u64 ip, u64 sp)
{
	t->stashed = true;
	t->at_nr = nr;
	t->at_ip = ip;
	t->at_sp = sp;
}

/*
 * A task is switched out: blocked, or still runnable. One older than the mark that blocks anywhere but in
 * the system call in which it was interrupted has run. (Being frozen for a dump interrupts the call; the
 * thaw enters it again, at the same place, without any code of the program in between.)
 */
static __always_inline void switched_out(struct task_struct *p, bool preempted)
{
	struct task *t = task_of(p);
	struct sandbox *s;
	struct pt_regs *regs;

	if (!t || (t->apart && !t->on))
		return;
	s = sandbox_of(t);
	if (!s)
		return;
	if (t->apart) {
		leave_processor(s, t);
		return;
	}
	if (preempted || !task_blocked(p)) {
		if (!t->on && !__sync_fetch_and_or(&t->on, 1))
			count(s->running);
		return;
	}
	leave_processor(s, t);
	if (!p->ptrace)
		t->traced = false;
	if (t->born == s->procs_epoch || t->ran == s->procs_epoch)
		return;
	regs = (struct pt_regs *)bpf_task_pt_regs(p);
	if (!at_stash(t, regs->orig_ax, regs->ip, regs->sp))
		ran(s, t);
}

static __always_inline void switched_in(struct task_struct *p)
{
	struct task *t = task_of(p);
	struct sandbox *s;

	if (!t || t->apart || t->on)
		return;
	s = sandbox_of(t);
	if (s && !__sync_fetch_and_or(&t->on, 1))
		count(s->running);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	switched_out(prev, preempt);
	switched_in(next);
	return 0;
}

/* 0f 05: the program will enter the call in ax without running any code before. */
static __always_inline bool at_syscall(u64 ip)
{
	u16 code = 0;

	return bpf_probe_read_user(&code, sizeof(code), (void *)ip) == 0 && code == 0x050f;
}

static __always_inline bool interrupted(long result)
{
	return result == -4 /* EINTR */ || (result <= -512 && result >= -516) /* ERESTART... */;
}

/* A task leaves a system call. */
static __always_inline void progress(struct sandbox *s, struct task *t, struct task_struct *p,
				     struct pt_regs *regs, long result, u8 kind)
{
	if (p->ptrace) {
		/* Our dump let it enter the very call again that it sits in, and interrupted that at once. */
		if (t->traced && interrupted(result) && at_stash(t, regs->orig_ax, regs->ip, regs->sp))
			return;
		/*
		 * A tracer works here: our dump, or a debugger. Count it as progress of this epoch; the
		 * dump's mark comes after. Only the first event tells where the task itself was.
		 */
		if (kind == K_SIGRETURN && at_syscall(regs->ip))
			stash(t, regs->ax, regs->ip + 2, regs->sp);
		else if (!t->traced && interrupted(result))
			stash(t, regs->orig_ax, regs->ip, regs->sp);
		else if (!t->traced)
			t->stashed = false;
		t->traced = true;
		ran(s, t);
		return;
	}
	t->traced = false;
	if (interrupted(result) && kind != K_SIGRETURN) {
		stash(t, regs->orig_ax, regs->ip, regs->sp);
		return;
	}
	t->stashed = false;
	ran(s, t);
}

/*
 * SIGCONT wakes, and it and the stop signals (18 to 22) take each other out of what waits, also where the signal itself
 * is ignored then.
 */
static __always_inline bool has_no_effect(int number, int result)
{
	return result == 1 /* ignored */ && (u32)(number - 18) > 4;
}

/* A signal to a process is told of its first thread, which may have ended before the others. */
static __always_inline bool led_by(struct task_struct *p, struct task *t, int group)
{
	return t->apart == APART_DEAD && group && BPF_CORE_READ(p, signal, live.counter) > 0;
}

SEC("tp_btf/signal_generate")
int BPF_PROG(on_signal, int number, struct kernel_siginfo *info, struct task_struct *p, int group, int result)
{
	struct task *t = task_of(p);
	struct sandbox *s;

	if (!t || (t->apart && !led_by(p, t, group)) || has_no_effect(number, result))
		return 0;
	s = sandbox_of(t);
	if (!s || t->born == s->procs_epoch || p->ptrace)
		return 0;
	count(procs_of(s)->signals);
	explain_proc(WHY_SIGNAL, NULL, NULL);
	return 0;
}

#endif
