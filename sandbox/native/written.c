/* written.so, loaded into a CRIU that dumps before its own libraries: it waits before the first task is stopped, it
 * dumps only pages that were written, and it dumps processes that read or write a terminal from its background.
 *
 * What CRIU does until then depends on no task and takes some milliseconds; so the daemon asks for a dump as soon as the
 * one before is over, and CRIU says that it is ready and waits for an answer, by a notification of its own protocol.
 *
 * CRIU asks the kernel which pages of a process there are (PAGEMAP_SCAN), while every task stands still. Of the processes
 * that the daemon names in a file in the directory of images, the answer is made to lack the pages that were not written
 * since the last dump; they are listed in another file instead, and the daemon takes them from there.
 *
 *   the kernel's answer ▸ take out what was not written ▸ CRIU ▸ at the end, protect what was, for the next dump
 *
 * A page counts as unwritten only where its mapping is registered with a userfaultfd for asynchronous protection
 * (PAGE_IS_WPALLOWED), the page is in memory (in a file's mapping a page that was dropped keeps its mark), and the kernel
 * says that nothing has written to it. So a mapping that is new, moved, or of a process that has executed another program
 * or was forked is dumped whole, by itself.
 *
 * And CRIU reads /proc/PID/smaps for the flags of mappings alone, for which the kernel counts all pages. Of the same
 * processes it gets a text that the inspector's program tells (ebpf/mappings.h), where the daemon knows all letters.
 *
 * Owns: these files, the moment of waiting. Does not own: what the daemon makes of them. Guarantee: without the first file,
 * on a kernel without PAGEMAP_SCAN and of processes that it does not name, CRIU gets the kernel's answer as it is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/memfd.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tracked.h"

struct page_region {
    uint64_t start, end, categories;
};
struct pm_scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN_CALL _IOWR('f', 16, struct pm_scan_arg)
enum { IS_WPALLOWED = 1 << 0, IS_WRITTEN = 1 << 1, IS_FILE = 1 << 2, IS_PRESENT = 1 << 3, IS_SWAPPED = 1 << 4 };
enum { WP_MATCHING = 1 << 0 };
enum { PAGE_SIZE = 4096, SWAPPED_BIT = 62, SWAP_TYPES = 31, MARKER = 31 }; /* of /proc/PID/pagemap; swapops.h */
enum { FLAGS = 64, MAX_DESCRIPTOR = 64 };
#define OUR_MASK (IS_WPALLOWED | IS_WRITTEN | IS_PRESENT)

extern int criu_get_image_dir(void);

static struct order_record *orders;
static size_t order_count;
static bool read_orders;
static FILE *answers;
struct ranges {
    struct range {
        pid_t pid;
        uint64_t start, end;
    } *of;
    size_t count;
};
static struct ranges read_ranges; /* whose written pages are to be protected */
static struct ranges anonymous;   /* mappings of no file, of each process in order */

/* The letters of each flag of a mapping, as the daemon has learned them; zeros where it has not. */
static char letters[FLAGS][2];
static int mappings_program = -1;

static int find_program(void);

