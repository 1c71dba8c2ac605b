/* SPDX-License-Identifier: Apache-2.0 */
/* What a system call that ended did to files, by descriptor or by path. Included by inspector.bpf.c. */
#ifndef PAGURUS_FILES_H
#define PAGURUS_FILES_H

#define ARG0 (regs->di)
#define ARG1 (regs->si)
#define ARG2 (regs->dx)
#define ARG3 (regs->r10)
#define ARG4 (regs->r8)

#define FMODE_WRITE 2
#define FMODE_CREATED 0x100000
#define O_ACCMODE 3
#define O_CREAT 0100
#define O_TRUNC 01000
#define O_TMPFILE_BIT 020000000
#define IPC_CREAT 01000
#define SHM_RDONLY 010000
#define AF_UNIX 1
#define AF_INET 2
#define AF_INET6 10
#define AF_NETLINK 16
#define EINPROGRESS 115
#define UTIME_NOW 0x3fffffff

static __always_inline struct file *file_at(struct task_struct *p, u32 fd)
{
	struct files_struct *files = p->files;
	struct fdtable *table;

	if (!files)
		return NULL;
	table = files->fdt;
	if (!table || fd >= table->max_fds)
		return NULL;
	return pointer_at((void *)table->fd + 8ull * fd);
}

static __always_inline struct inode *inode_at(struct file *file)
{
	return LOAD(struct file, file, f_inode);
}

static __always_inline struct dentry *entry_at(struct file *file)
{
	return LOAD(struct file, file, f_path.dentry);
}

#define AT_CALL(nr) ((nr >= 257 && nr <= 268) || nr == 280 || nr == 316 || nr == 437 || nr == 452 || nr >= 463)

/* A path that a call was given, with the directory that it is relative to. */
static __noinline int explain_name(struct sandbox *s, struct task *t, u64 nr, int fd, const void *path)
{
	struct task_struct *p = bpf_get_current_task_btf();
	struct dentry *base = NULL;
	struct file *file;

	if (!s || !t)
		return 0;
	file = fd >= 0 ? file_at(p, fd) : NULL;
	if (file)
		base = entry_at(file);
	else if (p->fs)
		base = BPF_CORE_READ(p, fs, pwd.dentry);
	explain_file(nr, base, path);
	return 0;
}

/* Of a name that became another one both are told, the former first. */
static __always_inline void explain_path(struct sandbox *s, struct task *t, struct pt_regs *regs, u64 nr)
{
	const void *path = (void *)(AT_CALL(nr) ? ARG1 : ARG0);
	int fd = AT_CALL(nr) ? (int)ARG0 : -100;

	if (files_of(s)->explained >= MAX_EXPLAINED_AT)
		return;
	switch (nr) { /* the new name comes last */
	case NR_RENAME:
		explain_name(s, t, nr, fd, path);
		path = (void *)ARG1;
		break;
	case NR_SYMLINK:
	case NR_LINK:
		path = (void *)ARG1;
		break;
	case NR_SYMLINKAT:
		path = (void *)ARG2;
		fd = (int)ARG1;
		break;
	case NR_RENAMEAT:
	case NR_RENAMEAT2:
		explain_name(s, t, nr, fd, path);
		path = (void *)ARG3;
		fd = (int)ARG2;
		break;
	case NR_LINKAT:
		path = (void *)ARG3;
		fd = (int)ARG2;
		break;
	}
	explain_name(s, t, nr, fd, path);
}

/* A name appeared. `inode` is its real inode where that is known: then its end nets it out. */
static __always_inline void created(struct sandbox *s, struct task *t, struct inode *inode)
{
	count(files_of(s)->creates);
	if (inode) {
		struct inode_key key = key_of(inode);

		touch(s, t, &key, TOUCHED_BORN | TOUCHED_NAMED);
	}
}

/* The same for calls that return no descriptor: the last inode that the call made. */
static __always_inline void created_by_birth(struct sandbox *s, struct task *t)
{
	struct inode_key key = { .inode = t->birth, .ino = t->birth_ino, .generation = t->birth_generation };

	count(files_of(s)->creates);
	if (key.inode)
		touch(s, t, &key, TOUCHED_BORN | TOUCHED_NAMED);
}

