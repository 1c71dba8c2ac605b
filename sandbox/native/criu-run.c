/* pagurus-criu-run: start CRIU where its kernel-feature cache is kept.
 *
 * Owns: a private mount namespace in which a tmpfs directory of ours lies over /run (CRIU caches what the
 * kernel can do only on a tmpfs /run, and without the cache probes it for 40 ms each time), and, for a
 * restore, a cgroup namespace rooted at the cgroup that we were started in (with manage-cgroups=ignore the
 * restored tasks inherit CRIU's).
 * Does not own: which namespaces and cgroup it is started in.
 *
 * usage: pagurus-criu-run CACHE_DIR cgroupns|- PROGRAM [ARGUMENT...]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

static int fail(const char *what)
{
	fprintf(stderr, "pagurus-criu-run: %s: %s\n", what, strerror(errno));
	return 1;
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
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return fail("make mounts private");
	if (mount(argv[1], "/run", NULL, MS_BIND, NULL))
		return fail("bind the cache over /run");
	/* CRIU silently restores a lower nofile limit when its own hard limit is lower. */
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
	char *environment[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", NULL };
	execve(argv[3], argv + 3, environment);
	return fail(argv[3]);
}
