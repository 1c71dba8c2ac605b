// SPDX-License-Identifier: Apache-2.0
/*
 * Kernel half of the inspector: what the tasks of a sandbox did since its mark.
 *
 * Owns: the counters of inspector.h. Does not own: what they mean (daemon/judge.py).
 * Guarantee: an effect is counted, or `unknown`/`untracked` is set; a full ring buffer loses
 * explanations only. Verdicts read the mapped array; no event stream lies on their path.
 *
 *   task_newtask ─▶ a task's record (slot, epoch of birth) in task storage: the filter of all hooks
 *   sys_exit ─────▶ name-space, metadata, data, IPC and foreign calls that succeeded; progress
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

/* Slot 0 belongs to the host: its init_level is the depth that sandboxes' inits have. */

/* Why a task is not a survivor: bits of task.apart. */
#define APART_INIT 1	/* pid 1 of the sandbox: ours, holds no state */
#define APART_HOST 2	/* outside the sandbox's pid namespace: a helper of ours that is entering it */
#define APART_DEAD 4
#define APART_AGENT 8	/* excluded by the owner; its threads are, too */
#define APART_TREE 16	/* and what it starts */

struct inode_key {
	u64 inode;
	u64 ino;
	u32 generation;
	u32 pad;
};

/* An inode, and in which epoch of the file half it was seen last: spares the maps. */
struct seen {
	u64 inode;
	u64 ino;
	u64 epoch;
	u32 generation;
	u32 pad;
};

/* A record per task of a sandbox. */
struct task {
	u64 cgroup_id;	/* of the sandbox, to notice that its slot has another owner now */
	u64 apart;	/* changed by the sweep, too: with atomic operations only */
	u64 on;		/* counted in sandbox.running; the same */
	u32 slot;
	bool traced;	/* events since somebody outside attached; only the first one tells where it was */
	bool stashed;
	bool entering;	/* child of a helper of ours: runs our code until it executes a program of the sandbox */
	u64 born;	/* epochs of the process half */
	u64 ran;
	u64 at_nr, at_ip, at_sp;	/* the interrupted system call it sits in */
	u64 birth, birth_ino;		/* inode made by the system call that is running */
	u32 birth_generation, birth_mode;
	u64 targets;			/* inodes whose attributes it changed: known where fentry programs load */
	struct inode_key target;	/* the last of them */
	struct seen dirtied;	/* last inode dirtied */
	struct seen written;	/* last inode written through a descriptor: of an overlay, not the real one */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task);
} tasks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1024);
	__type(key, u32);
	__type(value, struct sandbox);
} sandboxes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, u64);
	__type(value, u32);
} slots SEC(".maps");

/* Inodes touched since the mark. A lost entry only loses netting, which is safe: hence LRU. */
struct inode_value {
	u64 epoch;
	u64 flags;
	u32 slot;
	u32 pad;
};

#define TOUCHED_BORN 1
#define TOUCHED_DATA 2
#define TOUCHED_METADATA 4
#define TOUCHED_NAMED 8

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct inode_key);
	__type(value, struct inode_value);
} inodes SEC(".maps");

/*
 * The epoch of the process half in which a process number was given to a task of a sandbox. Whoever bears it in
 * that epoch is younger than the mark, whatever became of the first bearer (a zombie still has its number). A lost
 * entry costs precision only.
 */
struct number {
	u64 space;	/* pid namespace */
	u32 value;
	u32 pad;
};

struct birth {
	u64 cgroup_id;
	u64 epoch;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct number);
	__type(value, struct birth);
} births SEC(".maps");

/*
 * TCP ports that a task younger than the mark listens on, alone: then whoever connects to one talks to nobody older.
 * Alone means without SO_REUSEPORT and on no device of its own; the kernel then refuses the same address to others.
 */
struct tcp_port {
	u64 space;	/* network namespace */
	u32 address;
	u32 number;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct tcp_port);
	__type(value, struct birth);
} ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} explanations SEC(".maps");

