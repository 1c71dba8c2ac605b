/* The mounts of the host that the shim's mount namespace does not need.
 *
 * A mount namespace holds every mount that it was copied with: without this, a disk, an image file or a network file
 * system that was mounted on the host would stay in use for as long as any sandbox lives, also after the host has
 * unmounted it (mounts that are not shared tell nobody that they go). What stays: mounts on the way to what the shim and
 * CRIU open, what lies in the sandbox's own run directory, and kinds that hold no device (the kernel's own, tmpfs).
 */
#define _GNU_SOURCE
#include "shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>

/* CRIU and its libraries may be the system's own. */
static const char *const system_paths[] = {"/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/tmp"};
static const char *const deviceless[] = {
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs",
    "fusectl", "hugetlbfs", "mqueue", "proc", "pstore", "ramfs", "securityfs", "selinuxfs", "sysfs", "tmpfs", "tracefs",
};

struct mounted {
    char *point, *kind;
    bool stays;
};

static bool at_or_below(const char *path, const char *directory) {
    size_t size = strlen(directory);
    if (size == 1) return true;  /* "/" */
    return strncmp(path, directory, size) == 0 && (path[size] == 0 || path[size] == '/');
}

static bool is_deviceless(const char *kind) {
    for (size_t i = 0; i < sizeof deviceless / sizeof *deviceless; i++)
        if (strcmp(kind, deviceless[i]) == 0) return true;
    return false;
}

static bool is_needed(const struct mounted *m, const char *run_dir, const char *const *paths, size_t count) {
    if (is_deviceless(m->kind) || at_or_below(m->point, run_dir)) return true;
    for (size_t i = 0; i < count; i++)
        if (at_or_below(paths[i], m->point)) return true;
    for (size_t i = 0; i < sizeof system_paths / sizeof *system_paths; i++)
        if (at_or_below(system_paths[i], m->point)) return true;
    return false;
}

/* The kernel writes blanks and backslashes of a path as \NNN. */
static void unescape(char *text) {
    char *to = text;
    for (const char *from = text; *from; to++) {
        if (from[0] == '\\' && from[1] && from[2] && from[3]) {
            *to = (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = 0;
}

/* Mount point and kind of a line of mountinfo, which is cut up. */
static bool parse(char *line, struct mounted *m) {
    char *rest = strstr(line, " - ");
    if (!rest) return false;
    *rest = 0;
    char *save;
    m->point = strtok_r(line, " ", &save);
    for (int i = 0; m->point && i < 4; i++) m->point = strtok_r(NULL, " ", &save);
    m->kind = strtok_r(rest + 3, " ", &save);
    if (!m->point || !m->kind) return false;
    unescape(m->point);
    return true;
}

static void leave(const char *text, size_t size, const char *run_dir, const char *const *paths, size_t count) {
    size_t most = 0, found = 0;
    for (size_t i = 0; i < size; i++) most += text[i] == '\n';
    struct mounted *all = calloc(most + 1, sizeof *all);
    char *copy = strndup(text, size), *save;
    if (!all || !copy) goto out;
    for (char *line = strtok_r(copy, "\n", &save); line && found < most; line = strtok_r(NULL, "\n", &save))
        if (parse(line, &all[found])) found++;
    for (size_t i = 0; i < found; i++) all[i].stays = is_needed(&all[i], run_dir, paths, count);
    for (size_t i = 0; i < found; i++) {
        bool hidden = all[i].stays;  /* a path names the uppermost mount: one that is needed must not go for another */
        for (size_t j = 0; j < found && !hidden; j++) hidden = all[j].stays && strcmp(all[i].point, all[j].point) == 0;
        if (!hidden) umount2(all[i].point, MNT_DETACH | UMOUNT_NOFOLLOW);  /* may be gone with one above it */
    }
out:
    free(copy);
    free(all);
}

/* Unmount, in our namespace, all that nothing of ours lies on. What fails stays mounted. */
void leave_unneeded(const struct shim *s) {
    char run_dir[PATH_MAX];
    snprintf(run_dir, sizeof run_dir, "%s", s->root);
    char *slash = strrchr(run_dir, '/');
    if (!slash || slash == run_dir) return;
    *slash = 0;
    const char *const paths[] = {run_dir, s->layer, s->tree, s->image};
    FILE *table = fopen("/proc/self/mountinfo", "re");
    if (!table) return;
    char *text = NULL;
    size_t size = 0;
    ssize_t got = getdelim(&text, &size, 0, table);
    fclose(table);
    if (got > 0) leave(text, (size_t)got, run_dir, paths, sizeof paths / sizeof *paths);
    free(text);
}
