/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls that change processes, IPC objects, sockets, mounts, by outcome. Included by effects.c.
 *
 *     P(call, outcome, "operations before the mark", result)
 *
 * A call of outcome `changed` acts on a survivor of the setup, or on an object that was there.
 */
#ifndef PAGURUS_BENCH_MATRIX_PROCESSES_H
#define PAGURUS_BENCH_MATRIX_PROCESSES_H

#include <mqueue.h>

/* ------------------------------------------------------------------ IPC objects */

union semaphore {
	int value;
	unsigned short *all;
};

static int semaphore_set(int command)
{
	unsigned short values[1] = { 1 + varied(1023) };
	union semaphore argument = { .value = 1 + (int)varied(1023) };
	int id = semget(98, 1, 0600);

	if (command == SETALL)
		argument.all = values;
	return E(semctl(id, 0, command, argument));
}

static int semaphore_up(int timed)
{
	struct sembuf up = { 0, 1, IPC_NOWAIT };
	struct timespec limit = { 1, 0 };
	int id = semget(98, 1, 0600);

	return timed ? E(semtimedop(id, &up, 1, &limit)) : E(semop(id, &up, 1));
}

static int message_in(int key)
{
	struct { long type; char bytes[8]; } message = { 1, "hi" };

	return E(msgsnd(msgget(key, 0600), &message, 4, IPC_NOWAIT));
}

static int message_out(int key)
{
	struct { long type; char bytes[8]; } message;

	return E(msgrcv(msgget(key, 0600), &message, 8, 0, IPC_NOWAIT));
}

static int attached(int key, int flags)
{
	char *memory = shmat(shmget(key, 0, 0), NULL, flags);

	if (memory == (char *)-1)
		return -errno;
	if (!(flags & SHM_RDONLY))
		memory[varied(1023)]++;
	return E(shmdt(memory));
}

static int removed_at_once(int kind)
{
	if (kind == 0)
		return E(shmctl(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600), IPC_RMID, NULL));
	if (kind == 1)
		return E(semctl(semget(IPC_PRIVATE, 1, IPC_CREAT | 0600), 0, IPC_RMID));
	return E(msgctl(msgget(IPC_PRIVATE, IPC_CREAT | 0600), IPC_RMID, NULL));
}

static int set_shm_owner(void)
{
	struct shmid_ds data;
	int id = shmget(99, 0, 0);

	if (shmctl(id, IPC_STAT, &data))
		return -errno;
	data.shm_perm.mode ^= 0040;
	return E(shmctl(id, IPC_SET, &data));
}

static int queue(const char *name, int flags)
{
	return (int)mq_open(name, flags | O_RDWR | O_NONBLOCK | O_CLOEXEC, 0600, NULL) < 0 ? -errno : 0;
}

