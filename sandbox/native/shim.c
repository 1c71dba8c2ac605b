/* pagurus-shim: the one process per sandbox that outlives the daemon.
 *
 * Owns: the sandbox's mount namespace, its membership in v1 cgroups, its network namespace, the
 * reading ends of its output pipes, and the processes that are handed to it as child subreaper.
 * Does not own: any decision. It does what its one client, the daemon, asks; when the daemon dies it
 * goes on draining the pipes (a server in the sandbox must not die from SIGPIPE) and waits for the next.
 *
 *   pagurus-shim V2_CGROUP [V1_CGROUP...]      descriptor 3: a listening SOCK_SEQPACKET socket
 *   pagurus-shim --filter                      writes the system-call filter of sandboxes to stdout
 *
 * A packet is a list of fields, each ended by NUL: the command, then its arguments; descriptors travel
 * beside it. Every command is answered once, in order, by "ok", fields... or "error", stage, errno;
 * "event", "exit", pid, status come in between.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STREAMS_MAX 1024
#define CHILDREN_MAX 64
#define KEPT_MAX 8
#define LISTENER 3
#define LEAVE_AFTER 200  /* ms */

struct stream {
    int fd;          /* -1: free */
    uint32_t owner;  /* number of the command that it belongs to */
    bool draining;   /* ours to read and discard; else the daemon reads it */
};

static struct shim shim = {.cgroup = -1, .leaf = -1, .idmap = -1, .init_pidfd = -1};
static struct stream streams[STREAMS_MAX];
static pid_t watched[CHILDREN_MAX];  /* children whose end the client wants to know */
static uint32_t serial;
static int client = -1, signals = -1;
static char packet[PACKET_MAX + 1];
static char *field[FIELDS_MAX + 2];
static int fields;
static struct { char name[16]; int fd; } keeping[KEPT_MAX];  /* name[0] == 0: free */
static int passed[PASSED_MAX];
static int passed_count;

/* ------------------------------------------------------------------ answers */

static void drop_client(void);

static void send_packet(const char *data, size_t size, const int *fds, int count) {
    if (client < 0) return;
    struct iovec part = {(void *)data, size};
    char control[CMSG_SPACE(sizeof(int) * PASSED_MAX)] = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)count);
    }
    /* Never blocks: a client that does not read its answers is as good as gone. */
    if (sendmsg(client, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) drop_client();
}

static void answer(const int *fds, int count, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void answer(const int *fds, int count, const char *format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    int size = vsnprintf(text, sizeof text, format, list);
    va_end(list);
    for (int i = 0; i < size; i++)
        if (text[i] == '\n') text[i] = 0;
    send_packet(text, (size_t)size, fds, count);
}

static void refuse(const char *stage, int error) { answer(NULL, 0, "error\n%s\n%d\n", stage, error); }

/* ------------------------------------------------------------------ output pipes */

static void stream_open(int fd, uint32_t owner, bool draining) {
    for (int i = 0; i < STREAMS_MAX; i++) {
        if (streams[i].fd >= 0) continue;
        streams[i] = (struct stream){fd, owner, draining};
        return;
    }
    close(fd);  /* the daemon still holds its own copy */
}

static void stream_drain(struct stream *stream) {
    static char sink[65536];
    ssize_t size = read(stream->fd, sink, sizeof sink);
    if (size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR))) return;
    close(stream->fd);
    stream->fd = -1;
}

static void release_streams(bool all, uint32_t owner) {
    for (int i = 0; i < STREAMS_MAX; i++)
        if (streams[i].fd >= 0 && (all || streams[i].owner == owner)) streams[i].draining = true;
}

static void drop_client(void) {
    if (client >= 0) close(client);
    client = -1;
    memset(watched, 0, sizeof watched);
    release_streams(true, 0);
}

/* ------------------------------------------------------------------ children */

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        for (int i = 0; i < CHILDREN_MAX; i++) {
            if (watched[i] != pid) continue;
            watched[i] = 0;
            answer(NULL, 0, "event\nexit\n%d\n%d\n", pid, status);
        }
    }
}

static bool watch(pid_t pid) {
    for (int i = 0; i < CHILDREN_MAX; i++) {
        if (watched[i]) continue;
        watched[i] = pid;
        return true;
    }
    return false;
}

