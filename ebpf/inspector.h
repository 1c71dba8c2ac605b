/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layout shared by the kernel half (inspector.bpf.c) and the user half (layout.py, which scripts/sync_layout.py
 * makes of these very lines). Every counter is one u64; the order is the memory order of the mapped array.
 *
 * A sandbox has one `struct sandbox`. Counters live in a ring of buckets, one bucket per epoch:
 * a mark zeroes the next bucket and then publishes the next epoch with one store, so a mark and a read
 * cost the same however much happened. A task remembers in which epoch it was born and in which it ran,
 * and takes its contribution back from that very bucket when it dies.
 */
#ifndef PAGURUS_INSPECTOR_H
#define PAGURUS_INSPECTOR_H

#define BUCKETS 4
#define MAX_REPORTED_AT 8
#define IPC_UNKNOWN 0xffffffff

struct files_bucket {
	u64 epoch;
	u64 creates;	/* names made: files, directories, links to them excluded */
	u64 removes;	/* names removed */
	u64 renames;	/* renames and hard links */
	u64 metadata;	/* modes, owners, times, attributes, lengths */
	u64 hidden;	/* time stamps, lengths, allocations and flags set on purpose: not to be seen in the bytes */
	u64 touched;	/* times set to the present, of a directory, or of what a path led to */
	u64 data;	/* inodes whose content was dirtied */
	u64 temporary;	/* inodes made since the mark that are gone again */
	u64 uring;	/* io_uring requests that may change something */
	u64 unknown;	/* something happened that this program does not understand */
	u64 explained;	/* explanations sent since the mark */
};

struct procs_bucket {
	u64 epoch;
	u64 forks;
	u64 execs;
	u64 exits;
	u64 fresh;	/* tasks born since the mark and still alive */
	u64 ran;	/* tasks older than the mark that made progress and are still alive */
	u64 gone;	/* tasks older than the mark that ended */
	u64 ipc;
	u64 keys;	/* of the kernel's key rings */
	u64 listens;
	u64 foreign;	/* memory or attributes of another process changed */
	u64 signals;	/* signals sent to tasks older than the mark */
	u64 channels;	/* FIFOs opened, sockets connected or written: something a survivor may hold */
	u64 reported[MAX_REPORTED_AT];	/* inodes of pipes and sockets that excluded tasks wrote to: the reader's ends */
	u64 mounts;	/* mounts and other state of namespaces */
	u64 tmpfs;	/* changes on a tmpfs: they belong to the process dump */
	u64 unknown;
	u64 explained;
};

struct sandbox {
	u64 cgroup_id;	/* 0: the slot is free; slot 0 is the host's */
	u64 files_epoch;
	u64 procs_epoch;
	u64 alive;	/* tasks, pid 1 and the excluded ones not among them */
	u64 running;	/* of these, on a processor or waiting for one */
	u64 untracked;	/* tasks that could not be recorded: sticky until a new sweep */
	u64 init_level;	/* depth of the pid namespace whose pid 1 is the sandbox's init */
	u64 has_patience;	/* a socket was given a time-out, or the owner said so */
	u64 has_tmpfs;	/* a mount call succeeded: names may lie on a tmpfs */
	u64 lost;	/* explanations that did not fit */
	u64 tainted;	/* marks of the owner: 1 the file half, 2 the process half must be captured */
	u64 excluded;	/* tasks alive that were excluded */
	u64 ipc_before;	/* IPC objects at the mark of the process half, or IPC_UNKNOWN */
	u64 ipc_now;	/* found by the census */
	u64 ipc_space;	/* in this namespace */
	u64 target_slot;	/* slot 0 only: whose tasks the census tells of; whose process the sweep excludes */
	u64 target_pid;	/* slot 0 only: process to exclude, as its owner numbers it */
	struct files_bucket files[BUCKETS];
	struct procs_bucket procs[BUCKETS];
};

/*
 * An explanation: one line for people; no verdict depends on it. `parts` are the names of a directory entry and
 * of the directories above it, innermost first, `depth` of them; `name` is what the program wrote: relative to
 * that entry, when both are there.
 */
#define NAME_LENGTH 64
#define PART_LENGTH 32
#define DEPTH 12
#define PARTS_LENGTH 384

struct explanation {
	u64 slot;
	u64 cgroup_id;
	u32 what;	/* a syscall number, or 0x1000 + one of the reasons below */
	u32 pid;	/* as the sandbox's innermost pid namespace numbers it */
	u32 depth;
	u32 complete;	/* the outermost part is the root of a file system */
	char comm[16];
	char name[NAME_LENGTH];
	char parts[PARTS_LENGTH];
};

#define WHY_DATA 0x1000
#define WHY_RAN 0x1001
#define WHY_SIGNAL 0x1002
#define WHY_URING 0x1003

/* One task of the census: what it counts as in the sandbox's epoch of the process half. */
struct census {
	u32 pid;	/* of its process, as the inspector's pid namespace numbers it */
	u32 tid;
	u32 fresh;
	u32 ran;	/* or runs now */
	u32 spoke;	/* wrote to a pipe or socket that another process may hold */
	char comm[16];	/* of its process */
};

#endif
