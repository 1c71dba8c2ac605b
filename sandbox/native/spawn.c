/* Every process that the shim starts: pid 1, commands that pid 1 adopts, host programs.
 *
 * A child reports a failure over a close-on-exec socket; when that socket reaches its end without a
 * report, the program runs. Between clone and exec a child inside the sandbox is not dumpable, so
 * that nothing in there can read or trace it.
 *
 *   shim ── helper (joins the namespaces) ── middle (in the pid namespace, ends) ── command
 *                                                                                   adopted by pid 1
 *
 * pid 1 must be the parent, or CRIU would not see the command. The middle process is needed because a
 * child is handed to the reaper of its parent's pid namespace, and the helper is still in the host's.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <linux/sched/types.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Milliseconds: between looks at a child that gives no answer; that one may be seen stopped; for an answer. */
#define POLL_INTERVAL 20
#define MAX_HELD 3000
#define MAX_ANSWER 30000

int setns(int, int);
int chroot(const char *);
int unshare(int);
int write_maps(pid_t pid, uid_t base);

/* Time as well: a restored pid 1 has a namespace of its own, so that its clocks go on; a command outside of it would
 * see other clocks, and could not be restored together with the rest. */
#define JOINED \
    (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP | CLONE_NEWTIME)

pid_t clone_child(uint64_t flags, int cgroup, int *pidfd) {
    struct clone_args args = {.flags = flags, .exit_signal = flags & CLONE_PARENT ? 0 : SIGCHLD};
    if (pidfd) {
        args.flags |= CLONE_PIDFD;
        args.pidfd = (uint64_t)(uintptr_t)pidfd;
    }
    if (cgroup >= 0) {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = (uint64_t)cgroup;
    }
    return (pid_t)syscall(SYS_clone3, &args, sizeof args);
}

int status_pair(int pair[2]) { return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair); }

static void send_report(int status, const char *stage, int error, int fd) {
    struct failure f = {.error = error};
    snprintf(f.stage, sizeof f.stage, "%s", stage);
    struct iovec part = {&f, sizeof f};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    sendmsg(status, &message, MSG_NOSIGNAL);
}

void give_up(int status, const char *stage) {
    send_report(status, stage, errno, -1);
    _exit(127);
}

pid_t pid_of(int pidfd) {
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
    FILE *f = fopen(path, "re");
    pid_t pid = -1;
    if (!f) return -1;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "Pid:\t%d", &pid) == 1) break;
    fclose(f);
    return pid;
}

/* Whether somebody in the sandbox has stopped this process. */
static bool is_stopped(pid_t pid) {
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = pid > 0 ? fopen(path, "re") : NULL;
    if (!f) return false;
    size_t size = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[size] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[1] == ' ' && name_end[2] == 'T';
}

/* Lets those on their way to a command go on. Whether any was stopped. */
static bool nudge(pid_t helper, const struct started *out) {
    bool found = false;
    pid_t children[] = {helper, out->middle};
    for (size_t i = 0; i < 2; i++)
        if (is_stopped(children[i])) found = kill(children[i], SIGCONT) == 0;
    if (out->pidfd >= 0 && is_stopped(pid_of(out->pidfd)))
        found = syscall(SYS_pidfd_send_signal, out->pidfd, SIGCONT, NULL, 0) == 0;
    return found;
}

/* Reads reports up to the end of the status socket. One with a stage is a failure; one without hands
 * over the pidfd of the command, with its own number where it says so itself, or the pid of the middle process. Who stops them on their way only slows them down,
 * up to a bound: nobody else of this sandbox can be served meanwhile. */