static int queue_message(int in)
{
	mqd_t fd = mq_open("/q", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	static char buffer[65536];

	if (fd == (mqd_t)-1)
		return -errno;
	return in ? E(mq_send(fd, "hi", 2, 1)) : E(mq_receive(fd, buffer, sizeof(buffer), NULL));
}

static void forget_ipc(void)
{
	struct shm_info memory;
	struct seminfo semaphores;
	struct msginfo messages;
	struct shmid_ds a;
	struct msqid_ds b;
	struct semid_ds c;
	union { struct semid_ds *data; struct seminfo *all; } argument = { .all = &semaphores };
	int id, last;

	for (last = shmctl(0, SHM_INFO, (void *)&memory); last >= 0; last--)
		if ((id = shmctl(last, SHM_STAT, &a)) >= 0)
			shmctl(id, IPC_RMID, NULL);
	for (last = msgctl(0, MSG_INFO, (void *)&messages); last >= 0; last--)
		if ((id = msgctl(last, MSG_STAT, &b)) >= 0)
			msgctl(id, IPC_RMID, NULL);
	last = semctl(0, 0, SEM_INFO, argument);
	for (argument.data = &c; last >= 0; last--)
		if ((id = semctl(last, 0, SEM_STAT, argument)) >= 0)
			semctl(id, 0, IPC_RMID);
	mq_unlink("/q");
	mq_unlink("/gone");
	shm_unlink("/word");
}

/* ------------------------------------------------------------------ mounts and names of the machine */

static int new_mount(int way)
{
	int context, fd;

	mkdir("mnt", 0755);
	if (way == 0)
		return E(mount("none", "mnt", "tmpfs", 0, "size=64k"));
	if (way == 1)
		return E(mount("full", "mnt", NULL, MS_BIND, NULL));
	context = syscall(430, "tmpfs", 1);
	if (context < 0)
		return -errno;
	syscall(431, context, 6, NULL, NULL, 0);
	fd = syscall(432, context, 1, 0);
	close(context);
	if (fd < 0)
		return -errno;
	return way == 2 ? E(syscall(429, fd, "", AT_FDCWD, "mnt", 4)) : E(close(fd));
}

static int mounted_briefly(void)
{
	int result = new_mount(0);

	umount2("mnt", MNT_DETACH);
	rmdir("mnt");
	return result;
}

static int read_only_mount(void)
{
	struct { unsigned long set, clear, propagation, userns; } attributes = { 1, 0, 0, 0 };

	return E(syscall(442, AT_FDCWD, "mnt", 0, &attributes, sizeof(attributes)));
}

static int reconfigured(void)
{
	int context = syscall(433, AT_FDCWD, "mnt", 0), result; /* fspick */

	if (context < 0)
		return -errno;
	result = syscall(431, context, 1, "size", "128k", 0) ? -errno : E(syscall(431, context, 7, NULL, NULL, 0));
	close(context);
	return result;
}

static int opened_read_only(void)
{
	struct { unsigned long set, clear, propagation, userns; } attributes = { 1, 0, 0, 0 };
	int fd = syscall(467, AT_FDCWD, "mnt", O_CLOEXEC, &attributes, sizeof(attributes)); /* open_tree_attr */

	return fd < 0 ? -errno : E(close(fd));
}

/* ------------------------------------------------------------------ the table */

#define ON(call, setup) \
	P(call, changed, setup, settled(by_##call(SURVIVOR))) \
	P(call, zero, "", on_child(by_##call)) \
	P(call, failed, "", by_##call(NOBODY))

#define PROCESS_CALLS \
	ON(kill, "start_signal_taker") ON(tkill, "start_signal_taker") ON(tgkill, "start_signal_blocker") \
	ON(rt_sigqueueinfo, "start_signal_taker") ON(rt_tgsigqueueinfo, "start_signal_blocker") \
	ON(pidfd_signal, "start_signal_taker") \
	ON(process_vm_writev, "start_survivor") ON(ptrace_poke, "start_survivor") \
	ON(proc_mem, "start_survivor") ON(oom_score, "start_survivor") ON(prlimit, "start_survivor") \
	ON(setpriority, "start_survivor") ON(setaffinity, "start_survivor") ON(setscheduler, "start_survivor") \
	ON(setattr, "start_survivor") ON(ioprio, "start_survivor") ON(process_madvise, "start_survivor") \
	ON(getfd_seek, "start_holder") \
	P(stop_continue, zero, "start_survivor", settled(by_stop_continue(SURVIVOR))) \
	P(continue, changed, "start_survivor stop_survivor", settled(E(kill(SURVIVOR, SIGCONT)))) \
	P(stop_continue, failed, "", by_stop_continue(NOBODY)) \
	P(ptrace_seize, zero, "start_survivor", settled(by_ptrace_seize(SURVIVOR))) \
	P(ptrace_seize, failed, "", by_ptrace_seize(NOBODY)) \
	P(kill_thread, changed, "start_threaded", settled(by_kill(SURVIVOR))) \
	P(kill_ignored, zero, "start_survivor", E(kill(SURVIVOR, SIGURG))) \
	P(kill_probe, zero, "start_survivor", E(kill(SURVIVOR, 0))) \
	P(kill_group, changed, "start_survivor", settled(E(kill(-SURVIVOR, SIGKILL)))) \
	P(kill_everybody, changed, "start_threaded", settled(E(kill(-1, SIGKILL)))) \
	P(proc_fd_pipe, changed, "start_holder", into_proc_fd(63)) \
	P(proc_fd_pipe, failed, "start_survivor", into_proc_fd(63)) \
	P(getfd_eventfd, changed, "start_holder", taken_eventfd()) \
	P(kept_memfd_write, changed, "start_keeper", into_kept(65, 0)) \
	P(kept_memfd_truncate, changed, "start_keeper", into_kept(65, 1)) \
	P(kept_memfd_store, changed, "start_keeper", into_kept(65, 2)) \
	P(kept_memfd_uring, changed, "start_keeper", into_kept(65, 3)) \
	P(kept_file_write, changed, "start_keeper", into_kept(66, 0)) \
	P(kept_file_truncate, changed, "start_keeper", into_kept(66, 1)) \
	P(kept_file_store, changed, "start_keeper", into_kept(66, 2)) \
	P(kept_file_uring, changed, "start_keeper", into_kept(66, 3)) \
	P(kept_shared_write, changed, "start_keeper", into_kept(67, 0)) \
	P(kept_shared_store, changed, "start_keeper", into_kept(67, 2)) \
	P(uring_oom_score, changed, "start_survivor", uring_into_proc("oom_score_adj", "700")) \
	P(held_unlink, changed, "start_holder", E(unlink("other"))) \
	P(held_replace, changed, "start_holder", E(rename("file", "other"))) \
	P(held_rename, changed, "start_holder", E(rename("other", "elsewhere"))) \
	P(held_rewrite, changed, "start_holder", (fill("other", "short"), 0)) \
	P(mapped_replace, changed, "start_mapper", E(rename("big", "mapped"))) \
	P(working_directory_moves, changed, "start_in_directory", E(rename("full", "moved"))) \
	P(working_directory_goes, changed, "start_in_directory", (unlink("full/inside"), E(rmdir("full")))) \
	P(setpriority_user, changed, "start_survivor", E(setpriority(PRIO_USER, 0, 7))) \
	P(setpriority_group, changed, "start_survivor", E(setpriority(PRIO_PGRP, SURVIVOR, 7))) \
	P(ioprio_user, changed, "start_survivor", E(syscall(SYS_ioprio_set, 3, 0, 3 << 13))) \
	P(futex_wake, changed, "start_futex_waiter", futex_wake()) \
	P(sendto, changed, "start_datagrams", datagram("datagrams", 0)) \
	P(sendmsg, changed, "start_datagrams", datagram("datagrams", 1)) \
	P(sendmmsg, changed, "start_datagrams", datagram("datagrams", 2)) \
	P(connect_write, changed, "start_datagrams", datagram("datagrams", 3)) \
	P(uring_sendmsg, changed, "start_datagrams", datagram("datagrams", 4)) \
	P(sendto, failed, "", datagram("nobody", 0)) \
	P(connect_write, failed, "", datagram("nobody", 3)) \
	P(bind_udp, created, "", udp(9300, 1)) \
	P(sendto_udp, changed, "start_udp", udp(9301, 0)) \
	P(write_terminal, changed, "start_terminal", terminal(0)) \
	P(tcsetattr, changed, "start_terminal", terminal(1)) \
	P(tiocswinsz, changed, "start_terminal", terminal(2)) \
	P(write_terminal, failed, "", terminal(0)) \
	P(listen_unix, created, "", listen_unix("listens", 1)) \
	P(listen_unix, zero, "", listen_unix("listens", 0)) \
	P(listen_unix, failed, "", listen_unix("full", 0)) \
	P(listen_tcp, created, "", listen_tcp(9302, 1)) \
	P(listen_tcp, zero, "", listen_tcp(9302, 0)) \
	P(connect_unix, changed, "start_unix_server", connected("listens")) \
	P(connect_unix, failed, "", connected("nobody")) \
	P(fork, created, "", started(wait_paused)) \
	P(fork, zero, "", cloned(0)) \
	P(fork_beside, zero, "start_survivor", cloned(0)) \
	P(vfork, zero, "", cloned(CLONE_VFORK | CLONE_VM)) \
	P(clone_files, zero, "start_survivor", cloned(CLONE_FILES | CLONE_FS)) \
	P(thread, created, "", started(wait_with_thread)) \
	P(execve, created, "", started(wait_executed)) \
	P(execve, zero, "start_survivor", executed("/effects")) \
	P(execve, failed, "", executed("/missing")) \
	P(shmget, created, "", E(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600))) \
	P(shmget, zero, "", removed_at_once(0)) \
	P(shmget, failed, "", E(shmget(4711, 4096, 0))) \
	P(shmat, changed, "store_shm_segment", attached(99, 0)) \
	P(shmat, failed, "", attached(4711, 0)) \
	P(shmctl_set, changed, "store_shm_segment", set_shm_owner()) \
	P(shmctl_remove, changed, "store_shm_segment", E(shmctl(shmget(99, 0, 0), IPC_RMID, NULL))) \
	P(shmctl_remove, failed, "", E(shmctl(4711, IPC_RMID, NULL))) \
	P(semget, created, "", E(semget(IPC_PRIVATE, 2, IPC_CREAT | 0600))) \
	P(semget, zero, "", removed_at_once(1)) \
	P(semget, failed, "", E(semget(4711, 1, 0))) \
	P(semop, changed, "make_semaphores", semaphore_up(0)) \
	P(semop, failed, "", semaphore_up(0)) \
	P(semtimedop, changed, "make_semaphores", semaphore_up(1)) \
	P(semctl_setval, changed, "make_semaphores", semaphore_set(SETVAL)) \
	P(semctl_setall, changed, "make_semaphores", semaphore_set(SETALL)) \
	P(msgget, created, "", E(msgget(IPC_PRIVATE, IPC_CREAT | 0600))) \
	P(msgget, zero, "", removed_at_once(2)) \
	P(msgget, failed, "", E(msgget(4711, 0))) \
	P(msgsnd, changed, "send_message", message_in(97)) \
	P(msgsnd, failed, "", message_in(4711)) \
	P(msgrcv, changed, "send_message", message_out(97)) \
	P(msgrcv, failed, "", message_out(4711)) \
	P(mq_open, created, "", queue("/q", O_CREAT)) \
	P(mq_open, failed, "", queue("/missing", 0)) \
	P(mq_open, zero, "", queue("/gone", O_CREAT) ?: E(mq_unlink("/gone"))) \
	P(mq_send, changed, "make_queue", queue_message(1)) \
	P(mq_receive, changed, "make_queue", queue_message(0)) \
	P(mq_send, failed, "", queue_message(1)) \
	P(mq_unlink, changed, "make_queue", E(mq_unlink("/q"))) \
	P(mq_unlink, failed, "", E(mq_unlink("/missing"))) \
	P(mount_tmpfs, created, "", new_mount(0)) \
	P(mount_bind, created, "", new_mount(1)) \
	P(move_mount, created, "", new_mount(2)) \
	P(mount, zero, "", mounted_briefly()) \
	P(mount, failed, "", E(mount("none", "missing", "tmpfs", 0, NULL))) \
	P(fsmount, zero, "", (new_mount(3), E(rmdir("mnt")))) \
	P(mount_setattr, changed, "mount_there", read_only_mount()) \
	P(fsconfig, changed, "mount_there", reconfigured()) \
	P(open_tree_attr, changed, "mount_there", opened_read_only()) \
	P(umount, changed, "mount_there", E(umount2("mnt", MNT_DETACH))) \
	P(umount, failed, "", E(umount2("missing", 0))) \
	P(remount, changed, "mount_there", E(mount(NULL, "mnt", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL))) \
	P(sethostname, changed, "", (changing = varied(255), E(sethostname(&"name1name2name3"[changing % 10], 4)))) \
	P(setdomainname, changed, "", E(setdomainname(&"name1name2name3"[varied(7)], 4)))

#define P(call, outcome, setup, ...) static int process_##call##_##outcome(void) { return __VA_ARGS__; }
PROCESS_CALLS
#undef P

static const struct process_call {
	const char *name, *outcome, *setup;
	int (*run)(void);
} process_calls[] = {
#define P(call, outcome, setup, ...) { #call, #outcome, setup, process_##call##_##outcome },
	PROCESS_CALLS
#undef P
};

#endif