/* Metadata through a descriptor: netted out when the file is gone later. */
static __always_inline void metadata_of(struct sandbox *s, struct task *t, struct processor *c, struct task_struct *p,
					struct file *file, u64 nr)
{
	struct inode *inode = inode_at(file);
	struct facts f;

	facts_found(&f, inode);
	switch (home_of(&f)) {
	case NOWHERE:
		return;
	case MEMORY:
		count(procs_of(s)->tmpfs);
		return;
	case PERSISTENT:
		break;
	}
	inode = real_inode(&f);
	if (inode) {
		struct inode_key key = key_of(inode);

		if (!LOAD(struct inode, inode, i_nlink))
			nameless(s, t, &key);
		see(&c->shaped, &key, s->files_epoch);
		if (!touch(s, t, &key, TOUCHED_METADATA))
			return;
	}
	count(files_of(s)->metadata);
	explain_file(nr, entry_at(file), NULL);
}

/* False when the call made an inode that is not the one in the descriptor. */
static __always_inline bool made_by(struct task *t, struct file *file)
{
	struct inode *inode = inode_at(file);
	struct super_block *of = LOAD(struct inode, inode, i_sb);

	return !t->birth || t->birth == (u64)real_of(inode, LOAD(struct super_block, of, s_magic));
}

/* Terminals, but for the multiplexer: what it opens is new. */
static __always_inline bool is_terminal(struct inode *inode)
{
	u32 device = LOAD(struct inode, inode, i_rdev), major = device >> 20;

	if ((LOAD(struct inode, inode, i_mode) & 0170000) != 0020000)
		return false;
	return major == 4 || (major == 5 && (device & 0xfffff) != 2) || (major >= 136 && major <= 143);
}

/* True when something that is neither one of the caller's own standard streams was opened. */
static __always_inline bool foreign_pipe(struct task_struct *p, struct inode *inode)
{
	for (u32 fd = 0; fd < 3; fd++) {
		struct file *own = file_at(p, fd);

		if (own && inode_at(own) == inode)
			return false;
	}
	return true;
}

static __always_inline void opened(struct sandbox *s, struct task *t, struct processor *c, struct task_struct *p,
				   struct file *file, u64 nr, u64 flags)
{
	struct inode *inode = inode_at(file);
	u32 mode = LOAD(struct file, file, f_mode), type = LOAD(struct inode, inode, i_mode) & 0170000;
	struct facts f;

	if (type == 0010000) {
		if (BPF_CORE_READ(inode, i_sb, s_magic) != MAGIC_PIPE || foreign_pipe(p, inode)) {
			count(procs_of(s)->channels);
			explain_proc(nr, entry_at(file), NULL);
		}
		return;
	}
	if (type == 0020000) {
		if (is_terminal(inode) && !(t->apart & APART_AGENT) && foreign_pipe(p, inode)) {
			count(procs_of(s)->channels);
			explain_proc(nr, entry_at(file), NULL);
		}
		return;
	}
	/* O_TRUNC truncates also what is opened for reading alone. */
	if (!(mode & (FMODE_CREATED | FMODE_WRITE)) && !(flags & O_TRUNC))
		return;
	facts_found(&f, inode);
	switch (store_of(&f)) {
	case NOWHERE:
		if (is_memory(&f)) /* a memfd, by the descriptor of who holds it */
			count(procs_of(s)->channels);
		return;
	case MEMORY:
		if (mode & FMODE_CREATED || flags & O_TMPFILE_BIT) {
			struct inode_key key = key_from(&f);

			touch(s, t, &key, TOUCHED_BORN);
		}
		count(procs_of(s)->tmpfs);
		explain_proc(nr, entry_at(file), NULL);
		return;
	case PERSISTENT:
		break;
	}
	if (flags & O_TMPFILE_BIT && type == 0100000) {
		struct inode *real = real_inode(&f);

		/* Without a name until linkat; what is written to it nets out when it ends. */
		if (real) {
			struct inode_key key = key_of(real);

			touch(s, t, &key, TOUCHED_BORN);
		}
		return;
	}
	if (mode & FMODE_CREATED) {
		created(s, t, real_inode(&f));
		explain_file(nr, entry_at(file), NULL);
	} else if (flags & O_TRUNC) {
		metadata_of(s, t, c, p, file, nr);
	} else if (t->birth && t->birth == (u64)real_inode(&f)) {
		/* The call copied it up to be written to. The content was noted before the file had its name. */
		explain_file(WHY_DATA, entry_at(file), NULL);
	}
}