void await_status(int status, pid_t helper, struct started *out) {
    struct pollfd wait = {.fd = status, .events = POLLIN};
    int waited = 0, held = 0; /* milliseconds; the second: in which one of them was seen stopped */
    for (;;) {
        int ready = poll(&wait, 1, POLL_INTERVAL);
        if (ready < 0 && errno == EINTR) continue;
        if (ready == 0) {
            waited += POLL_INTERVAL;
            if (nudge(helper, out)) held += POLL_INTERVAL;
            if (held < MAX_HELD && waited < MAX_ANSWER) continue;
            const char *stage = held < MAX_HELD ? "no answer" : "stopped";
            out->failure = (struct failure){.error = ETIMEDOUT};
            snprintf(out->failure.stage, sizeof out->failure.stage, "%s", stage);
            return;
        }
        struct failure f;
        struct iovec part = {&f, sizeof f};
        char control[CMSG_SPACE(sizeof(int))];
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t size = recvmsg(status, &message, MSG_CMSG_CLOEXEC);
        if (size < 0 && errno == EINTR) continue;
        if (size != sizeof f) return;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        if (c && c->cmsg_type == SCM_RIGHTS) {
            if (out->pidfd >= 0) close(out->pidfd);
            memcpy(&out->pidfd, CMSG_DATA(c), sizeof(int));
            if (!f.stage[0] && f.error) out->inner = f.error;
        } else if (!f.stage[0] && f.error) {
            out->middle = f.error;
        }
        if (f.stage[0] && !out->failure.stage[0]) out->failure = f;
    }
}

/* A short time slice lets the shim and its helpers, which run for microseconds, run at once on a busy
 * host instead of after somebody else's slice (Linux 6.12 and newer; harmless before). */
void set_slice(uint64_t nanoseconds, int nice) {
    struct sched_attr attr = {
        .size = sizeof attr, .sched_policy = SCHED_NORMAL, .sched_nice = nice, .sched_runtime = nanoseconds};
    if (syscall(SYS_sched_setattr, 0, &attr, 0) == 0) return;
    attr.sched_nice = 0;  /* without CAP_SYS_NICE */
    syscall(SYS_sched_setattr, 0, &attr, 0);
}

/* The child must not inherit a place in the OOM killer's queue that the shim may have been given. Without such a
 * place nothing is written: the inspector takes any write to /proc for a change of another process. */
static void ordinary_oom_score(const struct shim *s) {
    if (!s->spared) return;
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, "0", 1) < 0) { /* raising towards 0 is always allowed; nothing else to do */ }
    close(fd);
}

/* The shim has SIGCHLD blocked and reads it as a descriptor; a program that inherits that waits in vain for it. */
static void unblock_signals(void) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* ------------------------------------------------------------------ pid 1 */

static void become_init(struct shim *s, int status) __attribute__((noreturn));
static void become_init(struct shim *s, int status) {
    char go;
    const char *stage;
    if (recv(status, &go, 1, 0) != 1) _exit(127);
    set_slice(0, 0);
    ordinary_oom_score(s);
    setsid();
    if ((stage = set_limits(s->open_files))) give_up(status, stage);
    int binds[BINDS_MAX];
    if ((stage = open_binds(s, binds))) give_up(status, stage);
    if (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0) give_up(status, "become root");
    if ((stage = enter_root(s, binds))) give_up(status, stage);
    if (sethostname(s->hostname, strlen(s->hostname)) < 0) give_up(status, "hostname");
    if (setdomainname(s->machine, strlen(s->machine)) < 0) give_up(status, "machine id");
    if (unshare(CLONE_NEWCGROUP) < 0) give_up(status, "cgroup namespace");
    umask(022);
    unblock_signals();
    if ((stage = confine(s->no_new_privs, 0, 0, NULL, 0))) give_up(status, stage);
    if (dup3(status, 3, O_CLOEXEC) < 0 && errno != EINVAL) _exit(127);
    syscall(SYS_close_range, 0, 2, 0);
    syscall(SYS_close_range, 4, ~0U, 0);
    char *argv[] = {"init", NULL}, *envp[] = {NULL};
    execve("/.pagurus/init", argv, envp);
    give_up(3, "exec init");
}

