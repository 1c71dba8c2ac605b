/* waits.so, a plugin of CRIU: no system call of a program returns because of a dump or a restore.
 *
 * CRIU stops threads in the middle of system calls. Where a call can be entered again as it was, CRIU sets the registers
 * back to its beginning; it ends all others with EINTR. This plugin undoes that, in CRIU and as the tracer that CRIU is:
 *
 *   dump     all threads are stopped ▸ note who was interrupted in which call ▸ CRIU works ▸ take the calls up ▸ let go
 *            (into the freezer, where CRIU was started with its file among its descriptors)
 *   restore  all threads are back, stopped ▸ take the calls up, by the file of the dump ▸ let go
 *
 * Owns: finding the threads, the file WAITS in the directory of images. Does not own: what is done to a thread (rearm.c).
 * Guarantee: a thread that is not found where it was left is not touched; nothing here makes a dump or a restore fail.
 *
 * The file comes from a dump of a sandbox that may be hostile, or from another host. All that it can do is to have a
 * thread enter a call, at an instruction of its own and with its own rights, which its registers in the other images can
 * as well.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "rearm.h"

#define WAITS "waits.img"
#define MAGIC 0x31746957 /* "Wit1" */
#define MAX_FILE (64 << 20)

/* CRIU's plugin interface, version 0.2: stages, hooks and the descriptor. */
enum { STAGE_DUMP = 0, STAGE_RESTORE = 2 };
enum { HOOK_RESTORED = 9, HOOK_STOPPED = 11, HOOKS = 13 };
struct plugin {
    const char *name;
    int (*init)(int stage);
    void (*exit)(int stage, int result);
    unsigned version, hook_count;
    void *hooks[HOOKS];
};
extern int criu_get_image_dir(void);
extern void protect_read(void) __attribute__((weak)); /* of written.so, where that is loaded */
extern void observe(pid_t pid) __attribute__((weak));

/* One of the file: a thread, where it is, and how its call goes on. sandbox/waits.py reads it, too. */
struct saved {
    int32_t process, thread;
    int32_t result, argument; /* of the call, and the one that is replaced; or -1 */
    uint64_t nr, ip, sp;
    int64_t left;
    struct place places[3];
};
struct head {
    uint32_t magic, count;
};

static struct waiting *found;
static struct saved *known;
static bool all_stopped;
static size_t count, room, known_count;

/* The number of a thread (of its process) in the innermost pid namespace; 0: it is gone. */
static int number_within(pid_t tid, const char *name) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/status", tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (size < 0) return 0;
    text[size] = 0;
    char *line = strstr(text, name);
    char *end = line ? strchr(line + 1, '\n') : NULL;
    if (!end) return 0;
    while (end > line && end[-1] >= '0' && end[-1] <= '9') end--; /* the last number: of the innermost namespace */
    return atoi(end);
}

static bool read_registers(pid_t tid, struct user_regs_struct *regs) {
    struct iovec into = {regs, sizeof *regs};
    return ptrace(PTRACE_GETREGSET, tid, (void *)NT_PRSTATUS, &into) == 0 && into.iov_len == sizeof *regs;
}

static void each_thread(pid_t pid, void (*act)(pid_t pid, pid_t tid, struct user_regs_struct *regs)) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    if (!tasks) return;
    struct user_regs_struct regs;
    for (struct dirent *entry; (entry = readdir(tasks));) {
        pid_t tid = atoi(entry->d_name);
        if (tid > 0 && read_registers(tid, &regs)) act(pid, tid, &regs);
    }
    closedir(tasks);
}

static void note(pid_t pid, pid_t tid, struct user_regs_struct *regs) {
    if (!is_interrupted(regs)) return;
    if (count == room) {
        struct waiting *more = realloc(found, (room + 64) * sizeof *found);
        if (!more) return;
        found = more;
        room += 64;
    }
    struct waiting *one = &found[count];
    memset(one, 0, sizeof *one);
    one->pid = pid;
    one->tid = tid;
    one->regs = *regs;
    if (find_rest(one)) count++;
}

/* CRIU has stopped every thread of the sandbox, and done nothing to any yet. */
static int on_stopped(int pid) {
    all_stopped = true;
    if (observe) observe(pid);
    each_thread(pid, note);
    attach(pid); /* it runs for a moment: what the inspector noted of it has been read */
    return 0;
}

/* CRIU gave up before it had stopped every thread. Those that it has stopped are the ones that we trace. */
static void note_tracees(void) {
    DIR *processes = opendir("/proc");
    for (struct dirent *entry; processes && (entry = readdir(processes));)
        if (atoi(entry->d_name) > 0) each_thread(atoi(entry->d_name), note);
    if (processes) closedir(processes);
}

