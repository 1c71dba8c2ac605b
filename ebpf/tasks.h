/* SPDX-License-Identifier: Apache-2.0 */
/* Which sandbox a task belongs to, and its life: birth, exec, exit, moves, the sweep and the census. Included by inspector.bpf.c. */
#ifndef PAGURUS_TASKS_H
#define PAGURUS_TASKS_H

#define DEEPEST 32
#define PF_EXITING 0x00000004 /* set before sched_process_exit */

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
	t->ran = t->on = t->spoke = 0;
	t->traced = t->stashed = false;
	t->birth = t->stamped = 0;
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
static __always_inline void exclude(struct sandbox *s, struct task *t)
{
	u64 before = __sync_fetch_and_or(&t->apart, APART_AGENT);

	if (before)
		return;
	count(s->excluded);
	withdraw(s, t);
}

/* ------------------------------------------------------------------ process life */

#define CLONE_THREAD 0x00010000

/* A thread of the agent is the agent. What it starts is not. */
static __always_inline u64 inherited(struct task *from, u64 flags)
{
	u64 apart = from->apart;

	if (!(apart & APART_AGENT) || apart & APART_DEAD)
		return 0;
	return flags & CLONE_THREAD ? APART_AGENT : 0;
}

SEC("tp_btf/task_newtask")
int BPF_PROG(on_newtask, struct task_struct *p, u64 flags)
{
	struct task_struct *parent = bpf_get_current_task_btf();
	struct css_set *set = p->cgroups;
	struct task *from = task_of(parent), *known;
	struct sandbox *s;
	u32 slot, *found;
	u64 apart = 0;
	bool entering;

	if (set == parent->cgroups && from && !(from->apart & APART_DEAD)) {
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
	if (set == parent->cgroups && !from)
		count(s->untracked); /* the parent lives in the sandbox, and has no record */
	entering = s->init_level && (!from || from->slot != slot || ours(s, from));
	if (from && from->slot == slot && from->cgroup_id == s->cgroup_id)
		apart = inherited(from, flags);
	if (inside(p, s))
		count(procs_of(s)->forks);
	known = task_of(p);
	if (known && !(known->apart & APART_DEAD) && known->slot == slot && known->cgroup_id == s->cgroup_id) {
		/* A sweep saw it in the list of tasks before this event: it counts already. */
		known->entering = entering;
		if (apart)
			exclude(s, known);
		return 0;
	}
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
			count(generation);
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
	count(generation);
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
	if (ctx->meta->seq_num == 0) {
		own->init_level = BPF_CORE_READ(bpf_get_current_task_btf(), thread_pid, level) + 1;
		count(generation); /* the hooks may have been attached just now, and have missed a lot */
	}
	/* One that ends is no survivor; its last event may be over, while it is still in the list for a while. */
	if (!p || BPF_CORE_READ(p, flags) & PF_EXITING || BPF_CORE_READ(p, exit_state))
		return 0;
	found = slot_of_cgroup(BPF_CORE_READ(p, cgroups, dfl_cgrp));
	if (!found)
		return 0;
	s = bpf_map_lookup_elem(&sandboxes, found);
	if (!s)
		return 0;
	t = task_of(p);
	if (!t || t->apart & APART_DEAD || t->slot != *found || t->cgroup_id != s->cgroup_id) {
		t = adopt(p, *found, false, 0);
		s->has_patience = patience = 1; /* nobody has seen what it did before */
	}
	count(generation);
	if (t && own->target_pid && own->target_slot == *found &&
	    number_at(group_pid(p), own->init_level - 1) == own->target_pid)
		exclude(s, t);
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
	if (!t || t->slot != own->target_slot || t->apart & (APART_HOST | APART_DEAD))
		return 0;
	s = sandbox_of(t);
	if (!s)
		return 0;
	count_ipc(p, s);
	if (t->apart)
		return 0;
	c.pid = number_at(group_pid(p), own->init_level - 1);
	c.tid = number_at(BPF_CORE_READ(p, thread_pid), own->init_level - 1);
	c.fresh = t->born == s->procs_epoch;
	c.spoke = t->spoke == s->procs_epoch;
	c.ran = t->ran == s->procs_epoch || t->on;
	BPF_CORE_READ_STR_INTO(&c.comm, p, group_leader, comm);
	bpf_seq_write(ctx->meta->seq, &c, sizeof(c));
	return 0;
}

#endif
