/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that make, link, rename and remove names, by outcome. Included by effects.c after matrix_content.h. */
#ifndef PAGURUS_BENCH_MATRIX_NAMES_H
#define PAGURUS_BENCH_MATRIX_NAMES_H

/* ------------------------------------------------------------------ names that appear: CALL(path) */

static void remove_any(const char *path)
{
	if (unlink(path))
		rmdir(path);
}

static int make_case(int (*call)(const char *path), enum outcome o)
{
	int result;

	switch (o) {
	case CREATED:
		return call(FRESH);
	case CHANGED:
		unlink("file");
		return call("file");
	case ZERO:
		result = call(GONE);
		remove_any(GONE);
		return result;
	case FAILED:
		return call("full");
	case RESTORED:
		rename("file", "aside");
		result = call("file");
		remove_any("file");
		rename("aside", "file");
		return result;
	default:
		return -ENOSYS;
	}
}

static int closed(int fd)
{
	if (fd < 0)
		return -errno;
	close(fd);
	return 0;
}

static int bound(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), result;

	strcpy(address.sun_path, path);
	result = E(bind(fd, (void *)&address, sizeof(address)));
	close(fd);
	return result;
}

static int linked_tmpfile(const char *path, int empty)
{
	int fd = open(".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0644), result;
	char proc[64];

	if (fd < 0)
		return -errno;
	put(fd, new_bytes);
	own_path(proc, fd);
	result = empty ? E(linkat(fd, "", AT_FDCWD, path, AT_EMPTY_PATH)) :
			 E(linkat(AT_FDCWD, proc, AT_FDCWD, path, AT_SYMLINK_FOLLOW));
	close(fd);
	return result;
}

static unsigned long long how2[3] = { O_CREAT | O_EXCL | O_RDWR, 0644, 0 };
#define CREATE_FLAGS (O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC)

#define MAKE_CALLS(X) \
	X(open, closed(syscall(SYS_open, path, O_CREAT | O_RDWR, 0644))) \
	X(open_excl, closed(syscall(SYS_open, path, CREATE_FLAGS, 0644))) \
	X(openat, closed(openat(AT_FDCWD, path, CREATE_FLAGS, 0644))) \
	X(openat2, closed(syscall(SYS_openat2, AT_FDCWD, path, how2, sizeof(how2)))) \
	X(creat, closed(syscall(SYS_creat, path, 0600))) \
	X(mkdir, E(syscall(SYS_mkdir, path, 0755))) \
	X(mkdirat, E(mkdirat(AT_FDCWD, path, 0755))) \
	X(mknod, E(syscall(SYS_mknod, path, S_IFREG | 0600, 0))) \
	X(mknodat_fifo, E(mknodat(AT_FDCWD, path, S_IFIFO | 0600, 0))) \
	X(mknod_socket, E(syscall(SYS_mknod, path, S_IFSOCK | 0600, 0))) \
	X(symlink, E(symlink("target", path))) \
	X(symlinkat, E(symlinkat("target", AT_FDCWD, path))) \
	X(bind, bound(path)) \
	X(tmpfile_linkat, linked_tmpfile(path, 0)) \
	X(tmpfile_linkat_empty, linked_tmpfile(path, 1)) \
	X(uring_openat, URING(.opcode = IORING_OP_OPENAT, .fd = AT_FDCWD, .addr = AT(path), .len = 0644, \
			      .open_flags = CREATE_FLAGS)) \
	X(uring_openat2, URING(.opcode = IORING_OP_OPENAT2, .fd = AT_FDCWD, .addr = AT(path), .len = sizeof(how2), \
			       .off = AT(how2))) \
	X(uring_mkdirat, URING(.opcode = IORING_OP_MKDIRAT, .fd = AT_FDCWD, .addr = AT(path), .len = 0755)) \
	X(uring_symlinkat, URING(.opcode = IORING_OP_SYMLINKAT, .fd = AT_FDCWD, .addr = AT("target"), .addr2 = AT(path)))

#define X(id, expression) static int make_##id(const char *path) { return expression; }
MAKE_CALLS(X)
#undef X

/* ------------------------------------------------------------------ links, renames: CALL(from, to) */

static int link_case(int (*call)(const char *from, const char *to), enum outcome o)
{
	int result;

	switch (o) {
	case CREATED:
		return call("file", FRESH);
	case CHANGED:
		unlink("third");
		return call("file", "third");
	case ZERO:
		close(made(GONE, 1));
		result = call(GONE, "temporary.y");
		unlink(GONE);
		unlink("temporary.y");
		return result;
	case FAILED:
		return call("missing", FRESH);
	case RESTORED:
		result = call("file", "temporary.y");
		unlink("temporary.y");
		return result;
	default:
		return -ENOSYS;
	}
}

static int link_by_descriptor(const char *from, const char *to)
{
	int fd = opened(from, O_RDONLY), result;
	char proc[64];

	own_path(proc, fd);
	result = E(linkat(AT_FDCWD, proc, AT_FDCWD, to, AT_SYMLINK_FOLLOW));
	close(fd);
	return result;
}

#define LINK_CALLS(X) \
	X(link, E(link(from, to))) \
	X(linkat, E(linkat(AT_FDCWD, from, AT_FDCWD, to, 0))) \
	X(linkat_descriptor, link_by_descriptor(from, to)) \
	X(uring_linkat, URING(.opcode = IORING_OP_LINKAT, .fd = AT_FDCWD, .addr = AT(from), .addr2 = AT(to), \
			      .len = AT_FDCWD))

#define X(id, expression) static int link_##id(const char *from, const char *to) { return expression; }
LINK_CALLS(X)
#undef X

/* `both`: the call needs both names (an exchange). */
static int rename_case(int (*call)(const char *from, const char *to), int both, enum outcome o)
{
	int result;

	switch (o) {
	case CREATED:
		close(made(GONE, 1));
		if (both)
			fill(FRESH, new_bytes);
		result = call(GONE, FRESH);
		unlink(GONE);
		return result;
	case CHANGED:
		return call("file", both ? "big" : "renamed");
	case ZERO:
		close(made(GONE, 1));
		if (both)
			fill("temporary.y", new_bytes);
		result = call(GONE, "temporary.y");
		unlink(GONE);
		unlink("temporary.y");
		return result;
	case FAILED:
		return call("missing", "file");
	case RESTORED:
		result = call("file", both ? "big" : "renamed");
		if (both)
			call("file", "big");
		else
			rename("renamed", "file");
		return result;
	default:
		return -ENOSYS;
	}
}

#define RENAME(from, to, flags) E(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags))
#define RENAME_CALLS(X) \
	X(rename, 0, E(syscall(SYS_rename, from, to))) \
	X(renameat, 0, E(syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to))) \
	X(renameat2, 0, RENAME(from, to, 0)) \
	X(renameat2_noreplace, 0, RENAME(from, to, 1)) \
	X(renameat2_exchange, 1, RENAME(from, to, 2)) \
	X(renameat2_whiteout, 0, RENAME(from, to, 4)) \
	X(uring_renameat, 0, URING(.opcode = IORING_OP_RENAMEAT, .fd = AT_FDCWD, .addr = AT(from), .addr2 = AT(to), \
				   .len = AT_FDCWD)) \
	X(uring_exchange, 1, URING(.opcode = IORING_OP_RENAMEAT, .fd = AT_FDCWD, .addr = AT(from), .addr2 = AT(to), \
				   .len = AT_FDCWD, .rename_flags = 2))

