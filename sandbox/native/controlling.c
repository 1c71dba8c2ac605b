/* SPDX-License-Identifier: Apache-2.0 */
/* Controlling terminals, in a CRIU that restores (part of rooted.so and terminals.so).
 *
 * A process gets its controlling terminal from its parent. CRIU opens terminals when all processes are there, and gives
 * them to the leaders of sessions only. Here a leader has its terminal before its children are made:
 *
 *   setsid()                  the leader makes the terminal, and holds both sides in descriptors that nobody else uses
 *   openat(.../pts/ptmx)      whoever has the master gets it from the leader
 *   ioctl(TIOCSCTTY)          CRIU gives it to the leader: it has it, and lets go of its two descriptors
 *
 * Which terminals these are is in the file TERMINALS of the directory of images (sandbox/criu/carried/controlling.py). The
 * path of a master begins with "./", once more than the number of its terminal.
 *
 * Guarantee: a leader that cannot make its terminal gets it from CRIU, as without this.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define TERMINALS "terminals.log"
#define MAX_TERMINALS 256 /* of a devpts (mounts.c) */

struct entry {
    int32_t leader, number, held; /* its number in the sandbox, the terminal's, and the first of its two descriptors */
    struct winsize size;          /* with another, CRIU would have the kernel signal it */
    char master[236];             /* the path of the master */
};

extern int criu_get_image_dir(void) __attribute__((weak));
static struct entry table[MAX_TERMINALS];
static int held = -1; /* of this process, or of the one that it was made by */
static int *own_held; /* the same, in memory that is empty in a child */

static int count(void) {
    static int result = -1;
    if (result >= 0) return result;
    result = 0;
    if (!criu_get_image_dir) return 0;
    int fd = (int)syscall(SYS_openat, criu_get_image_dir(), TERMINALS, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return 0;
    ssize_t size = syscall(SYS_read, fd, table, sizeof table);
    close(fd);
    result = size > 0 ? (int)((size_t)size / sizeof *table) : 0;
    for (int i = 0; i < result; i++) table[i].master[sizeof table->master - 1] = 0;
    return result;
}

/* The kernel hands out the lowest number: we take them up to ours. */
static int master_of(int number, const char *path) {
    int taken[MAX_TERMINALS], n = 0, result = -1;
    while (n < MAX_TERMINALS && result < 0) {
        int own = -1, fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_NOCTTY | O_CLOEXEC);
        if (fd < 0) break;
        if (ioctl(fd, TIOCGPTN, &own) == 0 && own == number) result = fd;
        else taken[n++] = fd;
        if (own < 0 || own >= number) break; /* it is no master, or ours is taken */
    }
    while (n) close(taken[--n]);
    return result;
}

static void let_go(void) {
    unsigned device;
    int before = errno;
    for (int fd = held; fd < held + 2; fd++) /* in a child another one of CRIU's may have taken its place */
        if (syscall(SYS_ioctl, fd, TIOCGDEV, &device) == 0) close(fd);
    held = -1;
    errno = before;
}

/* In a child: the terminal of its parent. CRIU opens the images of a child before it does anything else with it. */
static void drop_inherited(void) {
    if (held >= 0 && *own_held != held) let_go();
}

static void make(const struct entry *own) {
    const int unlocked = 0;
    own_held = mmap(NULL, sizeof *own_held, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own_held == MAP_FAILED || madvise(own_held, sizeof *own_held, MADV_WIPEONFORK)) return;
    int master = master_of(own->number, own->master);
    if (master < 0) return;
    int slave = ioctl(master, TIOCSPTLCK, &unlocked) ? -1 : ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave >= 0 && ioctl(master, TIOCSWINSZ, &own->size) == 0 && fcntl(own->held, F_GETFD) < 0 &&
        fcntl(own->held + 1, F_GETFD) < 0 && syscall(SYS_ioctl, slave, TIOCSCTTY, 0) == 0 &&
        dup3(master, own->held, O_CLOEXEC) >= 0) {
        held = *own_held = own->held;
        dup3(slave, held + 1, O_CLOEXEC);
    }
    if (slave >= 0) close(slave);
    close(master);
}

EXPORTED pid_t setsid(void) {
    pid_t result = (pid_t)syscall(SYS_setsid);
    int before = errno;
    drop_inherited();
    for (int i = 0; result >= 0 && i < count(); i++) {
        if (table[i].leader != result) continue;
        int lock = (int)syscall(SYS_openat, criu_get_image_dir(), TERMINALS, O_RDONLY | O_CLOEXEC);
        if (lock < 0 || flock(lock, LOCK_EX)) break; /* one after the other: numbers are handed out */
        make(&table[i]);
        close(lock);
        break;
    }
    errno = before;
    return result;
}

EXPORTED int ioctl(int fd, unsigned long request, ...) {
    va_list more;
    va_start(more, request);
    void *argument = va_arg(more, void *);
    va_end(more);
    int result = (int)syscall(SYS_ioctl, fd, request, argument);
    if (request == TIOCSCTTY && held >= 0) let_go();
    return result;
}

/* The master that a path of so many "./" means, from its leader; -1: it has none. */
static int master_from_leader(int number, int flags) {
    for (int i = 0; i < count(); i++) {
        if (table[i].number != number) continue;
        int leader = (int)syscall(SYS_pidfd_open, table[i].leader, 0), own = -1;
        int fd = leader < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, leader, table[i].held, 0);
        if (leader >= 0) close(leader);
        if (fd >= 0 && syscall(SYS_ioctl, fd, TIOCGPTN, &own) == 0 && own == number &&
            fcntl(fd, F_SETFD, flags & O_CLOEXEC ? FD_CLOEXEC : 0) == 0 && fcntl(fd, F_SETFL, flags) == 0)
            return fd;
        if (fd >= 0) close(fd);
    }
    return -1;
}

EXPORTED int openat64(int directory, const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | __O_TMPFILE)) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    drop_inherited();
    int times = 0;
    while (path[2 * times] == '.' && path[2 * times + 1] == '/') times++;
    size_t size = strlen(path), end = sizeof "pts/ptmx" - 1;
    if (times && size > end && strcmp(path + size - end, "pts/ptmx") == 0) {
        int before = errno, fd = master_from_leader(times - 1, flags);
        if (fd >= 0) return fd;
        errno = before;
    }
    return (int)syscall(SYS_openat, directory, path, flags, mode);
}
