/* SPDX-License-Identifier: Apache-2.0 */
/*
 * File calls, each by what becomes of it. Included by effects.c; a call is written once, the outcomes are made here:
 *
 *   created    on something new that stays            zero      on something new that is gone again
 *   changed    on something that was there            orphan    on something new without a name any more
 *   failed     the call itself fails                  restored  as changed, then set back as it was
 *
 * A call returns what the system call returned, or a negative error number.
 */
#ifndef PAGURUS_BENCH_MATRIX_CONTENT_H
#define PAGURUS_BENCH_MATRIX_CONTENT_H

enum outcome { CREATED, CHANGED, ZERO, ORPHAN, FAILED, RESTORED, OUTCOMES };

static const char *const outcome_names[OUTCOMES] = { "created", "changed", "zero", "orphan", "failed", "restored" };

#define FRESH "fresh"
#define GONE "temporary.x"
#define E(call) ({ long result_ = (call); result_ < 0 ? -errno : (int)result_; })

static int own_path(char *path, int fd)
{
	return snprintf(path, 64, "/proc/self/fd/%d", fd);
}

/* ------------------------------------------------------------------ content: CALL(fd, path, old size) */

static int made(const char *path, int filled)
{
	static char page[4096];
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);

	memset(page, 'q', sizeof(page));
	if (fd >= 0 && filled && pwrite(fd, page, sizeof(page), 0) < 0)
		return -1;
	return fd;
}

/* A file as it was: these bytes, and its times. Not 0: it cannot be. */
static int set_back(int fd, const void *bytes, long length, const struct stat *old)
{
	struct timespec times[2] = { old->st_atim, old->st_mtim };
	int failed = ftruncate(fd, 0) || pwrite(fd, bytes, length, 0) != length;

	return futimens(fd, times) || failed;
}

static int data_case(int (*call)(int fd, const char *path), int filled, enum outcome o)
{
	static char saved[1 << 16];
	char proc[64];
	struct stat old;
	long length = 0;
	int fd, result;

	switch (o) {
	case CREATED:
		fd = made(FRESH, filled);
		break;
	case ZERO:
	case ORPHAN:
		fd = made(GONE, filled);
		break;
	case FAILED:
		fd = opened("big", O_RDONLY);
		break;
	default:
		fd = opened("big", O_RDWR);
		break;
	}
	if (fd < 0)
		return -errno;
	if (o == ORPHAN) {
		unlink(GONE);
		own_path(proc, fd);
	}
	if (o == RESTORED) {
		fstat(fd, &old);
		length = pread(fd, saved, sizeof(saved), 0);
	}
	result = call(fd, o == CREATED ? FRESH : o == ZERO ? GONE : o == ORPHAN ? proc : o == FAILED ? "missing" : "big");
	if (o == RESTORED && set_back(fd, saved, length, &old))
		result = -EIO;
	close(fd);
	if (o == ZERO)
		unlink(GONE);
	return result;
}

static int linux_aio(int fd, int vector)
{
	static char block[512];
	struct iovec part = { block, sizeof(block) };
	aio_context_t context = 0;
	struct iocb control = { 0 }, *list[1] = { &control };
	struct io_event event = { 0 };
	int result;

	memset(block, 'x', sizeof(block));
	if (syscall(SYS_io_setup, 1, &context) < 0)
		return -errno;
	control.aio_fildes = fd;
	control.aio_lio_opcode = vector ? IOCB_CMD_PWRITEV : IOCB_CMD_PWRITE;
	control.aio_buf = vector ? (unsigned long)&part : (unsigned long)block;
	control.aio_nbytes = vector ? 1 : sizeof(block);
	result = E(syscall(SYS_io_submit, context, 1, list));
	if (result == 1 && syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1)
		result = event.res;
	syscall(SYS_io_destroy, context);
	return result;
}

enum store_by { STORE, STORE_MSYNC, STORE_MPROTECT, STORE_MREMAP, STORE_READ, STORE_RECV, STORE_CLOSED, STORE_DIRECT };

