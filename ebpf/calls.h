/* SPDX-License-Identifier: Apache-2.0 */
/* What a system call that ended did. Included by inspector.bpf.c after the small parts. */
#ifndef PAGURUS_CALLS_H
#define PAGURUS_CALLS_H

#include "files.h"
#include "sockets.h"

/* The number is neither the caller's nor that of a task younger than the mark. */
static __always_inline bool older(struct sandbox *s, struct task_struct *p, u32 number)
{
	struct number own = number_of(BPF_CORE_READ(p, thread_pid));

	if (number == own.value || number == own_number(p))
		return false;
	own.value = number;
	return !younger_than_mark(s, &own);
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
	case K_FSCONFIG:
		if (ARG1 == 7) /* FSCONFIG_CMD_RECONFIGURE; what is made anew is mounted by other calls */
			counter = &b->mounts;
		break;
	case K_OPEN_TREE:
		if (!(ARG2 & 1)) /* OPEN_TREE_CLONE */
			counter = &b->mounts;
		break;
	case K_IPC:
		counter = &b->ipc;
		break;
	case K_KEYS:
		counter = &b->keys;
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
	case K_FOREIGN_0:
		if (older(s, p, ARG0))
			counter = &b->foreign;
		break;
	case K_FOREIGN_IF_0:
		if ((u32)ARG0 && older(s, p, ARG0))
			counter = &b->foreign;
		break;
	case K_FOREIGN_IF_1:
		/* Whose, in argument 0: of one process, of a group, of a user. */
		if (ARG0 != (nr == NR_SETPRIORITY ? 0 : 1) || ((u32)ARG1 && older(s, p, ARG1)))
			counter = &b->foreign;
		break;
	case K_PRLIMIT:
		if (ARG2 && (u32)ARG0 && older(s, p, ARG0))
			counter = &b->foreign;
		break;
	case K_PTRACE:
		if (ARG0 && older(s, p, ARG1)) /* not PTRACE_TRACEME */
			counter = &b->foreign;
		break;
	case K_CHANNEL:
		counter = &b->channels;
		break;
	}
	if (!counter)
		return;
	count(*counter);
	explain_proc(nr, NULL, NULL);
}

static __always_inline void call(struct sandbox *s, struct task *t, struct processor *c, struct task_struct *p,
				 struct pt_regs *regs, u64 nr, u8 kind, long result)
{
	if (result < 0) {
		if (kind == K_CONNECT && result == -EINPROGRESS)
			call_sockets(s, t, p, regs, nr, kind, result);
		/* O_CREAT may have made the file before the open failed. */
		if (kind == K_OPEN && t->birth) {
			count(files_of(s)->creates);
			explain_file(nr, NULL, NULL);
		}
		return;
	}
	switch (kind) {
	case K_UNKNOWN:
		count(files_of(s)->unknown);
		count(procs_of(s)->unknown);
		explain_file(nr, NULL, NULL);
		return;
	case K_OPEN:
	case K_WRITE:
	case K_WRITE_1:
	case K_WRITE_2:
	case K_SUBMIT:
	case K_CREATE:
	case K_REMOVE:
	case K_RENAME:
	case K_META_PATH:
	case K_META_FD:
	case K_UTIMENSAT:
	case K_UTIMES:
		call_files(s, t, c, p, regs, nr, kind, result);
		return;
	case K_LISTEN:
	case K_BIND:
	case K_CONNECT:
	case K_SENDTO:
	case K_SENDMSG:
		call_sockets(s, t, p, regs, nr, kind, result);
		return;
	case K_IOCTL:
		call_ioctl(s, t, c, p, regs, nr);
		return;
	case K_NONE:
	case K_SIGRETURN:
		return;
	}
	call_processes(s, t, p, regs, nr, kind, result);
}

#endif
