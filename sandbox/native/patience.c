/* Time-outs of sockets, which calls read when they are entered.
 *
 * Owns: lending a socket the time that is left, and giving its own back once the thread that waits for it has entered its
 * call: by a process of its own that outlives CRIU for a moment. Does not own: which threads, and for how long (rearm.c).
 * Guarantee: a socket has its own time-out again at the latest a second after its thread runs.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rearm.h"

#define MAX_SOCKETS 256
#define FIRST_FD 3
#define MAX_FD 1024
#define TRIES 20000

static struct waiting lent[MAX_SOCKETS];
static size_t lent_count;

int64_t find_patience(struct waiting *one, bool receives) {
    struct timeval time = {0, 0};
    socklen_t size = sizeof time;
    int process = (int)syscall(SYS_pidfd_open, one->pid, 0);
    one->receives = receives;
    one->socket = process < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, process, (int)one->regs.rdi, 0);
    if (process >= 0) close(process);
    if (one->socket < 0) return FOREVER;
    int option = receives ? SO_RCVTIMEO : SO_SNDTIMEO;
    if (getsockopt(one->socket, SOL_SOCKET, option, &time, &size) == 0 && (time.tv_sec > 0 || time.tv_usec > 0))
        return time.tv_sec * SECOND + time.tv_usec * 1000;
    close(one->socket);
    one->socket = -1;
    return FOREVER;
}

static void set_patience(const struct waiting *one, int64_t time) {
    struct timeval value = {time / SECOND, time % SECOND / 1000};
    setsockopt(one->socket, SOL_SOCKET, one->receives ? SO_RCVTIMEO : SO_SNDTIMEO, &value, sizeof value);
}

bool lend_patience(struct waiting *one, int64_t left) {
    if (lent_count == MAX_SOCKETS) return false;
    set_patience(one, left < MILLISECOND ? MILLISECOND : left); /* zero would be for ever */
    lent[lent_count++] = *one;
    return true;
}

static bool read_proc(pid_t tid, const char *name, char *text, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", tid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t found = fd < 0 ? -1 : read(fd, text, size - 1);
    if (fd >= 0) close(fd);
    text[found < 0 ? 0 : found] = 0;
    return found > 0;
}

/* Not yet let go, or let go and not yet in a call. */
static bool has_yet_to_enter(pid_t tid) {
    char text[4096];
    if (!read_proc(tid, "status", text, sizeof text)) return false;
    char *line = strstr(text, "\nTracerPid:");
    if (line && atoi(line + strlen("\nTracerPid:")) != 0) return true;
    return read_proc(tid, "syscall", text, sizeof text) && strncmp(text, "running", strlen("running")) == 0;
}

static void give_back(void) {
    for (int fd = FIRST_FD; fd < MAX_FD; fd++) {
        bool ours = false;
        for (size_t i = 0; i < lent_count; i++) ours |= lent[i].socket == fd;
        if (!ours) close(fd);
    }
    for (size_t i = 0; i < lent_count; i++) {
        for (int tries = 0; tries < TRIES && has_yet_to_enter(lent[i].tid); tries++) usleep(QUICK / 1000);
        set_patience(&lent[i], lent[i].whole);
    }
}

void restore_sockets(void) {
    pid_t child = lent_count ? fork() : -1;
    if (child == 0) { /* a grandchild, of which CRIU never learns */
        if (fork() == 0) give_back();
        _exit(0);
    }
    if (child > 0) waitpid(child, NULL, 0);
    for (size_t i = 0; i < lent_count; i++) close(lent[i].socket);
    lent_count = 0;
}
