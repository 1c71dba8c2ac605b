/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of /dev/tty, in a CRIU that dumps (part of written.so).
 *
 * Such a descriptor is one of the terminal itself, except by its name and its file. CRIU knows it by these, and dumps it
 * for the leader of a session alone. So it is shown those of the terminal, and restores it by them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define FIRST_TERMINAL 136 /* major number of the first 256 */

static pid_t observed; /* a process of the sandbox */

EXPORTED void observe(pid_t pid) {
    if (!observed) observed = pid;
}

/* The number of the terminal of the sandbox that is behind a descriptor of /dev/tty, and its file; -1: it is another. */
static int terminal_of(int fd, struct stat *file) {
    char path[64];
    unsigned device;
    if (!observed || syscall(SYS_fstat, fd, file) || !S_ISCHR(file->st_mode) || file->st_rdev != makedev(5, 0)) return -1;
    if (syscall(SYS_ioctl, fd, TIOCGDEV, &device)) return -1;
    int number = (int)minor(device);
    snprintf(path, sizeof path, "/proc/%d/root/dev/pts/%d", observed, number);
    struct stat found;
    if (fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) || !S_ISCHR(found.st_mode) ||
        found.st_rdev != makedev(FIRST_TERMINAL, number))
        return -1;
    *file = found;
    return number;
}

EXPORTED int fstat64(int fd, struct stat64 *into) {
    int result = (int)syscall(SYS_fstat, fd, into), before = errno;
    struct stat file;
    if (result == 0 && into->st_rdev == makedev(5, 0) && terminal_of(fd, &file) >= 0) memcpy(into, &file, sizeof file);
    errno = before;
    return result;
}

EXPORTED ssize_t readlink(const char *path, char *into, size_t size) {
    ssize_t result = syscall(SYS_readlinkat, AT_FDCWD, path, into, size);
    struct stat file;
    char name[32];
    int fd, before = errno, number = -1;
    if (result == sizeof "/dev/tty" - 1 && sscanf(path, "/proc/self/fd/%d", &fd) == 1) number = terminal_of(fd, &file);
    if (number >= 0) {
        size_t length = (size_t)snprintf(name, sizeof name, "/dev/pts/%d", number);
        memcpy(into, name, result = (ssize_t)(length < size ? length : size));
    }
    errno = before;
    return result;
}