/* ------------------------------------------------------------------ small parts */

#define count(field) __sync_fetch_and_add(&(field), 1)
#define uncount(field) __sync_fetch_and_sub(&(field), 1)

/* The record of a task; most tasks of a host have none, and no storage at all. */
static __always_inline struct task *task_of(struct task_struct *p)
{
	return p->bpf_storage ? bpf_task_storage_get(&tasks, p, NULL, 0) : NULL;
}

static __always_inline struct sandbox *sandbox_of(struct task *t)
{
	u32 slot = t->slot;
	struct sandbox *s = bpf_map_lookup_elem(&sandboxes, &slot);

	return s && s->cgroup_id == t->cgroup_id ? s : NULL;
}

static __always_inline struct files_bucket *files_of(struct sandbox *s)
{
	return &s->files[s->files_epoch & (BUCKETS - 1)];
}

static __always_inline struct procs_bucket *procs_of(struct sandbox *s)
{
	return &s->procs[s->procs_epoch & (BUCKETS - 1)];
}

static __always_inline struct procs_bucket *procs_at(struct sandbox *s, u64 epoch)
{
	return &s->procs[epoch & (BUCKETS - 1)];
}

#define EXPLAINED_AT_MOST 16

/* Names from a directory entry up to the root of its file system. Only explanations come here: a few per epoch. */
static __noinline int name_parts(struct explanation *e, struct dentry *entry)
{
	if (!e)
		return 0;
	for (u32 i = 0; i < DEPTH; i++) {
		struct dentry *above = BPF_CORE_READ(entry, d_parent);
		const unsigned char *name = BPF_CORE_READ(entry, d_name.name);

		if (above == entry || !above) {
			e->whole = 1;
			return 0;
		}
		if (bpf_probe_read_kernel_str(&e->parts[i * PART_LENGTH], PART_LENGTH, name) < 0)
			return 0;
		e->depth = i + 1;
		entry = above;
	}
	return 0;
}

/* `entry`: what it is about, or the directory that `name` is relative to. `name`: of user memory. */
static __always_inline void explain(struct sandbox *s, struct task *t, u64 *explained, u32 what,
				    struct dentry *entry, const void *name)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct explanation *e;

	if (*explained >= EXPLAINED_AT_MOST)
		return;
	count(*explained);
	e = bpf_ringbuf_reserve(&explanations, sizeof(*e), 0);
	if (!e) {
		count(s->lost);
		return;
	}
	e->slot = t->slot;
	e->cgroup_id = s->cgroup_id;
	e->what = what;
	e->pid = own_number(p);
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	e->name[0] = 0;
	if (name && bpf_probe_read_user_str(e->name, sizeof(e->name), name) < 0)
		e->name[0] = 0;
	e->depth = e->whole = 0;
	if (entry)
		name_parts(e, entry);
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

#define explain_file(what, entry, name) explain(s, t, &files_of(s)->explained, what, entry, name)
#define explain_proc(what, entry, name) explain(s, t, &procs_of(s)->explained, what, entry, name)

/* Made progress since the mark. Born since the mark counts as fresh already. */
static __always_inline void ran(struct sandbox *s, struct task *t)
{
	u64 now = s->procs_epoch;

	if (t->apart || t->born == now || t->ran == now)
		return;
	t->ran = now;
	count(procs_at(s, now)->ran);
	explain_proc(WHY_RAN, NULL, NULL);
}

/* ------------------------------------------------------------------ which sandbox */

#define DEEPEST 32

/* Slot of the watched cgroup that is `cgroup` or an ancestor of it. */
static __always_inline u32 *slot_of_cgroup(struct cgroup *cgroup)
{
	int level = BPF_CORE_READ(cgroup, level);
	u32 *slot;

	for (int i = 0; i < DEEPEST; i++) {
		u64 id;

		if (level - i < 0)
			break;
		id = cgroup_ancestor_id(cgroup, level - i);
		slot = bpf_map_lookup_elem(&slots, &id);
		if (slot)
			return slot;
	}
	return NULL;
}

