/* The attendant: holds the other ends of one long-lived program of a sandbox.
 *
 * It lives inside the sandbox, below pid 1, so that a checkpoint holds the program, its pipes or
 * terminal, what it printed so far and the answer that nobody has taken yet, all of one instant; the
 * daemon may die and come back, and a restored or forked sandbox has its own. The daemon speaks to it
 * through two FIFOs, which a dump tolerates where it would refuse a connected socket.
 *
 *   attend DIRECTORY [ROOT CWD] MODE UID GID[,GID...] LIMIT ROWS COLUMNS FIRST ARGUMENT...
 *
 * Its environment is the program's, and without ROOT, that of a service, its working directory too. Descriptors that it
 * is started with from 4 on are lists of processes of control groups: its program joins these, and we do not.
 *
 *   process   stdin, stdout and stderr are pipes; the last LIMIT bytes of each output are kept
 *   terminal  a pseudoterminal of ROWS x COLUMNS; the last LIMIT bytes are kept
 *   session   an interactive shell: stdin carries scripts, descriptors FIRST and FIRST + 1 of the shell are
 *             the output and the errors of one; the first bytes of each are kept until they are
 *             acknowledged. Its stderr carries its prompts and nothing of what it runs: a prompt
 *             "RS exit code . serial US" says that the script with that serial has ended
 *
 * On its stdout it says once "ok OWN_PID PROGRAM_PID" or "error STAGE ERRNO". Then it serves frames:
 * DIRECTORY/rq holds requests (at most PIPE_BUF bytes each, hence whole), DIRECTORY/rs the answers. A
 * daemon that attaches sends a nonce, and what lies in rs before that nonce is another daemon's.
 *
 * No libc, as few pages as possible: they are dumped with the sandbox. No signal can end it but SIGKILL.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SYS_read = 0, SYS_write = 1, SYS_open = 2, SYS_close = 3, SYS_poll = 7, SYS_mmap = 9, SYS_rt_sigprocmask = 14,
    SYS_ioctl = 16, SYS_madvise = 28, SYS_dup2 = 33, SYS_getpid = 39, SYS_fork = 57, SYS_execve = 59, SYS_exit = 60,
    SYS_wait4 = 61, SYS_kill = 62, SYS_fcntl = 72, SYS_chdir = 80, SYS_mkdir = 83, SYS_rmdir = 84, SYS_unlink = 87,
    SYS_umask = 95, SYS_setsid = 112, SYS_setgroups = 116, SYS_setresuid = 117, SYS_setresgid = 119, SYS_mknod = 133,
    SYS_chroot = 161, SYS_signalfd4 = 289, SYS_pipe2 = 293, SYS_close_range = 436,
};
enum {
    O_RDONLY = 0, O_WRONLY = 1, O_RDWR = 2, O_NOCTTY = 0400, O_NONBLOCK = 04000, O_CLOEXEC = 02000000,
    POLLIN = 1, POLLOUT = 4, SIGCHLD = 17, SIGKILL = 9, EINTR = 4, ENOENT = 2, ENOTDIR = 20, EAGAIN = 11,
    EINVAL = 22, EBUSY = 16, ENOSPC = 28, S_IFIFO = 0010000, F_SETFL = 4, MADV_DONTNEED = 4,
};
#define TIOCSCTTY 0x540E
#define TIOCSWINSZ 0x5414
#define TIOCGPTN 0x80045430
#define TIOCSPTLCK 0x40045431

#define MAX_REQUEST 4096         /* PIPE_BUF */
#define CHUNK (64 << 10)          /* data of one answer; the daemon's FIFO holds about one */
#define MAX_OUTPUT (16 << 20)    /* of each output of one script */
#define MAX_TEXT (8 << 20)       /* one script */
#define INPUT_ROOM (64 << 10)
#define PENDING 32
#define MAX_GROUPS 256           /* supplementary groups */
#define CWD (1 << 16)            /* beside an errno of a program that did not start: for its working directory */