#define X(id, both, expression) static int rename_##id(const char *from, const char *to) { return expression; }
RENAME_CALLS(X)
#undef X

/* ------------------------------------------------------------------ names that go: CALL(path) */

static int remove_case(int (*call)(const char *path), int directory, enum outcome o)
{
	int result, held;

	switch (o) {
	case CREATED: /* what is removed had another name */
		if (directory)
			return mkdir(FRESH, 0755), mkdir(GONE, 0755), call(GONE);
		close(made(FRESH, 1));
		if (link(FRESH, GONE))
			return -errno;
		return call(GONE);
	case CHANGED:
		return call(directory ? "empty" : "file");
	case ZERO:
		if (directory)
			mkdir(GONE, 0755);
		else
			close(made(GONE, 1));
		return call(GONE);
	case ORPHAN: /* removed while it is open */
		held = directory ? (mkdir(GONE, 0755), opened(GONE, O_RDONLY)) : made(GONE, 1);
		result = call(GONE);
		if (!directory)
			put(held, new_bytes);
		close(held);
		return result;
	case FAILED:
		return call(directory ? "full" : "missing");
	case RESTORED:
		result = call(directory ? "empty" : "twin");
		if (directory ? mkdir("empty", 0755) : link("other", "twin"))
			return -errno;
		return result;
	default:
		return -ENOSYS;
	}
}

#define REMOVE_CALLS(X) \
	X(unlink, 0, E(syscall(SYS_unlink, path))) \
	X(unlinkat, 0, E(unlinkat(AT_FDCWD, path, 0))) \
	X(rmdir, 1, E(syscall(SYS_rmdir, path))) \
	X(unlinkat_directory, 1, E(unlinkat(AT_FDCWD, path, AT_REMOVEDIR))) \
	X(uring_unlinkat, 0, URING(.opcode = IORING_OP_UNLINKAT, .fd = AT_FDCWD, .addr = AT(path))) \
	X(uring_rmdir, 1, URING(.opcode = IORING_OP_UNLINKAT, .fd = AT_FDCWD, .addr = AT(path), \
				.unlink_flags = AT_REMOVEDIR))

#define X(id, directory, expression) static int remove_##id(const char *path) { return expression; }
REMOVE_CALLS(X)
#undef X

#endif
