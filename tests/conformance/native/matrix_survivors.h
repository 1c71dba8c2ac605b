/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that act on other processes, directly or through what they hold. Included by effects.c. */
#ifndef PAGURUS_BENCH_MATRIX_SURVIVORS_H
#define PAGURUS_BENCH_MATRIX_SURVIVORS_H

#include <termios.h>

#define NOBODY 30000
#define SURVIVOR survivor_pid()

/* ------------------------------------------------------------------ on another process */

/* A child of our own that waits, acted upon, then killed: nothing is left. */
static int on_child(int (*call)(pid_t pid))
{
	pid_t pid = fork();
	int result;

	if (pid == 0) {
		signal(SIGUSR1, SIG_IGN);
		dup2(opened("other", O_RDONLY), 61);
		for (;;)
			pause();
	}
	usleep(500);
	result = call(pid);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	return result;
}

static int settled(int result)
{
	usleep(2000); /* the receiver reacts; a case must not judge before */
	return result;
}

static int by_rt_sigqueueinfo(pid_t pid)
{
	siginfo_t information = { .si_signo = SIGUSR1, .si_code = SI_QUEUE };

	return E(syscall(SYS_rt_sigqueueinfo, pid, SIGUSR1, &information));
}

static int by_rt_tgsigqueueinfo(pid_t pid)
{
	siginfo_t information = { .si_signo = SIGUSR1, .si_code = SI_QUEUE };

	return E(syscall(SYS_rt_tgsigqueueinfo, pid, pid, SIGUSR1, &information));
}

static int by_pidfd(pid_t pid, int number)
{
	int fd = syscall(SYS_pidfd_open, pid, 0), result;

	if (fd < 0)
		return -errno;
	result = E(syscall(SYS_pidfd_send_signal, fd, number, NULL, 0));
	close(fd);
	return result;
}

static int by_pidfd_signal(pid_t pid)
{
	return by_pidfd(pid, SIGUSR1);
}

static int by_kill(pid_t pid)
{
	return E(kill(pid, SIGUSR1));
}

static int by_tkill(pid_t pid)
{
	return E(syscall(SYS_tkill, pid, SIGUSR1));
}

static int by_tgkill(pid_t pid)
{
	return E(syscall(SYS_tgkill, pid, pid, SIGUSR1));
}

static int by_stop_continue(pid_t pid)
{
	int result = E(kill(pid, SIGSTOP));

	usleep(500);
	return result ? result : E(kill(pid, SIGCONT));
}

static int by_process_vm_writev(pid_t pid)
{
	long value = varied(0xffffff);
	struct iovec here = { &value, sizeof(value) }, there = { (void *)&survivor_cell, sizeof(value) };

	return E(process_vm_writev(pid, &here, 1, &there, 1, 0));
}

static int by_ptrace_poke(pid_t pid)
{
	int result = E(ptrace(PTRACE_ATTACH, pid, NULL, NULL));

	if (result < 0)
		return result;
	waitpid(pid, NULL, __WALL);
	result = E(ptrace(PTRACE_POKEDATA, pid, (void *)&survivor_cell, (void *)(long)varied(0xffffff)));
	ptrace(PTRACE_DETACH, pid, NULL, NULL);
	return result;
}

static int by_ptrace_seize(pid_t pid)
{
	int result = E(ptrace(PTRACE_SEIZE, pid, NULL, NULL));

	if (result == 0)
		ptrace(PTRACE_DETACH, pid, NULL, NULL);
	return result;
}

static int proc_write(pid_t pid, const char *name, const void *bytes, size_t length, off_t at)
{
	char path[64];
	int fd, result;

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, name);
	fd = opened(path, O_RDWR);
	if (fd < 0)
		return -errno;
	result = E(pwrite(fd, bytes, length, at));
	close(fd);
	return result;
}

static int by_proc_mem(pid_t pid)
{
	long value = varied(0xffffff);

	return proc_write(pid, "mem", &value, sizeof(value), (off_t)&survivor_cell);
}

static int by_oom_score(pid_t pid)
{
	char text[16];

	snprintf(text, sizeof(text), "%u", 500 + varied(255));
	return proc_write(pid, "oom_score_adj", text, strlen(text), 0);
}

static int by_prlimit(pid_t pid)
{
	struct rlimit limit = { 64 + varied(63), 128 };

	return E(prlimit(pid, RLIMIT_NOFILE, &limit, NULL));
}

static int by_setpriority(pid_t pid)
{
	return E(setpriority(PRIO_PROCESS, pid, 5));
}

static int by_setaffinity(pid_t pid)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(0, &set);
	return E(sched_setaffinity(pid, sizeof(set), &set));
}

static int by_setscheduler(pid_t pid)
{
	struct sched_param none = { 0 };

	return E(sched_setscheduler(pid, SCHED_BATCH, &none));
}

static int by_setattr(pid_t pid)
{
	unsigned attributes[14] = { 48, 3 }; /* SCHED_BATCH */

	return E(syscall(SYS_sched_setattr, pid, attributes, 0));
}

