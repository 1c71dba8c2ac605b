/* SPDX-License-Identifier: Apache-2.0 */
/* The maps, the record of a task, and the small parts that all hooks use. Included by inspector.bpf.c. */
#ifndef PAGURUS_STATE_H
#define PAGURUS_STATE_H

/* Slot 0 belongs to the host: its init_level is the depth that sandboxes' inits have. */

/* Why a task is not a survivor: bits of task.apart. */
#define APART_INIT 1	/* pid 1 of the sandbox: ours, holds no state */
#define APART_HOST 2	/* outside the sandbox's pid namespace: a helper of ours that is entering it */
#define APART_DEAD 4
#define APART_AGENT 8	/* excluded by the owner; its threads are, too */

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
	u64 spoke;	/* wrote to a pipe or socket that another process may hold */
	u64 at_nr, at_ip, at_sp;	/* the interrupted system call it sits in */
	u64 birth, birth_ino;		/* inode made by the system call that is running */
	u32 birth_generation;
	u32 stamped;			/* STAMPED_...: whose times the running call set, by path */
};

/*
 * What a processor remembers of the task whose call it saw last: most calls need no more, and no look at its record.
 * Which task runs is asked at each call, not noted by sched_switch: kernels were seen that leave out one switch in a
 * thousand. What makes a running task another one's, or nobody's, raises `generation`. Programs on tracepoints are not
 * preempted.
 */
struct processor {
	u64 quiet;	/* epoch of the process half in which a call that changes nothing needs no look; or 0 */
	u64 task;	/* with the time of its start: nobody else */
	u64 started;
	u64 generation;
	u64 cgroup_id;	/* the sandbox that `quiet` and the inodes are about */
	u32 slot;
	u32 spoke;	/* that it writes to pipes and sockets is known */
	struct seen dirtied;	/* last inode dirtied */
	struct seen written;	/* last inode written through a descriptor: of an overlay, not the real one */
	struct seen shaped;	/* last inode whose metadata were changed through a descriptor; the real one */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct processor);
} processors SEC(".maps");

volatile u64 generation = 1;

/* Whether any sandbox has_patience: the calls that wait for sockets are the most frequent ones. */
volatile u64 patience;

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
	u64 procs;	/* epoch of the process half when it was seen first */
	u64 flags;
	u32 slot;
	u32 pad;
};

#define STAMPED 1	/* some inode's */
#define STAMPED_MOVING 2	/* those of one whose times also move by themselves */

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

static __always_inline struct processor *this_processor(void)
{
	u32 first = 0;

	return bpf_map_lookup_elem(&processors, &first);
}

/* What it has seen is of this sandbox from now on. */
static __always_inline void belongs_to(struct processor *c, u64 cgroup_id, u32 slot)
{
	if (c->cgroup_id == cgroup_id && c->slot == slot)
		return;
	c->quiet = 0;
	c->cgroup_id = cgroup_id;
	c->slot = slot;
	c->dirtied.inode = c->written.inode = c->shaped.inode = 0;
}

/* The sandbox of the running task, when nothing about its record needs a look. */
static __always_inline struct sandbox *quiet_sandbox(struct processor *c, struct task_struct *p)
{
	u32 slot = c->slot;
	struct sandbox *s;

	if (!c->quiet || c->task != (u64)p || c->started != p->start_time || c->generation != generation)
		return NULL;
	s = bpf_map_lookup_elem(&sandboxes, &slot);
	return s && s->cgroup_id == c->cgroup_id && s->procs_epoch == c->quiet ? s : NULL;
}

/* The next call on this processor needs the record of its task. */
static __always_inline void not_quiet(void)
{
	struct processor *c = this_processor();

	if (c)
		c->quiet = 0;
}

/* Most tasks of a host belong to no sandbox; they have no record, and are no help of one that has. */
static __always_inline bool is_nobodys(struct task_struct *p)
{
	return !p->bpf_storage && !helps_a_program(p);
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

#define MAX_EXPLAINED_AT 16

/* Names from a directory entry up to the root of its file system. Only explanations come here: a few per epoch. */
static __noinline int name_parts(struct explanation *e, struct dentry *entry)
{
	if (!e)
		return 0;
	for (u32 i = 0; i < DEPTH; i++) {
		struct dentry *above = BPF_CORE_READ(entry, d_parent);
		const unsigned char *name = BPF_CORE_READ(entry, d_name.name);

		if (above == entry || !above) {
			e->complete = 1;
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
	e->depth = e->complete = 0;
	if (entry)
		name_parts(e, entry);
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

/* The entry is looked for only where it will be told. */
#define explain_in(bucket, what, entry, name) do {                                                        \
	if ((bucket)->explained < MAX_EXPLAINED_AT)                                                      \
		explain(s, t, &(bucket)->explained, what, entry, name);                                   \
} while (0)
#define explain_file(what, entry, name) explain_in(files_of(s), what, entry, name)
#define explain_proc(what, entry, name) explain_in(procs_of(s), what, entry, name)

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

#endif