static void load(void) {
    struct stat status;
    read_orders = true;
    int fd = openat(criu_get_image_dir(), ORDERS, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return;
    if (fstat(fd, &status) == 0 && status.st_size % sizeof *orders == 0 &&
        (size_t)status.st_size <= MAX_ORDERS * sizeof *orders && (orders = malloc((size_t)status.st_size + 1)) &&
        read(fd, orders, (size_t)status.st_size) == status.st_size)
        order_count = (size_t)status.st_size / sizeof *orders;
    close(fd);
    int into = order_count ? openat(criu_get_image_dir(), ANSWERS, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600) : -1;
    if (into < 0 || !(answers = fdopen(into, "a"))) order_count = 0;
    int known = order_count ? openat(criu_get_image_dir(), LETTERS, O_RDONLY | O_CLOEXEC | O_NOFOLLOW) : -1;
    if (known >= 0 && read(known, letters, sizeof letters) == sizeof letters) mappings_program = find_program();
    if (known >= 0) close(known);
}

/* The process whose page map this is; 0: it is something else. */
static pid_t owner(int fd) {
    char path[32], target[64];
    int pid, end = 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(path, target, sizeof target - 1);
    if (size <= 0) return 0;
    target[size] = 0;
    return sscanf(target, "/proc/%d/pagemap%n", &pid, &end) == 1 && end && !target[end] ? pid : 0;
}

static uint32_t ordered(int fd) {
    pid_t pid = owner(fd);
    for (size_t i = 0; pid && i < order_count; i++)
        if (orders[i].pid == pid) return orders[i].what;
    return 0;
}


static bool answer(pid_t pid, enum answer what, uint64_t start, uint64_t end) {
    struct answer_record record = {pid, what, start, end};
    return fwrite(&record, sizeof record, 1, answers) == 1;
}

static bool append(struct ranges *ranges, pid_t pid, uint64_t start, uint64_t end) {
    if (!(ranges->count & (ranges->count - 1))) { /* room for twice as many */
        struct range *more = realloc(ranges->of, (ranges->count ? 2 * ranges->count : 1) * sizeof *more);
        if (!more) return false;
        ranges->of = more;
    }
    ranges->of[ranges->count++] = (struct range){pid, start, end};
    return true;
}

/* ------------------------------------------------------------------ waiting */

enum { CRIU_SOCKET = 3 };
/* criu_resp {type: NOTIFY, success: true, notify: {script: "ready"}}; CRIU ignores what the answer says, and so do we. */
static const char ready[] = "\10\6\20\1*\7\n\5ready";

/* CRIU sets this handler right before it stops the first task. */
__attribute__((visibility("default"))) int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    static int (*next)(int, const struct sigaction *, struct sigaction *);
    static bool waited;
    char answer[64];
    if (!next) next = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
    if (number == SIGALRM && !waited) {
        waited = true;
        if (send(CRIU_SOCKET, ready, sizeof ready - 1, MSG_NOSIGNAL) < 0 || recv(CRIU_SOCKET, answer, sizeof answer, 0) <= 0)
            _exit(1); /* nobody waits for a dump any more */
    }
    return next(number, new, old);
}

/* ------------------------------------------------------------------ processes that a terminal has stopped */

/* CRIU knows SIGSTOP and SIGTSTP alone as signals that stop a process. It is told SIGTSTP where SIGTTIN or SIGTTOU has
 * stopped one; then it asks what to write into the images, which is told as it is, and sends it SIGSTOP in the end. */
enum { MAX_STOPPED = 4096 };
static struct stopped {
    pid_t tid;
    int number;
    bool named;
} stopped[MAX_STOPPED];
static size_t stopped_count;

static struct stopped *find_stopped(pid_t tid) {
    for (size_t i = 0; i < stopped_count; i++)
        if (stopped[i].tid == tid) return &stopped[i];
    return NULL;
}

static void rename_stop(pid_t tid, siginfo_t *info) {
    if ((info->si_code & 0xFFFF) >> 8 != PTRACE_EVENT_STOP) return;
    if (info->si_signo != SIGTTIN && info->si_signo != SIGTTOU) return;
    struct stopped *one = find_stopped(tid);
    if (!one && stopped_count == MAX_STOPPED) return;
    if (!one) one = &stopped[stopped_count++];
    bool again = one->named;
    *one = (struct stopped){tid, info->si_signo, !again};
    if (!again) info->si_signo = SIGTSTP;
}

__attribute__((visibility("default"))) long ptrace(enum __ptrace_request request, ...) {
    static long (*next)(enum __ptrace_request, ...);
    va_list list;
    va_start(list, request);
    pid_t pid = va_arg(list, pid_t);
    void *address = va_arg(list, void *), *data = va_arg(list, void *);
    va_end(list);
    if (!next) next = (long (*)(enum __ptrace_request, ...))dlsym(RTLD_NEXT, "ptrace");
    long result = next(request, pid, address, data);
    if (request == PTRACE_GETSIGINFO && result == 0) rename_stop(pid, data);
    return result;
}

__attribute__((visibility("default"))) int kill(pid_t pid, int number) {
    struct stopped *one = number == SIGSTOP || number == SIGTSTP ? find_stopped(pid) : NULL;
    return (int)syscall(SYS_kill, pid, one ? one->number : number);
}

/* ------------------------------------------------------------------ mappings without their pages */

struct mapping {
    uint64_t start, end, flags;
};
#define BUFFER (1 << 16) /* bytes of a read: more than the kernel gives at once; it gives whole mappings */

/* Which of the descriptors that we were started with is the inspector's program that tells mappings; -1: none. */
static int find_program(void) {
    for (int fd = 3; fd < MAX_DESCRIPTOR; fd++) {
        char path[32], target[32];
        struct bpf_prog_info info = {0};
        union bpf_attr attr = {0};
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(path, target, sizeof target - 1);
        target[size < 0 ? 0 : size] = 0;
        if (strcmp(target, "anon_inode:bpf-prog")) continue;
        attr.info.bpf_fd = (unsigned)fd;
        attr.info.info_len = sizeof info;
        attr.info.info = (uint64_t)(uintptr_t)&info;
        if (syscall(SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &attr, sizeof attr) == 0 && !strcmp(info.name, "tell_mappings")) return fd;
    }
    return -1;
}