static void save(void) {
    int fd = openat(criu_get_image_dir(), WAITS, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return;
    FILE *file = fdopen(fd, "w");
    struct head head = {MAGIC, (uint32_t)count};
    fwrite(&head, sizeof head, 1, file);
    for (size_t i = 0; i < count; i++) {
        struct waiting *one = &found[i];
        struct saved entry = {.process = one->process, .thread = one->thread, .nr = one->regs.orig_rax,
                              .ip = one->regs.rip, .sp = one->regs.rsp, .result = (int32_t)one->regs.rax,
                              .left = one->left};
        entry.argument = find_places(one, entry.places);
        fwrite(&entry, sizeof entry, 1, file);
    }
    fclose(file);
}

static void load(void) {
    struct stat status;
    struct head head;
    int fd = openat(criu_get_image_dir(), WAITS, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return;
    if (fstat(fd, &status) == 0 && status.st_size <= MAX_FILE && read(fd, &head, sizeof head) == sizeof head &&
        head.magic == MAGIC && (size_t)status.st_size == sizeof head + head.count * sizeof *known) {
        size_t size = head.count * sizeof *known;
        known = malloc(size ? size : 1);
        if (known && read(fd, known, size) == (ssize_t)size) known_count = head.count;
    }
    close(fd);
}

/* CRIU leaves a call that it ended with EINTR behind its instruction, and one that it repeats at the beginning. */
static bool is_at(const struct saved *entry, const struct user_regs_struct *regs) {
    if (regs->rsp != entry->sp) return false;
    return (regs->rip == entry->ip && (int64_t)regs->rax == -EINTR) ||
           (regs->rip == entry->ip - 2 && regs->rax == entry->nr);
}

static void take_up_restored(pid_t pid, pid_t tid, struct user_regs_struct *regs) {
    int number = number_within(tid, "\nNSpid:");
    for (size_t i = 0; i < known_count; i++) {
        struct saved *entry = &known[i];
        if (entry->thread != number || !is_at(entry, regs)) continue;
        struct waiting one = {.process = entry->process, .thread = entry->thread, .pid = pid, .tid = tid,
                              .regs = *regs, .left = entry->left};
        one.regs.rip = entry->ip;
        one.regs.rax = (uint64_t)(int64_t)entry->result;
        one.regs.orig_rax = entry->nr;
        if (!is_interrupted(&one.regs)) return;
        wait_from_now(&one);
        take_up(&one);
        return;
    }
}

/* All threads of all processes are back, and stopped behind the last call of the restorer. */
static int on_restored(int pid) {
    each_thread(pid, take_up_restored);
    return 0;
}

static int begin(int stage) {
    count = known_count = 0;
    all_stopped = false;
    use_notes();
    if (stage == STAGE_RESTORE) load();
    return 0;
}

/* A frozen thread cannot enter a call: what is to be frozen in the end is so only now. */
static void freeze(void) {
    for (int fd = 3; fd < MAX_DESCRIPTOR; fd++) {
        struct statfs of;
        char path[64], target[PATH_MAX];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (fstatfs(fd, &of) || of.f_type != CGROUP2_SUPER_MAGIC) continue;
        ssize_t size = readlink(path, target, sizeof target - 1);
        target[size < 0 ? 0 : size] = 0;
        char *name = strrchr(target, '/');
        if (name && strcmp(name, "/cgroup.freeze") == 0 && write(fd, "1", 1) != 1) continue;
    }
}

static void take_up_live(struct waiting *one) {
    struct user_regs_struct now;
    if (!read_registers(one->tid, &now)) return;
    struct saved here = {.nr = one->regs.orig_rax, .ip = one->regs.rip, .sp = one->regs.rsp};
    if (!is_untouched(one, &now) && !is_at(&here, &now)) return;
    struct user_regs_struct stopped = one->regs;
    take_up(one);
    if ((int64_t)one->regs.orig_rax < 0) { /* its time was over meanwhile; what is restored ends it in its turn */
        one->regs.orig_rax = stopped.orig_rax;
        one->regs.rax = stopped.rax;
    }
}

/* A dump has ended, well or not, and its threads are still stopped; or a restore has, and they run. */
static void end(int stage, int result) {
    if (stage == STAGE_DUMP && result != 0 && !all_stopped) note_tracees();
    if (stage == STAGE_DUMP && result == 0 && protect_read) protect_read(); /* before anything is written to take calls up */
    for (size_t i = 0; i < count; i++) {
        if (result == 0) {
            found[i].thread = number_within(found[i].tid, "\nNSpid:");
            found[i].process = number_within(found[i].tid, "\nNStgid:");
        }
    }
    for (size_t i = 0; i < count; i++)
        if (found[i].runs) take_up_live(&found[i]);
    if (stage == STAGE_DUMP && result == 0) save();
    for (size_t i = 0; i < count; i++) /* the later, the more exactly: these are told how long, the others until when */
        if (!found[i].runs) take_up_live(&found[i]);
    if (stage == STAGE_DUMP) freeze();
    restore_sockets();
}

__attribute__((visibility("default"))) struct plugin CR_PLUGIN_DESC = {
    .name = "pagurus-waits",
    .init = begin,
    .exit = end,
    .version = 2 << 8,
    .hook_count = HOOKS,
    .hooks = {[HOOK_RESTORED] = (void *)on_restored, [HOOK_STOPPED] = (void *)on_stopped},
};
