/* File access inside the sandbox's own mount namespace and with its own ids.
 *
 * A child joins the sandbox before it resolves any path, so no symlink, ".." or magic link can lead
 * to the host; it is in the sandbox's cgroup, so that its writes are seen and counted like the
 * sandbox's own. Nothing but regular files and directories is ever opened for data.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int setns(int, int);

static int open_path(const char *path, uint64_t flags, uint64_t mode) {
    struct open_how how = {.flags = flags | O_CLOEXEC | O_NOCTTY, .mode = mode, .resolve = RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

/* Opened for data only once it is known to be a regular file; a FIFO or device is refused unopened.
 * The second look catches a swap in between, and O_NONBLOCK keeps even a lost race from blocking. */
static int open_regular(const char *path, int flags, mode_t mode) {
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
        return -1;
    }
    int fd = open_path(path, (uint64_t)(flags | O_NONBLOCK), flags & O_CREAT ? mode : 0);
    if (fd < 0) return -1;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

static int64_t copy_bytes(int from, int to, int64_t limit) {
    static char buffer[1 << 16];
    int64_t total = 0;
    while (total < limit) {
        size_t want = sizeof buffer;
        if ((int64_t)want > limit - total) want = (size_t)(limit - total);
        ssize_t size = read(from, buffer, want);
        if (size < 0) return -1;
        if (size == 0) break;
        for (ssize_t done = 0; done < size;) {
            ssize_t wrote = write(to, buffer + done, (size_t)(size - done));
            if (wrote < 0) return -1;
            done += wrote;
        }
        total += size;
    }
    return total;
}

static void describe(const struct stat *st, int64_t r[8]) {
    r[0] = st->st_mode;
    r[1] = st->st_size;
    r[2] = st->st_uid;
    r[3] = st->st_gid;
    r[4] = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
    r[5] = (int64_t)st->st_nlink;
}

/* read PATH OFFSET LIMIT  ->  bytes read, size of the file, mode */
static int do_read(char **a, int data, int64_t r[8]) {
    int fd = open_regular(a[0], O_RDONLY, 0);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0 || lseek(fd, atoll(a[1]), SEEK_SET) < 0) return errno;
    int64_t size = copy_bytes(fd, data, atoll(a[2]));
    if (size < 0) return errno;
    r[0] = size;
    r[1] = st.st_size;
    r[2] = st.st_mode;
    return 0;
}

/* write PATH OFFSET MODE: OFFSET -1 replaces the content, -2 appends */
static int do_write(char **a, int data, int64_t r[8]) {
    long long offset = atoll(a[1]);
    int flags = O_WRONLY | O_CREAT | (offset == -1 ? O_TRUNC : offset == -2 ? O_APPEND : 0);
    mode_t mode = (mode_t)atoll(a[2]);
    struct stat before;
    bool existed = stat(a[0], &before) == 0;
    int fd = open_regular(a[0], flags, mode & 07777);
    if (fd < 0) return errno;
    if (offset > 0 && lseek(fd, offset, SEEK_SET) < 0) return errno;
    if (lseek(data, 0, SEEK_SET) < 0) return errno;
    r[0] = copy_bytes(data, fd, INT64_MAX);
    if (r[0] < 0) return errno;
    if (!existed && fchmod(fd, mode & 07777) < 0) return errno;
    return close(fd) < 0 ? errno : 0;
}

static int do_stat(char **a, int data, int64_t r[8]) {
    (void)data;
    struct stat st;
    if (lstat(a[0], &st) < 0) return errno;
    describe(&st, r);
    return 0;
}

/* list PATH  ->  number of entries; each in the data as six numbers, the name, and its link's target */
static int do_list(char **a, int data, int64_t r[8]) {
    int fd = open_path(a[0], O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return errno;
    int copy = dup(data);
    DIR *dir = fdopendir(fd);
    FILE *out = copy < 0 ? NULL : fdopen(copy, "w");
    if (!dir || !out) return errno;
    for (struct dirent *e; (e = readdir(dir));) {
        struct stat st;
        int64_t n[8] = {0};
        char target[PATH_MAX] = "";
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (fstatat(fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0) continue;  /* removed meanwhile */
        if (S_ISLNK(st.st_mode) && readlinkat(fd, e->d_name, target, sizeof target - 1) < 0) continue;
        describe(&st, n);
        fprintf(out, "%ld %ld %ld %ld %ld %ld", n[0], n[1], n[2], n[3], n[4], n[5]);
        fputc(0, out);
        fputs(e->d_name, out);
        fputc(0, out);
        fputs(target, out);
        fputc(0, out);
        if (ferror(out) || ++r[0] >= 1000000) break;
    }
    closedir(dir);
    return fclose(out) == 0 ? 0 : errno;
}

static int do_mkdir(char **a, int data, int64_t r[8]) {
    (void)data;
    mode_t mode = (mode_t)atoll(a[1]) & 07777;
    if (mkdir(a[0], mode) == 0) return chmod(a[0], mode) < 0 ? errno : 0;
    if (errno == EEXIST) r[0] = 1;
    return errno;
}

static int do_remove(char **a, int data, int64_t r[8]) {
    (void)data, (void)r;
    if (unlink(a[0]) == 0) return 0;
    if (errno != EISDIR) return errno;
    return rmdir(a[0]) == 0 ? 0 : errno;
}

static int do_move(char **a, int data, int64_t r[8]) {
    (void)data, (void)r;
    return rename(a[0], a[1]) == 0 ? 0 : errno;
}

static const struct {
    const char *name;
    int arguments;
    int (*run)(char **, int, int64_t[8]);
} operations[] = {
    {"read", 3, do_read}, {"write", 3, do_write}, {"stat", 1, do_stat}, {"list", 1, do_list},
    {"mkdir", 2, do_mkdir}, {"remove", 1, do_remove}, {"move", 2, do_move},
};

struct outcome {
    int error;
    int64_t result[8];
};

static void child(struct shim *s, int which, char **arguments, int data, int status) __attribute__((noreturn));
static void child(struct shim *s, int which, char **arguments, int data, int status) {
    struct outcome o = {0};
    if (setns(s->init_pidfd, CLONE_NEWUSER | CLONE_NEWNS) < 0) o.error = errno;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (!o.error && (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)) o.error = errno;
    const char *stage = o.error ? NULL : confine(0, 0, false);
    if (stage) o.error = errno;
    umask(0);
    if (!o.error) o.error = operations[which].run(arguments, data, o.result);
    if (write(status, &o, sizeof o) < 0) _exit(1);
    _exit(0);
}

int file_operation(struct shim *s, char **field, int count, int data, int64_t result[8]) {
    int which = -1, pair[2];
    for (size_t i = 0; count > 0 && i < sizeof operations / sizeof *operations; i++)
        if (!strcmp(field[0], operations[i].name) && count == operations[i].arguments + 1) which = (int)i;
    if (which < 0) return EINVAL;
    if (status_pair(pair) < 0) return errno;
    pid_t pid = clone_child(0, s->cgroup, NULL);
    if (pid == 0) {
        close(pair[0]);
        child(s, which, field + 1, data, pair[1]);
    }
    int error = errno;
    close(pair[1]);
    struct outcome o = {.error = EIO};
    if (pid > 0) {
        ssize_t size = recv(pair[0], &o, sizeof o, 0);
        error = size == sizeof o ? o.error : ECANCELED;  /* killed: over the memory limit, or with the sandbox */
        memcpy(result, o.result, sizeof o.result);
        waitpid(pid, NULL, 0);
    }
    close(pair[0]);
    return error;
}