/* A descriptor that the mappings of a process can be read from; or -1. */
static int tell(pid_t pid) {
    union bpf_iter_link_info which = {.task = {.tid = (unsigned)pid}};
    union bpf_attr attr = {0};
    attr.link_create.prog_fd = (unsigned)mappings_program;
    attr.link_create.attach_type = BPF_TRACE_ITER;
    attr.link_create.iter_info = (uint64_t)(uintptr_t)&which;
    attr.link_create.iter_info_len = sizeof which.task;
    int link = (int)syscall(SYS_bpf, BPF_LINK_CREATE, &attr, sizeof attr);
    if (link < 0) return -1;
    memset(&attr, 0, sizeof attr);
    attr.iter_create.link_fd = (unsigned)link;
    int iterator = (int)syscall(SYS_bpf, BPF_ITER_CREATE, &attr, sizeof attr);
    close(link);
    return iterator;
}

static char *read_whole(int fd, size_t *size) {
    size_t room = 1 << 16;
    char *content = malloc(room);
    ssize_t part = content ? 1 : -1;
    *size = 0;
    while (part > 0) {
        if (*size + 1 >= room) {
            char *more = realloc(content, room * 2);
            if (!more) break;
            content = more;
            room *= 2;
        }
        part = read(fd, content + *size, room - *size - 1);
        if (part > 0) *size += (size_t)part;
    }
    if (part != 0) {
        free(content);
        return NULL;
    }
    content[*size] = 0;
    return content;
}

/* All mappings that an iterator tells; where they end. A process that has more than one buffer of the kernel's holds is
 * told from the last buffer's beginning again and again, never to an end. */
static char *read_mappings(int iterator, size_t *size) {
    const size_t one = sizeof(struct mapping);
    size_t room = 0;
    char *content = NULL;
    uint64_t last = 0;
    for (*size = 0;;) {
        if (*size + BUFFER > room) {
            char *more = realloc(content, room = 2 * room + BUFFER);
            if (!more) break;
            content = more;
        }
        ssize_t part = read(iterator, content + *size, room - *size);
        if (part < 0 || part % (ssize_t)one) break;
        struct mapping *told = (struct mapping *)(void *)(content + *size);
        if (part == 0 || (*size && told->start <= last)) return content;
        *size += (size_t)part;
        last = told[(size_t)part / one - 1].start;
    }
    free(content);
    return NULL;
}

static bool write_flags(FILE *into, uint64_t flags) {
    fputs("VmFlags:", into);
    for (int bit = 0; bit < FLAGS; bit++) {
        if (!(flags >> bit & 1)) continue;
        if (!letters[bit][0]) return false;
        fprintf(into, " %.2s", letters[bit]);
    }
    return fputs(" \n", into) >= 0;
}

/* Of no file, nor of shared memory, which have a device, nor the kernel's own. */
static void note_anonymous(pid_t pid, const char *line, uint64_t start, uint64_t end) {
    struct range *last = anonymous.count ? &anonymous.of[anonymous.count - 1] : NULL;
    const char *name = strchr(line, '[');
    unsigned major, minor;
    if (sscanf(line, "%*s %*s %*s %x:%x", &major, &minor) != 2 || major || minor) return;
    if (name && strncmp(name, "[heap", 5) && strncmp(name, "[stack", 6) && strncmp(name, "[anon:", 6)) return;
    if (last && last->pid == pid && last->end == start)
        last->end = end;
    else
        append(&anonymous, pid, start, end);
}

/* What `maps` says, with the flags of each mapping behind it. */
static bool join(pid_t pid, char *maps, const struct mapping *told, size_t count, FILE *into) {
    size_t next = 0;
    for (char *line = maps, *end; (end = strchr(line, '\n')); line = end + 1) {
        unsigned long start, stop;
        *end = 0;
        if (sscanf(line, "%lx-%lx ", &start, &stop) != 2) return false;
        bool kernels = strstr(line, "[vsyscall]"); /* no mapping of the process */
        if (!kernels) note_anonymous(pid, line, start, stop);
        if (!kernels && (next == count || told[next].start != start || told[next].end != stop)) return false;
        if (fprintf(into, "%s\n", line) < 0 || (!kernels && !write_flags(into, told[next++].flags))) return false;
    }
    return next == count;
}

