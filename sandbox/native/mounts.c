/* The sandbox's file tree: an overlay whose layers are idmapped, and the view that pid 1 gets of it.
 *
 * The layers are handed to overlayfs as /proc/self/fd/N of idmapped clones: paths would make it use
 * the host's own, unmapped mounts, and it then turns silently read-only. fsuid and fsgid
 * are at the sandbox's offset while mounting, because overlayfs creates its work directory then; the
 * secure bit keeps the capabilities that a changed fsuid would otherwise drop.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define MNT_DETACH 2  /* from sys/mount.h, which this C library cannot include beside linux/mount.h */
int mount(const char *, const char *, const char *, unsigned long, const void *);
int umount2(const char *, int);

static int tree_clone(const char *path) {
    return (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
}

static int write_map(pid_t pid, const char *file, uid_t base) {
    char path[64], line[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    int size = snprintf(line, sizeof line, "0 %u %u\n", base, ID_RANGE);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t done = write(fd, line, size);
    int saved = errno;
    close(fd);
    errno = saved;
    return done == size ? 0 : -1;
}

int write_maps(pid_t pid, uid_t base) {
    return write_map(pid, "gid_map", base) || write_map(pid, "uid_map", base) ? -1 : 0;
}

/* A user namespace that exists only as a mapping: its one process ends at once. */
const char *make_idmap(struct shim *s) {
    int pidfd = -1;
    pid_t pid = clone_child(CLONE_NEWUSER, -1, &pidfd);
    if (pid < 0) return "idmap clone";
    if (pid == 0) {
        for (;;) pause();
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int mapped = write_maps(pid, s->uid_base);
    int fd = mapped == 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    int saved = errno;
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(pidfd);
    errno = saved;
    if (fd < 0) return "idmap map";
    if (s->idmap >= 0) close(s->idmap);
    s->idmap = fd;
    return NULL;
}

/* An idmapped clone of the directory PATH, attached on top of it for a moment: before Linux 6.15 overlayfs takes only
 * layers that are attached in the caller's mount namespace. Nobody but us sees it there: our copy of the host's mounts
 * gives nothing back. */
static int layer_fd(struct shim *s, const char *path) {
    int fd = tree_clone(path);
    if (fd < 0) return -1;
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = s->idmap};
    if (syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0 ||
        syscall(SYS_move_mount, fd, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS) < 0) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

/* Overlayfs has clones of its own by now. */
static void let_layer_go(int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    umount2(path, MNT_DETACH);
    close(fd);
}

static int mount_layers(struct shim *s, int runtime, int base, int upper) {
    char options[512];
    snprintf(options, sizeof options,
             "lowerdir=/proc/self/fd/%d:/proc/self/fd/%d,upperdir=/proc/self/fd/%d/upper,"
             "workdir=/proc/self/fd/%d/work,index=off,xino=on,redirect_dir=on,metacopy=off",
             runtime, base, upper, upper);
    int bits = prctl(PR_GET_SECUREBITS);
    prctl(PR_SET_SECUREBITS, bits | SECBIT_NO_SETUID_FIXUP);
    setfsgid(s->uid_base);
    setfsuid(s->uid_base);
    int failed = mount("overlay", s->root, "overlay", MS_NOATIME, options);
    int saved = errno;
    setfsuid(0);
    setfsgid(0);
    prctl(PR_SET_SECUREBITS, bits);
    errno = saved;
    return failed;
}

/* Runtime layer above the image: an image can then neither hide /.pagurus/init nor bring devices to /dev. */
const char *mount_overlay(struct shim *s, const char *tree, const char *image) {
    const char *const paths[] = {s->layer, image, tree};
    static const char *const stages[] = {"runtime layer", "image layer", "upper layer"};
    const char *stage = NULL;
    int layers[3], count = 0;
    while (!stage && count < 3) {
        layers[count] = layer_fd(s, paths[count]);
        if (layers[count] < 0) stage = stages[count];
        else count++;
    }
    if (!stage && mount_layers(s, layers[0], layers[1], layers[2]) < 0) stage = "overlay";
    int saved = errno;
    while (count > 0) let_layer_go(layers[--count]);
    errno = saved;
    if (!stage) s->mounted = true;
    return stage;
}

/* What is mounted at the root from now on is also seen by programs that were started before, with a mount namespace of
 * their own: a CRIU that waits for a restore. */
const char *share_root(const struct shim *s) {
    if (mount(s->root, s->root, NULL, MS_BIND, NULL) < 0) return "root mount";
    return mount(NULL, s->root, NULL, MS_SHARED, NULL) < 0 ? "share root" : NULL;
}

/* An idmapped clone of the directory FROM at bind->source, which exists: what the sandbox gets is a bind of it. */
const char *make_bind(struct shim *s, const char *from, bool read_only, struct bind *bind) {
    int tree = tree_clone(from);
    if (tree < 0) return "mount source";
    struct mount_attr attr = {
        .attr_set = MOUNT_ATTR_IDMAP | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (read_only ? MOUNT_ATTR_RDONLY : 0),
        .userns_fd = s->idmap,
    };
    const char *stage = NULL;
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0)
        stage = "mount id mapping";
    else if (syscall(SYS_move_mount, tree, "", AT_FDCWD, bind->source, MOVE_MOUNT_F_EMPTY_PATH) < 0)
        stage = "mount place";
    int saved = errno;
    close(tree);
    errno = saved;
    return stage;
}

/* Mount points for control groups of v1, which have a hierarchy each. */
static const char *make_points(const char *place, struct mount_attr *attr) {
    static const char *const names[] = {"memory", "cpu", "cpuacct", "cpuset", "pids"};
    char path[PATH_MAX + 16];
    if (mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=4k") < 0) return "mount tmpfs";
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", place, names[i]);
        if (mkdir(path, 0755) < 0) return "view place";
    }
    return syscall(SYS_mount_setattr, AT_FDCWD, place, 0, attr, sizeof *attr) < 0 ? "view" : NULL;
}

/* What a sandbox sees of the kernel: a mount of sysfs in our network namespace, or a clone of a directory of the host's
 * control groups, which cannot be idmapped. Nobody writes to either. */
const char *make_view(const char *from, struct bind *bind) {
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC};
    if (strcmp(from, "tmpfs") == 0) return make_points(bind->source, &attr);
    if (strcmp(from, "sysfs") == 0) {
        if (mount("sysfs", bind->source, "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) return "mount sysfs";
        return syscall(SYS_mount_setattr, AT_FDCWD, bind->source, 0, &attr, sizeof attr) < 0 ? "view" : NULL;
    }
    int tree = tree_clone(from);
    if (tree < 0) return "view source";
    const char *stage = NULL;
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0) stage = "view";
    else if (syscall(SYS_move_mount, tree, "", AT_FDCWD, bind->source, MOVE_MOUNT_F_EMPTY_PATH) < 0) stage = "view place";
    int saved = errno;
    close(tree);
    errno = saved;
    return stage;
}

static int open_below(int root, const char *path) {
    struct open_how how = {
        .flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* Makes the directory PATH below ROOT with what is missing above it; links are not followed. */
static int make_below(int root, const char *path) {
    char part[PATH_MAX];
    int at = open_below(root, "/");
    for (const char *next = path; at >= 0 && *next;) {
        while (*next == '/') next++;
        size_t size = strcspn(next, "/");
        if (!size) break;
        memcpy(part, next, size);
        part[size] = 0;
        next += size;
        int below = open_below(at, part);
        if (below < 0 && errno == ENOENT && mkdirat(at, part, 0755) == 0) below = open_below(at, part);
        int saved = errno;
        close(at);
        errno = saved;
        at = below;
    }
    if (at >= 0) close(at);
    return at;
}

/* The directories on which the binds will be mounted, as the sandbox's root would make them. */
const char *make_targets(const struct shim *s) {
    if (!s->bind_count) return NULL;
    int root = open(s->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) return "mount target";
    int bits = prctl(PR_GET_SECUREBITS);
    prctl(PR_SET_SECUREBITS, bits | SECBIT_NO_SETUID_FIXUP);
    setfsgid(s->uid_base);
    setfsuid(s->uid_base);
    int failed = 0;
    for (int i = 0; i < s->bind_count && !failed; i++)
        failed = !s->bind[i].view && make_below(root, s->bind[i].target) < 0;
    int saved = errno;
    setfsuid(0);
    setfsgid(0);
    prctl(PR_SET_SECUREBITS, bits);
    close(root);
    errno = saved;
    return failed ? "mount target" : NULL;
}

/* Opens the sources of the binds in the mount namespace of pid 1, while it still has the rights to reach them. */
const char *open_binds(const struct shim *s, int sources[BINDS_MAX]) {
    for (int i = 0; i < s->bind_count; i++) {
        sources[i] = open(s->bind[i].source, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (sources[i] < 0) return "mount source";
    }
    return NULL;
}

static bool is_own_place(const struct join *join) {
    return join->from && join->to && strcmp(join->from, join->to) == 0;
}

/* A directory or a file below the root, which is the working directory; links are not followed. */
static int open_place(const char *path) {
    struct open_how how = {
        .flags = O_PATH | O_CLOEXEC,
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

/* Mounts what is at one place at another one too; the root of a service on itself. */
static const char *place_join(const struct join *join) {
    if (!join->from || !join->to) {
        errno = ENOMEM;
        return "join";
    }
    unsigned all = join->recursive ? AT_RECURSIVE : 0;
    int from = open_place(join->from), to = from < 0 ? -1 : open_place(join->to);
    int tree = to < 0 ? -1 : (int)syscall(SYS_open_tree, from, "", AT_EMPTY_PATH | all | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_RDONLY};
    int failed = tree < 0;
    if (!failed && join->read_only) failed = syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0;
    if (!failed)
        failed = syscall(SYS_move_mount, tree, "", to, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0;
    int saved = errno;
    if (tree >= 0) close(tree);
    if (to >= 0) close(to);
    if (from >= 0) close(from);
    errno = saved;
    return failed ? is_own_place(join) ? "service root" : "join" : NULL;
}

static const char *place_all(const struct join *joins, int count, bool own) {
    const char *stage = NULL;
    for (int i = 0; i < count && !stage; i++)
        if (is_own_place(&joins[i]) == own) stage = place_join(&joins[i]);
    return stage;
}

/* In the mount namespace of a living pid 1, at whose root we are. */
const char *join_here(const struct join *joins, int count) {
    const char *stage = place_all(joins, count, true);
    return stage ? stage : place_all(joins, count, false);
}

/* Likewise: takes the mount at PATH away, and what is mounted in it. Whoever uses it keeps it. */
const char *part_here(const char *path) {
    int place = open_below(AT_FDCWD, path);
    if (place < 0) return "mount place";
    int failed = fchdir(place) < 0 || umount2(".", MNT_DETACH) < 0;
    int saved = errno;
    close(place);
    errno = saved;
    return failed ? "part" : NULL;
}

static bool lies_in(const char *path, const char *directory) {
    size_t size = strlen(directory);
    return strncmp(path, directory, size) == 0 && path[size] == '/';
}

/* Puts one bind, of which SOURCES has a detached mount by now, below the root, which is the working directory. */
static const char *place_bind(const struct shim *s, int sources[BINDS_MAX], int i) {
    int target = open_below(AT_FDCWD, s->bind[i].target);
    int failed = target < 0 || syscall(SYS_move_mount, sources[i], "", target, "",
                                       MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0;
    int saved = errno;
    if (target >= 0) close(target);
    close(sources[i]);
    sources[i] = -1;
    errno = saved;
    return failed ? "mount target" : NULL;
}

/* All but those that lie in a join, which is placed later and would hide them. */
static const char *place_binds(const struct shim *s, int sources[BINDS_MAX]) {
    for (int i = 0; i < s->bind_count; i++) {
        int tree = (int)syscall(SYS_open_tree, sources[i], "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
        if (tree < 0) return "mount source";
        close(sources[i]);
        sources[i] = tree;
        bool later = false;
        for (int j = 0; j < s->join_count && !later; j++)
            later = !is_own_place(&s->join[j]) && s->join[j].to && lies_in(s->bind[i].target, s->join[j].to);
        const char *stage = later ? NULL : place_bind(s, sources, i);
        if (stage) return stage;
    }
    return NULL;
}

/* The binds that wait: all, or those in which PATH lies. What they lie in themselves is there. */
static const char *place_waiting(const struct shim *s, int sources[BINDS_MAX], const char *path) {
    const char *stage = NULL;
    for (int i = 0; i < s->bind_count && !stage; i++)
        if (sources[i] >= 0 && (!path || lies_in(path, s->bind[i].target))) stage = place_bind(s, sources, i);
    return stage;
}

/* The joins, which come outer ones first, and the binds in them. */
static const char *place_rest(const struct shim *s, int sources[BINDS_MAX]) {
    const char *stage = NULL;
    for (int i = 0; i < s->join_count && !stage; i++) {
        if (is_own_place(&s->join[i])) continue;
        if (s->join[i].to) stage = place_waiting(s, sources, s->join[i].to);
        if (!stage) stage = place_join(&s->join[i]);
    }
    return stage ? stage : place_waiting(s, sources, NULL);
}

/* The paths that Docker masks and makes read-only by default; and what tells of other sandboxes: the sizes of all in
 * the accounts of btrfs, the host's files behind loop devices. */
static const char *const masked[] = {
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
    "/sys/devices/virtual/block", "/sys/devices/virtual/powercap", "/sys/firmware", "/sys/fs/btrfs",
};
static const char *const read_only[] = {
    "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger",
};

static int bind_read_only(const char *from, const char *to) {
    if (mount(from, to, NULL, MS_BIND, NULL) < 0) return errno == ENOENT ? 0 : -1;
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_RDONLY};
    return (int)syscall(SYS_mount_setattr, AT_FDCWD, to, 0, &attr, sizeof attr);
}

/* The tree may come from a sandbox that has replaced what we are about to use: then it does not start. */
static const char *check_runtime(void) {
    struct stat st;
    if (lstat("/dev/null", &st) < 0 || !S_ISCHR(st.st_mode) || st.st_rdev != makedev(1, 3)) return "/dev/null was replaced";
    if (lstat("/dev/pts", &st) < 0 || !S_ISDIR(st.st_mode)) return "/dev/pts was replaced";
    if (lstat("/.pagurus/empty", &st) < 0 || !S_ISDIR(st.st_mode)) return "/.pagurus was replaced";
    return NULL;
}

static const char *mask_proc(void) {
    for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) {
        struct stat st;
        if (lstat(masked[i], &st) < 0) continue;
        if (bind_read_only(S_ISDIR(st.st_mode) ? "/.pagurus/empty" : "/dev/null", masked[i]) < 0) return "mask";
    }
    for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++)
        if (bind_read_only(read_only[i], read_only[i]) < 0) return "read-only path";
    return NULL;
}

/* Called by pid 1 to be, in its own mount namespace, with the working directory on the overlay.
 *
 * The mounts that a less privileged mount namespace inherits are locked; pivot_root wants one that
 * is not, hence the clone of the overlay's mount on top of itself. proc is mounted while the host's
 * is still there: the kernel grants a user namespace a proc mount only where one is already visible. */
const char *enter_root(const struct shim *s, int sources[BINDS_MAX]) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) return "private mounts";
    int root = tree_clone(".");
    if (root < 0) return "root clone";
    if (syscall(SYS_move_mount, root, "", AT_FDCWD, ".", MOVE_MOUNT_F_EMPTY_PATH) < 0) return "root mount";
    if (fchdir(root) < 0) return "root directory";
    close(root);
    struct stat st;
    if (lstat("proc", &st) < 0 || !S_ISDIR(st.st_mode)) return "/proc was replaced";
    if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) return "mount proc";
    const char *stage = place_all(s->join, s->join_count, true);
    if (!stage) stage = place_binds(s, sources);
    if (stage) return stage;
    if (syscall(SYS_pivot_root, ".", ".") < 0) return "pivot_root";
    if (umount2(".", MNT_DETACH) < 0) return "detach host root";
    if (chdir("/") < 0) return "root directory";
    stage = check_runtime();
    if (stage) {
        errno = EINVAL;
        return stage;
    }
    if (mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5,max=256") < 0)
        return "mount devpts";
    stage = mask_proc();
    return stage ? stage : place_rest(s, sources);
}