enum op { ATTACH = 1, READ, INPUT, CLOSE, SIGNAL, RESIZE, TEXT, EXEC, ACK, STATE, WAIT, HOLD, FINISH };
enum wait { UNTIL_EXIT, UNTIL_DONE, UNTIL_ROOM };
enum kind { KIND_STATE, KIND_DATA };

struct request {
    uint32_t size;
    uint8_t op, a;
    uint16_t b;
    uint32_t seq;
    uint32_t reserved;
    uint64_t x, y;
    char data[];
};

struct header {
    uint32_t size, seq;
    uint64_t kind;
};

struct state {
    struct header header;
    char key[16];
    uint64_t error, exited, status, busy, done, done_status, pid, written, room;
    struct { uint64_t start, end, dropped, ended; } out[2];
};

struct data {
    struct header header;
    uint64_t stream, from, ended;
};

struct output {
    char *data;
    uint64_t size, start, end, dropped, taken;
    bool first;   /* keep the first bytes, else the last */
    bool ended;
    int fd;
};

static struct output out[2] = {{.fd = -1}, {.fd = -1}};
static struct { bool used; uint8_t op, a; uint32_t seq; uint64_t x, y; } pending[PENDING];
static char answer_data[sizeof(struct data) + CHUNK] __attribute__((aligned(8)));
static size_t answer_size, answer_sent;
static char request_data[2 * MAX_REQUEST] __attribute__((aligned(8)));
static size_t request_size;
static char input[INPUT_ROOM];
static size_t input_size;
static uint64_t written;      /* bytes of stdin taken so far */
static bool closing;
static char *text;
static uint64_t text_size, text_sent;
static bool busy, done;
static char key[16];
static uint64_t done_status;
static bool exited;
static int exit_status;
static int child;
static bool holding;
static bool fresh = true;    /* nobody has attached yet */
static bool terminal, session;
static const char *root, *cwd;  /* of the program, where that has another root than we; else NULL */
static int rq = -1, rs = -1, signals = -1, in = -1, codes = -1;
static int groups_count;
static char directory[256], rq_path[272], rs_path[272];

/* ------------------------------------------------------------------ without a libc */

static long call6(long n, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#define call(n, a, b, c, d) call6(n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

void *memcpy(void *to, const void *from, size_t size) {
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
    return start;
}

void *memset(void *to, int value, size_t size) {
    void *start = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(size) : "a"(value) : "memory");
    return start;
}

void *memmove(void *to, const void *from, size_t size) {
    char *t = to;
    const char *f = from;
    if (t <= f) return memcpy(to, from, size);
    while (size--) t[size] = f[size];
    return to;
}

static size_t length(const char *s) {
    size_t n = 0;
    while (s[n]) n++;
    return n;
}

static bool same(const char *a, const char *b, size_t size) {
    while (size--)
        if (a[size] != b[size]) return false;
    return true;
}

static bool is(const char *a, const char *b) { return length(a) == length(b) && same(a, b, length(a)); }

static long number(const char *s) {
    long value = 0;
    for (; *s >= '0' && *s <= '9'; s++) value = value * 10 + (*s - '0');
    return value;
}

static char *decimal(char *to, long value) {
    char digits[24];
    int n = 0;
    do digits[n++] = (char)('0' + value % 10);
    while (value /= 10);
    while (n) *to++ = digits[--n];
    return to;
}

static void say(const char *word, const char *stage, long a, long b) {
    char line[128], *end = line;
    memcpy(end, word, length(word));
    end += length(word);
    if (stage) {
        *end++ = ' ';
        memcpy(end, stage, length(stage));
        end += length(stage);
    }
    *end++ = ' ';
    end = decimal(end, a);
    if (b) {
        *end++ = ' ';
        end = decimal(end, b);
    }
    *end++ = '\n';
    call(SYS_write, 1, line, end - line, 0);
}

static void leave(int code) __attribute__((noreturn));
static void leave(int code) {
    if (rq_path[0]) {
        call(SYS_unlink, rq_path, 0, 0, 0);
        call(SYS_unlink, rs_path, 0, 0, 0);
        call(SYS_rmdir, directory, 0, 0, 0);
    }
    for (;;) call(SYS_exit, code, 0, 0, 0);
}

