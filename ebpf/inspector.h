/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layout shared by the kernel half (inspector.bpf.c) and the user half (layout.py, which reads these
 * very lines). Every counter is one u64; the order is the memory order of the mapped array.
 *
 * A sandbox has one `struct sandbox`. Counters live in a ring of buckets, one bucket per epoch:
 * a mark zeroes the next bucket and then publishes the next epoch with one store, so a mark and a read
 * cost the same however much happened. A task remembers in which epoch it was born and in which it ran,
 * and takes its contribution back from that very bucket when it dies.
 */
#ifndef PAGURUS_INSPECTOR_H
#define PAGURUS_INSPECTOR_H

#define BUCKETS 4

struct files_bucket {
	u64 epoch;
	u64 creates;	/* names made: files, directories, links to them excluded */
	u64 removes;	/* names removed */
	u64 renames;	/* renames and hard links */
	u64 metadata;	/* modes, owners, times, attributes, lengths */
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
	u64 listens;
	u64 foreign;	/* memory or attributes of another process changed */
	u64 signals;	/* signals sent to tasks older than the mark */
	u64 channels;	/* FIFOs opened, sockets connected or written: something a survivor may hold */
	u64 mounts;	/* mounts and other state of namespaces */
	u64 tmpfs;	/* files of a tmpfs written: they belong to the process dump */
	u64 unknown;
	u64 explained;
};

struct sandbox {
	u64 cgroup_id;	/* 0: the slot is free; slot 0 is the host's */
	u64 files_epoch;
	u64 procs_epoch;
	u64 alive;	/* tasks, pid 1 excluded */
	u64 running;	/* of these, on a processor or waiting for one */
	u64 untracked;	/* tasks that could not be recorded: sticky until a new sweep */
	u64 init_level;	/* depth of the pid namespace whose pid 1 is the sandbox's init */
	u64 has_tmpfs;	/* a mount call succeeded, or the owner said so: names may lie on a tmpfs */
	u64 lost;	/* explanations that did not fit */
	u64 tainted;	/* marks of the owner: 1 the file half, 2 the process half must be captured */
	struct files_bucket files[BUCKETS];
	struct procs_bucket procs[BUCKETS];
};

/* An explanation: one line for people; no verdict depends on it. */
#define NAME_LENGTH 64

struct explanation {
	u64 slot;
	u64 cgroup_id;
	u32 what;	/* a syscall number, or 0x1000 + one of the reasons below */
	u32 pid;
	char comm[16];
	char name[NAME_LENGTH];
};

#define WHY_DATA 0x1000
#define WHY_RAN 0x1001
#define WHY_SIGNAL 0x1002
#define WHY_URING 0x1003

#endif