static void init_gone(void) {
    close(shim.init_pidfd);
    shim.init_pidfd = -1;
    shim.init = 0;
    reap();
}

/* ------------------------------------------------------------------ commands */

static bool number(int index, long *out) {
    if (index >= fields) return false;
    char *end;
    errno = 0;
    *out = strtol(field[index], &end, 10);
    return !errno && end != field[index] && !*end;
}

static bool copy(char *to, size_t size, const char *from) { return snprintf(to, size, "%s", from) < (int)size; }

/* hello  ->  ok, our pid, host pid of pid 1 or 0, whether the overlay is mounted; with pid 1's pidfd */
static void command_hello(void) {
    answer(&shim.init_pidfd, shim.init ? 1 : 0, "ok\n%d\n%d\n%d\n", getpid(), shim.init, shim.mounted);
}

/* setup ROOT LAYER UID_BASE HOSTNAME OPEN_FILES MACHINE NO_NEW_PRIVS */
static void command_setup(void) {
    long base, files, no_new_privs;
    if (fields != 8 || !number(7, &no_new_privs) || !number(3, &base) || !number(5, &files) || base < ID_RANGE || base > (long)UINT32_MAX - ID_RANGE ||
        files < 3 || !copy(shim.root, sizeof shim.root, field[1]) || !copy(shim.layer, sizeof shim.layer, field[2]) ||
        !copy(shim.hostname, sizeof shim.hostname, field[4]) || !copy(shim.machine, sizeof shim.machine, field[6]))
        return refuse("setup", EINVAL);
    shim.uid_base = (uid_t)base;
    shim.open_files = (uint64_t)files;
    shim.no_new_privs = no_new_privs;
    const char *stage = make_idmap(&shim);
    if (!stage) stage = share_root(&shim);
    if (stage) return refuse(stage, errno);
    answer(NULL, 0, "ok\n");
}

static int unmount(void);

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Let go of the host's mounts. It takes milliseconds, so not while somebody waits for a sandbox; but before a program is
 * started that stays, with a copy of our mounts. */
static void leave(void) {
    if (shim.left || !shim.leave_at) return;
    shim.left = true;
    leave_unneeded(&shim);
}

/* Milliseconds until that is due; -1: never. */
static int until_leave(void) {
    if (shim.left || !shim.leave_at) return -1;
    int64_t left = shim.leave_at - now_ms();
    return left < 0 ? 0 : (int)left;
}

/* mount TREE IMAGE */
static void command_mount(void) {
    if (fields != 3) return refuse("mount", EINVAL);
    if (shim.mounted) return refuse("mount", EBUSY);
    if (!copy(shim.tree, sizeof shim.tree, field[1]) || !copy(shim.image, sizeof shim.image, field[2]))
        return refuse("mount", ENAMETOOLONG);
    const char *stage = mount_overlay(&shim, field[1], field[2]);
    if (!stage && (stage = make_targets(&shim)) != NULL) {
        int error = errno;
        unmount();
        errno = error;
    }
    if (stage) return refuse(stage, errno);
    if (!shim.leave_at && !shim.left) shim.leave_at = now_ms() + LEAVE_AFTER;
    answer(NULL, 0, "ok\n");
}

/* bind FROM SOURCE TARGET READ_ONLY: before mount; SOURCE is an empty directory for our own clone of FROM */
static void command_bind(void) {
    long read_only;
    if (fields != 5 || !number(4, &read_only) || shim.mounted) return refuse("bind", EINVAL);
    if (shim.bind_count == BINDS_MAX) return refuse("bind", ENOSPC);
    struct bind *bind = &shim.bind[shim.bind_count];
    if (!copy(bind->source, sizeof bind->source, field[2]) || !copy(bind->target, sizeof bind->target, field[3]))
        return refuse("bind", ENAMETOOLONG);
    const char *stage = make_bind(&shim, field[1], read_only, bind);
    if (stage) return refuse(stage, errno);
    shim.bind_count++;
    answer(NULL, 0, "ok\n");
}

