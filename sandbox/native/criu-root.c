/* pagurus-criu-root: start CRIU in a root of its own, in which nothing of the host can be found.
 *
 * Owns: the private root. It is an empty tmpfs that gets what the arguments name, and the root of a new mount namespace
 * by pivot_root; all other mounts are gone from that namespace, not hidden. Its capabilities: what it restores from images
 * that a sandbox may have shaped, it restores without CAP_SYS_PTRACE. The links in /proc to the roots and files of
 * processes with more capabilities are then closed to it, so that /proc is no way back to the host. (It has every
 * capability over a sandbox, whose user namespace root has made.) Its priority.
 * Does not own: which namespaces and cgroup it is started in.
 *
 * usage: pagurus-criu-root [WHAT=WHERE...] PROGRAM [ARGUMENT...]
 *   ptrace=never   without CAP_SYS_PTRACE
 *   preload=PATH   a library that is loaded before CRIU's own; it must be one of the programs
 *   cgroupns=new   a cgroup namespace rooted where we were started (restored tasks inherit CRIU's cgroups)
 *   run=DIR        on a tmpfs, lies at /run: CRIU keeps there what it knows of the kernel, or probes it for 40 ms
 *   images=FD      a detached mount of the directory of images, at /images
 *   group=NAME:FD  likewise of the sandbox's control group in one hierarchy, at /groups/NAME
 *   leaf=NAME:CONTROLLERS  with cgroupns=new: go on to the cgroup NAME below /groups, and let the one above it have these
 *   program=PATH   read-only, at the same place: a directory, file or link that CRIU consists of; any number
 *   sandbox=DIR    the root of the sandbox, at /sandbox; what is mounted there later is seen
 *   mount=DIR      a directory that the sandbox gets from the host, at /mounts/0, /mounts/1 and so on
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define MNT_DETACH 2 /* from sys/mount.h, which this C library cannot include beside linux/mount.h */
#define UMOUNT_NOFOLLOW 8
#define PLACES_MAX 64
#define LINKS_MAX 8
#define PRIVATE (1 << 18) /* MS_PRIVATE */
int mount(const char *, const char *, const char *, unsigned long, const void *);
int umount2(const char *, int);

struct place {
    char path[PATH_MAX]; /* below the private root, without the first slash */
    int tree;            /* what is mounted there: a detached mount */
    int above;           /* and what is mounted upon that; -1: nothing */
    bool directory, read_only, slave;
};

static struct place places[PLACES_MAX];
static const char *linked[LINKS_MAX]; /* symbolic links on the way to programs: the same in the private root */
static int count, mounts, links;
static bool own_cgroups, no_ptrace;
static const char *leaf, *controllers;
static char preload[PATH_MAX + 16];

static void fail(const char *what) __attribute__((noreturn));
static void fail(const char *what) {
    fprintf(stderr, "pagurus-criu-root: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int take(const char *path) {
    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_NO_AUTOMOUNT);
    if (tree < 0) fail(path);
    return tree;
}

static int new_mount(const char *kind, const char *key, const char *value) {
    int fs = (int)syscall(SYS_fsopen, kind, FSOPEN_CLOEXEC);
    if (fs < 0 || syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, value, 0) < 0 ||
        syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        fail(kind);
    int tree = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, 0);
    if (tree < 0) fail(kind);
    close(fs);
    return tree;
}

static struct place *add(const char *at, int tree) {
    if (count == PLACES_MAX) {
        errno = E2BIG;
        fail(at);
    }
    struct stat st;
    if (fstat(tree, &st) < 0) fail(at);
    struct place *place = &places[count++];
    if (snprintf(place->path, sizeof place->path, "%s", at) >= (int)sizeof place->path) {
        errno = ENAMETOOLONG;
        fail(at);
    }
    place->tree = tree;
    place->above = -1;
    place->directory = S_ISDIR(st.st_mode);
    return place;
}

/* The overlay lies on a shared mount of its own. A clone of that one, which is a slave as all mounts here are, gets what
 * is mounted and unmounted there later; the overlay that lies there now is laid upon it again. */
static void add_sandbox(const char *path) {
    int overlay = take(path);
    if (umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW) < 0) fail("uncover the sandbox's root");
    struct place *place = add("sandbox", take(path));
    place->above = overlay;
    place->slave = true;
}

static void add_program(const char *path) {
    struct stat st;
    if (lstat(path, &st) < 0) fail(path);
    if (S_ISLNK(st.st_mode)) {
        if (links == LINKS_MAX) fail(path);
        linked[links++] = path;
    } else {
        add(path + 1, take(path))->read_only = true;
    }
}

