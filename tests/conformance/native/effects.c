/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Generator of effects: runs the operations named on its command line, in order, inside a sandbox.
 *
 *     effects DIRECTORY [main:|child:|thread:]OPERATION ...      operations.h
 *     effects DIRECTORY [main:|child:|thread:]CALL.OUTCOME ...   matrix_*.h
 *     effects --list                                             all CALL.OUTCOME, with family and setup
 *
 * What an operation did is found by comparing the sandbox with what it was before. A call of the matrix prints its
 * result: 0, or the number of the error with which the sandbox refused it.
 * `reset` makes the state that the others start from.
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

/* Not blocking: an operation before may have put a FIFO there. */
static int opened(const char *path, int flags)
{
	return open(path, flags | O_CLOEXEC | O_NONBLOCK, 0644);
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
	int fd = open("fifo", O_RDWR | O_CLOEXEC);
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
	int fd = opened("mapped", O_RDWR), fifo = open("fifo", O_RDWR | O_CLOEXEC);
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

/* A file without checksums: direct writes to it make no page dirty. */
static void make_nocow(void)
{
	int fd = opened("nocow", O_RDWR | O_CREAT | O_TRUNC), flags = 0;
	char page[4096];

	memset(page, 'n', sizeof(page));
	if (ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0) {
		flags |= FS_NOCOW_FL;
		if (ioctl(fd, FS_IOC_SETFLAGS, &flags) < 0)
			perror("chattr +C");
	}
	if (write(fd, page, sizeof(page)) < 0 || fsync(fd))
		perror("nocow");
	close(fd);
}

static void aio_direct(int fd)
{
	static char block[4096] __attribute__((aligned(4096)));
	aio_context_t context = 0;
	struct iocb control = { .aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_buf = (unsigned long)block,
				.aio_nbytes = sizeof(block) };
	struct iocb *list[1] = { &control };
	struct io_event event;

	memset(block, 'a' + varied(15), sizeof(block));
	if (syscall(SYS_io_setup, 1, &context) < 0)
		return;
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

#include "state.h"
#include "uring.h"
#include "matrix_content.h"
#include "matrix_shared.h"
#include "matrix_names.h"
#include "matrix_metadata.h"
#include "matrix_survivors.h"
#include "matrix_processes.h"

/* ------------------------------------------------------------------ the operations */

struct operation {
	const char *name;
	void (*run)(void);
};

static void *no_thread(void *unused)
{
	return unused;
}

#define OP(id, ...) static void op_##id(void) { __VA_ARGS__ }
#include "operations.h"
#undef OP

static const struct operation operations[] = {
#define OP(id, ...) { #id, op_##id },
#include "operations.h"
#undef OP
};

/* ------------------------------------------------------------------ one word */

struct job {
	const struct operation *operation;
	const struct file_call *file;
	const struct process_call *process;
	enum outcome outcome;
};

static int do_job(const struct job *j)
{
	int result;

	if (j->operation) {
		j->operation->run();
		return 0;
	}
	result = j->file ? run_file_call(j->file, j->outcome) : j->process->run();
	return result < 0 ? -result : 0;
}

static void *in_thread(void *job)
{
	return (void *)(long)do_job(job);
}

static int find(const char *name, struct job *j)
{
	const char *dot = strchr(name, '.');
	size_t length = dot ? (size_t)(dot - name) : strlen(name);

	for (unsigned i = 0; !dot && i < sizeof(operations) / sizeof(*operations); i++)
		if (!strcmp(operations[i].name, name))
			j->operation = &operations[i];
	for (unsigned i = 0; dot && i < sizeof(file_calls) / sizeof(*file_calls); i++)
		if (!strncmp(file_calls[i].name, name, length) && !file_calls[i].name[length])
			j->file = &file_calls[i];
	for (unsigned i = 0; dot && i < sizeof(process_calls) / sizeof(*process_calls); i++)
		if (!strncmp(process_calls[i].name, name, length) && !process_calls[i].name[length] &&
		    !strcmp(process_calls[i].outcome, dot + 1)) {
			j->process = &process_calls[i];
			return 1;
		}
	if (j->file) {
		for (int o = 0; o < OUTCOMES; o++)
			if (!strcmp(outcome_names[o], dot + 1)) {
				j->outcome = o;
				return 1;
			}
		return 0;
	}
	return j->operation != NULL;
}

static void run(const char *word)
{
	const char *colon = strchr(word, ':'), *name = colon ? colon + 1 : word;
	struct job j = { 0 };
	int status = 0;

	if (!find(name, &j)) {
		fprintf(stderr, "no operation %s\n", name);
		exit(2);
	}
	if (colon && !strncmp(word, "child", 5)) {
		pid_t pid = fork();

		if (pid == 0)
			_exit(do_job(&j));
		waitpid(pid, &status, 0);
		status = WEXITSTATUS(status);
	} else if (colon && !strncmp(word, "thread", 6)) {
		void *result = NULL;
		pthread_t thread;

		if (pthread_create(&thread, NULL, in_thread, &j) == 0)
			pthread_join(thread, &result);
		status = (int)(long)result;
	} else {
		status = do_job(&j);
	}
	if (!j.operation)
		printf("%s %d\n", word, status);
}

static void list(void)
{
	for (unsigned i = 0; i < sizeof(file_calls) / sizeof(*file_calls); i++)
		for (int o = 0; o < OUTCOMES; o++)
			if (file_calls[i].outcomes & 1u << o)
				printf("%s %s %s\n", family_names[file_calls[i].family], file_calls[i].name, outcome_names[o]);
	for (unsigned i = 0; i < sizeof(process_calls) / sizeof(*process_calls); i++)
		printf("processes %s %s %s\n", process_calls[i].name, process_calls[i].outcome, process_calls[i].setup);
}

int main(int argc, char **argv)
{
	char gate;

	if (argc == 2 && !strcmp(argv[1], "--list")) {
		list();
		return 0;
	}
	signal(SIGPIPE, SIG_IGN);
	umask(022);
	if (argc < 2 || chdir(argv[1]) < 0)
		return 1;
	for (int i = 2; i < argc; i++) {
		if (strcmp(argv[i], "--wait"))
			run(argv[i]);
		else if (read(0, &gate, 1) < 0) /* until the host has moved us */
			return 1;
	}
	return 0;
}