/* A file of procfs about the caller, or about a task that is younger than the mark. */
static __always_inline bool own_proc_file(struct sandbox *s, struct task_struct *p, struct inode *inode)
{
	struct proc_inode *found = (void *)inode - bpf_core_field_offset(struct proc_inode, vfs_inode);
	struct pid *pid = BPF_CORE_READ(found, pid);
	struct number number;

	if (!pid)
		return false;
	if (pid == BPF_CORE_READ(p, thread_pid) || pid == group_pid(p))
		return true;
	number = number_of(pid);
	return younger_than_mark(s, &number);
}

static __always_inline void written_nameless(struct sandbox *s, struct task *t, struct inode *inode)
{
	struct inode_key key = {};
	struct facts f;

	facts_found(&f, inode);
	if (store_of(&f) != PERSISTENT)
		return;
	inode = real_inode(&f);
	if (inode)
		key = key_of(inode);
	nameless(s, t, &key);
}

/*
 * Something that another process may hold the other end of. What the host made, who starts and reads it, is of another
 * user than the sandbox's.
 */
static __always_inline bool speaks(struct inode *inode)
{
	u32 type = LOAD(struct inode, inode, i_mode) & 0170000;

	return (type == 0010000 || type == 0140000) && LOAD(struct inode, inode, i_uid.val);
}

/* Noted once; the daemon looks whether a survivor holds it. One more than there is room for is a channel. */
static __always_inline void reported(struct procs_bucket *b, u64 whom)
{
	for (int i = 0; whom && i < MAX_REPORTED_AT; i++) {
		u64 was = __sync_val_compare_and_swap(&b->reported[i], 0, whom);

		if (!was || was == whom)
			return;
	}
	count(b->channels);
}

/*
 * What an excluded process writes to a pipe or socket may wait in a survivor's end of it. Of any other process it is
 * noted: an ignore rule may leave that out later. The other end of a network connection is in no checkpoint that leaves
 * the writer out.
 */
static __always_inline void spoken(struct sandbox *s, struct task *t, struct task_struct *p, struct file *file)
{
	struct inode *inode = inode_at(file);
	struct socket *socket;
	u64 whom = 0;
	u16 family;

	if (!speaks(inode))
		return;
	if ((LOAD(struct inode, inode, i_mode) & 0170000) == 0140000) {
		socket = BPF_CORE_READ(file, private_data);
		family = BPF_CORE_READ(socket, sk, __sk_common.skc_family);
		if (family == AF_INET || family == AF_INET6 || family == AF_NETLINK)
			return;
		if (family == AF_UNIX && bpf_core_type_exists(struct unix_sock)) {
			struct unix_sock *own = (void *)BPF_CORE_READ(socket, sk);

			/* 0: nobody has accepted the connection yet. */
			whom = BPF_CORE_READ(own, peer, sk_socket, file, f_inode, i_ino);
		}
	} else { /* a pipe, or a FIFO of the tree */
		struct super_block *of = LOAD(struct inode, inode, i_sb);
		struct inode *real = real_of(inode, LOAD(struct super_block, of, s_magic));

		whom = real ? LOAD(struct inode, real, i_ino) : 0;
	}
	if (t->apart & APART_AGENT)
		reported(procs_of(s), whom);
	else if (foreign_pipe(p, inode))
		t->spoke = s->procs_epoch;
}