/* The text of smaps but for how many pages there are, which takes the kernel as long as there is memory; or -1. */
static int brief_smaps(int directory, pid_t pid) {
    int fd = (int)syscall(SYS_openat, directory, "maps", O_RDONLY | O_CLOEXEC), iterator = fd < 0 ? -1 : tell(pid);
    size_t size = 0, told_size = 0;
    char *maps = iterator < 0 ? NULL : read_whole(fd, &size), *told = maps ? read_mappings(iterator, &told_size) : NULL;
    if (fd >= 0) close(fd);
    if (iterator >= 0) close(iterator);
    int made = told ? (int)syscall(SYS_memfd_create, "smaps", MFD_CLOEXEC) : -1;
    FILE *into = made < 0 ? NULL : fdopen(dup(made), "w");
    bool good = into && join(pid, maps, (struct mapping *)(void *)told, told_size / sizeof(struct mapping), into);
    if (into && fclose(into)) good = false;
    free(maps);
    free(told);
    if (made >= 0 && (!good || lseek(made, 0, SEEK_SET))) {
        close(made);
        return -1;
    }
    return made;
}

/* The process whose directory in /proc this is, if it is one that the daemon named; else 0. */
static pid_t ordered_directory(int fd) {
    char path[32], target[64];
    int pid, end = 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(path, target, sizeof target - 1);
    target[size < 0 ? 0 : size] = 0;
    if (sscanf(target, "/proc/%d%n", &pid, &end) != 1 || target[end]) return 0;
    for (size_t i = 0; i < order_count; i++)
        if (orders[i].pid == pid) return pid;
    return 0;
}

static int open_at(int directory, const char *path, int flags, mode_t mode) {
    if (directory >= 0 && path && !strcmp(path, "smaps")) {
        if (!read_orders && criu_get_image_dir() >= 0) load();
        pid_t pid = mappings_program < 0 ? 0 : ordered_directory(directory);
        int brief = pid ? brief_smaps(directory, pid) : -1;
        if (brief >= 0) {
            answer(pid, BRIEF, 0, 0);
            fflush(answers);
            return brief;
        }
    }
    return (int)syscall(SYS_openat, directory, path, flags, mode);
}

__attribute__((visibility("default"))) int openat64(int directory, const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, mode_t) : 0;
    va_end(list);
    return open_at(directory, path, flags, mode);
}

/* ------------------------------------------------------------------ pages */

/* Whether there are no pages in a region, only entries that say what they were: in a mapping of a file the kernel notes
 * so that a page was protected when it lets go of it, and reports it as swapped. The file still has the page. */
static bool is_empty(int fd, const struct page_region *region) {
    static uint64_t entries[512];
    uint64_t page = region->start / PAGE_SIZE, end = region->end / PAGE_SIZE;
    while (page < end) {
        uint64_t left = end - page, count = left < 512 ? left : 512;
        if (pread(fd, entries, count * sizeof *entries, (off_t)(page * sizeof *entries)) != (ssize_t)(count * sizeof *entries))
            return false;
        for (uint64_t i = 0; i < count; i++)
            if ((entries[i] >> SWAPPED_BIT & 1) == 0 || (entries[i] & SWAP_TYPES) != MARKER) return false;
        page += count;
    }
    return true;
}

/* Those regions that CRIU is to have, in place; returns how many. */
static long sift(int fd, pid_t pid, struct page_region *regions, long count, uint64_t asked, bool skip) {
    long kept = 0;
    for (long i = 0; i < count; i++) {
        struct page_region one = regions[i];
        if ((one.categories & (IS_PRESENT | IS_SWAPPED)) == IS_SWAPPED && is_empty(fd, &one)) continue;
        bool unwritten = (one.categories & OUR_MASK) == (IS_WPALLOWED | IS_PRESENT);
        if (skip && unwritten && answer(pid, UNWRITTEN, one.start, one.end)) continue;
        one.categories &= asked;
        if (kept && regions[kept - 1].end == one.start && regions[kept - 1].categories == one.categories)
            regions[kept - 1].end = one.end;
        else
            regions[kept++] = one;
    }
    return kept;
}

/* Protects the written pages of a range. With room for regions, which nobody reads: without it the kernel would also mark
 * where no pages are, and give the range page tables for that. */
