/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Generator of effects: runs the operations named on its command line, in order, inside a sandbox.
 *
 *     effects DIRECTORY [main:|child:|thread:]OPERATION ...
 *
 * It reports nothing: what an operation did is found by comparing the sandbox with what it was before.
 * Operations that the sandbox refuses just fail. `reset` makes the state that the others start from.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/sendfile.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

static const char old_bytes[] = "the bytes that were there before\n";
static const char new_bytes[] = "other bytes\n";

/* A number that is another one next time, so that an operation done twice changes something twice. */
static unsigned varied(unsigned mask)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_nsec ^ now.tv_nsec >> 10) & mask;
}

static int opened(const char *path, int flags)
{
	return open(path, flags | O_CLOEXEC, 0644);
}

static void put(int fd, const char *bytes)
{
	if (write(fd, bytes, strlen(bytes)) < 0)
		return;
}

static void fill(const char *path, const char *bytes)
{
	int fd = opened(path, O_WRONLY | O_CREAT | O_TRUNC);

	put(fd, bytes);
	close(fd);
}

static void age(const char *path)
{
	struct timespec times[2] = { { 1000000000, 0 }, { 1000000000, 0 } };

	utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}

/* ------------------------------------------------------------------ survivors */

static volatile long survivor_cell = 7;

/* A process that outlives the command. It waits in a call that nothing but its purpose ends. */
static void survivor(const char *pidfile, void (*body)(void))
{
	int gate[2];
	char byte;
	pid_t pid;

	if (pipe(gate) < 0)
		return;
	pid = fork();
	if (pid == 0) {
		int null = open("/dev/null", O_RDWR);

		setsid();
		dup2(null, 0);
		dup2(null, 1);
		dup2(null, 2);
		close(null);
		close(gate[0]);
		if (dup2(gate[1], 60) >= 0) /* closed by the body when it is ready to wait */
			close(gate[1]);
		body();
		_exit(0);
	}
	close(gate[1]);
	while (read(gate[0], &byte, 1) < 0 && errno == EINTR)
		;
	close(gate[0]);
	usleep(2000); /* from its last word to its wait */
	if (pidfile) {
		char text[32];

		snprintf(text, sizeof(text), "%d\n", pid);
		fill(pidfile, text);
	}
}

static pid_t survivor_pid(void)
{
	char text[32] = "";
	int fd = opened("survivor.pid", O_RDONLY);

	if (fd < 0)
		return -1;
	if (read(fd, text, sizeof(text) - 1) < 0)
		text[0] = 0;
	close(fd);
	return atoi(text) > 1 ? atoi(text) : -1;
}

static void wait_paused(void)
{
	close(60);
	for (;;)
		pause();
}

static void wait_fifo(void)
{
	/* Holds both ends open and sleeps: what others put in stays in. */
	int fd = opened("fifo", O_RDWR);

	(void)fd;
	wait_paused();
}

static void wait_fifo_reading(void)
{
	int fd = opened("fifo", O_RDWR);
	char buffer[64];

	close(60);
	while (read(fd, buffer, sizeof(buffer)) > 0)
		survivor_cell++;
}

static int listening;

static void wait_accepting(void)
{
	int fd;

	close(60);
	while ((fd = accept(listening, NULL, NULL)) >= 0) {
		survivor_cell++;
		close(fd);
	}
}

static void wait_listening_only(void)
{
	wait_paused();
}

static void wait_mapped(void)
{
	int fd = opened("mapped", O_RDWR), fifo = opened("fifo", O_RDWR);
	char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), byte;

	map[0] = 'a'; /* dirty and writable before the mark */
	close(60);
	while (read(fifo, &byte, 1) > 0)
		map[1]++;
	pause();
}

static void signalled(int number)
{
	(void)number;
	survivor_cell++;
}

static void wait_for_signals(void)
{
	signal(SIGUSR1, signalled);
	wait_paused();
}

static void wait_blocking_signals(void)
{
	sigset_t set;

	sigfillset(&set);
	sigprocmask(SIG_BLOCK, &set, NULL);
	wait_paused();
}

static void spin(void)
{
	close(60);
	for (;;)
		survivor_cell++;
}

/* A workload for the measurement of latency: changes of all kinds, for ever. */
static void noise(void)
{
	close(60);
	for (;;) {
		fill("noise", new_bytes);
		mkdir("noise.d", 0755);
		chmod("noise", 0600);
		unlink("noise");
		rmdir("noise.d");
		if (fork() == 0)
			_exit(0);
		wait(NULL);
		usleep(20000);
	}
}

static void listen_on(int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1;

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	bind(listening, (void *)&address, sizeof(address));
	listen(listening, 5);
}

static void connect_to(int port, int send_something)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (connect(fd, (void *)&address, sizeof(address)) == 0 && send_something)
		put(fd, new_bytes);
	close(fd);
}

/* ------------------------------------------------------------------ helpers of operations */

static void through_pipe(int to)
{
	int pipes[2];
	loff_t at = 0;

	if (pipe(pipes) < 0)
		return;
	put(pipes[1], new_bytes);
	close(pipes[1]);
	while (splice(pipes[0], NULL, to, &at, 4096, 0) > 0)
		;
	close(pipes[0]);
}

