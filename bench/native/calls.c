/* SPDX-License-Identifier: Apache-2.0 */
/* calls DIRECTORY: nanoseconds of processor time that single calls take, `name value` a line. For bench/hooks.py. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define REPEATS 21

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static int compare(const void *one, const void *other)
{
	double a = *(const double *)one, b = *(const double *)other;

	return (a > b) - (a < b);
}

/* The first quartile: interrupts and other load only ever add. */
#define MEASURE(name, times, ...) do {                                                          \
	double taken[REPEATS];                                                                  \
	for (int r = 0; r < REPEATS; r++) {                                                     \
		double began = now();                                                           \
		for (int i = 0; i < times; i++) { __VA_ARGS__; }                                \
		taken[r] = (now() - began) / times;                                             \
	}                                                                                       \
	qsort(taken, REPEATS, sizeof(double), compare);                                         \
	printf("%s %.1f\n", name, taken[REPEATS / 4]);                                          \
} while (0)

int main(int argc, char **argv)
{
	static char page[4096] = "x";
	struct stat status;
	struct epoll_event event = {.events = EPOLLIN};
	int file, zero, null, set, ready;

	if (argc != 2 || chdir(argv[1]))
		return 2;
	file = open("calls.data", O_RDWR | O_CREAT, 0644);
	zero = open("/dev/zero", O_RDONLY);
	null = open("/dev/null", O_WRONLY);
	set = epoll_create1(0);
	ready = eventfd(1, 0); /* what is waited for has always happened: the wait has a time-out, which it never needs */
	if (epoll_ctl(set, EPOLL_CTL_ADD, ready, &event))
		return 1;
	if (ftruncate(file, 1 << 20))
		return 1;
	MEASURE("getppid", 20000, syscall(SYS_getppid));
	MEASURE("read", 20000, if (read(zero, page, 1)) {});
	MEASURE("write_null", 20000, if (write(null, page, 1)) {});
	MEASURE("stat", 5000, stat("/etc/passwd", &status));
	MEASURE("open_close", 5000, close(open("/etc/passwd", O_RDONLY)));
	MEASURE("write_page", 2000, if (pwrite(file, page, 4096, i % 256 * 4096)) {});
	MEASURE("create_remove", 500, close(open("calls.new", O_CREAT | O_WRONLY, 0600)); unlink("calls.new"));
	MEASURE("fork_wait", 100, pid_t p = fork(); if (!p) _exit(0); while (waitpid(p, NULL, 0) < 0) ;);
	MEASURE("epoll_wait", 20000, epoll_wait(set, &event, 1, 1000));
	unlink("calls.data");
	return 0;
}
