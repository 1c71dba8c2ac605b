/* written.so, loaded into a CRIU that dumps before its own libraries: it dumps only pages that were written.
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
 * Owns: the two files. Does not own: what the daemon makes of them. Guarantee: without the first file, on a kernel without
 * PAGEMAP_SCAN and of processes that it does not name, CRIU gets the kernel's answer as it is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
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
enum { IS_WPALLOWED = 1 << 0, IS_WRITTEN = 1 << 1, IS_PRESENT = 1 << 3, IS_SWAPPED = 1 << 4 };
enum { WP_MATCHING = 1 << 0 };
#define OUR_MASK (IS_WPALLOWED | IS_WRITTEN | IS_PRESENT)

extern int criu_get_image_dir(void);

static struct order_record *orders;
static size_t order_count;
static bool read_orders;
static FILE *answers;
static struct range {
    pid_t pid;
    uint64_t start, end;
} *read_ranges;
static size_t range_count;

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

/* Those regions that CRIU is to have, in place; returns how many. */
static long sift(pid_t pid, struct page_region *regions, long count, uint64_t asked, bool skip) {
    long kept = 0;
    for (long i = 0; i < count; i++) {
        struct page_region one = regions[i];
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

static void remember(pid_t pid, uint64_t start, uint64_t end) {
    struct range *more = realloc(read_ranges, (range_count + 1) * sizeof *more);
    if (!more) {
        answer(pid, FAILED, start, end);
        return;
    }
    read_ranges = more;
    read_ranges[range_count++] = (struct range){pid, start, end};
}

static long scan(int fd, struct pm_scan_arg *asked, uint32_t what) {
    pid_t pid = owner(fd);
    struct pm_scan_arg wide = *asked;
    wide.return_mask |= OUR_MASK;
    long count = syscall(SYS_ioctl, fd, PAGEMAP_SCAN_CALL, &wide);
    if (count < 0) return count;
    if (what & PROTECT) remember(pid, asked->start, wide.walk_end);
    struct page_region *regions = (struct page_region *)(uintptr_t)wide.vec;
    count = sift(pid, regions, count, asked->return_mask, what & SKIP);
    fflush(answers);
    asked->walk_end = wide.walk_end;
    return count;
}

/* The dump is good and every task stopped still: what is written from now on is for the next one. Not earlier, since CRIU
 * asks for some pages twice. */
__attribute__((visibility("default"))) void protect_read(void) {
    for (size_t i = 0; i < range_count; i++) {
        struct range one = read_ranges[i];
        char path[32];
        snprintf(path, sizeof path, "/proc/%d/pagemap", one.pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        answer(one.pid, fd >= 0 && protect(fd, one.start, one.end) ? READ : FAILED, one.start, one.end);
        if (fd >= 0) close(fd);
    }
    range_count = 0;
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