static void fail(const char *stage, long error) __attribute__((noreturn));
static void fail(const char *stage, long error) {
    say("error", stage, -error, 0);
    leave(1);
}

static long need(long result, const char *stage) {
    if (result < 0) fail(stage, result);
    return result;
}

static char *pages(size_t size) {
    long address = call6(SYS_mmap, 0, (long)size, 3, 0x4022 /* private, anonymous, no reserve */, -1, 0);
    if (address < 0 && address > -4096) fail("memory", address);
    return (char *)address;
}

static void mask_all(bool blocked) {
    uint64_t set = blocked ? ~0UL : 0;
    call(SYS_rt_sigprocmask, 2, &set, 0, sizeof set);
}

/* ------------------------------------------------------------------ the program */

/* Returns only when it fails, with the error that says most. */
static long run_program(char **argv, char **envp, const char *path) {
    size_t name = length(argv[0]);
    for (size_t i = 0; i < name; i++)
        if (argv[0][i] == '/') return call(SYS_execve, argv[0], argv, envp, 0);
    long worst = -ENOENT;
    while (*path) {
        char candidate[4096];
        size_t part = 0;
        while (path[part] && path[part] != ':') part++;
        if (part + name + 2 < sizeof candidate) {
            memcpy(candidate, path, part);
            candidate[part] = '/';
            memcpy(candidate + part + 1, argv[0], name + 1);
            long error = call(SYS_execve, candidate, argv, envp, 0);
            if (error != -ENOENT && error != -ENOTDIR) worst = error;
        }
        path += part + (path[part] == ':');
    }
    return worst;
}

/* "GID[,GID...]": the group, then the supplementary ones. Returns the group. */
static uint32_t groups_of(const char *text, uint32_t *groups, long *count) {
    uint32_t gid = (uint32_t)number(text);
    for (*count = 0; *text && *count < MAX_GROUPS; text++)
        if (*text == ',') groups[(*count)++] = (uint32_t)number(text + 1);
    return gid;
}

/* What is open from 4 on when we begin. */
static int groups_given(void) {
    int count = 0;
    while (call(SYS_fcntl, 4 + count, 1 /* F_GETFD */, 0, 0) >= 0) count++;
    return count;
}

static long join_groups(void) {
    long result = 0;
    for (int i = 0; i < groups_count && result >= 0; i++) result = call(SYS_write, 4 + i, "0", 1, 0);
    return result;
}

static long become_user(long uid, const char *listed) {
    uint32_t groups[MAX_GROUPS];
    long count, gid = groups_of(listed, groups, &count);
    if (!uid && !gid && !count) return 0;
    long error = call(SYS_setgroups, count, groups, 0, 0);
    if (error >= 0) error = call(SYS_setresgid, gid, gid, gid, 0);
    if (error >= 0) error = call(SYS_setresuid, uid, uid, uid, 0);
    return error;
}

static void become_program(const int fd[3], int extra[2], long first, long uid, const char *gids, char **argv,
                           char **envp, int report) {
    const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    for (char **e = envp; *e; e++)
        if (same(*e, "PATH=", 5)) path = *e + 5;
    long joined = join_groups();
    call(SYS_setsid, 0, 0, 0, 0);
    for (int i = 0; i < 3; i++) call(SYS_dup2, fd[i], i, 0, 0);
    if (terminal) call(SYS_ioctl, 0, TIOCSCTTY, 0, 0);
    long keep = 3;
    call(SYS_dup2, report, keep++, 0, 0);
    call(SYS_fcntl, 3, 2 /* F_SETFD */, 1, 0);
    if (session) {
        for (int i = 0; i < 2; i++)  /* out of the way first: a target may be another one's source */
            extra[i] = (int)call(SYS_fcntl, extra[i], 0 /* F_DUPFD */, 20, 0);
        for (int i = 0; i < 2; i++) call(SYS_dup2, extra[i], first + i, 0, 0);
        call(SYS_close_range, keep, first - 1, 0, 0);
        keep = first + 2;
    }
    call(SYS_close_range, keep, ~0U, 0, 0);
    long error = joined;
    if (error >= 0 && root) error = call(SYS_chroot, root, 0, 0, 0);
    if (error >= 0) error = become_user(uid, gids);
    if (error >= 0 && root && (error = call(SYS_chdir, cwd, 0, 0, 0)) < 0) {
        int code = (int)-error | CWD;
        call(SYS_write, 3, &code, sizeof code, 0);
        call(SYS_exit, 127, 0, 0, 0);
    }
    mask_all(false);
    if (error >= 0) error = run_program(argv, envp, path);
    int code = (int)-error;
    call(SYS_write, 3, &code, sizeof code, 0);
    call(SYS_exit, 127, 0, 0, 0);
}