static bool option(const char *word) {
    const char *value = strchr(word, '=');
    if (!value || word[0] == '/') return false;
    size_t size = (size_t)(++value - word);
    char at[32];
    if (strncmp(word, "cgroupns=", size) == 0) {
        own_cgroups = true;
    } else if (strncmp(word, "ptrace=", size) == 0) {
        no_ptrace = true;
    } else if (strncmp(word, "preload=", size) == 0) {
        snprintf(preload, sizeof preload, "LD_PRELOAD=%s", value);
    } else if (strncmp(word, "run=", size) == 0) {
        add("run", take(value));
    } else if (strncmp(word, "images=", size) == 0) {
        add("images", atoi(value));
    } else if (strncmp(word, "group=", size) == 0) {
        snprintf(at, sizeof at, "groups/%.*s", (int)strcspn(value, ":"), value);
        add(at, atoi(value + strcspn(value, ":") + 1));
    } else if (strncmp(word, "leaf=", size) == 0) {
        controllers = value + strcspn(value, ":");
        if (*controllers) controllers++;
        leaf = value;
    } else if (strncmp(word, "program=", size) == 0) {
        add_program(value);
    } else if (strncmp(word, "sandbox=", size) == 0) {
        add_sandbox(value);
    } else if (strncmp(word, "mount=", size) == 0) {
        snprintf(at, sizeof at, "mounts/%d", mounts++);
        add(at, take(value));
    } else {
        errno = EINVAL;
        fail(word);
    }
    return true;
}

/* Makes the mount point PATH, relative to the working directory, and what is missing above it. */
static void make_point(const char *path, bool directory) {
    char part[PATH_MAX];
    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        if (mkdir(part, 0755) < 0 && errno != EEXIST) fail(part);
    }
    if (directory ? mkdir(path, 0755) < 0 && errno != EEXIST : mknod(path, S_IFREG | 0600, 0) < 0) fail(path);
}

static void put(int tree, const char *path) {
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH) < 0) fail(path);
    close(tree);
}

static void fill(void) {
    make_point("tmp", true);
    make_point("dev", true);
    if (mknod("dev/null", S_IFCHR | 0666, makedev(1, 3)) < 0) fail("/dev/null");
    for (int i = 0; i < count; i++) {
        struct place *place = &places[i];
        make_point(place->path, place->directory);
        put(place->tree, place->path);
        struct mount_attr attr = {
            .attr_set = place->read_only ? MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID : 0,
            .propagation = place->slave ? 0 : PRIVATE,
        };
        if (syscall(SYS_mount_setattr, AT_FDCWD, place->path, 0, &attr, sizeof attr) < 0) fail(place->path);
        if (place->above >= 0) put(place->above, place->path);
    }
    for (int i = 0; i < links; i++) {
        char target[PATH_MAX];
        ssize_t size = readlink(linked[i], target, sizeof target - 1);
        if (size < 0) fail(linked[i]);
        target[size] = 0;
        if (symlink(target, linked[i] + 1) < 0) fail(linked[i]);
    }
}

static void make_root(void) {
    int root = new_mount("tmpfs", "mode", "0755");
    if (syscall(SYS_move_mount, root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0) fail("mount the root");
    if (fchdir(root) < 0) fail("enter the root");
    close(root);
    fill();
    if (syscall(SYS_pivot_root, ".", ".") < 0) fail("pivot_root");
    if (umount2(".", MNT_DETACH) < 0) fail("leave the host's root");
    if (chdir("/") < 0) fail("enter the root");
}

static void write_to(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) fail(path);
    close(fd);
}

/* Its namespace has the cgroup above as its root. That one may have controllers for those below once it is empty. */
static void enter_leaf(void) {
    char path[PATH_MAX];
    int size = (int)(controllers - leaf) - 1;
    snprintf(path, sizeof path, "/groups/%.*s/cgroup.procs", size, leaf);
    write_to(path, "0");
    snprintf(path, sizeof path, "/groups/%.*s/../cgroup.subtree_control", size, leaf);
    write_to(path, controllers);
}

int main(int argc, char **argv) {
    if (unshare(CLONE_NEWNS) < 0) fail("unshare");
    /* Not private: what is mounted or unmounted on the sandbox's root meanwhile is so here. */
    if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0) fail("make mounts slaves");
    int next = 1;
    while (next < argc && option(argv[next])) next++;
    if (next == argc) {
        errno = EINVAL;
        fail("no program");
    }
    add("proc", take("/proc"));
    add("dev/pts", new_mount("devpts", "ptmxmode", "0600"));  /* by which CRIU tells terminals of the host from others */
    if (own_cgroups && unshare(CLONE_NEWCGROUP) < 0) fail("cgroup namespace");
    make_root();
    if (leaf) enter_leaf();
    if (no_ptrace && prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) < 0) fail("bounding set");
    /* CRIU silently restores a lower nofile limit when its own hard limit is lower. */
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    /* While CRIU works the sandbox stands still: go first. CRIU restores the niceness of what it restores. */
    setpriority(PRIO_PROCESS, 0, -10);
    char *environment[] = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", *preload ? preload : NULL, NULL};
    execve(argv[next], argv + next, environment);
    fail(argv[next]);
}