/* A task of the pid namespace of the sandbox's init, or of one below it? Always, where there is none. */
static __always_inline bool inside(struct task_struct *p, struct sandbox *s)
{
	return BPF_CORE_READ(p, thread_pid, level) >= s->init_level;
}

static __always_inline bool is_init(struct task_struct *p, struct sandbox *s)
{
	struct pid *pid = BPF_CORE_READ(p, thread_pid);
	u32 level = BPF_CORE_READ(pid, level);

	return s->init_level && level == s->init_level && number_at(pid, level) == 1;
}

/*
 * Our own code at work: a helper that has not entered the pid namespace, or its child before it executes a
 * program. A restored process executes none: for it this ends with the mark that follows a restore.
 */
static __always_inline bool ours(struct sandbox *s, struct task *t)
{
	return t->apart & APART_HOST || (t->entering && t->born == s->procs_epoch);
}

/* The number that a task or process goes by in the innermost namespace that it has one in. */
static __always_inline struct number number_of(struct pid *pid)
{
	u32 level = BPF_CORE_READ(pid, level);
	struct number n = {};

	if (level < 32) {
		bpf_probe_read_kernel(&n.value, sizeof(n.value), &pid->numbers[level].nr);
		bpf_probe_read_kernel(&n.space, sizeof(n.space), &pid->numbers[level].ns);
	}
	return n;
}

static __always_inline bool younger_than_mark(struct sandbox *s, struct number *n)
{
	struct birth *b = bpf_map_lookup_elem(&births, n);

	return b && b->cgroup_id == s->cgroup_id && b->epoch == s->procs_epoch;
}

/* Count `p` as a task of the sandbox, born in the running epoch. `apart`: it is the owner's, from its birth. */
static __always_inline struct task *adopt(struct task_struct *p, u32 slot, bool entering, u64 apart)
{
	struct sandbox *s = bpf_map_lookup_elem(&sandboxes, &slot);
	struct number number = number_of(BPF_CORE_READ(p, thread_pid));
	struct birth birth = {};
	struct task *t;

	if (!s || !s->cgroup_id)
		return NULL;
	birth.cgroup_id = s->cgroup_id;
	birth.epoch = s->procs_epoch;
	bpf_map_update_elem(&births, &number, &birth, BPF_ANY);
	t = bpf_task_storage_get(&tasks, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t) {
		count(s->untracked);
		return NULL;
	}
	t->slot = slot;
	t->cgroup_id = s->cgroup_id;
	if (is_init(p, s))
		apart = APART_INIT;
	else if (!inside(p, s))
		apart = APART_HOST;
	t->apart = apart;
	t->entering = entering;
	t->born = s->procs_epoch;
	t->ran = t->on = 0;
	t->traced = t->stashed = false;
	t->birth = t->targets = t->dirtied.inode = t->written.inode = 0;
	if (apart == APART_INIT)
		s->ipc_before = IPC_UNKNOWN; /* a new init, a new namespace */
	if (!apart) {
		count(s->alive);
		count(procs_at(s, t->born)->fresh);
	} else if (apart & APART_AGENT) {
		count(s->excluded);
	}
	return t;
}

static __always_inline void leave_processor(struct sandbox *s, struct task *t)
{
	if (t->on && __sync_fetch_and_and(&t->on, 0))
		uncount(s->running);
}

/* Take back what the task counts for. */
static __always_inline void withdraw(struct sandbox *s, struct task *t)
{
	struct procs_bucket *b;

	uncount(s->alive);
	leave_processor(s, t);
	b = procs_at(s, t->born);
	if (b->epoch == t->born)
		uncount(b->fresh);
	b = procs_at(s, t->ran);
	if (t->ran && b->epoch == t->ran)
		uncount(b->ran);
}

