/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls that change nothing that is not known yet: most of them. They are told without the record of the task, and
 * without a helper of the kernel. Included by inspector.bpf.c. Guarantee: what call() and progress() would count is not
 * among them.
 */
#ifndef PAGURUS_QUIET_H
#define PAGURUS_QUIET_H

/* Whether, in this epoch, the next call needs the record only when it changes something, or is interrupted. */
static __always_inline bool is_quiet(struct sandbox *s, struct task *t, u64 epoch)
{
	if (t->apart & APART_DEAD || t->stashed || t->traced || ours(s, t))
		return false;
	return t->apart || t->born == epoch || t->ran == epoch;
}

/* A file of the tree, or a directory, that was opened to read. */
static __always_inline bool opened_to_read(struct task_struct *p, u32 fd, u64 flags)
{
	struct file *file = file_at(p, fd);
	u32 type;

	if (!file || flags & O_TRUNC || LOAD(struct file, file, f_mode) & (FMODE_CREATED | FMODE_WRITE))
		return false;
	type = LOAD(struct inode, inode_at(file), i_mode) & 0170000;
	return type == 0100000 || type == 0040000;
}

/* Opens to read, without O_CREAT. */
static __always_inline bool makes_nothing(struct pt_regs *regs, u64 nr)
{
	return (nr == NR_OPENAT && !(ARG2 & (O_ACCMODE | O_CREAT | O_TRUNC))) ||
	       (nr == NR_OPEN && !(ARG1 & (O_ACCMODE | O_CREAT | O_TRUNC)));
}

/* Written since the mark by somebody in this sandbox; or no content to write. */
static __always_inline bool written_before(struct sandbox *s, struct processor *c, struct task_struct *p, u32 fd)
{
	struct file *file = file_at(p, fd);
	struct inode *inode;

	if (!file)
		return false;
	inode = inode_at(file);
	if (!LOAD(struct inode, inode, i_nlink))
		return false;
	if (seen_before(&c->written, inode, s->files_epoch))
		return true;
	return !has_content(LOAD(struct inode, inode, i_mode)) && (c->spoke || !speaks(inode));
}

/* The same of metadata. */
static __always_inline bool shaped_before(struct sandbox *s, struct processor *c, struct task_struct *p, u32 fd)
{
	struct file *file = file_at(p, fd);
	struct super_block *of;
	struct inode *inode;

	if (!file)
		return false;
	inode = inode_at(file);
	if (times_move(LOAD(struct inode, inode, i_mode)))
		return false;
	of = LOAD(struct inode, inode, i_sb);
	inode = real_of(inode, LOAD(struct super_block, of, s_magic));
	return inode && LOAD(struct inode, inode, i_nlink) && seen_before(&c->shaped, inode, s->files_epoch);
}

/* A call of a task whose record needs no look: whether all that it did was counted already, or counts nothing. */
static __always_inline bool nothing_new(struct sandbox *s, struct processor *c, struct task_struct *p,
					struct pt_regs *regs, long result)
{
	u64 nr = regs->orig_ax;
	u8 kind;

	if (nr >= SYSCALLS || p->ptrace || task_compat(p) || interrupted(result))
		return false;
	kind = syscall_kinds[nr];
	/*
	 * A connect may go on; other calls may have made an inode before they failed. The record knows, which must then
	 * forget it: not_quiet() told the processor that the call began on, and it may end on another.
	 */
	if (result < 0)
		return kind == K_NONE || kind == K_WRITE || (kind == K_OPEN && makes_nothing(regs, nr)) ||
		       (kind == K_IOCTL && !ioctl_changes(ARG1));
	switch (kind) {
	case K_NONE:
		return true;
	case K_OPEN:
		return (nr == NR_OPENAT && opened_to_read(p, result, ARG2)) ||
		       (nr == NR_OPEN && opened_to_read(p, result, ARG1));
	case K_WRITE:
		return nr != NR_FALLOCATE && (!result || written_before(s, c, p, ARG0));
	case K_META_FD:
		return nr != NR_FTRUNCATE && shaped_before(s, c, p, ARG0);
	case K_UTIMENSAT:
		if (ARG1 || !shaped_before(s, c, p, ARG0))
			return false;
		count(files_of(s)->hidden);
		return true;
	}
	return false;
}

#endif