static void pipe_pair(int pair[2]) { need(call(SYS_pipe2, pair, O_CLOEXEC, 0, 0), "pipe"); }

static void unblocking(int fd) { call(SYS_fcntl, fd, F_SETFL, O_NONBLOCK, 0); }

static int open_terminal(long rows, long columns) {
    char path[32] = "/dev/pts/";
    int number = 0, unlock = 0;
    struct { uint16_t rows, columns, x, y; } window = {(uint16_t)rows, (uint16_t)columns, 0, 0};
    int master = (int)need(call(SYS_open, "/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK, 0, 0), "terminal");
    need(call(SYS_ioctl, master, TIOCSPTLCK, &unlock, 0), "terminal");
    need(call(SYS_ioctl, master, TIOCGPTN, &number, 0), "terminal");
    *decimal(path + 9, number) = 0;
    int slave = (int)need(call(SYS_open, path, O_RDWR | O_NOCTTY | O_CLOEXEC, 0, 0), "terminal");
    call(SYS_ioctl, master, TIOCSWINSZ, &window, 0);
    out[0].fd = in = master;
    out[1].ended = true;
    return slave;
}

static void start_program(long uid, const char *gids, long rows, long columns, long first, char **argv, char **envp) {
    int fd[3], extra[2] = {-1, -1}, report[2], ends[2];
    if (terminal) {
        fd[0] = fd[1] = fd[2] = open_terminal(rows, columns);
    } else {
        pipe_pair(ends);
        fd[0] = ends[0], in = ends[1];
        pipe_pair(ends);
        fd[1] = ends[1], out[0].fd = ends[0];
        pipe_pair(ends);
        fd[2] = ends[1], out[1].fd = ends[0];
        unblocking(in), unblocking(out[0].fd), unblocking(out[1].fd);
    }
    if (session) {
        pipe_pair(ends);
        codes = ends[0];
        unblocking(codes);
        extra[0] = fd[1], extra[1] = fd[2], fd[2] = ends[1];
        /* Not blocking: the sandbox may have put a FIFO there. */
        fd[1] = (int)need(call(SYS_open, "/dev/null", O_WRONLY | O_NONBLOCK | O_CLOEXEC, 0, 0), "/dev/null");
    }
    pipe_pair(report);
    child = (int)need(call(SYS_fork, 0, 0, 0, 0), "fork");
    if (!child) become_program(fd, extra, first, uid, gids, argv, envp, report[1]);
    call(SYS_close, report[1], 0, 0, 0);
    for (int i = 0; i < groups_count; i++) call(SYS_close, 4 + i, 0, 0, 0);
    int code = 0;
    long got;
    while ((got = call(SYS_read, report[0], &code, sizeof code, 0)) == -EINTR) {
    }
    if (got != 0) fail(code & CWD ? "cwd" : "exec", -(code & ~CWD));
    call(SYS_close, report[0], 0, 0, 0);
    /* Also of a terminal: CRIU takes a process that holds it for the one that controls it. */
    for (int i = 0; i < 3; i++) call(SYS_close, fd[i], 0, 0, 0);
    if (session)
        for (int i = 0; i < 2; i++) call(SYS_close, extra[i], 0, 0, 0);
}

/* ------------------------------------------------------------------ what it prints */

static void keep(struct output *o, const char *from, uint64_t size) {
    if (o->first) {
        uint64_t used = o->end - o->start, room = used < o->size ? o->size - used : 0, most = size < room ? size : room;
        memcpy(o->data + used, from, most);
        o->end += most;
        o->dropped += size - most;
        return;
    }
    while (size) {
        uint64_t at = o->end % o->size, part = o->size - at;
        if (part > size) part = size;
        memcpy(o->data + at, from, part);
        o->end += part, from += part, size -= part;
    }
    if (o->end - o->start > o->size) {
        o->dropped += o->end - o->size - o->start;
        o->start = o->end - o->size;
    }
}

/* False when there is nothing more now. */
static bool take(struct output *o) {
    static char space[CHUNK];
    long size = call(SYS_read, o->fd, space, sizeof space, 0);
    if (size == -EINTR) return true;
    if (size > 0) {
        keep(o, space, (uint64_t)size);
        return true;
    }
    if (size != -EAGAIN) {
        if (!terminal) call(SYS_close, o->fd, 0, 0, 0), o->fd = -1;
        o->ended = true;
    }
    return false;
}

static void drain(void) {
    for (int i = 0; i < 2; i++)
        for (int n = 0; out[i].fd >= 0 && n < 64 && take(&out[i]); n++) {
        }
}

static bool paused(const struct output *o) { return holding && o->end - o->taken + CHUNK > o->size; }

static void forget_outputs(void) {
    for (int i = 0; i < 2; i++) {
        out[i].start = out[i].end = out[i].dropped = 0;
        call(SYS_madvise, out[i].data, out[i].size, MADV_DONTNEED, 0);
        out[i].size = MAX_OUTPUT;
    }
}

/* ------------------------------------------------------------------ its end */

static void reap(void) {
    char info[128];
    int status;
    while (call(SYS_read, signals, info, sizeof info, 0) > 0) {
    }
    for (;;) {
        long pid = call(SYS_wait4, -1, &status, 1 /* WNOHANG */, 0);
        if (pid <= 0) return;
        if (pid != child) continue;
        drain();
        exited = true;
        exit_status = status;
        if (terminal) out[0].ended = true;
    }
}

static uint32_t serial(void) {
    uint32_t value;
    memcpy(&value, key, sizeof value);
    return value & 0x7fffffff;
}

static void script_ended(uint64_t code, uint64_t of) {
    if (!busy || of != serial()) return;
    drain();  /* all that the script wrote lies in the pipes by now */
    done_status = code;
    busy = false;
    done = true;
}

static void read_prompts(void) {
    static uint64_t values[2];
    static int field = 2;  /* 0: exit code, 1: serial, 2: not in a prompt of ours */
    char line[256];
    long size = call(SYS_read, codes, line, sizeof line, 0);
    if (size == 0) call(SYS_close, codes, 0, 0, 0), codes = -1;
    for (long i = 0; i < size; i++) {
        char c = line[i];
        if (c == 0x1e) values[0] = values[1] = 0, field = 0;
        else if (field == 0 && c == '.') field = 1;
        else if (field < 2 && c >= '0' && c <= '9') values[field] = values[field] * 10 + (uint64_t)(c - '0');
        else {
            if (field == 1 && c == 0x1f) script_ended(values[0], values[1]);
            field = 2;
        }
    }
}

/* ------------------------------------------------------------------ answers */

static void answer_state(uint32_t seq, uint64_t error) {
    struct state *s = (struct state *)answer_data;
    memset(s, 0, sizeof *s);
    s->header = (struct header){sizeof *s, seq, KIND_STATE};
    memcpy(s->key, key, sizeof key);
    s->error = error;
    s->exited = exited, s->status = (uint64_t)(uint32_t)exit_status;
    s->busy = busy, s->done = done, s->done_status = done_status;
    s->pid = (uint64_t)child, s->written = written, s->room = sizeof input - input_size;
    for (int i = 0; i < 2; i++) {
        s->out[i].start = out[i].start, s->out[i].end = out[i].end;
        s->out[i].dropped = out[i].dropped, s->out[i].ended = out[i].ended;
    }
    answer_size = sizeof *s, answer_sent = 0;
}

static void answer_output(uint32_t seq, int stream, uint64_t from, uint64_t most) {
    struct output *o = &out[stream];
    struct data *d = (struct data *)answer_data;
    if (from < o->start) from = o->start;
    if (from > o->end) from = o->end;
    uint64_t size = o->end - from;
    if (size > most) size = most;
    if (size > CHUNK) size = CHUNK;
    o->taken = from;
    for (uint64_t copied = 0; copied < size;) {
        uint64_t at = o->first ? from - o->start + copied : (from + copied) % o->size, part = size - copied;
        if (!o->first && part > o->size - at) part = o->size - at;
        memcpy(answer_data + sizeof *d + copied, o->data + at, part);
        copied += part;
    }
    bool ended = (o->ended || (exited && session) || (session && done)) && from + size == o->end;
    d->header = (struct header){(uint32_t)(sizeof *d + size), seq, KIND_DATA};
    d->stream = (uint64_t)stream, d->from = from, d->ended = ended;
    answer_size = sizeof *d + size, answer_sent = 0;
}

static bool ready(uint8_t op, uint8_t a, uint64_t x) {
    if (op == READ) return x < out[a].end || out[a].ended || (session && (done || exited));
    if (a == UNTIL_EXIT) return exited;
    if (a == UNTIL_DONE) return done || exited || !busy;
    return exited || closing || input_size < sizeof input;
}

static void serve_pending(void) {
    for (int i = 0; i < PENDING && !answer_size; i++) {
        if (!pending[i].used || !ready(pending[i].op, pending[i].a, pending[i].x)) continue;
        pending[i].used = false;
        if (pending[i].op == READ) answer_output(pending[i].seq, pending[i].a, pending[i].x, pending[i].y);
        else answer_state(pending[i].seq, 0);
    }
}

static void later(const struct request *r) {
    for (int i = 0; i < PENDING; i++) {
        if (pending[i].used) continue;
        pending[i].used = true, pending[i].op = r->op, pending[i].a = r->a, pending[i].seq = r->seq;
        pending[i].x = r->x, pending[i].y = r->y;
        return;
    }
    answer_state(r->seq, EBUSY);
}

/* ------------------------------------------------------------------ requests */

static void attach(const char *nonce) {
    memset(pending, 0, sizeof pending);
    holding = holding && fresh;  /* a daemon that has died must not leave it waiting */
    fresh = false;
    if (!busy) text_size = text_sent = 0;
    answer_state(0, 0);
    memmove(answer_data + 16, answer_data, answer_size);
    memcpy(answer_data, nonce, 16);
    answer_size += 16;
}

static void feed(const struct request *r, size_t size) {
    const char *from = r->data;
    if (r->x < written) {
        uint64_t known = written - r->x;
        if (known > size) known = size;
        from += known, size -= known;
    } else if (r->x > written) {
        return answer_state(r->seq, EINVAL);
    }
    if (closing || in < 0) return answer_state(r->seq, size ? 32 /* EPIPE */ : 0);
    size_t room = sizeof input - input_size;
    if (size > room) size = room;
    memcpy(input + input_size, from, size);
    input_size += size, written += size;
    answer_state(r->seq, 0);
}

static void take_text(const struct request *r, size_t size) {
    if (!session || busy) return answer_state(r->seq, EBUSY);
    if (r->x > text_size || r->x + size > MAX_TEXT) return answer_state(r->seq, EINVAL);
    memcpy(text + r->x, r->data, size);
    text_size = r->x + size;
    answer_state(r->seq, 0);
}

/* The same key again is the same request again: nothing is run twice. */
static void execute(const struct request *r) {
    if (!session) return answer_state(r->seq, EINVAL);
    if ((busy || done) && same(r->data, key, sizeof key)) return answer_state(r->seq, 0);
    if (busy || exited) return answer_state(r->seq, EBUSY);
    if (r->x != text_size || !text_size) return answer_state(r->seq, EINVAL);
    if (done) forget_outputs();
    for (int i = 0; i < 2; i++) out[i].size = r->y < MAX_OUTPUT ? r->y : MAX_OUTPUT;
    memcpy(key, r->data, sizeof key);
    done_status = 0, text_sent = 0;
    busy = true, done = false;
    answer_state(r->seq, 0);
}

static void acknowledge(const struct request *r) {
    if (done && same(r->data, key, sizeof key)) {
        forget_outputs();
        done = false;
        memset(key, 0, sizeof key);
        text_size = 0;
        call(SYS_madvise, text, MAX_TEXT, MADV_DONTNEED, 0);
    }
    answer_state(r->seq, 0);
}

static void finish(void) __attribute__((noreturn));
static void finish(void) {
    if (!exited) call(SYS_kill, -child, SIGKILL, 0, 0);
    leave(0);
}

static void handle(const struct request *r, size_t size) {
    struct { uint16_t rows, columns, x, y; } window = {(uint16_t)r->x, (uint16_t)r->y, 0, 0};
    long result;
    switch (r->op) {
    case ATTACH: if (size == 16) attach(r->data); break;
    case READ:
        if (r->a > 1) answer_state(r->seq, EINVAL);
        else if (r->b && !ready(READ, r->a, r->x)) { if (out[r->a].taken < r->x) out[r->a].taken = r->x; later(r); }
        else answer_output(r->seq, r->a, r->x, r->y);
        break;
    case INPUT: feed(r, size); break;
    case CLOSE: closing = true; answer_state(r->seq, 0); break;
    case SIGNAL:
        result = exited ? -3 /* ESRCH */ : call(SYS_kill, r->b ? child : -child, r->a, 0, 0);
        answer_state(r->seq, (uint64_t)-result);
        break;
    case RESIZE: answer_state(r->seq, (uint64_t)-call(SYS_ioctl, in, TIOCSWINSZ, &window, 0)); break;
    case TEXT: take_text(r, size); break;
    case EXEC: if (size == 16) execute(r); break;
    case ACK: if (size == 16) acknowledge(r); break;
    case WAIT: if (ready(WAIT, r->a, 0)) answer_state(r->seq, 0); else later(r); break;
    case HOLD: holding = r->a; out[0].taken = out[0].end; out[1].taken = out[1].end; answer_state(r->seq, 0); break;
    case FINISH: finish();
    default: answer_state(r->seq, 0); break;
    }
}

/* One request at a time, and only when the last answer is on its way. */
static void serve_request(void) {
    if (request_size < sizeof(struct request)) return;
    struct request *r = (struct request *)request_data;
    if (r->size < sizeof *r || r->size > MAX_REQUEST) {  /* nonsense: drop all of it */
        request_size = 0;
        return;
    }
    if (request_size < r->size) return;
    static char whole[MAX_REQUEST] __attribute__((aligned(8)));
    size_t size = r->size;
    memcpy(whole, request_data, size);
    memmove(request_data, request_data + size, request_size - size);
    request_size -= size;
    handle((struct request *)whole, size - sizeof *r);
}

static void read_requests(void) {
    long size = call(SYS_read, rq, request_data + request_size, sizeof request_data - request_size, 0);
    if (size > 0) request_size += (size_t)size;
}

/* ------------------------------------------------------------------ loop */

static void write_answer(void) {
    long size = call(SYS_write, rs, answer_data + answer_sent, answer_size - answer_sent, 0);
    if (size > 0) answer_sent += (size_t)size;
    if (answer_sent == answer_size) answer_size = answer_sent = 0;
}

static void write_input(void) {
    bool script = session && busy && text_sent < text_size;
    const char *from = script ? text + text_sent : input;
    size_t size = script ? text_size - text_sent : input_size;
    long done_now = call(SYS_write, in, from, size, 0);
    if (done_now == -EAGAIN || done_now == -EINTR) return;
    if (done_now < 0) {  /* nobody reads any more */
        input_size = 0, text_sent = text_size, closing = true;
        return;
    }
    if (script) {
        text_sent += (uint64_t)done_now;
        return;
    }
    memmove(input, input + done_now, input_size - (size_t)done_now);
    input_size -= (size_t)done_now;
}

static void loop(void) __attribute__((noreturn));
static void loop(void) {
    struct { int fd; short events, got; } set[8];
    for (;;) {
        for (int more = 1; more;) {
            more = 0;
            if (!answer_size) serve_pending();
            if (!answer_size && request_size) {
                size_t before = request_size;
                serve_request();
                more = request_size != before;
            }
            if (answer_size) {
                write_answer();
                more |= !answer_size;
            }
        }
        bool wanted = input_size || (session && busy && text_sent < text_size);
        if (closing && !input_size && in >= 0 && !terminal) call(SYS_close, in, 0, 0, 0), in = -1;
        bool full = request_size + MAX_REQUEST > sizeof request_data;
        set[0].fd = full ? -1 : rq, set[0].events = POLLIN;
        set[1].fd = answer_size ? rs : -1, set[1].events = POLLOUT;
        set[2].fd = signals, set[2].events = POLLIN;
        for (int i = 0; i < 2; i++) set[3 + i].fd = out[i].ended || paused(&out[i]) ? -1 : out[i].fd, set[3 + i].events = POLLIN;
        set[5].fd = wanted ? in : -1, set[5].events = POLLOUT;
        set[6].fd = codes, set[6].events = POLLIN;
        if (call(SYS_poll, set, 7, -1, 0) < 0) continue;
        if (set[2].got) reap();
        if (set[6].got) read_prompts();
        for (int i = 0; i < 2; i++)
            if (set[3 + i].got && out[i].fd >= 0) take(&out[i]);
        if (set[5].got && in >= 0) write_input();
        if (set[0].got) read_requests();
        if (set[1].got) write_answer();
    }
}

/* ------------------------------------------------------------------ start */

static int open_fifo(char *path, const char *name) {
    memcpy(path, directory, length(directory));
    memcpy(path + length(directory), name, length(name) + 1);
    need(call(SYS_mknod, path, S_IFIFO | 0600, 0, 0), "fifo");
    /* Both ways: then neither end of it is ever closed while we live. */
    return (int)need(call(SYS_open, path, O_RDWR | O_NONBLOCK | O_CLOEXEC, 0, 0), "fifo");
}

__attribute__((used)) static void start(long *stack) {
    long argc = stack[0];
    char **argv = (char **)(stack + 1), **envp = argv + argc + 1;
    if (argc > 11 && argv[2][0] == '/') {
        root = argv[2], cwd = argv[3];
        argv[3] = argv[1], argv += 2, argc -= 2;
    }
    if (argc < 10 || length(argv[1]) >= sizeof directory) fail("arguments", -EINVAL);
    memcpy(directory, argv[1], length(argv[1]) + 1);
    terminal = is(argv[2], "terminal");
    session = is(argv[2], "session");
    long limit = number(argv[5]);
    holding = !session && !number(argv[8]);
    groups_count = groups_given();
    mask_all(true);
    call(SYS_umask, 077, 0, 0, 0);
    call(SYS_mkdir, "/.pagurus/run", 0700, 0, 0);
    need(call(SYS_mkdir, directory, 0700, 0, 0), "directory");
    rq = open_fifo(rq_path, "/rq");
    rs = open_fifo(rs_path, "/rs");
    call(SYS_umask, 022, 0, 0, 0);
    uint64_t child_signal = 1UL << (SIGCHLD - 1);
    signals = (int)need(call(SYS_signalfd4, -1, &child_signal, sizeof child_signal, O_NONBLOCK | O_CLOEXEC), "signalfd");
    start_program(number(argv[3]), argv[4], number(argv[6]), number(argv[7]), number(argv[8]), argv + 9, envp);
    if (session) text = pages(MAX_TEXT);
    for (int i = 0; i < 2; i++) {
        out[i].size = session ? MAX_OUTPUT : (uint64_t)(limit < 4096 ? 4096 : limit);
        out[i].first = session;
        out[i].data = pages(out[i].size);
    }
    call(SYS_chdir, "/", 0, 0, 0);
    say("ok", NULL, call(SYS_getpid, 0, 0, 0, 0), child);
    for (int fd = 0; fd < 3; fd++) call(SYS_close, fd, 0, 0, 0);
    loop();
}

__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall start\n");