/* views [FROM SOURCE TARGET]...: likewise, of what is the kernel's; FROM is a directory, "sysfs" or "tmpfs" */
static void command_views(void) {
    if (fields % 3 != 1 || shim.mounted) return refuse("views", EINVAL);
    for (int i = 1; i < fields; i += 3) {
        if (shim.bind_count == BINDS_MAX) return refuse("views", ENOSPC);
        struct bind *bind = &shim.bind[shim.bind_count];
        if (!copy(bind->source, sizeof bind->source, field[i + 1]) || !copy(bind->target, sizeof bind->target, field[i + 2]))
            return refuse("views", ENAMETOOLONG);
        bind->view = true;
        const char *stage = make_view(field[i], bind);
        if (stage) return refuse(stage, errno);
        shim.bind_count++;
    }
    answer(NULL, 0, "ok\n");
}

/* leaf, with a descriptor of the v2 cgroup in which commands start from now on */
static void command_leaf(void) {
    int leaf = passed_count == 1 ? fcntl(passed[0], F_DUPFD_CLOEXEC, 0) : -1;
    if (leaf < 0) return refuse("leaf", EINVAL);
    if (shim.leaf >= 0) close(shim.leaf);
    shim.leaf = leaf;
    answer(NULL, 0, "ok\n");
}

static void free_joins(struct join *joins, int count) {
    for (int i = 0; i < count; i++) {
        free(joins[i].from);
        free(joins[i].to);
    }
    free(joins);
}

/* The fields as joins; NULL where they are none. */
static struct join *joins_of_fields(int *count) {
    struct join *joins = fields % 3 == 1 ? calloc((size_t)fields / 3 + 1, sizeof *joins) : NULL;
    *count = 0;
    for (int i = 1; joins && i < fields; i += 3)
        joins[(*count)++] = (struct join){strdup(field[i]), strdup(field[i + 1]), field[i + 2][0] & 1, field[i + 2][0] & 2};
    return joins;
}

/* joins [FROM TO FLAGS]...: 1 read-only, 2 with what is mounted in FROM; what each pid 1 from now on mounts at last, in this order */
static void command_joins(void) {
    int count;
    struct join *joins = joins_of_fields(&count);
    if (!joins) return refuse("joins", EINVAL);
    free_joins(shim.join, shim.join_count);
    shim.join = joins;
    shim.join_count = count;
    answer(NULL, 0, "ok\n");
}

/* join [FROM TO FLAGS]...: mount these now, for the pid 1 that lives */
static void command_join(void) {
    int count;
    struct started out = {.pidfd = -1};
    if (!shim.init) return refuse("join", ESRCH);
    struct join *joins = joins_of_fields(&count);
    if (!joins) return refuse("join", EINVAL);
    change_mounts(&shim, joins, count, NULL, &out);
    free_joins(joins, count);
    if (out.failure.stage[0]) return refuse(out.failure.stage, out.failure.error);
    answer(NULL, 0, "ok\n");
}

/* part PATH: take away what is mounted there, for the pid 1 that lives */
static void command_part(void) {
    struct started out = {.pidfd = -1};
    if (!shim.init || fields != 2) return refuse("part", shim.init ? EINVAL : ESRCH);
    change_mounts(&shim, NULL, 0, field[1], &out);
    if (out.failure.stage[0]) return refuse(out.failure.stage, out.failure.error);
    answer(NULL, 0, "ok\n");
}

static int unmount(void) {
    if (!shim.mounted) return 0;
    if (umount2(shim.root, MNT_DETACH) < 0) return errno;
    shim.mounted = false;
    return 0;
}

static void command_umount(void) {
    int error = shim.init ? EBUSY : unmount();
    if (error) return refuse("umount", error);
    answer(NULL, 0, "ok\n");
}

static void adopt_init(pid_t pid, int pidfd) {
    shim.init = pid;
    shim.init_pidfd = pidfd;
    answer(&pidfd, 1, "ok\n%d\n", pid);
}

static void command_start(void) {
    struct started out = {.pidfd = -1};
    if (shim.init) return refuse("start", EEXIST);
    if (!shim.mounted) return refuse("start", ENOENT);
    start_init(&shim, &out);
    if (out.failure.stage[0]) return refuse(out.failure.stage, out.failure.error);
    adopt_init(out.pid, out.pidfd);
}

/* attach PID: a restored pid 1 */
static void command_attach(void) {
    long pid;
    if (shim.init) return refuse("attach", EEXIST);
    if (!number(1, &pid)) return refuse("attach", EINVAL);
    int pidfd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    if (pidfd < 0) return refuse("attach", errno);
    adopt_init((pid_t)pid, pidfd);
}

