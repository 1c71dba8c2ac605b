/* SPDX-License-Identifier: Apache-2.0 */
/* What differs between kernels, and which file systems hold what. */
#ifndef PAGURUS_KERNEL_H
#define PAGURUS_KERNEL_H

/*
 * a35b9af4ec2c (6.2) added bpf_rdonly_cast: a load through it is one instruction, where bpf_probe_read_kernel is a call
 * of several functions. Only for structures of vmlinux: their numbers in a module's BTF mean something else.
 */
extern void *bpf_rdonly_cast(const void *object, __u32 type) __ksym __weak;

#define AS(type, pointer) ((type *)bpf_rdonly_cast(pointer, bpf_core_type_id_kernel(type)))
#define LOAD(type, pointer, field)                                                                        \
	(&bpf_rdonly_cast ? AS(type, pointer)->field : BPF_CORE_READ((type *)(pointer), field))

/* The pointer that lies at an address. */
static __always_inline void *pointer_at(const void *address)
{
	void *found = NULL;

	if (&bpf_rdonly_cast)
		return AS(struct hlist_head, address)->first;
	bpf_probe_read_kernel(&found, sizeof(found), address);
	return found;
}

/* 7f203bc89eb6 (6.1) replaced cgroup.ancestor_ids by pointers. */
struct cgroup___ids {
	u64 ancestor_ids[0];
} __attribute__((preserve_access_index));

/* A function of its own, or the compiler hoists the offset that the other kernels lack out of the branch. */
static __noinline u64 cgroup_ancestor_id_by_number(struct cgroup *cgroup, int level)
{
	struct cgroup___ids *old = (void *)cgroup;
	u64 id = 0;

	bpf_probe_read_kernel(&id, sizeof(id), &old->ancestor_ids[level]);
	return id;
}

static __always_inline u64 cgroup_ancestor_id(struct cgroup *cgroup, int level)
{
	struct cgroup *ancestor = NULL;

	if (level < 0 || level > 255)
		return 0;
	if (!bpf_core_field_exists(cgroup->ancestors))
		return cgroup_ancestor_id_by_number(cgroup, level);
	bpf_probe_read_kernel(&ancestor, sizeof(ancestor), &cgroup->ancestors[level]);
	return BPF_CORE_READ(ancestor, kn, id);
}

/* 2f064a59a11f (5.14) renamed task_struct.state. */
struct task_struct___state {
	volatile long state;
} __attribute__((preserve_access_index));

static __always_inline bool task_blocked(struct task_struct *p)
{
	if (bpf_core_field_exists(p->__state))
		return BPF_CORE_READ(p, __state) != 0;
	return BPF_CORE_READ((struct task_struct___state *)p, state) != 0;
}

/* Process id of a task's thread group, in the pid namespace of that depth; 0 where it is not visible. */
static __always_inline u32 number_at(struct pid *pid, u32 level)
{
	int number = 0;

	if (level <= BPF_CORE_READ(pid, level) && level < 32)
		bpf_probe_read_kernel(&number, sizeof(number), &pid->numbers[level].nr);
	return number;
}

static __always_inline struct pid *group_pid(struct task_struct *p)
{
	return BPF_CORE_READ(p, group_leader, thread_pid);
}

/* Process id as the task itself sees it. */
static __always_inline u32 own_number(struct task_struct *p)
{
	struct pid *pid = group_pid(p);

	return number_at(pid, BPF_CORE_READ(pid, level));
}

/* A call by the 32-bit entry: its numbers mean something else. */
static __always_inline bool task_compat(struct task_struct *p)
{
	return p->thread_info.status & 2 /* TS_COMPAT */;
}

/*
 * The I_DIRTY bits are macros up to 6.17, of which type information tells nothing: SYNC, DATASYNC, PAGES and TIME are
 * bits 0, 1, 2 and 11 on 6.1; on 6.12 the first three are 3, 4 and 5. Marks hold no others, so that one mask finds
 * content in both. 6.18 made them an enum; 6.19 gave the enum another name. Where a later kernel has renamed it
 * again every mark counts, and some turns are captured for nothing.
 */