static __always_inline void written(struct sandbox *s, struct task *t, struct processor *c, struct task_struct *p,
				    u32 fd, u64 nr)
{
	struct file *file = file_at(p, fd);
	struct inode *inode, *real;
	struct inode_key key;
	struct facts f;

	if (!file) { /* closed meanwhile by another thread */
		count(files_of(s)->unknown);
		return;
	}
	inode = inode_at(file);
	if (!LOAD(struct inode, inode, i_nlink))
		written_nameless(s, t, inode);
	if (seen_before(&c->written, inode, s->files_epoch))
		return;
	if (!has_content(LOAD(struct inode, inode, i_mode))) {
		spoken(s, t, p, file);
		return;
	}
	facts_found(&f, inode);
	if (f.magic == MAGIC_PROC) {
		if (!own_proc_file(s, p, inode)) {
			count(procs_of(s)->foreign);
			explain_proc(nr, entry_at(file), NULL);
		}
		return;
	}
	switch (home_of(&f)) {
	case NOWHERE:
		return;
	case MEMORY:
		count(procs_of(s)->tmpfs);
		return;
	case PERSISTENT:
		break;
	}
	real = real_inode(&f);
	if (!real) {
		count(files_of(s)->data);
		explain_file(WHY_DATA, entry_at(file), NULL);
		return;
	}
	key = key_from(&f);
	see(&c->written, &key, s->files_epoch);
	if (seen_before(&c->dirtied, real, s->files_epoch))
		return;
	if (real != inode)
		facts_found(&f, real);
	dirtied(s, t, c, &f, entry_at(file));
}

static __always_inline bool ioctl_changes(u32 command)
{
	switch ((command >> 8) & 0xff) {
	case 0x89: /* network interfaces */
		switch (command & 0xff) {
		case 0x0b: case 0x0c: case 0x14: case 0x16: case 0x18: case 0x1a: case 0x1c: case 0x20:
		case 0x22: case 0x23: case 0x24: case 0x31: case 0x34: case 0x36: case 0x43: case 0x53: case 0x55:
			return true;
		}
		return false;
	case 0x94: /* btrfs, reflinks */
	case 'f': case 'X': case 'v':
		if (command >> 30 == 2 || command == 0xc020660b /* FIEMAP */ || command == 0xc0c0583b ||
		    command == 0xc0189436 /* dedupe: the same bytes */)
			return false;
		return true;
	}
	return false;
}

static __always_inline bool ioctl_changes_terminal(u32 command)
{
	switch (command) {
	case 0x5402: case 0x5403: case 0x5404: case 0x5406: case 0x5407: case 0x5408: /* TCSETS, TCSETA */
	case 0x5409: case 0x540a: case 0x540b: case 0x540e: case 0x5410: case 0x5412: /* ... TIOCSTI */
	case 0x5414: case 0x5422: case 0x5423: case 0x5425: case 0x540c: case 0x540d: /* TIOCSWINSZ */
	case 0x402c542b: case 0x402c542c: case 0x402c542d: /* TCSETS2 */
		return true;
	}
	return false;
}

static __always_inline void call_ioctl(struct sandbox *s, struct task *t, struct processor *c, struct task_struct *p,
				       struct pt_regs *regs, u64 nr)
{
	struct file *file;

	if (ioctl_changes_terminal(ARG1)) {
		file = file_at(p, ARG0);
		if (!(t->apart & APART_AGENT) && (!file || is_terminal(inode_at(file)))) {
			count(procs_of(s)->channels);
			explain_proc(nr, file ? entry_at(file) : NULL, NULL);
		}
		return;
	}
	if (!ioctl_changes(ARG1))
		return;
	if (((ARG1 >> 8) & 0xff) == 0x89) {
		count(procs_of(s)->mounts);
		return;
	}
	count(files_of(s)->hidden);
	file = file_at(p, ARG0);
	if (file)
		metadata_of(s, t, c, p, file, nr);
	else
		count(files_of(s)->unknown);
}

/* Calls about names: their file system is not known here, so a tmpfs in the sandbox makes them both. */
static __always_inline void named(struct sandbox *s)
{
	if (s->has_tmpfs)
		count(procs_of(s)->tmpfs);
}

/* To the present: such a time of a directory looks like one that follows from a name made or removed in it. */
static __always_inline bool to_now(struct pt_regs *regs, u64 nr, u8 kind)
{
	const void *times = (void *)(kind == K_UTIMENSAT || nr == NR_FUTIMESAT ? ARG2 : ARG1);
	s64 given[4];

	if (!times)
		return true;
	return kind == K_UTIMENSAT && (bpf_probe_read_user(given, sizeof(given), times) || given[3] == UTIME_NOW);
}

/* Times were set, of this directory, or (NULL) of what a path led to. */
static __always_inline void touched(struct sandbox *s, struct task *t, struct pt_regs *regs, u64 nr, u8 kind,
				    struct file *file)
{
	count(files_of(s)->hidden);
	if ((file && !times_move(LOAD(struct inode, inode_at(file), i_mode))) || !to_now(regs, nr, kind))
		return;
	if (t->stamped == STAMPED) /* seen, and of a file */
		return;
	count(files_of(s)->touched);
}

