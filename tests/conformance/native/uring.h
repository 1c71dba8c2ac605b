/* SPDX-License-Identifier: Apache-2.0 */
/* One io_uring request at a time, without a library. Included by effects.c. */
#ifndef PAGURUS_BENCH_URING_H
#define PAGURUS_BENCH_URING_H

#include <linux/io_uring.h>

#define OP_FTRUNCATE 55 /* newer than the headers of Debian 12 */

struct ring {
	int fd;
	unsigned *sq_tail, *sq_mask, *sq_array, *sq_flags, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
};

static int ring_open(struct ring *r, unsigned flags)
{
	struct io_uring_params p = { .flags = flags, .sq_thread_idle = 50 };
	char *sq, *cq;

	r->fd = syscall(SYS_io_uring_setup, 4, &p);
	if (r->fd < 0)
		return -errno;
	sq = mmap(NULL, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
		  IORING_OFF_SQ_RING);
	cq = mmap(NULL, p.cq_off.cqes + p.cq_entries * sizeof(*r->cqes), PROT_READ | PROT_WRITE,
		  MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_CQ_RING);
	r->sqes = mmap(NULL, p.sq_entries * sizeof(*r->sqes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
		       IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || r->sqes == MAP_FAILED) {
		close(r->fd);
		return -ENOMEM;
	}
	r->sq_tail = (void *)(sq + p.sq_off.tail);
	r->sq_mask = (void *)(sq + p.sq_off.ring_mask);
	r->sq_flags = (void *)(sq + p.sq_off.flags);
	r->sq_array = (void *)(sq + p.sq_off.array);
	r->cq_head = (void *)(cq + p.cq_off.head);
	r->cq_tail = (void *)(cq + p.cq_off.tail);
	r->cq_mask = (void *)(cq + p.cq_off.ring_mask);
	r->cqes = (void *)(cq + p.cq_off.cqes);
	return 0;
}

/* Submit one request and wait for it. */
static int ring_do(struct ring *r, const struct io_uring_sqe *request, unsigned setup)
{
	unsigned tail = *r->sq_tail, slot = tail & *r->sq_mask, head = *r->cq_head;
	unsigned flags = IORING_ENTER_GETEVENTS, submit = 1;

	r->sqes[slot] = *request;
	r->sq_array[slot] = slot;
	__atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE);
	if (setup & IORING_SETUP_SQPOLL) {
		submit = 0;
		flags |= IORING_ENTER_SQ_WAKEUP;
	}
	while (__atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE) == head) {
		if (syscall(SYS_io_uring_enter, r->fd, submit, 1, flags, NULL, 0) < 0 && errno != EINTR)
			return -errno;
		submit = 0;
	}
	*r->cq_head = head + 1;
	return r->cqes[head & *r->cq_mask].res;
}

static int uring_with(struct io_uring_sqe request, unsigned setup)
{
	struct ring r;
	int result = ring_open(&r, setup);

	if (result == 0) {
		result = ring_do(&r, &request, setup);
		close(r.fd);
	}
	return result;
}

#define URING(...) uring_with((struct io_uring_sqe){ __VA_ARGS__ }, 0)
#define URING_SQPOLL(...) uring_with((struct io_uring_sqe){ __VA_ARGS__ }, IORING_SETUP_SQPOLL)

/* The buffer is registered first. */
static int uring_write_fixed(int fd, char *buffer, unsigned length)
{
	struct io_uring_sqe request = { .opcode = IORING_OP_WRITE_FIXED, .fd = fd, .addr = (unsigned long)buffer,
					.len = length };
	struct iovec whole = { buffer, length };
	struct ring r;
	int result = ring_open(&r, 0);

	if (result < 0)
		return result;
	if (syscall(SYS_io_uring_register, r.fd, IORING_REGISTER_BUFFERS, &whole, 1) < 0)
		result = -errno;
	else
		result = ring_do(&r, &request, 0);
	close(r.fd);
	return result;
}

#endif