#define CONTENT_MARKS_WITHOUT_ENUM (1 << 1 | 1 << 2 | 1 << 4 | 1 << 5)
enum inode_state_flags_t___first { I_DIRTY_DATASYNC___first = 1, I_DIRTY_PAGES___first = 2 };
enum inode_state_flags_enum___second { I_DIRTY_DATASYNC___second = 1, I_DIRTY_PAGES___second = 2 };
struct inode_state_flags___second {
} __attribute__((preserve_access_index));

static __always_inline int dirty_content(void)
{
	if (bpf_core_enum_value_exists(enum inode_state_flags_t___first, I_DIRTY_PAGES___first))
		return bpf_core_enum_value(enum inode_state_flags_t___first, I_DIRTY_DATASYNC___first) |
		       bpf_core_enum_value(enum inode_state_flags_t___first, I_DIRTY_PAGES___first);
	if (bpf_core_enum_value_exists(enum inode_state_flags_enum___second, I_DIRTY_PAGES___second))
		return bpf_core_enum_value(enum inode_state_flags_enum___second, I_DIRTY_DATASYNC___second) |
		       bpf_core_enum_value(enum inode_state_flags_enum___second, I_DIRTY_PAGES___second);
	return bpf_core_type_exists(struct inode_state_flags___second) ? ~0 : CONTENT_MARKS_WITHOUT_ENUM;
}

/* 7.2 has the union around dentry.d_alias without a name. */
struct dentry___unnamed {
	struct hlist_node d_alias;
} __attribute__((preserve_access_index));
struct dentry___named {
	union {
		struct hlist_node d_alias;
	} d_u;
} __attribute__((preserve_access_index));

static __always_inline u64 alias_offset(void)
{
	if (bpf_core_field_exists(((struct dentry___named *)0)->d_u.d_alias))
		return bpf_core_field_offset(struct dentry___named, d_u.d_alias);
	return bpf_core_field_offset(struct dentry___unnamed, d_alias);
}

enum store {
	PERSISTENT,	/* part of the file tree */
	MEMORY,		/* a tmpfs that is mounted: belongs to the process dump */
	NOWHERE,	/* pipes, sockets, procfs, terminals, memory of processes */
};

#define SB_KERNMOUNT (1 << 22)
#define MAGIC_OVERLAY 0x794c7630

/* What is needed of an inode. Hooks that are given one load it directly; others have to copy. */
struct facts {
	u64 inode;
	u64 ino;
	u64 magic;	/* of its file system */
	u64 flags;	/* of its super block */
	u32 generation;
	u32 mode;
};

static __always_inline void facts_given(struct facts *f, const struct inode *inode)
{
	struct super_block *sb = inode->i_sb;

	f->inode = (u64)inode;
	f->ino = inode->i_ino;
	f->generation = inode->i_generation;
	f->mode = inode->i_mode;
	f->magic = sb->s_magic;
	f->flags = sb->s_flags;
}

static __always_inline void facts_found(struct facts *f, const struct inode *inode)
{
	struct super_block *sb = LOAD(struct inode, inode, i_sb);

	f->inode = (u64)inode;
	f->ino = LOAD(struct inode, inode, i_ino);
	f->generation = LOAD(struct inode, inode, i_generation);
	f->mode = LOAD(struct inode, inode, i_mode);
	f->magic = LOAD(struct super_block, sb, s_magic);
	f->flags = LOAD(struct super_block, sb, s_flags);
}

/* Where an inode's metadata live. */
static __always_inline enum store home_of(const struct facts *f)
{
	switch (f->magic) {
	case 0x9123683e: /* btrfs; inode 1 is its metadata, dirtied on behalf of anybody */
		return f->ino == 1 ? NOWHERE : PERSISTENT;
	case MAGIC_OVERLAY:
		return PERSISTENT;
	case 0x01021994: /* tmpfs; the kernel's own mount serves memfd, shmget and MAP_SHARED */
	case 0x858458f6: /* ramfs */
	case 0x958458f6: /* hugetlbfs */
		return f->flags & SB_KERNMOUNT ? NOWHERE : MEMORY;
	case 0x9fa0:	 /* proc */
	case 0x62656572: /* sysfs */
	case 0x1cd1:	 /* devpts */
	case 0x50495045: /* pipefs */
	case 0x534f434b: /* sockfs */
	case 0x09041934: /* anonymous inodes */
	case 0x19800202: /* mqueue: its calls are seen */
	case 0x6e736673: /* nsfs */
	case 0x50494446: /* pidfs */
	case 0x62646576: /* block devices */
	case 0x27e0eb:	 /* cgroup */
	case 0x63677270: /* cgroup2 */
	case 0x73636673: /* securityfs */
	case 0x74726163: /* tracefs */
	case 0x64626720: /* debugfs */
	case 0xcafe4a11: /* bpf */
	case 0x5345434d: /* secretmem */
		return NOWHERE;
	}
	return PERSISTENT;
}