/* A store through a shared mapping, by the program or by the kernel on its behalf. */
static int mapped_store(int fd, enum store_by how)
{
	int first = how == STORE_MPROTECT ? PROT_READ : PROT_READ | PROT_WRITE, source, pair[2], result = 0;
	struct stat now;
	char *map;

	if (fstat(fd, &now) == 0 && now.st_size < 4096 && ftruncate(fd, 4096))
		return -errno;
	if (how == STORE_CLOSED)
		fd = dup(fd);
	map = mmap(NULL, 4096, first, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return -errno;
	if (how == STORE_CLOSED)
		close(fd);
	if (how == STORE_MREMAP)
		map = mremap(map, 4096, 8192, MREMAP_MAYMOVE);
	if (how == STORE_MPROTECT && mprotect(map, 4096, PROT_READ | PROT_WRITE))
		return -errno;
	switch (how) {
	case STORE_READ:
		source = opened("other", O_RDONLY);
		result = E(read(source, map + 8, 8));
		close(source);
		break;
	case STORE_DIRECT:
		source = open("mapped", O_RDONLY | O_DIRECT | O_CLOEXEC);
		result = source < 0 ? -errno : E(pread(source, map, 4096, 0));
		close(source);
		break;
	case STORE_RECV:
		if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
			return -errno;
		put(pair[0], new_bytes);
		result = E(recv(pair[1], map + 8, 8, 0));
		close(pair[0]);
		close(pair[1]);
		break;
	default:
		map[2] = 'M' + (char)varied(7);
	}
	if (how == STORE_MSYNC)
		result = E(msync(map, 4096, MS_SYNC));
	munmap(map, 4096);
	return result;
}

/* Bytes reach the file through a pipe; they entered it by write, vmsplice or tee. */
static int spliced(int fd, int entry)
{
	struct iovec part = { (void *)new_bytes, 8 };
	int first[2], second[2], result;
	loff_t at = 0;

	if (pipe2(first, O_CLOEXEC) || pipe2(second, O_CLOEXEC))
		return -errno;
	if (entry == 1 && vmsplice(first[1], &part, 1, 0) < 0)
		return -errno;
	if (entry != 1)
		put(first[1], new_bytes);
	if (entry == 2 && tee(first[0], second[1], 8, 0) < 0)
		return -errno;
	result = E(splice(entry == 2 ? second[0] : first[0], NULL, fd, &at, 8, 0));
	for (int i = 0; i < 2; i++) {
		close(first[i]);
		close(second[i]);
	}
	return result;
}

static int from_other(int fd, int by)
{
	struct file_clone_range range = { .src_fd = opened(by == 2 || by == 3 ? "mapped" : "other", O_RDONLY) };
	int result;

	if (by == 0)
		result = E(sendfile(fd, range.src_fd, NULL, 20));
	else if (by == 1)
		result = E(copy_file_range(range.src_fd, NULL, fd, NULL, 20, 0));
	else if (by == 2)
		result = E(ioctl(fd, FICLONE, range.src_fd));
	else
		result = E(ioctl(fd, FICLONERANGE, &range));
	close(range.src_fd);
	return result;
}

static int reopened(const char *path, int flags, int direct)
{
	static char block[4096] __attribute__((aligned(4096)));
	int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK), result;

	memset(block, 'd' + varied(7), sizeof(block));
	if (fd < 0)
		return -errno;
	result = E(write(fd, block, direct ? sizeof(block) : 7));
	close(fd);
	return result;
}

/* The descriptor travels through a socket to a child, which writes. */
static int by_passed_descriptor(int fd)
{
	char control[CMSG_SPACE(sizeof(int))] = "", byte = 'x';
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
				  .msg_controllen = sizeof(control) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	int pair[2], got, status = 0;
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		return -errno;
	pid = fork();
	if (pid == 0) {
		close(fd);
		if (recvmsg(pair[1], &message, 0) < 0)
			_exit(EIO);
		memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(got));
		_exit(write(got, new_bytes, 5) < 0 ? errno : 0);
	}
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(head), &fd, sizeof(fd));
	if (sendmsg(pair[0], &message, 0) < 0)
		kill(pid, SIGKILL);
	waitpid(pid, &status, 0);
	close(pair[0]);
	close(pair[1]);
	return -WEXITSTATUS(status);
}

/* Another process writes into our mapping of the file. */
static int by_vm_writev(int fd)
{
	char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	struct iovec here = { (void *)new_bytes, 8 }, there = { map, 8 };
	pid_t parent = getpid(), pid;
	int status = 0;

	if (map == MAP_FAILED)
		return -errno;
	pid = fork();
	if (pid == 0)
		_exit(process_vm_writev(parent, &here, 1, &there, 1, 0) < 0 ? errno : 0);
	waitpid(pid, &status, 0);
	munmap(map, 4096);
	return -WEXITSTATUS(status);
}