/* network PID: enter its network namespace, which is the sandbox's from now on */
static void command_network(void) {
    long pid;
    if (!number(1, &pid)) return refuse("network", EINVAL);
    int pidfd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    if (pidfd < 0) return refuse("network", errno);
    int error = setns(pidfd, CLONE_NEWNET) < 0 ? errno : 0;
    close(pidfd);
    if (error) return refuse("network", error);
    answer(NULL, 0, "ok\n");
}

/* Splits the fields from `index` into COUNT arguments and, after them, the environment. */
static bool vectors(int index, char ***argv, char ***envp) {
    static char *arguments[FIELDS_MAX + 2];
    long count;
    if (!number(index, &count) || count < 1 || index + 1 + count > fields) return false;
    memcpy(arguments, field + index + 1, sizeof(char *) * (size_t)count);
    arguments[count] = NULL;
    field[fields] = NULL;
    *argv = arguments;
    *envp = field + index + 1 + count;
    return true;
}

#define EXEC_STDIN 1     /* make a pipe for stdin and return its writing end */
#define EXEC_ROOT 2      /* the root of a service follows the working directory */

static bool open_pipes(long flags, struct command *c, int mine[3]) {
    for (int i = 0; i < 3; i++) {
        int ends[2];
        if (i == 0 && !(flags & EXEC_STDIN)) continue;
        if (pipe2(ends, O_CLOEXEC) < 0) return false;
        mine[i] = ends[i ? 0 : 1];
        c->fd[i] = ends[i ? 1 : 0];
    }
    return true;
}

/* "GID[,GID...]": the group, then the supplementary ones. */
static bool groups_of(char *text, struct command *c) {
    for (int i = -1; i < MAX_GROUPS; i++) {
        char *end;
        errno = 0;
        long gid = strtol(text, &end, 10);
        if (errno || end == text || gid < 0 || gid >= ID_RANGE) return false;
        if (i < 0) c->gid = (gid_t)gid;
        else c->groups[c->group_count++] = (gid_t)gid;
        if (!*end) return true;
        if (*end != ',') return false;
        text = end + 1;
    }
    return false;
}

/* exec FLAGS UID GID[,GID...] CWD [ROOT] COUNT ARGUMENT... VARIABLE..., with the groups of a service that it joins  ->  ok PID STREAM INNER, with pidfd, stdout, stderr[, stdin] */
static void command_exec(void) {
    long flags, uid;
    struct command c = {.fd = {-1, -1, -1}};
    struct started out = {.pidfd = -1};
    if (!shim.init) return refuse("exec", ESRCH);
    if (!number(1, &flags) || !number(2, &uid) || fields < 7 || !groups_of(field[3], &c) ||
        !vectors(flags & EXEC_ROOT ? 6 : 5, &c.argv, &c.envp) || uid < 0 || uid >= ID_RANGE)
        return refuse("exec arguments", EINVAL);
    c.cwd = field[4];
    c.root = flags & EXEC_ROOT ? field[5] : NULL;
    c.uid = (uid_t)uid;
    c.group = passed;
    c.in_groups = passed_count;
    int mine[3] = {-1, -1, -1};
    if (!open_pipes(flags, &c, mine)) out.failure = (struct failure){.stage = "pipes", .error = errno};
    if (!out.failure.stage[0]) start_command(&shim, &c, &out);
    for (int i = 0; i < 3; i++)
        if (c.fd[i] >= 0) close(c.fd[i]);
    if (out.failure.stage[0]) {
        for (int i = 0; i < 3; i++)
            if (mine[i] >= 0) close(mine[i]);
        if (out.pidfd >= 0) close(out.pidfd);
        return refuse(out.failure.stage, out.failure.error);
    }
    serial++;
    int fds[4] = {out.pidfd, mine[1], mine[2], mine[0]};
    answer(fds, mine[0] >= 0 ? 4 : 3, "ok\n%d\n%u\n%d\n", out.pid, serial, out.inner);
    close(out.pidfd);
    if (mine[0] >= 0) close(mine[0]);
    for (int i = 1; i < 3; i++) stream_open(mine[i], serial, client < 0);
}

/* release STREAM: from now on we read and discard that command's output */
static void command_release(void) {
    long owner;
    if (!number(1, &owner)) return refuse("release", EINVAL);
    release_streams(false, (uint32_t)owner);
    answer(NULL, 0, "ok\n");
}