void start_init(struct shim *s, struct started *out) {
    int pair[2], pidfd = -1;
    out->pidfd = -1;
    if (status_pair(pair) < 0 || chdir(s->root) < 0) {
        out->failure = (struct failure){.stage = "prepare", .error = errno};
        return;
    }
    pid_t pid = clone_child(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS, s->cgroup, &pidfd);
    if (pid == 0) {
        close(pair[0]);
        become_init(s, pair[1]);
    }
    int saved = errno;
    close(pair[1]);
    if (chdir("/") < 0) saved = errno;
    if (pid < 0) {
        out->failure = (struct failure){.stage = "clone", .error = saved};
    } else {
        if (write_maps(pid, s->uid_base) < 0) out->failure = (struct failure){.stage = "id maps", .error = errno};
        else if (send(pair[0], "g", 1, MSG_NOSIGNAL) == 1) await_status(pair[0], pid, out);
        out->pid = pid;
        out->pidfd = pidfd;
        if (out->failure.stage[0]) {
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            close(pidfd);
        }
    }
    close(pair[0]);
}

/* ------------------------------------------------------------------ mounts of a living sandbox */

/* As host root in its mount namespace, where the sandbox may make no mounts. Of these, either the joins or PARTED. */
void change_mounts(struct shim *s, const struct join *joins, int count, const char *parted, struct started *out) {
    int pair[2];
    out->pidfd = -1;
    if (status_pair(pair) < 0) {
        out->failure = (struct failure){.stage = "prepare", .error = errno};
        return;
    }
    pid_t pid = clone_child(0, -1, NULL);
    int saved = errno;
    if (pid == 0) {
        const char *stage;
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
        if (setns(s->init_pidfd, CLONE_NEWNS) < 0 || chdir("/") < 0) give_up(pair[1], "join namespaces");
        if ((stage = parted ? part_here(parted) : join_here(joins, count))) give_up(pair[1], stage);
        _exit(0);
    }
    close(pair[1]);
    if (pid < 0) {
        out->failure = (struct failure){.stage = "clone", .error = saved};
    } else {
        await_status(pair[0], pid, out);
        if (out->failure.stage[0]) kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    close(pair[0]);
}

/* ------------------------------------------------------------------ commands inside */

static void search_path(char **argv, char **envp) {
    const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    if (strchr(argv[0], '/')) {
        execve(argv[0], argv, envp);
        return;
    }
    for (char **e = envp; *e; e++)
        if (strncmp(*e, "PATH=", 5) == 0) path = *e + 5;
    int worst = ENOENT;
    char candidate[PATH_MAX];
    while (*path) {
        size_t length = strcspn(path, ":");
        if (snprintf(candidate, sizeof candidate, "%.*s/%s", (int)length, path, argv[0]) < (int)sizeof candidate) {
            execve(candidate, argv, envp);
            if (errno != ENOENT && errno != ENOTDIR) worst = errno;
        }
        path += length;
        if (*path == ':') path++;
    }
    errno = worst;
}

/* A path of the sandbox's choosing may lead through /proc/self/fd. So nothing of the host is open by now, and what
 * lies outside of its root for all that is refused: the kernel names it "(unreachable)". */
static int enter_directory(const char *path) {
    char here[PATH_MAX];
    if (chdir(path) < 0) return -1;
    if (syscall(SYS_getcwd, here, sizeof here) > 0 && here[0] == '/') return 0;
    errno = ENOENT;
    return -1;
}

/* A program of a service joins its groups. An attendant gets them as descriptors from 4 on: its program joins them. */
static int take_groups(const struct command *c) {
    for (int i = 0; i < c->in_groups; i++)
        if (c->root ? write(c->group[i], "0", 1) != 1 : dup2(c->group[i], 4 + i) < 0) return -1;
    return 0;
}

static void become_command(const struct command *c, bool no_new_privs, int status) __attribute__((noreturn));
static void become_command(const struct command *c, bool no_new_privs, int status) {
    const char *stage;
    /* By itself and before it runs: whoever else could tell may be killed by the command, with kill(-1). */
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (self < 0) give_up(status, "pidfd");
    send_report(status, "", getpid(), self);
    setsid();
    set_slice(0, 0);
    if (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0) give_up(status, "become root");
    for (int i = 0; i < 3; i++) {
        /* Not blocking: the sandbox may have put a FIFO there. */
        int fd = c->fd[i] >= 0 ? c->fd[i] : open("/dev/null", (i ? O_WRONLY : O_RDONLY) | O_NONBLOCK);
        if (fd < 0) give_up(status, "open /dev/null");
        if (c->fd[i] < 0) fcntl(fd, F_SETFL, 0);
        if (dup2(fd, i) < 0) give_up(status, "descriptors");
    }
    umask(022);
    unblock_signals();
    if (status != 3 && dup3(status, 3, O_CLOEXEC) < 0) _exit(127);
    if (take_groups(c) < 0) give_up(3, "groups");
    if (syscall(SYS_close_range, c->root ? 4 : 4 + c->in_groups, ~0U, 0) < 0) give_up(3, "descriptors");
    if (c->root && (enter_directory(c->root) < 0 || chroot(".") < 0)) give_up(3, "service");
    /* With the credentials of the user, as a login would; root of the sandbox may enter anywhere. */
    if (c->uid == 0 && enter_directory(c->cwd) < 0) give_up(3, "cwd");
    if ((stage = confine(no_new_privs, c->uid, c->gid, c->groups, c->group_count))) give_up(3, stage);
    if (c->uid != 0 && enter_directory(c->cwd) < 0) give_up(3, "cwd");
    search_path(c->argv, c->envp);
    give_up(3, "exec");
}

static void help_command(struct shim *s, const struct command *c, int status) __attribute__((noreturn));
static void help_command(struct shim *s, const struct command *c, int status) {
    const char *stage;
    ordinary_oom_score(s);
    if ((stage = set_limits(s->open_files))) give_up(status, stage);
    if (setns(s->init_pidfd, JOINED) < 0) give_up(status, "join namespaces");
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    pid_t child = clone_child(CLONE_PARENT, -1, NULL);
    if (child < 0) give_up(status, "fork");
    if (child > 0) {
        send_report(status, "", child, -1);
        _exit(0);
    }
    int pidfd = -1;
    child = clone_child(0, -1, &pidfd);
    if (child < 0) give_up(status, "fork");
    if (child == 0) become_command(c, s->no_new_privs, status);
    send_report(status, "", 0, pidfd);  /* it says so itself, unless somebody stops it before */
    _exit(0);
}

void start_command(struct shim *s, const struct command *c, struct started *out) {
    int pair[2];
    out->pidfd = -1;
    if (status_pair(pair) < 0) {
        out->failure = (struct failure){.stage = "prepare", .error = errno};
        return;
    }
    pid_t helper = clone_child(0, s->leaf >= 0 ? s->leaf : s->cgroup, NULL);
    if (helper == 0) {
        close(pair[0]);
        help_command(s, c, pair[1]);
    }
    int saved = errno;
    close(pair[1]);
    if (helper < 0) {
        out->failure = (struct failure){.stage = "fork", .error = saved};
    } else {
        await_status(pair[0], helper, out);
        if (out->failure.stage[0]) {  /* perhaps no answer at all: then nobody may be waited for */
            kill(helper, SIGKILL);
            if (out->middle > 0) kill(out->middle, SIGKILL);
            if (out->pidfd >= 0) syscall(SYS_pidfd_send_signal, out->pidfd, SIGKILL, NULL, 0);
        }
        waitpid(helper, NULL, 0);
        if (out->middle > 0) waitpid(out->middle, NULL, 0);
        if (!out->failure.stage[0] && out->pidfd < 0)  /* killed on the way, by the OOM killer or by a kill */
            out->failure = (struct failure){.stage = "killed", .error = ECANCELED};
        if (out->pidfd >= 0) out->pid = pid_of(out->pidfd);
    }
    close(pair[0]);
}

/* ------------------------------------------------------------------ host programs */

/* Leaves the sandbox's v1 cgroups, whose limits must not count a dump. Waits for an RCU grace
 * period, so callers keep such a program running rather than start one for every use. */
static int leave_cgroups(struct shim *s) {
    for (int i = 0; i < s->v1_count; i++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/cgroup.controllers", s->v1[i]);
        if (access(path, F_OK) == 0) continue;  /* v2: the shims' own group, which limits nothing */
        snprintf(path, sizeof path, "%s/../cgroup.procs", s->v1[i]);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0) return -1;
        ssize_t done = write(fd, "0", 1);
        close(fd);
        if (done < 0) return -1;
    }
    return 0;
}

