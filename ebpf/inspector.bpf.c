// SPDX-License-Identifier: Apache-2.0
/*
 * Kernel half of the inspector: what the tasks of a sandbox did since its mark.
 *
 * Owns: the counters of inspector.h. Does not own: what they mean (daemon/verdict/judge.py).
 * Guarantee: an effect is counted, or `unknown`/`untracked` is set; a full ring buffer loses
 * explanations only. Verdicts read the mapped array, and depend on no event stream.
 *
 *   task_newtask ─▶ a task's record (slot, epoch of birth) in task storage: the filter of all hooks
 *   sys_exit ─────▶ name-space, metadata, data, IPC and foreign calls that succeeded; progress.
 *                   Most calls change nothing new: what the processor remembers of the task tells so
 *   sys_enter ────▶ when waits with a time-out began (for what happens to them in a dump)
 *   sched_switch ─▶ survivors that ran without finishing a system call
 *   writeback_mark_inode_dirty ──▶ content dirtied by any path: write, O_DIRECT, mappings, io_uring
 *   btrfs_inode_* ▶ births and ends of inodes: what was made and is gone again nets to nothing
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "inspector.h"
#include "syscalls.h"
#include "kernel.h"

char LICENSE[] SEC("license") = "GPL";

#include "state.h"
#include "tasks.h"
#include "progress.h"
#include "inodes.h"
#include "calls.h"
#include "quiet.h"
#include "waits.h"
#include "mappings.h"

/* Whether a request writes to a file of the tree, and not to something that another process may hold. */
static __always_inline bool goes_to_file(struct task_struct *p, struct io_kiocb *request)
{
	struct file *file;
	struct facts f;

	if (BPF_CORE_READ(request, flags) & 1 /* REQ_F_FIXED_FILE */)
		return false; /* its number means something else */
	file = file_at(p, BPF_CORE_READ(request, cqe.fd));
	if (!file)
		return false;
	facts_found(&f, BPF_CORE_READ(file, f_inode));
	return store_of(&f) != NOWHERE && BPF_CORE_READ(file, f_inode, i_nlink);
}

SEC("tp_btf/io_uring_submit_req")
int BPF_PROG(on_uring, struct io_kiocb *request)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct task *t = task_of(p);
	struct sandbox *s;
	u8 opcode;

	if (!t && helps_a_program(p))
		t = task_of(p->group_leader);
	opcode = BPF_CORE_READ(request, opcode);
	if (!t || uring_harmless(opcode))
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
	count(files_of(s)->uring);
	named(s);
	if (!uring_only_files(opcode) && !(uring_writes(opcode) && goes_to_file(p, request)))
		count(procs_of(s)->channels);
	explain_file(WHY_URING, NULL, NULL);
	return 0;
}

/* A call that may have changed something, or the first one after another task ran on this processor. */
static __always_inline int looked_at(struct processor *c, struct task_struct *p, struct pt_regs *regs, long result)
{
	u64 nr, epoch, now = generation; /* before the look at the record */
	struct task *t = task_of(p);
	struct sandbox *s;
	u8 kind = K_UNKNOWN;

	if (!t || t->apart & APART_DEAD)
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
	belongs_to(c, s->cgroup_id, t->slot);
	nr = regs->orig_ax;
	if (task_compat(p))
		kind = K_UNKNOWN;
	else if (nr < SYSCALLS)
		kind = syscall_kinds[nr];
	else if (nr == -1ull)
		kind = K_SIGRETURN; /* which forgets its own number, so that nothing restarts it */
	/* A new task may be interrupted by the very dump that makes it an older one. */
	if (!t->apart && (t->born != s->procs_epoch || t->stashed || p->ptrace || interrupted(result))) {
		if (!ours(s, t))
			progress(s, t, p, regs, result, kind);
	}
	if (kind != K_NONE && !ours(s, t))
		call(s, t, c, p, regs, nr, kind, result);
	if (t->birth)
		t->birth = 0;
	if (t->stamped)
		t->stamped = 0;
	epoch = s->procs_epoch; /* once: the next mark makes all of this void */
	c->quiet = is_quiet(s, t, epoch) ? epoch : 0;
	c->spoke = !(t->apart & APART_AGENT) && t->spoke == epoch;
	c->task = (u64)p;
	c->started = p->start_time;
	c->generation = now;
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(on_sys_exit, struct pt_regs *regs, long result)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct processor *c;
	struct sandbox *s;

	if (is_nobodys(p))
		return 0;
	if (goes_on_later(regs->orig_ax, result))
		interrupted_wait(p, regs);
	c = this_processor();
	if (!c)
		return 0;
	s = quiet_sandbox(c, p);
	if (s && nothing_new(s, c, p, regs, result))
		return 0;
	return looked_at(c, p, regs, result);
}
