/* SPDX-License-Identifier: Apache-2.0 */
/* probe DIRECTORY TIMES OPERATION: does one thing some times. For the inspector's tests; see ebpf_support.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char *at;
static int N;
static long cell = 7;
static char name[256];

static const char *numbered(int i) { snprintf(name, sizeof(name), "%s/n%d", at, i); return name; }
static const char *file(void) { snprintf(name, sizeof(name), "%s/file", at); return name; }
static int opened(int flags) { return open(file(), flags, 0644); }

static pid_t sleeper(void)
{
	int gate[2]; char byte; pid_t pid;

	if (pipe(gate)) return -1;
	pid = fork();
	if (!pid) { close(gate[0]); close(gate[1]); for (;;) pause(); }
	close(gate[1]);
	if (read(gate[0], &byte, 1)) {}
	close(gate[0]);
	return pid;
}

static void *idle(void *unused) { for (;;) pause(); return unused; }

/* Lives on as an agent would: threads, a child now and then, always at work. */
static void agent(void)
{
	pthread_t thread;
	int null = open("/dev/null", O_RDWR);

	for (int fd = 0; fd < 3; fd++) dup2(null, fd);
	setsid();
	prctl(PR_SET_NAME, "agent of mine");
	for (int i = 0; i < 3; i++) pthread_create(&thread, NULL, idle, NULL);
	close(70);
	for (;;) {
		pthread_t brief; pid_t pid; char b[8];
		int f = open("/proc/self/stat", O_RDONLY);

		if (read(f, b, 8)) {}
		close(f);
		pid = fork();
		if (!pid) _exit(0);
		setpgid(pid, pid);
		waitpid(pid, NULL, 0);
		pthread_create(&brief, NULL, (void *(*)(void *))getppid, NULL);
		pthread_join(brief, NULL);
		usleep(2000);
	}
}

static void leave(void (*body)(void))
{
	int gate[2]; char byte;

	if (pipe(gate)) return;
	if (!fork()) {
		if (fork()) _exit(0);
		close(gate[0]);
		dup2(gate[1], 70);
		close(gate[1]);
		fcntl(70, F_SETFD, FD_CLOEXEC);
		body();
		_exit(0);
	}
	close(gate[1]);
	wait(NULL);
	if (read(gate[0], &byte, 1)) {}
}

static void quiet(void)
{
	int null = open("/dev/null", O_RDWR);

	for (int fd = 0; fd < 3; fd++) dup2(null, fd);
	char b[16];
	int f;

	setsid();
	snprintf(name, sizeof(name), "%s/quiet.pid", at);
	f = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
	if (write(f, b, snprintf(b, sizeof(b), "%d", getpid()))) {}
	close(f);
	close(70);
	for (;;) pause();
}

/* Sends a byte again and again to a child that never reads. */
static void talk(int kind)
{
	int pair[2];

	snprintf(name, sizeof(name), "%s/talk", at);
	if (kind == 3) {
		if (mkfifo(name, 0600) || (pair[0] = open(name, O_RDWR)) < 0 || (pair[1] = open(name, O_WRONLY)) < 0) return;
	} else if (kind == 0 ? pipe(pair) : socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) {
		return;
	}
	for (int fd = 0; fd < 3; fd++) close(fd);
	prctl(PR_SET_NAME, "agent of mine");
	setsid();
	if (!fork()) { prctl(PR_SET_NAME, "deaf"); close(pair[1]); close(70); for (;;) pause(); }
	close(pair[0]);
	fcntl(pair[1], F_SETFL, O_NONBLOCK);
	usleep(2000);
	close(70);
	for (;;) {
		if (kind == 2 ? send(pair[1], "x", 1, 0) : write(pair[1], "x", 1)) {}
		usleep(20000);
	}
}

static void talk_by_pipe(void) { talk(0); }
static void talk_by_write(void) { talk(1); }
static void talk_by_send(void) { talk(2); }
static void talk_by_fifo(void) { talk(3); }

