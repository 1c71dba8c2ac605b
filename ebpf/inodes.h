/* SPDX-License-Identifier: Apache-2.0 */
/* Content and births of inodes: what happens to them whatever call did it. Included by inspector.bpf.c. */
#ifndef PAGURUS_INODES_H
#define PAGURUS_INODES_H

static __always_inline struct inode_key key_of(const struct inode *inode)
{
	struct inode_key key = {};

	key.inode = (u64)inode;
	key.ino = LOAD(struct inode, inode, i_ino);
	key.generation = LOAD(struct inode, inode, i_generation);
	return key;
}

static __always_inline struct inode_key key_from(const struct facts *f)
{
	struct inode_key key = { .inode = f->inode, .ino = f->ino, .generation = f->generation };

	return key;
}

static __always_inline bool seen_before(const struct seen *seen, const struct inode *inode, u64 epoch)
{
	return seen->inode == (u64)inode && seen->epoch == epoch && seen->ino == LOAD(struct inode, inode, i_ino) &&
	       seen->generation == LOAD(struct inode, inode, i_generation);
}

static __always_inline void see(struct seen *seen, const struct inode_key *key, u64 epoch)
{
	seen->inode = key->inode;
	seen->ino = key->ino;
	seen->generation = key->generation;
	seen->epoch = epoch;
}

/* True when `flag` is new for this inode since the mark. */
static __always_inline bool touch(struct sandbox *s, struct task *t, struct inode_key *key, u64 flag)
{
	struct inode_value *v = bpf_map_lookup_elem(&inodes, key);
	struct inode_value fresh = { .epoch = s->files_epoch, .procs = s->procs_epoch, .slot = t->slot, .flags = flag };

	if (v && v->slot == t->slot && v->epoch == fresh.epoch)
		return !(__sync_fetch_and_or(&v->flags, flag) & flag);
	bpf_map_update_elem(&inodes, key, &fresh, BPF_ANY);
	return true;
}

/*
 * A file without a name changed. Only processes hold it, and only their dump does: unless it was made since their
 * mark, it may be that of an older one.
 */
static __always_inline void nameless(struct sandbox *s, struct task *t, struct inode_key *key)
{
	struct inode_value *v;

	if (t->birth == key->inode && t->birth_ino == key->ino)
		return; /* being made */
	v = bpf_map_lookup_elem(&inodes, key);
	if (!v || v->slot != t->slot || !(v->flags & TOUCHED_BORN) || v->procs != s->procs_epoch)
		count(procs_of(s)->channels);
}

static __always_inline struct dentry *entry_of(const struct inode *inode)
{
	struct hlist_node *first = BPF_CORE_READ(inode, i_dentry.first);

	return first ? (void *)first - alias_offset() : NULL;
}

/* `entry`: of the file; NULL: one of those that the inode has. */
static __always_inline void dirtied(struct sandbox *s, struct task *t, struct processor *c, const struct facts *f,
				    struct dentry *entry)
{
	struct inode_key key = key_from(f);

	see(&c->dirtied, &key, s->files_epoch);
	if (touch(s, t, &key, TOUCHED_DATA)) {
		count(files_of(s)->data);
		if (!entry)
			entry = entry_of((void *)f->inode);
		if (entry) /* else a file without a name, such as one that is being copied up */
			explain_file(WHY_DATA, entry, NULL);
	}
}

static __always_inline int marked(const struct inode *inode)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct processor *c;
	struct sandbox *s;
	struct facts f;
	struct task *t;

	if (is_nobodys(p) || !has_content(inode->i_mode))
		return 0;
	c = this_processor();
	if (!c)
		return 0;
	s = quiet_sandbox(c, p);
	if (s && inode->i_nlink && seen_before(&c->dirtied, inode, s->files_epoch))
		return 0;
	t = task_of(p);
	if (!t && helps_a_program(p))
		t = task_of(p->group_leader);
	if (!t || t->apart & APART_HOST)
		return 0;
	s = sandbox_of(t);
	if (!s || ours(s, t))
		return 0;
	belongs_to(c, s->cgroup_id, t->slot);
	facts_given(&f, inode);
	if (!inode->i_nlink) {
		struct inode_key key = key_from(&f);

		nameless(s, t, &key);
	}
	if (home_of(&f) == PERSISTENT && !seen_before(&c->dirtied, inode, s->files_epoch))
		dirtied(s, t, c, &f, NULL);
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

/*
 * 838a10bd2ebf (6.13, and in 6.12's stable releases) has the verifier take any argument of a module's tracepoint for
 * one that may be NULL. None of these two is.
 */
SEC("tp_btf/btrfs_inode_new")
int BPF_PROG(on_inode_new, const struct inode *inode)
{
	struct task *t = task_of(bpf_get_current_task_btf());

	if (!t || !inode)
		return 0;
	not_quiet(); /* until the call has ended */
	t->birth = (u64)inode;
	t->birth_ino = inode->i_ino;
	t->birth_generation = inode->i_generation;
	return 0;
}

/* The inode leaves memory, whoever drops it last. Gone for good when it has no link. */
SEC("tp_btf/btrfs_inode_evict")
int BPF_PROG(on_inode_evict, const struct inode *inode)
{
	struct task *t = task_of(bpf_get_current_task_btf());
	struct inode_value *v;
	struct files_bucket *b;
	struct inode_key key;
	struct sandbox *s;

	if (!inode)
		return 0;
	key = key_of(inode);
	v = bpf_map_lookup_elem(&inodes, &key);
	if (t && t->birth == key.inode && t->birth_ino == key.ino)
		t->birth = 0;
	if (!v)
		return 0;
	s = bpf_map_lookup_elem(&sandboxes, &v->slot);
	if (s && v->epoch == s->files_epoch && (v->flags & TOUCHED_BORN) && inode->i_nlink == 0) {
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

/* Of directories, FIFOs, sockets and devices, whose times also move when somebody uses them. */
static __always_inline bool times_move(u32 mode)
{
	u32 type = mode & 0170000;

	return type != 0100000 && type != 0120000;
}

/*
 * Linux 6.13 added these events. They tell what a call that sets times by path led to, and come with each change of an
 * inode, by anybody.
 */
static __always_inline int stamped(struct inode *inode)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct pt_regs *regs;
	struct task *t;
	u64 nr;

	if (is_nobodys(p))
		return 0;
	regs = (struct pt_regs *)bpf_task_pt_regs(p);
	nr = regs->orig_ax;
	if (nr != NR_UTIME && nr != NR_UTIMES && nr != NR_FUTIMESAT && (nr != NR_UTIMENSAT || !regs->si))
		return 0;
	t = task_of(p);
	if (t)
		t->stamped |= times_move(inode->i_mode) ? STAMPED_MOVING : STAMPED;
	return 0;
}

SEC("tp_btf/ctime_ns_xchg")
int BPF_PROG(on_stamp, struct inode *inode)
{
	return stamped(inode);
}

SEC("tp_btf/ctime_xchg_skip")
int BPF_PROG(on_same_stamp, struct inode *inode)
{
	return stamped(inode);
}

#endif