/* sink  ->  the writing end of a pipe that we drain: for pipes of restored processes */
static void command_sink(void) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0) return refuse("sink", errno);
    stream_open(ends[0], ++serial, true);
    answer(&ends[1], 1, "ok\n");
    close(ends[1]);
}

/* keep NAME: hold the descriptors beside it for the next daemon, instead of those held by that name until now.
 * Sockets in the sandbox's network namespace then go on accepting what nobody answers for a moment. */
static void command_keep(void) {
    if (fields != 2 || strlen(field[1]) >= sizeof keeping[0].name) return refuse("keep", EINVAL);
    int free_slots = 0;
    for (int i = 0; i < KEPT_MAX; i++) {
        if (keeping[i].name[0] && strcmp(keeping[i].name, field[1]) == 0) {
            close(keeping[i].fd);
            keeping[i].name[0] = 0;
        }
        free_slots += !keeping[i].name[0];
    }
    if (free_slots < passed_count) return refuse("keep", ENOSPC);
    for (int i = 0, next = 0; i < passed_count; i++) {
        while (keeping[next].name[0]) next++;
        int fd = fcntl(passed[i], F_DUPFD_CLOEXEC, 0);
        if (fd < 0) return refuse("keep", errno);
        keeping[next].fd = fd;
        strcpy(keeping[next].name, field[1]);
    }
    answer(NULL, 0, "ok\n");
}

/* kept NAME  ->  what is held by that name, in the order in which it came */
static void command_kept(void) {
    int fds[KEPT_MAX], count = 0;
    for (int i = 0; i < KEPT_MAX && fields == 2; i++)
        if (keeping[i].name[0] && strcmp(keeping[i].name, field[1]) == 0) fds[count++] = keeping[i].fd;
    answer(fds, count, "ok\n");
}

/* host IN_CGROUP JOIN TARGETS COUNT ARGUMENT... VARIABLE...; TARGETS: "0,1,7", one for each descriptor
 * IN_CGROUP: 0 outside all groups, 1 in the sandbox's groups and fresh namespaces */
static void run_host(bool waits) {
    long in_cgroup, join;
    struct host_command c = {.count = passed_count};
    struct started out = {.pidfd = -1};
    if (!number(1, &in_cgroup) || !number(2, &join) || fields < 6 || !vectors(4, &c.argv, &c.envp))
        return refuse("host arguments", EINVAL);
    if (join && !shim.init) return refuse("host join", ESRCH);
    char *rest = field[3];
    for (int i = 0; i < passed_count; i++) {
        c.fd[i] = passed[i];
        c.target[i] = (int)strtol(rest, &rest, 10);
        if (c.target[i] < 0 || c.target[i] >= 512) return refuse("host targets", EINVAL);
        if (*rest == ',') rest++;
    }
    c.in_cgroup = in_cgroup && !waits;
    if (!c.in_cgroup) leave();
    c.fresh = in_cgroup;
    c.join = (int)join;
    start_host(&shim, &c, &out);
    if (out.failure.stage[0]) return refuse(out.failure.stage, out.failure.error);
    watch(out.pid);
    answer(&out.pidfd, 1, "ok\n%d\n", out.pid);
    close(out.pidfd);
}

static void command_host(void) { run_host(false); }

/* wait: as host, but the program is to join the sandbox's groups later, when it is needed */
static void command_wait(void) { run_host(true); }

static void command_exit(void) {
    if (shim.init) return refuse("exit", EBUSY);
    unmount();
    answer(NULL, 0, "ok\n");
    _exit(0);
}

static const struct { const char *name; void (*run)(void); } commands[] = {
    {"hello", command_hello}, {"setup", command_setup}, {"bind", command_bind}, {"views", command_views}, {"leaf", command_leaf}, {"joins", command_joins}, {"join", command_join}, {"part", command_part}, {"mount", command_mount}, {"umount", command_umount},
    {"start", command_start}, {"attach", command_attach}, {"exec", command_exec}, {"release", command_release},
    {"sink", command_sink}, {"keep", command_keep}, {"kept", command_kept}, {"host", command_host}, {"wait", command_wait}, {"network", command_network}, {"exit", command_exit},
};

/* ------------------------------------------------------------------ loop */

static void take_descriptors(struct msghdr *message) {
    passed_count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        passed_count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(passed, CMSG_DATA(c), sizeof(int) * (size_t)passed_count);
    }
}