#define MAX_SUBMITTED_AT 8

/*
 * The descriptor that requests of io_submit write to. -1: none; -2: several, or more than are looked at. A direct write to
 * a file without checksums (chattr +C) makes no page dirty.
 */
static __always_inline int submitted_to(struct pt_regs *regs, long submitted)
{
	int found = -1;

	for (int i = 0; i < MAX_SUBMITTED_AT && i < submitted; i++) {
		struct iocb request;
		void *where;

		if (bpf_probe_read_user(&where, sizeof(where), (void *)(ARG2 + 8 * i)) ||
		    bpf_probe_read_user(&request, sizeof(request), where))
			return -2;
		if (request.aio_lio_opcode != 1 /* PWRITE */ && request.aio_lio_opcode != 8 /* PWRITEV */)
			continue;
		if (found != -1 && found != (int)request.aio_fildes)
			return -2;
		found = request.aio_fildes;
	}
	return submitted > MAX_SUBMITTED_AT ? -2 : found;
}

static __always_inline void call_files(struct sandbox *s, struct task *t, struct processor *c, struct task_struct *p,
				       struct pt_regs *regs, u64 nr, u8 kind, long result)
{
	struct file *file;
	u64 flags = 0;
	int fd = ARG0;

	if (nr == NR_FALLOCATE || nr == NR_TRUNCATE || nr == NR_FTRUNCATE)
		count(files_of(s)->hidden);
	switch (kind) {
	case K_OPEN:
		if (nr == NR_OPEN)
			flags = ARG1;
		else if (nr == NR_OPENAT)
			flags = ARG2;
		else if (nr == NR_CREAT)
			flags = O_CREAT | O_TRUNC;
		else if (nr == NR_OPENAT2)
			flags = O_TRUNC; /* they lie where the program may have changed them since */
		else
			flags = ARG2;
		file = file_at(p, result);
		if (!file) {
			count(files_of(s)->unknown);
			return;
		}
		if (nr == NR_OPENAT2)
			flags |= O_CREAT | (LOAD(struct file, file, f_flags) & O_TMPFILE_BIT);
		if (flags & O_CREAT && !made_by(t, file)) { /* another thread put another file there meanwhile */
			count(files_of(s)->creates);
			explain_file(nr, NULL, NULL);
		}
		opened(s, t, c, p, file, nr, flags);
		return;
	case K_WRITE:
	case K_WRITE_1:
	case K_WRITE_2:
	case K_SUBMIT:
		if (kind == K_WRITE_1)
			fd = ARG1;
		else if (kind == K_WRITE_2)
			fd = ARG2;
		else if (kind == K_SUBMIT)
			fd = submitted_to(regs, result);
		if (kind == K_SUBMIT && fd == -2) {
			count(files_of(s)->data);
			count(procs_of(s)->channels);
			named(s);
			explain_file(nr, NULL, NULL);
			return;
		}
		if (fd >= 0 && (result > 0 || nr == NR_FALLOCATE))
			written(s, t, c, p, fd, nr);
		return;
	case K_CREATE:
		created_by_birth(s, t);
		break;
	case K_REMOVE:
		count(files_of(s)->removes);
		break;
	case K_RENAME:
		count(files_of(s)->renames);
		break;
	case K_UTIMENSAT:
		file = ARG1 ? NULL : file_at(p, ARG0);
		touched(s, t, regs, nr, kind, file);
		if (!ARG1) {
			if (file)
				metadata_of(s, t, c, p, file, nr);
			else
				count(files_of(s)->metadata);
			return;
		}
		count(files_of(s)->metadata);
		break;
	case K_UTIMES:
		touched(s, t, regs, nr, kind, NULL);
		count(files_of(s)->metadata);
		break;
	case K_META_PATH:
		count(files_of(s)->metadata);
		break;
	case K_META_FD:
		file = file_at(p, ARG0);
		if (file)
			metadata_of(s, t, c, p, file, nr);
		else
			count(files_of(s)->metadata);
		return;
	}
	named(s);
	explain_path(s, t, regs, nr);
}

#endif
