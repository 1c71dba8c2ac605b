/* SPDX-License-Identifier: Apache-2.0 */
/* Metadata calls by outcome, and the table of all file calls. Included by effects.c after matrix_names.h. */
#ifndef PAGURUS_BENCH_MATRIX_METADATA_H
#define PAGURUS_BENCH_MATRIX_METADATA_H

#include <linux/fs.h>

struct attributes { /* struct file_attr of file_setattr */
	unsigned long long xflags;
	unsigned int extent, nextents, project, cow;
};

static int flag_ioctl(int fd, int set)
{
	int flags = 0, result = E(ioctl(fd, FS_IOC_GETFLAGS, &flags));

	if (result < 0)
		return result;
	flags = set ? flags ^ FS_NODUMP_FL : flags & ~FS_NODUMP_FL;
	return E(ioctl(fd, FS_IOC_SETFLAGS, &flags));
}

static int xflag_ioctl(int fd)
{
	struct fsxattr attributes;
	int result = E(ioctl(fd, FS_IOC_FSGETXATTR, &attributes));

	if (result < 0)
		return result;
	attributes.fsx_xflags ^= FS_XFLAG_NODUMP;
	return E(ioctl(fd, FS_IOC_FSSETXATTR, &attributes));
}

static int file_setattr(const char *path)
{
	struct attributes now = { 0 };
	int result = E(syscall(468, AT_FDCWD, path, &now, sizeof(now), 0));

	if (result < 0)
		return result;
	now.xflags ^= FS_XFLAG_NODUMP;
	return E(syscall(469, AT_FDCWD, path, &now, sizeof(now), 0));
}

static int chmod_by_descriptor(int fd)
{
	char proc[64];

	own_path(proc, fd);
	return E(chmod(proc, 0500 | varied(0277)));
}

/* As the state was: what can be put back by the calls that everybody has. */
static void restore_metadata(const char *path, const struct stat *old)
{
	struct timespec times[2] = { old->st_atim, old->st_mtim };
	int fd = opened(path, O_RDONLY);

	removexattr(path, "user.now");
	removexattr(path, "system.posix_acl_access");
	setxattr(path, "user.before", "1", 1, 0);
	if (chown(path, old->st_uid, old->st_gid))
		perror("chown");
	flag_ioctl(fd, 0);
	chmod(path, old->st_mode & 07777);
	futimens(fd, times);
	close(fd);
}

static int meta_case(int (*call)(int fd, const char *path), enum outcome o)
{
	const char *path = o == CREATED ? FRESH : o == ZERO || o == ORPHAN ? GONE : o == FAILED ? "missing" : "third";
	char proc[64];
	struct stat old;
	int fd, result;

	if (o == CREATED || o == ZERO || o == ORPHAN) {
		fd = made(path, 0);
		fsetxattr(fd, "user.before", "1", 1, 0);
	} else if (o == FAILED) {
		fd = -1;
	} else {
		fd = opened(path, O_RDONLY);
		fstat(fd, &old);
	}
	if (o == ORPHAN) {
		unlink(path);
		own_path(proc, fd);
		path = proc;
	}
	result = call(fd, path);
	if (o == RESTORED)
		restore_metadata(path, &old);
	if (fd >= 0)
		close(fd);
	if (o == ZERO)
		unlink(path);
	return result;
}

static struct timespec past[2];
static struct timeval past_us[2];
static unsigned changing;

static const void *some_times(void)
{
	past[1].tv_sec = past_us[1].tv_sec = 1000 + varied(0xffffff);
	return past;
}

