/* SPDX-License-Identifier: Apache-2.0 */
/* What a system call that ended did. Included by inspector.bpf.c after the small parts. */
#ifndef PAGURUS_CALLS_H
#define PAGURUS_CALLS_H

#define ARG0 (regs->di)
#define ARG1 (regs->si)
#define ARG2 (regs->dx)
#define ARG3 (regs->r10)
#define ARG4 (regs->r8)

#define FMODE_WRITE 2
#define FMODE_CREATED 0x100000
#define O_CREAT 0100
#define O_TRUNC 01000
#define O_TMPFILE_BIT 020000000
#define IPC_CREAT 01000
#define SHM_RDONLY 010000
#define AF_UNIX 1
#define AF_NETLINK 16
#define EINPROGRESS 115

static __always_inline struct file *file_at(struct task_struct *p, u32 fd)
{
	struct files_struct *files = p->files;
	struct fdtable *table;
	struct file **array, *file = NULL;

	if (!files)
		return NULL;
	table = BPF_CORE_READ(files, fdt);
	if (fd >= BPF_CORE_READ(table, max_fds))
		return NULL;
	array = BPF_CORE_READ(table, fd);
	bpf_probe_read_kernel(&file, sizeof(file), &array[fd]);
	return file;
}

static __always_inline const void *name_of_file(struct file *file)
{
	return BPF_CORE_READ(file, f_path.dentry, d_name.name);
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
static __always_inline void metadata_of(struct sandbox *s, struct task *t, struct file *file)
{
	struct inode *inode = BPF_CORE_READ(file, f_inode);

	switch (home_of(inode)) {
	case NOWHERE:
		return;
	case MEMORY:
		count(procs_of(s)->tmpfs);
		return;
	case PERSISTENT:
		break;
	}
	inode = real_inode(inode);
	if (inode) {
		struct inode_key key = key_of(inode);

		if (!touch(s, t, &key, TOUCHED_METADATA))
			return;
	}
	count(files_of(s)->metadata);
}

/* True when something that is neither one of the caller's own standard streams was opened. */
static __always_inline bool foreign_pipe(struct task_struct *p, struct inode *inode)
{
	for (u32 fd = 0; fd < 3; fd++) {
		struct file *own = file_at(p, fd);

		if (own && BPF_CORE_READ(own, f_inode) == inode)
			return false;
	}
	return true;
}

static __always_inline void opened(struct sandbox *s, struct task *t, struct task_struct *p, struct file *file,
				   u64 nr, u64 flags, const void *path)
{
	struct inode *inode = BPF_CORE_READ(file, f_inode);
	u32 mode = BPF_CORE_READ(file, f_mode), type = BPF_CORE_READ(inode, i_mode) & 0170000;

	if (type == 0010000) {
		if (BPF_CORE_READ(inode, i_sb, s_magic) != MAGIC_PIPE || foreign_pipe(p, inode)) {
			count(procs_of(s)->channels);
			explain_proc(nr, FROM_USER, path);
		}
		return;
	}
	switch (store_of(inode)) {
	case NOWHERE:
		return;
	case MEMORY:
		if (mode & (FMODE_CREATED | FMODE_WRITE)) {
			count(procs_of(s)->tmpfs);
			explain_proc(nr, FROM_USER, path);
		}
		return;
	case PERSISTENT:
		break;
	}
	if (flags & O_TMPFILE_BIT && type == 0100000) {
		struct inode *real = real_inode(inode);

		/* Without a name until linkat; what is written to it nets out when it ends. */
		if (real) {
			struct inode_key key = key_of(real);

			touch(s, t, &key, TOUCHED_BORN);
		}
		return;
	}
	if (mode & FMODE_CREATED) {
		created(s, t, real_inode(inode));
		explain_file(nr, FROM_USER, path);
	} else if (flags & O_TRUNC && mode & FMODE_WRITE) {
		metadata_of(s, t, file);
		explain_file(nr, FROM_USER, path);
	}
}

static __always_inline void written(struct sandbox *s, struct task *t, struct task_struct *p, u32 fd, u64 nr)
{
	struct file *file = file_at(p, fd);
	struct inode *inode, *real;

	if (!file) { /* closed meanwhile by another thread */
		count(files_of(s)->unknown);
		return;
	}
	inode = BPF_CORE_READ(file, f_inode);
	if (BPF_CORE_READ(inode, i_sb, s_magic) == MAGIC_PROC) {
		count(procs_of(s)->foreign);
		explain_proc(nr, FROM_KERNEL, name_of_file(file));
		return;
	}
	switch (store_of(inode)) {
	case NOWHERE:
		return;
	case MEMORY:
		count(procs_of(s)->tmpfs);
		return;
	case PERSISTENT:
		break;
	}
	real = real_inode(inode);
	if (real) {
		dirtied(s, t, real, name_of_file(file));
	} else {
		count(files_of(s)->data);
		explain_file(nr, FROM_KERNEL, name_of_file(file));
	}
}

static __always_inline u16 family_at(const void *address)
{
	u16 family = 0;

	bpf_probe_read_user(&family, sizeof(family), address);
	return family;
}

static __always_inline u16 family_of_socket(struct task_struct *p, u32 fd)
{
	struct file *file = file_at(p, fd);
	struct socket *socket;

	if (!file || (BPF_CORE_READ(file, f_inode, i_mode) & 0170000) != 0140000)
		return 0;
	socket = BPF_CORE_READ(file, private_data);
	return BPF_CORE_READ(socket, sk, __sk_common.skc_family);
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

/* Calls about names: their file system is not known here, so a tmpfs in the sandbox makes them both. */
static __always_inline void named(struct sandbox *s)
{
	if (s->has_tmpfs)
		count(procs_of(s)->tmpfs);
}

static __always_inline void call_files(struct sandbox *s, struct task *t, struct task_struct *p,
				       struct pt_regs *regs, u64 nr, u8 kind, long result)
{
	struct file *file;
	u64 flags = 0;
	bool at = nr >= 257 && nr <= 268;
	const void *path = (void *)(at ? ARG1 : ARG0);

	switch (kind) {
	case K_OPEN:
		if (nr == NR_OPEN)
			flags = ARG1;
		else if (nr == NR_OPENAT)
			flags = ARG2;
		else if (nr == NR_OPENAT2)
			bpf_probe_read_user(&flags, sizeof(flags), (void *)ARG2);
		else if (nr == NR_CREAT)
			flags = O_CREAT | O_TRUNC | FMODE_WRITE;
		else
			flags = ARG2;
		file = file_at(p, result);
		if (file)
			opened(s, t, p, file, nr, flags, nr == NR_OPENAT2 ? (void *)ARG1 : path);
		else
			count(files_of(s)->unknown);
		return;
	case K_WRITE:
		if (result > 0 || nr == NR_FALLOCATE)
			written(s, t, p, ARG0, nr);
		return;
	case K_WRITE_2:
		if (result > 0)
			written(s, t, p, ARG2, nr);
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
		if (!ARG1) {
			file = file_at(p, ARG0);
			if (file)
				metadata_of(s, t, file);
			else
				count(files_of(s)->metadata);
			return;
		}
		path = (void *)ARG1;
		count(files_of(s)->metadata);
		break;
	case K_META_PATH:
		count(files_of(s)->metadata);
		break;
	case K_META_FD:
		file = file_at(p, ARG0);
		if (file)
			metadata_of(s, t, file);
		else
			count(files_of(s)->metadata);
		return;
	}
	named(s);
	explain_file(nr, path ? FROM_USER : FROM_NOTHING, path);
}

static __always_inline void call_sockets(struct sandbox *s, struct task *t, struct task_struct *p,
					 struct pt_regs *regs, u64 nr, u8 kind, long result)
{
	u16 family;
	char first = 0;

	switch (kind) {
	case K_LISTEN:
		count(procs_of(s)->listens);
		return;
	case K_BIND:
		bpf_probe_read_user(&first, 1, (void *)(ARG1 + 2));
		if (family_at((void *)ARG1) == AF_UNIX && ARG2 > 2 && first) {
			created_by_birth(s, t);
			named(s);
			explain_file(nr, FROM_USER, (void *)(ARG1 + 2));
		}
		return;
	case K_CONNECT:
		family = family_at((void *)ARG1);
		break;
	case K_SENDTO:
		if (!ARG4)
			return; /* connected: its connect counted, or it was inherited */
		family = family_of_socket(p, ARG0);
		break;
	default:
		family = family_of_socket(p, ARG0);
		break;
	}
	if (family != AF_NETLINK)
		count(procs_of(s)->channels);
}

static __always_inline void call_processes(struct sandbox *s, struct task *t, struct task_struct *p,
					   struct pt_regs *regs, u64 nr, u8 kind, long result)
{
	struct procs_bucket *b = procs_of(s);
	u64 *counter = NULL;
	u32 command;

	switch (kind) {
	case K_MOUNT:
		counter = &b->mounts;
		s->has_tmpfs = 1;
		break;
	case K_IPC:
		counter = &b->ipc;
		break;
	case K_IPC_GET_1:
		if (ARG1 & IPC_CREAT || ARG0 == 0)
			counter = &b->ipc;
		break;
	case K_IPC_GET_2:
		if (ARG2 & IPC_CREAT || ARG0 == 0)
			counter = &b->ipc;
		break;
	case K_IPC_CTL_1:
	case K_IPC_CTL_2:
		command = (kind == K_IPC_CTL_1 ? ARG1 : ARG2) & 0xff;
		if (command == 0 || command == 1 || command == 11 || command == 12 || command == 16 || command == 17)
			counter = &b->ipc;
		break;
	case K_SHMAT:
		if (!(ARG2 & SHM_RDONLY))
			counter = &b->ipc;
		break;
	case K_MQ_OPEN:
		if (ARG1 & O_CREAT)
			counter = &b->ipc;
		break;
	case K_FOREIGN:
		counter = &b->foreign;
		break;
	case K_FOREIGN_IF_0:
		if ((u32)ARG0 && (u32)ARG0 != own_number(p))
			counter = &b->foreign;
		break;
	case K_FOREIGN_IF_1:
		if ((u32)ARG1 && (u32)ARG1 != own_number(p))
			counter = &b->foreign;
		break;
	case K_PRLIMIT:
		if (ARG2 && (u32)ARG0 && (u32)ARG0 != own_number(p))
			counter = &b->foreign;
		break;
	case K_PTRACE:
		if (ARG0) /* not PTRACE_TRACEME */
			counter = &b->foreign;
		break;
	case K_CHANNEL:
		counter = &b->channels;
		break;
	}
	if (!counter)
		return;
	count(*counter);
	explain_proc(nr, FROM_NOTHING, NULL);
}

static __always_inline void call(struct sandbox *s, struct task *t, struct task_struct *p, struct pt_regs *regs,
				 u64 nr, u8 kind, long result)
{
	if (result < 0) {
		if (kind == K_CONNECT && result == -EINPROGRESS)
			count(procs_of(s)->channels);
		/* O_CREAT may have made the file before the open failed. */
		if (kind == K_OPEN && t->birth) {
			count(files_of(s)->creates);
			explain_file(nr, FROM_NOTHING, NULL);
		}
		return;
	}
	switch (kind) {
	case K_UNKNOWN:
		count(files_of(s)->unknown);
		count(procs_of(s)->unknown);
		explain_file(nr, FROM_NOTHING, NULL);
		return;
	case K_OPEN:
	case K_WRITE:
	case K_WRITE_2:
	case K_CREATE:
	case K_REMOVE:
	case K_RENAME:
	case K_META_PATH:
	case K_META_FD:
	case K_UTIMENSAT:
		call_files(s, t, p, regs, nr, kind, result);
		return;
	case K_LISTEN:
	case K_BIND:
	case K_CONNECT:
	case K_SENDTO:
	case K_SENDMSG:
		call_sockets(s, t, p, regs, nr, kind, result);
		return;
	case K_IOCTL:
		if (!ioctl_changes(ARG1))
			return;
		if (((ARG1 >> 8) & 0xff) == 0x89)
			count(procs_of(s)->mounts);
		else
			count(files_of(s)->metadata);
		return;
	case K_NONE:
	case K_SIGRETURN:
		return;
	}
	call_processes(s, t, p, regs, nr, kind, result);
}

#endif