static void *after_leader(void *unused)
{
	char b[64], state = 0, *end;

	while (state != 'Z') {
		int f = open("/proc/self/stat", O_RDONLY), length = read(f, b, sizeof(b) - 1);

		close(f);
		b[length > 0 ? length : 0] = 0;
		end = strrchr(b, ')');
		state = end ? end[2] : 'Z';
	}
	close(70);
	for (;;) pause();
	return unused;
}

/* Its first thread ends, another one lives on and takes no signals. */
static void leaderless(void)
{
	pthread_t thread;
	sigset_t all;

	setsid();
	for (int fd = 0; fd < 3; fd++) close(fd);
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	pthread_create(&thread, NULL, after_leader, NULL);
	pthread_exit(NULL);
}

/* Starts a process when it is told to by SIGUSR1. */
static void parent(void)
{
	sigset_t set; int got;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	prctl(PR_SET_NAME, "agent of mine");
	setsid();
	close(0); close(1); close(2); close(70);
	for (;;) {
		sigwait(&set, &got);
		if (!fork()) { prctl(PR_SET_NAME, "started"); for (;;) pause(); }
	}
}

/* The process that `quiet` left. */
static pid_t survivor(void)
{
	char b[16] = "";
	int f;

	snprintf(name, sizeof(name), "%s/quiet.pid", at);
	f = open(name, O_RDONLY);
	if (read(f, b, sizeof(b) - 1)) {}
	close(f);
	return atoi(b) > 0 ? atoi(b) : -1;
}

static int tcp(int port, int server)
{
	struct sockaddr_in a = { AF_INET, htons(port), { htonl(INADDR_LOOPBACK) } };
	int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (server ? bind(s, (void *)&a, sizeof(a)) || listen(s, 64) : connect(s, (void *)&a, sizeof(a))) return -1;
	return s;
}

#define OP(word, ...) if (!strcmp(argv[3], word)) { for (int i = 0; i < N; i++) { __VA_ARGS__; } return 0; }