static __always_inline void release(struct sandbox *s, struct task *t)
{
	u64 before = __sync_fetch_and_or(&t->apart, APART_DEAD);

	if (before & APART_DEAD)
		return;
	if (before & APART_AGENT) {
		leave_processor(s, t);
		uncount(s->excluded);
	}
	if (before)
		return;
	withdraw(s, t);
	if (t->born != s->procs_epoch)
		count(procs_of(s)->gone);
}

/*
 * From now on this task is no survivor, whatever it does. Runs beside the task's own hooks: what one of them
 * adds to `running` in this very moment is taken back when the task leaves the processor.
 */
static __always_inline void exclude(struct sandbox *s, struct task *t, u64 how)
{
	u64 before = __sync_fetch_and_or(&t->apart, how);

	if (before)
		return;
	count(s->excluded);
	withdraw(s, t);
}

/* ------------------------------------------------------------------ process life */

#define CLONE_THREAD 0x00010000

/* A thread of the agent is the agent; so is what it starts, when the owner said so. */
static __always_inline u64 inherited(struct task *from, u64 flags)
{
	u64 apart = from->apart;

	if (!(apart & APART_AGENT) || apart & APART_DEAD)
		return 0;
	return flags & CLONE_THREAD || apart & APART_TREE ? apart & (APART_AGENT | APART_TREE) : 0;
}