static void serve(void) {
    struct iovec part = {packet, PACKET_MAX};
    char control[CMSG_SPACE(sizeof(int) * PASSED_MAX)];
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(client, &message, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) return;
    if (size <= 0) return drop_client();
    take_descriptors(&message);
    fields = 0;
    bool whole = packet[size - 1] == 0 && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
    for (ssize_t i = 0; whole && i < size; i += (ssize_t)strlen(packet + i) + 1) {
        if (fields == FIELDS_MAX) whole = false;
        else field[fields++] = packet + i;
    }
    void (*run)(void) = NULL;
    for (size_t i = 0; whole && i < sizeof commands / sizeof *commands; i++)
        if (strcmp(field[0], commands[i].name) == 0) run = commands[i].run;
    if (run) run();
    else refuse(whole ? "unknown command" : "packet too large", whole ? EINVAL : E2BIG);
    for (int i = 0; i < passed_count; i++) close(passed[i]);
    passed_count = 0;
}

static void loop(void) {
    static struct pollfd set[STREAMS_MAX + 4];
    static struct stream *which[STREAMS_MAX + 4];
    for (;;) {
        int count = 0;
        set[count++] = (struct pollfd){.fd = signals, .events = POLLIN};
        set[count++] = (struct pollfd){.fd = shim.init_pidfd, .events = POLLIN};
        set[count++] = (struct pollfd){.fd = client, .events = POLLIN};
        set[count++] = (struct pollfd){.fd = client < 0 ? LISTENER : -1, .events = POLLIN};
        for (int i = 0; i < STREAMS_MAX; i++) {
            if (streams[i].fd < 0 || !streams[i].draining) continue;
            which[count] = &streams[i];
            set[count++] = (struct pollfd){.fd = streams[i].fd, .events = POLLIN};
        }
        int ready = poll(set, (nfds_t)count, until_leave());
        if (until_leave() == 0) leave();
        if (ready < 0) continue;
        if (set[0].revents) {
            struct signalfd_siginfo info;
            if (read(signals, &info, sizeof info) > 0) reap();
        }
        if (set[1].revents) init_gone();
        for (int i = 4; i < count; i++)
            if (set[i].revents) stream_drain(which[i]);
        if (set[3].revents) client = accept4(LISTENER, NULL, NULL, SOCK_CLOEXEC);
        else if (set[2].revents) serve();
    }
}

/* ------------------------------------------------------------------ start */

static void die(const char *what) {
    fprintf(stderr, "pagurus-shim: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t done = write(fd, text, strlen(text));
    close(fd);
    return done < 0 ? -1 : 0;
}

/* A network namespace of our own costs 0.6 ms: no pool needed. It belongs to the host's user
 * namespace, so the sandbox has no privilege over it; the two settings let its users bind low ports
 * and send pings without any. */
static void make_network(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (unshare(CLONE_NEWNET) < 0) die("network namespace");
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) < 0) die("loopback");
    close(fd);
    if (write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0") < 0) die("ip_unprivileged_port_start");
    if (write_file("/proc/sys/net/ipv4/ping_group_range", "0 4294967294") < 0) die("ping_group_range");
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "--filter") == 0) return write_filter() < 0;
    if (argc < 2 || argc > 2 + V1_MAX) {
        fprintf(stderr, "usage: pagurus-shim V2_CGROUP [V1_CGROUP...]   (started by the daemon)\n");
        return 2;
    }
    umask(022);
    set_slice(100 * 1000, URGENT);
    shim.spared = write_file("/proc/self/oom_score_adj", "-900") >= 0;  /* refused without CAP_SYS_RESOURCE */
    for (int i = 2; i < argc; i++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/cgroup.procs", argv[i]);
        if (write_file(path, "0") < 0) die(path);
        shim.v1[shim.v1_count++] = argv[i];
    }
    if ((shim.cgroup = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) die(argv[1]);
    fcntl(LISTENER, F_SETFD, FD_CLOEXEC);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0) die("subreaper");
    syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, NULL);
    make_network();
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0) die("mount namespace");
    prepare_filter();
    prepare_limits();
    for (int i = 0; i < STREAMS_MAX; i++) streams[i].fd = -1;
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    if (signals < 0) die("signalfd");
    loop();
}