#define UID (1 + varied(1023))
#define META_CALLS(X) \
	X(chmod, E(syscall(SYS_chmod, path, 0500 | varied(0277)))) \
	X(fchmod, E(fchmod(fd, 0500 | varied(0277)))) \
	X(fchmodat, E(syscall(SYS_fchmodat, AT_FDCWD, path, 0500 | varied(0277)))) \
	X(fchmodat2, E(syscall(452, AT_FDCWD, path, 0500 | varied(0277), 0))) \
	X(chmod_descriptor, chmod_by_descriptor(fd)) \
	X(chown, E(chown(path, UID, 1))) \
	X(fchown, E(fchown(fd, UID, 2))) \
	X(lchown, E(lchown(path, UID, 3))) \
	X(fchownat, E(fchownat(AT_FDCWD, path, UID, 4, 0))) \
	X(fchownat_empty, E(fchownat(fd, "", UID, 5, AT_EMPTY_PATH))) \
	X(utime, (some_times(), E(syscall(SYS_utime, path, (long[2]){ 5, past[1].tv_sec })))) \
	X(utimes, (some_times(), E(syscall(SYS_utimes, path, past_us)))) \
	X(futimesat, (some_times(), E(syscall(SYS_futimesat, AT_FDCWD, path, past_us)))) \
	X(utimensat, E(utimensat(AT_FDCWD, path, some_times(), 0))) \
	X(utimensat_now, E(utimensat(AT_FDCWD, path, NULL, 0))) \
	X(futimens, E(futimens(fd, some_times()))) \
	X(setxattr, (changing = varied(0xffffff), E(setxattr(path, "user.now", &changing, 4, 0)))) \
	X(lsetxattr, (changing = varied(0xffffff), E(lsetxattr(path, "user.now", &changing, 4, 0)))) \
	X(fsetxattr, (changing = varied(0xffffff), E(fsetxattr(fd, "user.now", &changing, 4, 0)))) \
	X(setxattrat, set_xattr_at(path)) \
	X(removexattr, E(removexattr(path, "user.before"))) \
	X(lremovexattr, E(lremovexattr(path, "user.before"))) \
	X(fremovexattr, E(fremovexattr(fd, "user.before"))) \
	X(removexattrat, E(syscall(466, AT_FDCWD, path, 0, "user.before"))) \
	X(set_acl, E(setxattr(path, "system.posix_acl_access", acl, sizeof(acl), 0))) \
	X(ioctl_setflags, flag_ioctl(fd, 1)) \
	X(ioctl_fssetxattr, xflag_ioctl(fd)) \
	X(file_setattr, file_setattr(path)) \
	X(uring_setxattr, URING(.opcode = IORING_OP_SETXATTR, .fd = -1, .addr = AT("user.now"), .addr3 = AT(path), \
				.off = AT("uring"), .len = 5)) \
	X(uring_fsetxattr, URING(.opcode = IORING_OP_FSETXATTR, .fd = fd, .addr = AT("user.now"), .off = AT("uring"), \
				 .len = 5))

static int set_xattr_at(const char *path)
{
	struct {
		unsigned long value;
		unsigned int size, flags;
	} arguments = { AT(&changing), 4, 0 };

	changing = varied(0xffffff);
	return E(syscall(463, AT_FDCWD, path, 0, "user.now", &arguments, sizeof(arguments)));
}

#define X(id, expression) \
	static int meta_##id(int fd, const char *path) { (void)fd, (void)path; return expression; }
META_CALLS(X)
#undef X

/* ------------------------------------------------------------------ the table */

enum family { CONTENT, NAMES, LINKS, RENAMES, REMOVALS, METADATA, SHARED };

static const char *const family_names[] = { "content", "names", "links", "renames", "removals", "metadata",
					    "shared" };

struct file_call {
	enum family family;
	const char *name;
	union {
		int (*with_fd)(int fd, const char *path);
		int (*with_path)(const char *path);
		int (*with_two)(const char *from, const char *to);
	};
	int option;
	unsigned outcomes; /* bits */
};

#define ALL ((1 << OUTCOMES) - 1)
#define NO_ORPHAN (ALL & ~(1 << ORPHAN))

static const struct file_call file_calls[] = {
#define X(id, filled, ...) { CONTENT, #id, { .with_fd = data_##id }, filled, ALL },
	DATA_CALLS(X)
#undef X
#define X(id, ...) { NAMES, #id, { .with_path = make_##id }, 0, NO_ORPHAN },
	MAKE_CALLS(X)
#undef X
#define X(id, ...) { LINKS, #id, { .with_two = link_##id }, 0, NO_ORPHAN },
	LINK_CALLS(X)
#undef X
#define X(id, both, ...) { RENAMES, #id, { .with_two = rename_##id }, both, NO_ORPHAN },
	RENAME_CALLS(X)
#undef X
#define X(id, directory, ...) { REMOVALS, #id, { .with_path = remove_##id }, directory, ALL },
	REMOVE_CALLS(X)
#undef X
#define X(id, ...) { METADATA, #id, { .with_fd = meta_##id }, 0, ALL },
	META_CALLS(X)
#undef X
#define X(id, ...) { SHARED, #id, { .with_fd = shared_##id }, 0, ALL },
	SHARED_CALLS(X)
#undef X
};

static int run_file_call(const struct file_call *c, enum outcome o)
{
	switch (c->family) {
	case CONTENT:
		return data_case(c->with_fd, c->option, o);
	case NAMES:
		return make_case(c->with_path, o);
	case LINKS:
		return link_case(c->with_two, o);
	case RENAMES:
		return rename_case(c->with_two, c->option, o);
	case REMOVALS:
		return remove_case(c->with_path, c->option, o);
	case METADATA:
		return meta_case(c->with_fd, o);
	case SHARED:
		return shared_case(c->with_fd, o);
	}
	return -ENOSYS;
}

#endif