static int by_ioprio(pid_t pid)
{
	return E(syscall(SYS_ioprio_set, 1, pid, 3 << 13));
}

static int by_process_madvise(pid_t pid)
{
	struct iovec part = { (void *)((unsigned long)&survivor_cell & ~4095ul), 4096 };
	int fd = syscall(SYS_pidfd_open, pid, 0), result;

	if (fd < 0)
		return -errno;
	result = E(syscall(SYS_process_madvise, fd, &part, 1, MADV_COLD, 0));
	close(fd);
	return result;
}

/* Takes a descriptor of another process and moves its position. */
static int by_getfd_seek(pid_t pid)
{
	int fd = syscall(SYS_pidfd_open, pid, 0), got, result;

	if (fd < 0)
		return -errno;
	got = syscall(SYS_pidfd_getfd, fd, 61, 0);
	result = got < 0 ? -errno : E(lseek(got, varied(1023), SEEK_SET));
	close(got);
	close(fd);
	return result;
}

/* ------------------------------------------------------------------ through what a survivor holds */

static int into_proc_fd(int number)
{
	char path[64];
	int fd, result;

	snprintf(path, sizeof(path), "/proc/%d/fd/%d", SURVIVOR, number);
	fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	result = E(write(fd, new_bytes, 3));
	close(fd);
	return result;
}

static int unix_socket(int kind, const char *path, struct sockaddr_un *address)
{
	memset(address, 0, sizeof(*address));
	address->sun_family = AF_UNIX;
	strcpy(address->sun_path, path);
	return socket(AF_UNIX, kind | SOCK_CLOEXEC, 0);
}

static int datagram(const char *path, int way)
{
	struct sockaddr_un address;
	struct iovec part = { (void *)new_bytes, 5 };
	struct mmsghdr message = { .msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 } };
	int fd = unix_socket(SOCK_DGRAM, path, &address), result;

	message.msg_hdr.msg_name = &address;
	message.msg_hdr.msg_namelen = sizeof(address);
	if (way == 0)
		result = E(sendto(fd, new_bytes, 5, 0, (void *)&address, sizeof(address)));
	else if (way == 1)
		result = E(sendmsg(fd, &message.msg_hdr, 0));
	else if (way == 2)
		result = E(sendmmsg(fd, &message, 1, 0));
	else if (way == 3)
		result = connect(fd, (void *)&address, sizeof(address)) ? -errno : E(write(fd, new_bytes, 5));
	else
		result = URING(.opcode = IORING_OP_SENDMSG, .fd = fd, .addr = AT(&message.msg_hdr), .len = 1);
	close(fd);
	return settled(result);
}

static int udp(int port, int stays)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), result;

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	result = stays ? E(bind(fd, (void *)&address, sizeof(address))) :
			 E(sendto(fd, new_bytes, 5, 0, (void *)&address, sizeof(address)));
	if (stays && result == 0) {
		survivor("survivor.pid", wait_paused);
		close(fd);
		return 0;
	}
	close(fd);
	return settled(result);
}

static int held_terminal;

static void wait_holding_terminal(void)
{
	wait_paused();
}

static void start_terminal(void)
{
	char text[16];

	held_terminal = open("/dev/ptmx", O_RDWR | O_NOCTTY);
	if (held_terminal < 0 || grantpt(held_terminal) || unlockpt(held_terminal))
		return;
	survivor("survivor.pid", wait_holding_terminal);
	snprintf(text, sizeof(text), "%s", ptsname(held_terminal) + strlen("/dev/pts/"));
	fill("terminal", text);
	close(held_terminal);
}

static int terminal(int way)
{
	struct winsize size = { 20 + varied(31), 70, 0, 0 };
	struct termios settings;
	char path[32] = "/dev/pts/";
	int number = opened("terminal", O_RDONLY), fd, result;
	long length = read(number, path + 9, 8);

	close(number);
	path[9 + (length > 0 ? length : 0)] = 0;
	fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (way == 0) {
		result = E(write(fd, "hello", 5));
	} else if (way == 1) {
		tcgetattr(fd, &settings);
		settings.c_lflag ^= ECHO;
		result = E(tcsetattr(fd, TCSANOW, &settings));
	} else {
		result = E(ioctl(fd, TIOCSWINSZ, &size));
	}
	close(fd);
	return result;
}

/* A word in shared memory, and a survivor that sleeps on it. */
static int *shared_word(void)
{
	int fd = opened("/dev/shm/word", O_RDWR | O_CREAT), *word;

	if (ftruncate(fd, 4096))
		return NULL;
	word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	return word;
}

static void wait_futex(void)
{
	int *word = shared_word(), seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);

	close(60);
	for (;;) {
		syscall(SYS_futex, word, 0, seen, NULL, NULL, 0);
		seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
		survivor_cell++;
	}
}

static int futex_wake(void)
{
	int *word = shared_word(), result;

	__atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
	result = E(syscall(SYS_futex, word, 1, 1, NULL, NULL, 0));
	return settled(result);
}

