/* SPDX-License-Identifier: Apache-2.0 */
/* What differs between kernels, and which file systems hold what. */
#ifndef PAGURUS_KERNEL_H
#define PAGURUS_KERNEL_H

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

/* Process id as the task itself sees it. */
static __always_inline u32 own_number(struct task_struct *p)
{
	struct pid *pid = BPF_CORE_READ(p, group_leader, thread_pid);
	u32 level = BPF_CORE_READ(pid, level);
	int number = 0;

	if (level < 32)
		bpf_probe_read_kernel(&number, sizeof(number), &pid->numbers[level].nr);
	return number;
}

/* A call by the 32-bit entry: its numbers mean something else. */
static __always_inline bool task_compat(struct task_struct *p)
{
	return p->thread_info.status & 2 /* TS_COMPAT */;
}

/* The I_DIRTY bits became an enum, and moved, in 6.18; they were macros with these values before. */
static __always_inline int dirty_content(void)
{
	if (bpf_core_enum_value_exists(enum inode_state_flags_t, I_DIRTY_PAGES))
		return bpf_core_enum_value(enum inode_state_flags_t, I_DIRTY_DATASYNC) |
		       bpf_core_enum_value(enum inode_state_flags_t, I_DIRTY_PAGES);
	return 2 | 4;
}

enum store {
	PERSISTENT,	/* part of the file tree */
	MEMORY,		/* a tmpfs that is mounted: belongs to the process dump */
	NOWHERE,	/* pipes, sockets, procfs, terminals, memory of processes */
};

#define SB_KERNMOUNT (1 << 22)

/* Where an inode's metadata live. */
static __always_inline enum store home_of(const struct inode *inode)
{
	struct super_block *sb = BPF_CORE_READ(inode, i_sb);

	switch (BPF_CORE_READ(sb, s_magic)) {
	case 0x9123683e: /* btrfs; inode 1 is its metadata, dirtied on behalf of anybody */
		return BPF_CORE_READ(inode, i_ino) == 1 ? NOWHERE : PERSISTENT;
	case 0x01021994: /* tmpfs; the kernel's own mount serves memfd, shmget and MAP_SHARED */
	case 0x858458f6: /* ramfs */
	case 0x958458f6: /* hugetlbfs */
		return BPF_CORE_READ(sb, s_flags) & SB_KERNMOUNT ? NOWHERE : MEMORY;
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

/* Where an inode's content lives: that of a device, a FIFO or a socket is nowhere. */
static __always_inline enum store store_of(const struct inode *inode)
{
	u32 type = BPF_CORE_READ(inode, i_mode) & 0170000;

	if (type != 0100000 && type != 0040000 && type != 0120000)
		return NOWHERE;
	return home_of(inode);
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

/*
 * The inode that really holds the bytes: of an overlay, the one in the upper layer. NULL while a file has
 * not been copied up, or when the overlay's types are unknown: then nothing is netted, which is safe.
 */
static __always_inline struct inode *real_inode(struct inode *inode)
{
	if (BPF_CORE_READ(inode, i_sb, s_magic) != 0x794c7630)
		return inode;
	if (bpf_core_type_exists(struct ovl_inode)) {
		struct ovl_inode *ovl = (void *)inode - bpf_core_field_offset(struct ovl_inode, vfs_inode);

		return BPF_CORE_READ(ovl, __upperdentry, d_inode);
	}
	return NULL;
}

#endif
