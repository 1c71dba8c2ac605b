/* SPDX-License-Identifier: Apache-2.0 */
/*
 * POSIX shared memory by its names, by outcome as in matrix_content.h. Included by effects.c.
 * An object is a file of /dev/shm, whatever is mounted there: these calls are made in no other place.
 */
#ifndef PAGURUS_BENCH_MATRIX_SHARED_H
#define PAGURUS_BENCH_MATRIX_SHARED_H

static int shared_object(const char *name, int fresh)
{
	int fd = shm_open(name, fresh ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);

	if (fd >= 0 && fresh && ftruncate(fd, 4096)) {
		close(fd);
		return -1;
	}
	return fd;
}

static int shared_case(int (*call)(int fd, const char *path), enum outcome o)
{
	static char saved[1 << 16];
	const char *name = o == CREATED ? "/" FRESH : o == ZERO || o == ORPHAN ? "/" GONE : o == FAILED ? "/missing" : "/big";
	int fresh = o == CREATED || o == ZERO || o == ORPHAN, fd = shared_object(name, fresh), result;
	long length = 0;
	struct stat old;

	if (fd < 0)
		return -errno;
	if (o == ORPHAN)
		shm_unlink(name);
	if (o == RESTORED) {
		fstat(fd, &old);
		length = pread(fd, saved, sizeof(saved), 0);
	}
	result = call(fd, name);
	if (o == RESTORED && set_back(fd, saved, length, &old))
		result = -EIO;
	close(fd);
	if (o == ZERO)
		shm_unlink(name);
	return result;
}

/* A child maps the object as well, by its name or by what it inherited, and stores. */
static int stored_by_child(int fd, const char *name)
{
	int status = 0;
	pid_t pid = fork();

	if (pid == 0) {
		int own = shm_open(name, O_RDWR, 0);

		_exit(-mapped_store(own < 0 ? fd : own, STORE));
	}
	waitpid(pid, &status, 0);
	return -WEXITSTATUS(status);
}

/* Larger than it was, and stored into the new part. */
static int stored_behind(int fd)
{
	char *map;

	if (ftruncate(fd, 12288))
		return -errno;
	map = mmap(NULL, 12288, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return -errno;
	map[8192] = 'S' + (char)varied(7);
	munmap(map, 12288);
	return 0;
}

#define SHARED_CALLS(X) \
	X(shm_store, mapped_store(fd, STORE)) \
	X(shm_store_closed, mapped_store(fd, STORE_CLOSED)) \
	X(shm_store_mprotect, mapped_store(fd, STORE_MPROTECT)) \
	X(shm_store_by_read, mapped_store(fd, STORE_READ)) \
	X(shm_store_behind, stored_behind(fd)) \
	X(shm_store_by_child, stored_by_child(fd, name)) \
	X(shm_write, E(pwrite(fd, eight, 8, varied(15)))) \
	X(shm_truncate, E(ftruncate(fd, 5000 + varied(4095))))

#define X(id, expression) \
	static int shared_##id(int fd, const char *name) { (void)fd, (void)name; return expression; }
SHARED_CALLS(X)
#undef X

#endif