/* Memory with an inode: what memfd_create, shmget and shared anonymous mappings make. */
static __always_inline bool is_memory(const struct facts *f)
{
	return f->magic == 0x01021994 || f->magic == 0x958458f6 || f->magic == 0x5345434d;
}

/* Content of a device, a FIFO or a socket is nowhere. */
static __always_inline bool has_content(u32 mode)
{
	u32 type = mode & 0170000;

	return type == 0100000 || type == 0040000 || type == 0120000;
}

/* Where an inode's content lives. */
static __always_inline enum store store_of(const struct facts *f)
{
	return has_content(f->mode) ? home_of(f) : NOWHERE;
}

#define MAGIC_PROC 0x9fa0
#define MAGIC_PIPE 0x50495045

/* Requests that only read or wait. Everything else, and everything newer, counts. */
static __always_inline bool uring_harmless(u8 opcode)
{
	switch (opcode) {
	case 0:	 /* NOP */
	case 1:	 /* READV */
	case 3:	 /* FSYNC */
	case 4:	 /* READ_FIXED */
	case 6:	 /* POLL_ADD */
	case 7:	 /* POLL_REMOVE */
	case 8:	 /* SYNC_FILE_RANGE */
	case 10: /* RECVMSG */
	case 11: /* TIMEOUT */
	case 12: /* TIMEOUT_REMOVE */
	case 13: /* ACCEPT */
	case 14: /* ASYNC_CANCEL */
	case 15: /* LINK_TIMEOUT */
	case 19: /* CLOSE */
	case 20: /* FILES_UPDATE */
	case 21: /* STATX */
	case 22: /* READ */
	case 24: /* FADVISE */
	case 25: /* MADVISE */
	case 27: /* RECV */
	case 29: /* EPOLL_CTL */
	case 31: /* PROVIDE_BUFFERS */
	case 32: /* REMOVE_BUFFERS */
		return true;
	}
	return false;
}

/* Requests about names, attributes and lengths: nobody can hold the other end of them. */
static __always_inline bool uring_only_files(u8 opcode)
{
	return opcode == 17 || (opcode >= 35 && opcode <= 39) || opcode == 41 || opcode == 42 || opcode == 55;
}

/* WRITEV, WRITE_FIXED, WRITE, WRITEV_FIXED */
static __always_inline bool uring_writes(u8 opcode)
{
	return opcode == 2 || opcode == 5 || opcode == 23 || opcode == 61;
}

/*
 * The inode that really holds the bytes: of an overlay, the one in the upper layer. NULL while a file has
 * not been copied up, or when the overlay's types are unknown: then nothing is netted, which is safe.
 */
static __always_inline struct inode *real_of(struct inode *inode, u64 magic)
{
	if (magic != MAGIC_OVERLAY)
		return inode;
	if (bpf_core_type_exists(struct ovl_inode)) {
		void *ovl = (void *)inode - bpf_core_field_offset(struct ovl_inode, vfs_inode);
		void *upper = pointer_at(ovl + bpf_core_field_offset(struct ovl_inode, __upperdentry));

		return upper ? LOAD(struct dentry, upper, d_inode) : NULL;
	}
	return NULL;
}

static __always_inline struct inode *real_inode(const struct facts *f)
{
	return real_of((void *)f->inode, f->magic);
}

/* A task that the kernel runs on behalf of a program: workers of io_uring. Created without an event. */
#define PF_IO_WORKER 0x00000010
#define PF_USER_WORKER 0x00004000

static __always_inline bool helps_a_program(struct task_struct *p)
{
	return p->flags & (PF_IO_WORKER | PF_USER_WORKER);
}

#endif