static void aio(int fd)
{
	static char block[512];
	aio_context_t context = 0;
	struct iocb control = { 0 }, *list[1] = { &control };
	struct io_event event;

	memset(block, 'x', sizeof(block));
	if (syscall(SYS_io_setup, 1, &context) < 0)
		return;
	control.aio_fildes = fd;
	control.aio_lio_opcode = IOCB_CMD_PWRITE;
	control.aio_buf = (unsigned long)block;
	control.aio_nbytes = sizeof(block);
	if (syscall(SYS_io_submit, context, 1, list) == 1)
		syscall(SYS_io_getevents, context, 1, 1, &event, NULL);
	syscall(SYS_io_destroy, context);
}

static void direct(const char *path)
{
	void *block = NULL;
	int fd = open(path, O_WRONLY | O_DIRECT | O_CLOEXEC);

	if (fd < 0 || posix_memalign(&block, 4096, 4096))
		return;
	memset(block, 'd', 4096);
	if (pwrite(fd, block, 4096, 0) < 0)
		perror("direct");
	close(fd);
	free(block);
}

static void store(const char *path, int flags, int touch)
{
	int fd = opened(path, O_RDWR);
	volatile char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, flags, fd, 0), seen;

	close(fd);
	if (map == MAP_FAILED)
		return;
	if (touch)
		map[2] = 'M';
	else
		seen = map[0], (void)seen;
	munmap((void *)map, 4096);
}

static void foreign_memory(pid_t pid, int by_file)
{
	long value = 4242;
	struct iovec here = { &value, sizeof(value) }, there = { (void *)&survivor_cell, sizeof(value) };
	char path[64];
	int fd;

	if (pid < 0)
		return;
	if (!by_file) {
		process_vm_writev(pid, &here, 1, &there, 1, 0);
		return;
	}
	snprintf(path, sizeof(path), "/proc/%d/mem", pid);
	fd = opened(path, O_RDWR);
	if (fd >= 0 && pwrite(fd, &value, sizeof(value), (off_t)&survivor_cell) < 0)
		return;
	close(fd);
}

static const unsigned char acl[] = { /* user::rw- user:1:r-- group::r-- mask::r-- other::r-- */
	2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 1, 0, 0, 0, 4, 0, 4, 0, 255, 255, 255, 255,
	16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255,
};

/* No shell in the image: remove by hand what operations can have made. */
static void remove_all(const char *directory)
{
	int dir = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	char buffer[4096];
	long got;
	int again;

	if (dir < 0)
		return;
	do {
		again = 0;
		lseek(dir, 0, SEEK_SET);
		while ((got = syscall(SYS_getdents64, dir, buffer, sizeof(buffer))) > 0) {
			for (long at = 0; at < got;) {
				unsigned short length;
				char *name = buffer + at + 19, path[512];

				memcpy(&length, buffer + at + 16, 2);
				at += length;
				if (!strcmp(name, ".") || !strcmp(name, ".."))
					continue;
				snprintf(path, sizeof(path), "%s/%s", directory, name);
				if (unlink(path) == 0)
					again = 1;
				else {
					remove_all(path);
					if (rmdir(path) == 0)
						again = 1;
				}
			}
		}
	} while (again);
	close(dir);
}

static void reset(void)
{
	static const char *const files[] = { "file", "other", "third", "mapped", "full/inside" };
	char page[4097];

	remove_all(".");
	mkdir("empty", 0755);
	mkdir("full", 0755);
	for (unsigned i = 0; i < sizeof(files) / sizeof(*files); i++)
		fill(files[i], old_bytes);
	memset(page, 'p', 4096);
	page[4096] = 0;
	fill("mapped", page);
	fill("big", page);
	fill("nothing", "");
	symlink("file", "link");
	link("other", "twin");
	mkfifo("fifo", 0644);
	setxattr("third", "user.before", "1", 1, 0);
	shm_unlink("/there");
	for (unsigned i = 0; i < sizeof(files) / sizeof(*files); i++)
		age(files[i]);
	age("big");
	age("nothing");
	age("link");
	age("fifo");
}

/* ------------------------------------------------------------------ the operations */

struct operation {
	const char *name;
	void (*run)(void);
};

static void *in_thread(void *operation);

#define OP(id, ...) static void op_##id(void) { __VA_ARGS__ }
#include "operations.h"
#undef OP

static const struct operation operations[] = {
#define OP(id, ...) { #id, op_##id },
#include "operations.h"
#undef OP
};

static void *in_thread(void *operation)
{
	((const struct operation *)operation)->run();
	return NULL;
}

static void run(const char *word)
{
	const char *colon = strchr(word, ':'), *name = colon ? colon + 1 : word;

	for (unsigned i = 0; i < sizeof(operations) / sizeof(*operations); i++) {
		const struct operation *o = &operations[i];

		if (strcmp(o->name, name))
			continue;
		if (colon && !strncmp(word, "child", 5)) {
			pid_t pid = fork();

			if (pid == 0) {
				o->run();
				_exit(0);
			}
			waitpid(pid, NULL, 0);
		} else if (colon && !strncmp(word, "thread", 6)) {
			pthread_t thread;

			if (pthread_create(&thread, NULL, in_thread, (void *)o) == 0)
				pthread_join(thread, NULL);
		} else {
			o->run();
		}
		return;
	}
	fprintf(stderr, "no operation %s\n", name);
	exit(2);
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "--list")) {
		for (unsigned i = 0; i < sizeof(operations) / sizeof(*operations); i++)
			puts(operations[i].name);
		return 0;
	}
	signal(SIGPIPE, SIG_IGN);
	umask(022);
	if (argc < 2 || chdir(argv[1]) < 0)
		return 1;
	for (int i = 2; i < argc; i++)
		run(argv[i]);
	return 0;
}