SEC("tp_btf/task_newtask")
int BPF_PROG(on_newtask, struct task_struct *p, u64 flags)
{
	struct task_struct *parent = bpf_get_current_task_btf();
	struct css_set *set = p->cgroups;
	struct task *from = task_of(parent);
	struct sandbox *s;
	u32 slot, *found;
	u64 apart = 0;
	bool entering;

	if (set == parent->cgroups) {
		if (!from || from->apart & APART_DEAD)
			return 0;
		slot = from->slot;
	} else {
		found = slot_of_cgroup(BPF_CORE_READ(set, dfl_cgrp));
		if (!found)
			return 0;
		slot = *found;
	}
	s = bpf_map_lookup_elem(&sandboxes, &slot);
	if (!s || !s->cgroup_id)
		return 0;
	entering = s->init_level && (!from || from->slot != slot || ours(s, from));
	if (from && from->slot == slot && from->cgroup_id == s->cgroup_id)
		apart = inherited(from, flags);
	if (inside(p, s))
		count(procs_of(s)->forks);
	adopt(p, slot, entering, apart);
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(on_exit, struct task_struct *p)
{
	struct task *t = task_of(p);
	struct sandbox *s;

	if (!t || t->apart & APART_DEAD)
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
	if (!(t->apart & APART_HOST))
		count(procs_of(s)->exits);
	release(s, t);
	return 0;
}

SEC("tp_btf/sched_process_exec")
int BPF_PROG(on_exec, struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm)
{
	struct task *t = task_of(p);
	struct sandbox *s;

	if (!t || t->apart & APART_HOST)
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
	t->entering = false;
	count(procs_of(s)->execs);
	return 0;
}

/* Tasks that enter or leave a watched cgroup by a write to cgroup.procs. */
SEC("tp_btf/cgroup_attach_task")
int BPF_PROG(on_attach, struct cgroup *to, const char *path, struct task_struct *p, bool threadgroup)
{
	struct cgroup *now = BPF_CORE_READ(p, cgroups, dfl_cgrp);
	struct task *t = task_of(p);
	u32 *found = slot_of_cgroup(now);
	struct sandbox *s;

	if (t && !(t->apart & APART_DEAD)) {
		if (found && *found == t->slot)
			return 0;
		s = sandbox_of(t);
		if (s) {
			release(s, t);
			count(s->untracked);
		}
	}
	if (!found)
		return 0;
	s = bpf_map_lookup_elem(&sandboxes, found);
	if (!s)
		return 0;
	/* The event names the leader alone; its other threads are found by the next sweep. */
	if (threadgroup && BPF_CORE_READ(p, signal, nr_threads) > 1)
		count(s->untracked);
	adopt(p, *found, false, 0);
	return 0;
}

/* The sweep: all tasks of the host, once per watch; records those of watched cgroups, and excludes an agent. */
SEC("iter/task")
int sweep(struct bpf_iter__task *ctx)
{
	struct task_struct *p = ctx->task;
	struct sandbox *s, *own;
	struct task *t;
	u32 *found, host = 0;

	own = bpf_map_lookup_elem(&sandboxes, &host);
	if (!own)
		return 0;
	if (ctx->meta->seq_num == 0)
		own->init_level = BPF_CORE_READ(bpf_get_current_task_btf(), thread_pid, level) + 1;
	if (!p || BPF_CORE_READ(p, exit_state))
		return 0;
	found = slot_of_cgroup(BPF_CORE_READ(p, cgroups, dfl_cgrp));
	if (!found)
		return 0;
	s = bpf_map_lookup_elem(&sandboxes, found);
	if (!s)
		return 0;
	t = task_of(p);
	if (!t || t->apart & APART_DEAD || t->slot != *found || t->cgroup_id != s->cgroup_id)
		t = adopt(p, *found, false, 0);
	if (t && own->wanted_pid && own->wanted_slot == *found &&
	    number_at(group_pid(p), own->init_level - 1) == own->wanted_pid)
		exclude(s, t, own->wanted_how);
	return 0;
}

/* IPC objects that there are now: System V ones, and message queues. */
static __always_inline void count_ipc(struct task_struct *p, struct sandbox *s)
{
	struct ipc_namespace *space = BPF_CORE_READ(p, nsproxy, ipc_ns);
	u64 found;

	if (!space)
		return;
	if (s->ipc_space && s->ipc_space != (u64)space) {
		s->ipc_now = IPC_UNKNOWN;
		return;
	}
	found = BPF_CORE_READ(space, mq_queues_count);
	found += BPF_CORE_READ(space, ids[0].in_use);
	found += BPF_CORE_READ(space, ids[1].in_use);
	found += BPF_CORE_READ(space, ids[2].in_use);
	s->ipc_space = (u64)space;
	s->ipc_now = found;
}

/* The census: the tasks and the IPC objects of one sandbox. */
SEC("iter/task")
int tell(struct bpf_iter__task *ctx)
{
	struct task_struct *p = ctx->task;
	struct census c = {};
	struct sandbox *s, *own;
	struct task *t;
	u32 host = 0;

	own = bpf_map_lookup_elem(&sandboxes, &host);
	if (!own || !p)
		return 0;
	t = task_of(p);
	if (!t || t->slot != own->wanted_slot || t->apart & (APART_HOST | APART_DEAD))
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
	count_ipc(p, s);
	if (t->apart & APART_INIT) {
		s->mount_space = (u64)BPF_CORE_READ(p, nsproxy, mnt_ns);
		s->init_pid = number_at(group_pid(p), own->init_level - 1);
	}
	if (t->apart)
		return 0;
	c.pid = number_at(group_pid(p), own->init_level - 1);
	c.tid = number_at(BPF_CORE_READ(p, thread_pid), own->init_level - 1);
	c.fresh = t->born == s->procs_epoch;
	c.ran = t->ran == s->procs_epoch || t->on;
	BPF_CORE_READ_STR_INTO(&c.comm, p, group_leader, comm);
	bpf_seq_write(ctx->meta->seq, &c, sizeof(c));
	return 0;
}

/* ------------------------------------------------------------------ did a survivor run? */

static __always_inline bool at_stash(struct task *t, u64 nr, u64 ip, u64 sp)
{
	return t->stashed && (t->at_nr == nr || nr == NR_RESTART_SYSCALL) && t->at_ip == ip && t->at_sp == sp;
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

SEC("tp_btf/signal_generate")
int BPF_PROG(on_signal, int number, struct kernel_siginfo *info, struct task_struct *p, int group, int result)
{
	struct task *t = task_of(p);
	struct sandbox *s;

	if (!t || t->apart || result == 1 /* ignored */)
		return 0;
	s = sandbox_of(t);
	if (!s || t->born == s->procs_epoch || p->ptrace)
		return 0;
	count(procs_of(s)->signals);
	explain_proc(WHY_SIGNAL, NULL, NULL);
	return 0;
}

/* ------------------------------------------------------------------ inodes */

static __always_inline struct inode_key key_of(const struct inode *inode)
{
	struct inode_key key = {};

	key.inode = (u64)inode;
	key.ino = BPF_CORE_READ(inode, i_ino);
	key.generation = BPF_CORE_READ(inode, i_generation);
	return key;
}

static __always_inline struct inode_key key_from(const struct facts *f)
{
	struct inode_key key = { .inode = f->inode, .ino = f->ino, .generation = f->generation };

	return key;
}

static __always_inline bool seen_before(struct seen *seen, const struct facts *f, u64 epoch)
{
	return seen->inode == f->inode && seen->ino == f->ino && seen->generation == f->generation &&
	       seen->epoch == epoch;
}

static __always_inline void see(struct seen *seen, const struct facts *f, u64 epoch)
{
	seen->inode = f->inode;
	seen->ino = f->ino;
	seen->generation = f->generation;
	seen->epoch = epoch;
}

/* True when `flag` is new for this inode since the mark. */
static __always_inline bool touch(struct sandbox *s, struct task *t, struct inode_key *key, u64 flag)
{
	struct inode_value *v = bpf_map_lookup_elem(&inodes, key);
	struct inode_value fresh = { .epoch = s->files_epoch, .slot = t->slot, .flags = flag };

	if (v && v->slot == t->slot && v->epoch == fresh.epoch)
		return !(__sync_fetch_and_or(&v->flags, flag) & flag);
	bpf_map_update_elem(&inodes, key, &fresh, BPF_ANY);
	return true;
}

static __always_inline void dirtied(struct sandbox *s, struct task *t, const struct facts *f, struct dentry *entry)
{
	struct inode_key key;

	if (seen_before(&t->dirtied, f, s->files_epoch))
		return;
	see(&t->dirtied, f, s->files_epoch);
	key = key_from(f);
	if (touch(s, t, &key, TOUCHED_DATA)) {
		count(files_of(s)->data);
		explain_file(WHY_DATA, entry, NULL);
	}
}

static __always_inline struct dentry *entry_of(const struct inode *inode)
{
	struct hlist_node *first = BPF_CORE_READ(inode, i_dentry.first);

	return first ? (void *)first - bpf_core_field_offset(struct dentry, d_u.d_alias) : NULL;
}

static __always_inline int marked(const struct inode *inode)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct task *t = task_of(p);
	struct sandbox *s;
	struct facts f;

	if (!t && helps_a_program(p))
		t = task_of(p->group_leader);
	if (!t || t->apart & APART_HOST || !has_content(inode->i_mode))
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
	if (t->dirtied.inode == (u64)inode && t->dirtied.ino == inode->i_ino &&
	    t->dirtied.generation == inode->i_generation && t->dirtied.epoch == s->files_epoch)
		return 0;
	facts_given(&f, inode);
	if (home_of(&f) == PERSISTENT && !ours(s, t))
		dirtied(s, t, &f, entry_of(inode));
	return 0;
}

SEC("tp_btf/writeback_mark_inode_dirty")
int BPF_PROG(on_mark, struct inode *inode, int flags)
{
	/*
	 * I_DIRTY_SYNC alone is a time stamp: an atime, or the mtime of a change that is seen elsewhere. Every page
	 * that becomes dirty marks its inode (filemap_dirty_folio, block_dirty_folio, mark_buffer_dirty), so the
	 * event of the page itself would tell the same once more.
	 */
	return flags & dirty_content() ? marked(inode) : 0;
}

SEC("tp_btf/btrfs_inode_new")
int BPF_PROG(on_inode_new, const struct inode *inode)
{
	struct task *t = task_of(bpf_get_current_task_btf());
	struct inode_key key;

	if (!t)
		return 0;
	key = key_of(inode);
	t->birth = key.inode;
	t->birth_ino = key.ino;
	t->birth_generation = key.generation;
	t->birth_mode = BPF_CORE_READ(inode, i_mode);
	return 0;
}

/* The inode leaves memory, whoever drops it last. Gone for good when it has no link. */
SEC("tp_btf/btrfs_inode_evict")
int BPF_PROG(on_inode_evict, const struct inode *inode)
{
	struct task *t = task_of(bpf_get_current_task_btf());
	struct inode_key key = key_of(inode);
	struct inode_value *v = bpf_map_lookup_elem(&inodes, &key);
	struct files_bucket *b;
	struct sandbox *s;

	if (t && t->birth == key.inode && t->birth_ino == key.ino)
		t->birth = 0;
	if (!v)
		return 0;
	s = bpf_map_lookup_elem(&sandboxes, &v->slot);
	if (s && v->epoch == s->files_epoch && (v->flags & TOUCHED_BORN) && BPF_CORE_READ(inode, i_nlink) == 0) {
		b = files_of(s);
		if (v->flags & TOUCHED_NAMED)
			count(b->temporary);
		if (v->flags & TOUCHED_DATA)
			uncount(b->data);
		if (v->flags & TOUCHED_METADATA)
			uncount(b->metadata);
	}
	bpf_map_delete_elem(&inodes, &key);
	return 0;
}

/*
 * The fentry tier: which inode a call about a path changed. With it, attributes of a file that is gone again net out,
 * as those changed through a descriptor do everywhere. Of an overlay, the hooks run for the upper inode last.
 */
static __always_inline int aimed_at(struct dentry *entry)
{
	struct task *t = task_of(bpf_get_current_task_btf());
	struct inode *inode = entry->d_inode;
	struct facts f;

	if (!t || !inode)
		return 0;
	facts_given(&f, inode);
	if (f.magic == MAGIC_OVERLAY)
		return 0;
	t->target = key_from(&f);
	t->targets++;
	return 0;
}

SEC("fentry/security_inode_setattr")
int BPF_PROG(on_setattr, struct mnt_idmap *idmap, struct dentry *entry)
{
	return aimed_at(entry);
}

SEC("fentry/security_inode_setxattr")
int BPF_PROG(on_setxattr, struct mnt_idmap *idmap, struct dentry *entry)
{
	return aimed_at(entry);
}

SEC("fentry/security_inode_removexattr")
int BPF_PROG(on_removexattr, struct mnt_idmap *idmap, struct dentry *entry)
{
	return aimed_at(entry);
}

/* ------------------------------------------------------------------ system calls */

#include "calls.h"

/* Whether a request writes to a file of the tree, and not to something that another process may hold. */
static __always_inline bool goes_to_file(struct task_struct *p, struct io_kiocb *request)
{
	struct file *file;

	if (BPF_CORE_READ(request, flags) & 1 /* REQ_F_FIXED_FILE */)
		return false; /* its number means something else */
	file = file_at(p, BPF_CORE_READ(request, cqe.fd));
	return file && has_content(BPF_CORE_READ(file, f_inode, i_mode));
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
	named(s, p);
	if (!uring_only_files(opcode) && !(uring_writes(opcode) && goes_to_file(p, request)))
		count(procs_of(s)->channels);
	explain_file(WHY_URING, NULL, NULL);
	return 0;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(on_sys_exit, struct pt_regs *regs, long result)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct task *t = task_of(p);
	struct sandbox *s;
	u64 nr;
	u8 kind = K_UNKNOWN;

	if (!t || t->apart & APART_DEAD)
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
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
		call(s, t, p, regs, nr, kind, result);
	if (t->birth)
		t->birth = 0;
	if (t->targets)
		t->targets = 0;
	return 0;
}