static void become_host(struct shim *s, const struct host_command *c, int status) __attribute__((noreturn));
static void become_host(struct shim *s, const struct host_command *c, int status) {
    set_slice(0, URGENT);  /* the sandbox is frozen while a dump runs */
    ordinary_oom_score(s);
    setsid();
    if (!c->in_cgroup && leave_cgroups(s) < 0) give_up(status, "leave cgroups");
    if (c->join && setns(s->init_pidfd, c->join) < 0) give_up(status, "join namespaces");
    /* What is restored without host name and System V IPC of its own (a dump that was taken from inside
     * those namespaces has neither) inherits them from CRIU: they must be fresh ones, not the host's. */
    if (c->fresh && unshare(CLONE_NEWUTS | CLONE_NEWIPC) < 0) give_up(status, "fresh namespaces");
    if (c->fresh && sethostname(s->hostname, strlen(s->hostname)) < 0) give_up(status, "hostname");
    if (c->fresh && setdomainname(s->machine, strlen(s->machine)) < 0) give_up(status, "machine id");
    int moved[PASSED_MAX];
    int high = fcntl(status, F_DUPFD_CLOEXEC, 512);
    if (high < 0) give_up(status, "descriptors");
    for (int i = 0; i < c->count; i++)  /* out of the way first: a target may be another one's source */
        if ((moved[i] = fcntl(c->fd[i], F_DUPFD_CLOEXEC, 512)) < 0) give_up(high, "descriptors");
    for (int i = 0; i < c->count; i++)
        if (dup2(moved[i], c->target[i]) < 0) give_up(high, "descriptors");
    for (int fd = 3; fd < 512; fd++) {
        bool wanted = false;
        for (int i = 0; i < c->count; i++) wanted |= c->target[i] == fd;
        if (!wanted) close(fd);
    }
    for (int i = 0; i < c->count; i++) close(moved[i]);
    syscall(SYS_close_range, 512, ~0U, CLOSE_RANGE_CLOEXEC);
    signal(SIGPIPE, SIG_DFL);
    execve(c->argv[0], c->argv, c->envp);
    give_up(high, "exec");
}

void start_host(struct shim *s, const struct host_command *c, struct started *out) {
    int pair[2], pidfd = -1;
    out->pidfd = -1;
    if (status_pair(pair) < 0) {
        out->failure = (struct failure){.stage = "prepare", .error = errno};
        return;
    }
    pid_t pid = clone_child(0, c->in_cgroup ? s->cgroup : -1, &pidfd);
    if (pid == 0) {
        close(pair[0]);
        become_host(s, c, pair[1]);
    }
    int saved = errno;
    close(pair[1]);
    if (pid < 0) {
        out->failure = (struct failure){.stage = "fork", .error = saved};
    } else {
        await_status(pair[0], pid, out);
        out->pid = pid;
        out->pidfd = pidfd;
        if (out->failure.stage[0]) {
            waitpid(pid, NULL, 0);
            close(pidfd);
        }
    }
    close(pair[0]);
}