static char eight[4096] = "eightxyz";
static struct iovec two_parts[2] = { { eight, 3 }, { eight + 3, 5 } };

#define AT(p) ((unsigned long)(p))
#define DATA_CALLS(X) \
	X(write, 0, E(write(fd, eight, 8))) \
	X(pwrite64, 0, E(pwrite(fd, eight, 8, 3))) \
	X(writev, 0, E(writev(fd, two_parts, 2))) \
	X(pwritev, 0, E(pwritev(fd, two_parts, 2, 5))) \
	X(pwritev2, 0, E(pwritev2(fd, two_parts, 2, 5, RWF_SYNC))) \
	X(pwritev2_append, 0, E(pwritev2(fd, two_parts, 2, 0, RWF_APPEND))) \
	X(sendfile, 0, from_other(fd, 0)) \
	X(copy_file_range, 0, from_other(fd, 1)) \
	X(ficlone, 0, from_other(fd, 2)) \
	X(ficlonerange, 1, from_other(fd, 3)) \
	X(splice, 0, spliced(fd, 0)) \
	X(vmsplice, 0, spliced(fd, 1)) \
	X(tee, 0, spliced(fd, 2)) \
	X(fallocate, 0, E(fallocate(fd, 0, 0, 100000))) \
	X(fallocate_punch, 1, E(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096))) \
	X(fallocate_zero, 1, E(fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, 100))) \
	X(fallocate_collapse, 1, E(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096))) \
	X(fallocate_insert, 1, E(fallocate(fd, FALLOC_FL_INSERT_RANGE, 0, 4096))) \
	X(ftruncate_shrink, 1, E(ftruncate(fd, varied(31)))) \
	X(ftruncate_grow, 0, E(ftruncate(fd, 5000 + varied(4095)))) \
	X(truncate, 0, E(truncate(path, 5000 + varied(4095)))) \
	X(open_trunc, 1, E(close(opened(path, O_WRONLY | O_TRUNC)))) \
	X(open_append, 0, reopened(path, O_WRONLY | O_APPEND, 0)) \
	X(open_sync, 0, reopened(path, O_WRONLY | O_SYNC, 0)) \
	X(open_direct, 0, reopened(path, O_WRONLY | O_DIRECT, 1)) \
	X(map_store, 1, mapped_store(fd, STORE)) \
	X(map_msync, 1, mapped_store(fd, STORE_MSYNC)) \
	X(map_mprotect, 1, mapped_store(fd, STORE_MPROTECT)) \
	X(map_mremap, 1, mapped_store(fd, STORE_MREMAP)) \
	X(map_closed, 1, mapped_store(fd, STORE_CLOSED)) \
	X(map_by_read, 1, mapped_store(fd, STORE_READ)) \
	X(map_by_recv, 1, mapped_store(fd, STORE_RECV)) \
	X(map_by_direct_read, 1, mapped_store(fd, STORE_DIRECT)) \
	X(map_by_vm_writev, 1, by_vm_writev(fd)) \
	X(passed_descriptor, 0, by_passed_descriptor(fd)) \
	X(io_submit_pwrite, 0, linux_aio(fd, 0)) \
	X(io_submit_pwritev, 0, linux_aio(fd, 1)) \
	X(uring_write, 0, URING(.opcode = IORING_OP_WRITE, .fd = fd, .addr = AT(eight), .len = 8)) \
	X(uring_write_async, 0, URING(.opcode = IORING_OP_WRITE, .flags = IOSQE_ASYNC, .fd = fd, .addr = AT(eight), \
				      .len = 8)) \
	X(uring_write_sqpoll, 0, URING_SQPOLL(.opcode = IORING_OP_WRITE, .fd = fd, .addr = AT(eight), .len = 8)) \
	X(uring_writev, 0, URING(.opcode = IORING_OP_WRITEV, .fd = fd, .addr = AT(two_parts), .len = 2)) \
	X(uring_write_fixed, 0, uring_write_fixed(fd, eight, 8)) \
	X(uring_fallocate, 0, URING(.opcode = IORING_OP_FALLOCATE, .fd = fd, .off = 0, .addr = 99999, .len = 0)) \
	X(uring_ftruncate, 0, URING(.opcode = OP_FTRUNCATE, .fd = fd, .off = 7777))

#define X(id, filled, expression) \
	static int data_##id(int fd, const char *path) { (void)fd, (void)path; return expression; }
DATA_CALLS(X)
#undef X

#endif