int main(int argc, char **argv)
{
	int v = 0;

	if (argc < 4) return 2;
	at = argv[1];
	N = atoi(argv[2]);
	OP("nothing", )
	OP("truncate_read_only", close(opened(O_RDONLY | O_TRUNC)))
	OP("same_bytes", int f = opened(O_WRONLY | O_CREAT | O_TRUNC); if (write(f, "same\n", 5)) {} close(f))
	OP("other_bytes", int f = opened(O_WRONLY | O_CREAT | O_TRUNC); if (write(f, "else\n", 5)) {} close(f))
	OP("same_bytes_in_place", int f = opened(O_WRONLY); if (write(f, "same\n", 5)) {} close(f))
	OP("replace_same", int f = open(numbered(0), O_WRONLY | O_CREAT, 0644); char to[256];
		if (write(f, "same\n", 5)) {} close(f); snprintf(to, 256, "%s/file", at); rename(name, to))
	OP("touch", utimensat(AT_FDCWD, file(), NULL, 0))
	OP("mode_there_and_back", chmod(file(), 0600); chmod(file(), 0644))
	OP("directory", mkdir(numbered(i), 0755))
	OP("node", mknod(numbered(i), S_IFIFO | 0600, 0))
	OP("symlink", if (symlink("x", numbered(i))) {})
	OP("socket_name", struct sockaddr_un a = { AF_UNIX }; strcpy(a.sun_path, numbered(i)); int s = socket(AF_UNIX, SOCK_STREAM, 0);
		bind(s, (void *)&a, sizeof(a)); close(s))
	OP("xattr", setxattr(file(), "user.n", &i, 4, 0))
	OP("owner", if (chown(file(), i + 1, 1)) {})
	OP("truncate", if (truncate(file(), i)) {})
	OP("times", utimensat(AT_FDCWD, file(), NULL, 0))
	OP("link", char to[256]; snprintf(to, 256, "%s/l%d", at, i); if (link(file(), to)) {})
	OP("data", int f = open(numbered(i), O_WRONLY); if (write(f, "x", 1)) {} close(f))
	OP("foreign", if (!v) v = sleeper(); long w = 1; struct iovec h = { &w, 8 }, t = { &w, 8 };
		process_vm_writev(v, &h, 1, &t, 1, 0); if (i == N - 1) kill(v, SIGKILL))
	OP("foreign_old", struct iovec h = { (void *)&cell, 8 }, t = h; process_vm_writev(survivor(), &h, 1, &t, 1, 0))
	OP("limits_old", struct rlimit l = { 64, 64 }; prlimit(survivor(), RLIMIT_NOFILE, &l, NULL))
	OP("nice_all", setpriority(PRIO_USER, 0, 3))
	OP("limits", if (!v) v = sleeper(); struct rlimit l = { 64, 64 }; prlimit(v, RLIMIT_NOFILE, &l, NULL); if (i == N - 1) kill(v, SIGKILL))
	OP("channels", if (!v) v = tcp(9300, 1); int c = tcp(9300, 0); close(c); close(accept(v, NULL, NULL)))
	OP("channels_both", if (!v) v = tcp(9300, 1); int c = tcp(9300, 0); close(c); close(accept(v, NULL, NULL)); close(tcp(9100, 0)))
	OP("channels_old", close(tcp(9100, 0)))
	OP("unix_pair", struct sockaddr_un a = { AF_UNIX }; strcpy(a.sun_path + 1, "pair"); int s = socket(AF_UNIX, SOCK_STREAM, 0), c;
		if (bind(s, (void *)&a, sizeof(a)) || listen(s, 5)) return 1;
		if (!fork()) { c = socket(AF_UNIX, SOCK_STREAM, 0); _exit(connect(c, (void *)&a, sizeof(a)) != 0); }
		close(accept(s, NULL, NULL)); wait(&v); close(s); if (v) return 1)
	OP("share_port", int one = 1; struct sockaddr_in a = { AF_INET, htons(9102), { htonl(INADDR_LOOPBACK) } };
		v = socket(AF_INET, SOCK_STREAM, 0); setsockopt(v, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one));
		if (bind(v, (void *)&a, sizeof(a)) || listen(v, 5)) return 1; close(tcp(9102, 0)))
	OP("mqueue_left", char q[32]; snprintf(q, 32, "/q%d", i); struct mq_attr a = { .mq_maxmsg = 1, .mq_msgsize = 8 };
		mqd_t m = mq_open(q, O_CREAT | O_RDWR, 0600, &a); mq_close(m))
	OP("shm_left", shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600))
	OP("sem_left", semget(IPC_PRIVATE, 1, IPC_CREAT | 0600))
	OP("ipc_gone", int s = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600), q = msgget(IPC_PRIVATE, 0600),
		e = semget(IPC_PRIVATE, 1, IPC_CREAT | 0600); char *m = shmat(s, NULL, 0); m[0] = 1; shmdt(m);
		shmctl(s, IPC_RMID, NULL); msgctl(q, IPC_RMID, NULL); semctl(e, 0, IPC_RMID);
		mqd_t p = mq_open("/gone", O_CREAT | O_RDWR, 0600, NULL); mq_close(p); mq_unlink("/gone"))
	OP("ipc_held", int s = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600); shmat(s, NULL, 0); shmctl(s, IPC_RMID, NULL))
	OP("ipc_swap", shmctl(shmget(7, 0, 0), IPC_RMID, NULL); shmget(8, 4096, IPC_CREAT | 0600))
	OP("ipc_seven", shmget(7, 4096, IPC_CREAT | 0600))
	OP("agent", leave(agent))
	OP("parent", leave(parent))
	OP("talk_by_pipe", leave(talk_by_pipe))
	OP("talk_by_write", leave(talk_by_write))
	OP("talk_by_send", leave(talk_by_send))
	OP("talk_by_fifo", leave(talk_by_fifo))
	OP("leaderless", leave(leaderless))
	OP("quiet", leave(quiet))
	OP("uring", char p[256]; memset(p, 0, sizeof(p)); if (syscall(425, 4, p) < 0) return errno)
	return 2;
}
