/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Puts programs into a sandbox as `nsenter` and `docker exec` do: a task of the host joins the control group and the
 * namespaces, its child executes the program. No system-call filter, all capabilities of the user namespace.
 *
 *     enter SOCKET     requests and answers, one packet each, on the descriptor SOCKET
 *
 * request: how NUL pid of the sandbox's init NUL cgroup NUL nested cgroup NUL argument NUL ...
 *     "setns"   into the cgroup       "nested"  into the nested cgroup
 *     "moved"   into the cgroup; moved to the nested one while it waits for its standard input to end
 * answer: wait status (decimal) NUL output
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int setns(int, int);

#define JOINED (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP)
#define WORDS 64

static void fail(const char *what)
{
	dprintf(2, "%s: %s\n", what, strerror(errno));
	_exit(126);
}

/* In the cgroup already. */
static void enter(char **word, int out, int moves) __attribute__((noreturn));
static void enter(char **word, int out, int moves)
{
	char path[512], number[16];
	int init, procs = -1, gate[2] = { -1, -1 }, status = 0;
	pid_t pid;

	dup2(out, 1);
	dup2(out, 2);
	init = syscall(SYS_pidfd_open, atoi(word[1]), 0);
	if (init < 0)
		fail("init");
	if (moves) {
		snprintf(path, sizeof(path), "%s/cgroup.procs", word[3]);
		procs = open(path, O_WRONLY | O_CLOEXEC);
		if (procs < 0 || pipe2(gate, O_CLOEXEC))
			fail(path);
	}
	if (setns(init, JOINED) < 0)
		fail("setns");
	pid = fork();
	if (pid == 0) {
		int input = moves ? gate[0] : open("/dev/null", O_RDONLY);

		setsid();
		if (setresgid(0, 0, 0) || setresuid(0, 0, 0) || chdir("/"))
			fail("root");
		dup2(input, 0);
		syscall(SYS_close_range, 3, ~0u, 0);
		/* As STILL in _torture_enter.py. */
		execve(word[4], word + 4, (char *[]){ "GLIBC_TUNABLES=glibc.pthread.rseq=0", NULL });
		fail(word[4]);
	}
	if (moves) {
		snprintf(number, sizeof(number), "%d", pid);
		if (write(procs, number, strlen(number)) < 0)
			dprintf(2, "move: %s\n", strerror(errno));
		close(gate[1]);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

int main(int argc, char **argv)
{
	static char packet[65536], answer[65536];
	char *word[WORDS];
	long length;
	int link;

	if (argc != 2)
		return 1;
	link = atoi(argv[1]);
	fcntl(link, F_SETFD, FD_CLOEXEC);
	while ((length = recv(link, packet, sizeof(packet) - 1, 0)) > 0) {
		struct clone_args args = { .exit_signal = SIGCHLD, .flags = CLONE_INTO_CGROUP };
		int count = 0, pipes[2], status = 0, group;
		long at, got;
		pid_t pid;

		packet[length] = 0;
		for (at = 0; at < length && count < WORDS - 1; at += strlen(packet + at) + 1)
			word[count++] = packet + at;
		word[count] = NULL;
		group = open(word[!strcmp(word[0], "nested") ? 3 : 2], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (count < 5 || group < 0 || pipe2(pipes, O_CLOEXEC))
			return 1;
		args.cgroup = group;
		pid = syscall(SYS_clone3, &args, sizeof(args));
		if (pid < 0)
			return 1;
		if (pid == 0)
			enter(word, pipes[1], !strcmp(word[0], "moved"));
		close(pipes[1]);
		close(group);
		/* Survivors let go of their output: this ends with the program. */
		at = 16;
		while ((got = read(pipes[0], answer + at, sizeof(answer) - at)) > 0)
			at += got;
		close(pipes[0]);
		while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
			;
		snprintf(answer, 16, "%015d", status);
		send(link, answer, at, 0);
	}
	return 0;
}