static bool protect(int fd, uint64_t start, uint64_t end) {
    static struct page_region unread[1024];
    struct pm_scan_arg ask = {.size = sizeof ask, .flags = WP_MATCHING, .end = end, .category_mask = IS_WRITTEN,
                              .category_anyof_mask = IS_PRESENT | IS_SWAPPED, .return_mask = IS_WRITTEN,
                              .vec = (uint64_t)(uintptr_t)unread, .vec_len = sizeof unread / sizeof *unread};
    for (ask.start = start; ask.start < end; ask.start = ask.walk_end)
        if (syscall(SYS_ioctl, fd, PAGEMAP_SCAN_CALL, &ask) < 0 || ask.walk_end <= ask.start) return false;
    return true;
}

/* Where the stretch ends that begins at `start` and lies in anonymous mappings of a process, or in none that we know. */
static uint64_t stretch(pid_t pid, uint64_t start, uint64_t end, bool *within) {
    static size_t next; /* where the last question was answered: they come in order */
    struct range *all = anonymous.of;
    if (next >= anonymous.count || all[next].pid != pid || (next && all[next - 1].pid == pid && all[next - 1].end > start)) next = 0;
    while (next < anonymous.count && (all[next].pid != pid || all[next].end <= start)) next++;
    *within = next < anonymous.count && all[next].start <= start;
    if (next == anonymous.count) return end;
    uint64_t edge = *within ? all[next].end : all[next].start;
    return edge < end ? edge : end;
}

/* The kernel's answer, sooner: to tell pages of files it looks up each page, which takes longer than all else, and where
 * no file is mapped there are none. */
static long ask(int fd, pid_t pid, struct pm_scan_arg *wide) {
    struct pm_scan_arg part = *wide;
    long count = 0, more = 0;
    if (!(wide->category_mask & wide->category_inverted & IS_FILE) || wide->return_mask & IS_FILE || wide->max_pages)
        return syscall(SYS_ioctl, fd, PAGEMAP_SCAN_CALL, wide);
    for (wide->walk_end = wide->start; wide->walk_end < wide->end && count < (long)wide->vec_len; count += more) {
        bool within;
        part.start = wide->walk_end;
        part.end = stretch(pid, part.start, wide->end, &within);
        part.category_mask = within ? wide->category_mask & ~(uint64_t)IS_FILE : wide->category_mask;
        part.category_inverted = within ? wide->category_inverted & ~(uint64_t)IS_FILE : wide->category_inverted;
        part.vec = wide->vec + (uint64_t)count * sizeof(struct page_region);
        part.vec_len = wide->vec_len - (uint64_t)count;
        more = syscall(SYS_ioctl, fd, PAGEMAP_SCAN_CALL, &part);
        if (more < 0) return more;
        if (part.walk_end <= part.start) break;
        wide->walk_end = part.walk_end;
    }
    return count;
}

static long scan(int fd, struct pm_scan_arg *asked, uint32_t what) {
    pid_t pid = owner(fd);
    struct pm_scan_arg wide = *asked;
    wide.return_mask |= OUR_MASK | IS_SWAPPED;
    long count = ask(fd, pid, &wide);
    if (count < 0) return count;
    if ((what & PROTECT) && !append(&read_ranges, pid, asked->start, wide.walk_end)) answer(pid, FAILED, asked->start, wide.walk_end);
    struct page_region *regions = (struct page_region *)(uintptr_t)wide.vec;
    count = sift(fd, pid, regions, count, asked->return_mask, what & SKIP);
    fflush(answers);
    asked->walk_end = wide.walk_end;
    return count;
}

/* The dump is good and every task stopped still: what is written from now on is for the next one. Not earlier, since CRIU
 * asks for some pages twice. */
__attribute__((visibility("default"))) void protect_read(void) {
    for (size_t i = 0; i < read_ranges.count; i++) {
        struct range one = read_ranges.of[i];
        char path[32];
        snprintf(path, sizeof path, "/proc/%d/pagemap", one.pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        answer(one.pid, fd >= 0 && protect(fd, one.start, one.end) ? READ : FAILED, one.start, one.end);
        if (fd >= 0) close(fd);
    }
    read_ranges.count = 0;
    if (answers) fflush(answers);
}

__attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    struct pm_scan_arg *asked = argument;
    if (request == PAGEMAP_SCAN_CALL && asked && asked->size == sizeof *asked && !asked->flags && asked->vec) {
        if (!read_orders && criu_get_image_dir() >= 0) load();
        uint32_t what = ordered(fd);
        if (what & (PROTECT | SKIP)) return (int)scan(fd, asked, what);
    }
    return (int)syscall(SYS_ioctl, fd, request, argument);
}