/* Holds a pipe (62 and 63), a file (61) and an eventfd (64), and sleeps. */
static void wait_holding(void)
{
	int pair[2], file = opened("other", O_RDONLY), counter = eventfd(0, 0);

	if (pipe(pair) == 0) {
		dup2(pair[0], 62);
		dup2(pair[1], 63);
	}
	dup2(file, 61);
	dup2(counter, 64);
	wait_paused();
}

/* Holds memory without a name (65), a file that has lost its name (66) and one in /dev/shm that has (67), and sleeps. */
static void wait_keeping(void)
{
	int memory = memfd_create("kept", 0), file = made("lost", 1), shared = made("/dev/shm/lost", 1);

	put(memory, old_bytes);
	unlink("lost");
	unlink("/dev/shm/lost");
	dup2(memory, 65);
	dup2(file, 66);
	dup2(shared, 67);
	wait_paused();
}

static void wait_in_directory(void)
{
	if (chdir("full") == 0)
		wait_paused();
}

/* Opens what a survivor holds, and changes its content. */
static int into_kept(int number, int way)
{
	char path[64], *map;
	int fd, result;

	snprintf(path, sizeof(path), "/proc/%d/fd/%d", SURVIVOR, number);
	fd = opened(path, O_RDWR);
	if (fd < 0)
		return -errno;
	if (way == 0) {
		result = E(pwrite(fd, eight, 5, varied(15)));
	} else if (way == 1) {
		result = E(ftruncate(fd, 5000 + varied(1023)));
	} else if (way == 2) {
		map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (map == MAP_FAILED)
			return -errno;
		result = map[3]++ & 0;
		munmap(map, 4096);
	} else {
		result = URING(.opcode = IORING_OP_WRITE, .fd = fd, .addr = AT(eight), .len = 7);
	}
	close(fd);
	return result;
}

static int uring_into_proc(const char *name, const char *text)
{
	char path[64];
	int fd, result;

	snprintf(path, sizeof(path), "/proc/%d/%s", SURVIVOR, name);
	fd = opened(path, O_WRONLY);
	if (fd < 0)
		return -errno;
	result = URING(.opcode = IORING_OP_WRITE, .fd = fd, .addr = AT(text), .len = strlen(text));
	close(fd);
	return result;
}

static int taken_eventfd(void)
{
	int fd = syscall(SYS_pidfd_open, SURVIVOR, 0), got;
	unsigned long long one = 1;

	got = syscall(SYS_pidfd_getfd, fd, 64, 0);
	return got < 0 ? -errno : E(write(got, &one, sizeof(one)));
}

static void bind_datagram(void)
{
	struct sockaddr_un address;
	int fd = unix_socket(SOCK_DGRAM, "datagrams", &address);

	unlink("datagrams");
	if (bind(fd, (void *)&address, sizeof(address)) == 0)
		survivor("survivor.pid", wait_paused);
	close(fd);
}

static int listen_unix(const char *path, int stays)
{
	struct sockaddr_un address;
	int fd = unix_socket(SOCK_STREAM, path, &address), result;

	result = bind(fd, (void *)&address, sizeof(address)) ? -errno : E(listen(fd, 4));
	if (stays)
		survivor("survivor.pid", wait_paused);
	close(fd);
	if (!stays)
		unlink(path);
	return result;
}

static int listen_tcp(int port, int stays)
{
	listen_on(port);
	if (stays)
		survivor("survivor.pid", wait_paused);
	return E(close(listening));
}

static int connected(const char *path)
{
	struct sockaddr_un address;
	int fd = unix_socket(SOCK_STREAM, path, &address), result;

	result = E(connect(fd, (void *)&address, sizeof(address)));
	close(fd);
	return settled(result);
}

/* ------------------------------------------------------------------ process life */

static void *idle_thread(void *unused)
{
	(void)unused;
	for (;;)
		pause();
	return NULL;
}

static void wait_with_thread(void)
{
	pthread_t thread;

	pthread_create(&thread, NULL, idle_thread, NULL);
	usleep(1000);
	wait_paused();
}

static int started(void (*body)(void))
{
	survivor("survivor.pid", body);
	return 0;
}

static int cloned(unsigned long flags)
{
	pid_t pid = syscall(SYS_clone, flags | SIGCHLD, NULL, NULL, NULL, NULL);

	if (pid == 0)
		_exit(0);
	return pid < 0 ? -errno : E(waitpid(pid, NULL, 0)) < 0 ? -errno : 0;
}

static int executed(const char *program)
{
	pid_t pid = vfork();
	int status;

	if (pid == 0) {
		execl(program, "effects", "/", "nothing", (char *)NULL);
		_exit(127);
	}
	waitpid(pid, &status, 0);
	return WEXITSTATUS(status) ? -ENOENT : 0;
}

/* A survivor that becomes another program, and sleeps in that. */
static void wait_executed(void)
{
	execl("/effects", "effects", "/", "sleep", (char *)NULL);
}

#endif
