/* pagurus-criu-run: start CRIU where its kernel-feature cache is kept.
 *
 * Owns: a private mount namespace in which a tmpfs directory of ours lies over /run (CRIU caches what the
 * kernel can do only on a tmpfs /run, and without the cache probes it for 40 ms each time), and, for a
 * restore, a cgroup namespace rooted at the cgroup that we were started in (with manage-cgroups=ignore the
 * restored tasks inherit CRIU's). Its priority.
 * Does not own: which namespaces and cgroup it is started in.
 *
 * usage: pagurus-criu-run CACHE_DIR cgroupns|- PROGRAM [ARGUMENT...]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TREE_CLONE 1		/* OPEN_TREE_CLONE */
#define TREE_RECURSIVE 0x8000	/* AT_RECURSIVE */
#define MOVE_FROM_FD 4		/* MOVE_MOUNT_F_EMPTY_PATH */

static int fail(const char *what)
{
	fprintf(stderr, "pagurus-criu-run: %s: %s\n", what, strerror(errno));
	return 1;
}

/* Lay `cache` over /run. The cache lies in the daemon's run directory, as do the sandboxes' roots: where that
 * directory is itself below /run, its part of the old /run stays in sight. */
static int cover_run(const char *cache)
{
	char real[PATH_MAX], kept[PATH_MAX] = "";
	int tree = -1;

	if (!realpath(cache, real))
		return fail(cache);
	if (strncmp(real, "/run/", 5) == 0) {
		snprintf(kept, sizeof(kept), "/run/%.*s", (int)strcspn(real + 5, "/"), real + 5);
		tree = syscall(SYS_open_tree, AT_FDCWD, kept, TREE_CLONE | TREE_RECURSIVE | O_CLOEXEC);
		if (tree < 0)
			return fail(kept);
	}
	if (mount(real, "/run", NULL, MS_BIND, NULL))
		return fail("bind the cache over /run");
	if (tree < 0)
		return 0;
	if (mkdir(kept, 0700) && errno != EEXIST)
		return fail(kept);
	if (syscall(SYS_move_mount, tree, "", AT_FDCWD, kept, MOVE_FROM_FD))
		return fail("keep the run directory in sight");
	return 0;
}

int main(int argc, char **argv)
{
	if (argc < 4) {
		fprintf(stderr, "usage: %s CACHE_DIR cgroupns|- PROGRAM [ARGUMENT...]\n", argv[0]);
		return 2;
	}
	int flags = CLONE_NEWNS;
	if (strcmp(argv[2], "cgroupns") == 0)
		flags |= CLONE_NEWCGROUP;
	if (unshare(flags))
		return fail("unshare");
	/* Not private: what is unmounted or mounted on the sandbox's root meanwhile is so here. */
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL))
		return fail("make mounts slaves");
	if (cover_run(argv[1]))
		return 1;
	/* CRIU silently restores a lower nofile limit when its own hard limit is lower. */
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
	/* While CRIU works the sandbox stands still: go first. CRIU restores the niceness of what it restores. */
	setpriority(PRIO_PROCESS, 0, -10);
	char *environment[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", NULL };
	execve(argv[3], argv + 3, environment);
	return fail(argv[3]);
}
