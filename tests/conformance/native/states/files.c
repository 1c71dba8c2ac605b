/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of every kind but sockets, and locks. */
#include "states.h"

#include <linux/fs.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <sys/wait.h>
#include <termios.h>

static void say_flags(int descriptor) { say("flags %o ", fcntl(descriptor, F_GETFL) & ~0100000); say_call("fd", fcntl(descriptor, F_GETFD)); }

/* ------------------------------------------------------------------ a file with flags */

struct opened { int flags; const char *path; };
static void make_opened(const void *data)
{
	const struct opened *o = data;
	if (!o->path)
		put("file", "0123456789");
	fd[0] = must(open(o->path ? o->path : "file", o->flags, 0644));
	if (!o->path)
		lseek(fd[0], 4, SEEK_SET);
}
static void look_opened(const void *data)
{
	char path[64], link[256] = "";
	(void)data;
	say("%d ", fd[0] > 2);
	say_flags(fd[0]);
	say_call("at", lseek(fd[0], 0, SEEK_CUR));
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd[0]);
	if (readlink(path, link, 255) > 0)
		say("%.*s", (int)strcspn(link, "["), link); /* the number of a namespace is another one in a fork */
}
#define OPENED(name, how, ...)                                                                     \
	static const struct opened opened_##name = {__VA_ARGS__};                                  \
	ENTRY(name, "files", "open: " how, make_opened, look_opened, &opened_##name)
OPENED(file_offset, "O_RDWR, and its offset", O_RDWR);
OPENED(file_append, "O_APPEND", O_WRONLY | O_APPEND);
OPENED(file_nonblock, "O_NONBLOCK", O_RDONLY | O_NONBLOCK);
OPENED(file_close_on_exec, "O_CLOEXEC", O_RDONLY | O_CLOEXEC);
OPENED(file_sync, "O_SYNC", O_WRONLY | O_SYNC);
OPENED(file_data_sync, "O_DSYNC", O_WRONLY | O_DSYNC);
OPENED(file_direct, "O_DIRECT", O_RDWR | O_DIRECT);
OPENED(file_no_access_time, "O_NOATIME", O_RDONLY | O_NOATIME);
OPENED(file_path_only, "O_PATH", O_PATH);
OPENED(file_temporary, "O_TMPFILE", O_RDWR | O_TMPFILE, ".");
OPENED(directory, "O_DIRECTORY", O_RDONLY | O_DIRECTORY, "/usr");
OPENED(device_null, "/dev/null", O_RDWR, "/dev/null");
OPENED(device_random, "/dev/urandom", O_RDONLY, "/dev/urandom");
OPENED(device_full, "/dev/full", O_WRONLY, "/dev/full");
OPENED(proc_file, "/proc/self/status", O_RDONLY, "/proc/self/status");
OPENED(proc_limits, "/proc/meminfo", O_RDONLY, "/proc/meminfo");
OPENED(proc_setting, "/proc/sys/kernel/hostname", O_RDONLY, "/proc/sys/kernel/hostname");
OPENED(proc_namespace, "/proc/self/ns/net", O_RDONLY, "/proc/self/ns/net");
OPENED(proc_memory, "/proc/self/mem", O_RDWR, "/proc/self/mem");
OPENED(proc_mounts, "/proc/self/mountinfo", O_RDONLY, "/proc/self/mountinfo");

STATE(shared_offset, "files", "dup, and a child: one offset");
MAKE(shared_offset) { put("file", "0123456789"); fd[0] = open("file", O_RDONLY); fd[1] = dup2(fd[0], 77); child = start_child(NULL); }
OBSERVE(shared_offset)
{
	char path[64];
	lseek(fd[0], 3, SEEK_SET);
	say_call("dup", lseek(fd[1], 0, SEEK_CUR));
	snprintf(path, sizeof path, "/proc/%d/fdinfo/%d", child, fd[1]);
	say_lines(path, "pos");
	lseek(fd[0], 0, SEEK_SET);
}
STATE(deleted_file_in_the_way, "files", "a removed open file next to files with the name that CRIU would use (NAME.cr.1.ghost)");
MAKE(deleted_file_in_the_way) { fd[0] = must(open("crab", O_RDWR | O_CREAT, 0600)); must(write(fd[0], "claw", 4)); unlink("crab"); for (int i = 1; i < 9; i++) { char name[64]; snprintf(name, sizeof name, "crab.cr.%x.ghost", i); put(name, "mine"); } }
OBSERVE(deleted_file_in_the_way) { char text[8] = ""; say_call("read", pread(fd[0], text, 4, 0)); say("%s", text); }
STATE(deleted_file, "files", "an open file that was removed");
MAKE(deleted_file) { put("file", "ghost"); fd[0] = open("file", O_RDWR); unlink("file"); }
OBSERVE(deleted_file) { char text[9] = ""; say_call("read", pread(fd[0], text, 8, 0)); struct stat found; fstat(fd[0], &found); say("%s %ld links %ld", text, (long)found.st_size, (long)found.st_nlink); }
STATE(directory_offset, "files", "a directory read in part");
MAKE(directory_offset) { char block[256]; fd[0] = open("/usr/bin", O_RDONLY | O_DIRECTORY); must(syscall(SYS_getdents64, fd[0], block, sizeof block)); }
OBSERVE(directory_offset) { say_call("at", lseek(fd[0], 0, SEEK_CUR)); }
STATE(write_hint, "files", "fcntl(F_SET_RW_HINT)");
MAKE(write_hint) { uint64_t hint = 2; fd[0] = open("file", O_RDWR | O_CREAT, 0644); must(fcntl(fd[0], F_SET_RW_HINT, &hint)); }
OBSERVE(write_hint) { uint64_t hint = 9; fcntl(fd[0], F_GET_RW_HINT, &hint); say("%ld", (long)hint); }
STATE(read_advice, "files", "posix_fadvise(RANDOM)");
MAKE(read_advice) { put("file", "x"); fd[0] = open("file", O_RDONLY); must(posix_fadvise(fd[0], 0, 0, POSIX_FADV_RANDOM) ? -1 : 0); }
OBSERVE(read_advice) { say_flags(fd[0]); }

/* ------------------------------------------------------------------ pipes */

STATE(pipe_content, "pipes", "bytes in a pipe");
MAKE(pipe_content) { must(pipe(fd)); must(write(fd[1], "in the pipe", 11)); }
OBSERVE(pipe_content)
{
	char text[65] = "";
	int copy[2], waiting = 0;
	ioctl(fd[0], FIONREAD, &waiting);
	if (pipe(copy)) return;
	say_call("tee", tee(fd[0], copy[1], 64, SPLICE_F_NONBLOCK));
	say_call("read", read(copy[0], text, 64));
	say("%s %d", text, waiting);
	close(copy[0]), close(copy[1]);
}
STATE(pipe_size, "pipes", "fcntl(F_SETPIPE_SZ)");
MAKE(pipe_size) { must(pipe(fd)); must(fcntl(fd[0], F_SETPIPE_SZ, 1 << 18)); }
OBSERVE(pipe_size) { say_call("size", fcntl(fd[0], F_GETPIPE_SZ)); }
static void say_owner(int descriptor) { struct stat found; fstat(descriptor, &found); say("%o %u %u ", found.st_mode, found.st_uid, found.st_gid); }
STATE(pipe_rights, "pipes", "fchown and fchmod of a pipe: who may open it through /proc");
MAKE(pipe_rights) { must(pipe(fd)); must(fchown(fd[0], 1000, 1001)); must(fchmod(fd[0], 0640)); }
OBSERVE(pipe_rights) { say_owner(fd[0]); say_owner(fd[1]); }
STATE(pipe_both_ways, "pipes", "a pipe opened through /proc for reading and writing at once");
MAKE(pipe_both_ways) { char path[64]; must(pipe(fd)); snprintf(path, sizeof path, "/proc/self/fd/%d", fd[0]); fd[2] = must(open(path, O_RDWR)); }
OBSERVE(pipe_both_ways) { say_owner(fd[2]); say_flags(fd[2]); }
STATE(pipe_packets, "pipes", "pipe2(O_DIRECT) with two packets");
MAKE(pipe_packets) { must(pipe2(fd, O_DIRECT)); must(write(fd[1], "one", 3)); must(write(fd[1], "two", 3)); }
OBSERVE(pipe_packets)
{
	char text[64] = "";
	int copy[2];
	if (pipe2(copy, O_DIRECT)) return;
	say_flags(fd[0]);
	tee(fd[0], copy[1], 64, SPLICE_F_NONBLOCK);
	say_call("first", read(copy[0], text, 64));
	close(copy[0]), close(copy[1]);
}
STATE(pipe_flags, "pipes", "one end O_NONBLOCK, both O_CLOEXEC");
MAKE(pipe_flags) { must(pipe2(fd, O_CLOEXEC)); fcntl(fd[1], F_SETFL, O_NONBLOCK); }
OBSERVE(pipe_flags) { say_flags(fd[0]); say_flags(fd[1]); }
STATE(pipe_half, "pipes", "a pipe whose writer is gone, with bytes in it");
MAKE(pipe_half) { must(pipe(fd)); must(write(fd[1], "rest", 4)); close(fd[1]); }
OBSERVE(pipe_half) { int waiting = 0; ioctl(fd[0], FIONREAD, &waiting); struct pollfd p = {fd[0], POLLIN, 0}; poll(&p, 1, 0); say("%d %x", waiting, p.revents); }
STATE(fifo_content, "pipes", "bytes in a FIFO");
MAKE(fifo_content) { mkfifo("fifo", 0644); fd[0] = must(open("fifo", O_RDWR)); must(write(fd[0], "fifo", 4)); }
OBSERVE(fifo_content) { int waiting = 0; ioctl(fd[0], FIONREAD, &waiting); say("%d", waiting); say_flags(fd[0]); }

/* ------------------------------------------------------------------ event descriptors */

STATE(event_counter, "events", "eventfd with a value");
MAKE(event_counter) { fd[0] = must(eventfd(41, EFD_NONBLOCK)); }
OBSERVE(event_counter) { uint64_t value = 0; say_call("read", read(fd[0], &value, 8)); say("%ld", (long)value); if (write(fd[0], &value, 8)) { } say_flags(fd[0]); }
STATE(event_semaphore, "events", "eventfd(EFD_SEMAPHORE)");
MAKE(event_semaphore) { fd[0] = must(eventfd(3, EFD_SEMAPHORE)); }
OBSERVE(event_semaphore) { uint64_t value = 0; say_call("read", read(fd[0], &value, 8)); say("%ld", (long)value); if (write(fd[0], &value, 8)) { } }
STATE(pressure_trigger, "events", "a trigger of /proc/pressure/memory");
MAKE(pressure_trigger)
{
	static const char trigger[] = "some 1000000 2000000";
	fd[0] = must(open("/proc/pressure/memory", O_RDWR | O_CLOEXEC));
	must(write(fd[0], trigger, sizeof trigger));
}
OBSERVE(pressure_trigger) { struct pollfd p = {fd[0], POLLPRI, 0}; poll(&p, 1, 0); say("%x", p.revents & POLLERR); say_flags(fd[0]); }
STATE(signal_descriptor, "events", "signalfd with a signal to be read");
MAKE(signal_descriptor)
{
	sigset_t set;
	sigemptyset(&set), sigaddset(&set, SIGUSR2);
	sigprocmask(SIG_BLOCK, &set, NULL);
	fd[0] = must(signalfd(-1, &set, SFD_NONBLOCK));
	sigqueue(getpid(), SIGUSR2, (union sigval){.sival_int = 5});
}
OBSERVE(signal_descriptor) { struct pollfd p = {fd[0], POLLIN, 0}; poll(&p, 1, 0); say("%x ", p.revents); say_fdinfo(fd[0]); }

static void say_events(int descriptor)
{
	struct epoll_event ready[8];
	int count = epoll_wait(descriptor, ready, 8, 0);
	say("ready %d: ", count);
	for (int i = 0; i < count; i++)
		say("%x %lx,", ready[i].events, (long)ready[i].data.u64);
	char path[64], line[256];
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", descriptor);
	FILE *file = fopen(path, "re");
	while (file && fgets(line, sizeof line, file)) {
		unsigned target, events; unsigned long data;
		if (sscanf(line, "tfd: %u events: %x data: %lx", &target, &events, &data) == 3)
			say("%u %x %lx|", target, events, data);
	}
	if (file)
		fclose(file);
}
static void watch(int descriptor, int target, unsigned events, long data)
{
	struct epoll_event event = {.events = events, .data.u64 = data};
	must(epoll_ctl(descriptor, EPOLL_CTL_ADD, target, &event));
}
struct polled { unsigned events; bool spent; };
static void make_polled(const void *data)
{
	const struct polled *p = data;
	must(pipe(fd));
	fd[2] = must(epoll_create1(EPOLL_CLOEXEC));
	watch(fd[2], fd[0], p->events, 0x1234567890abcdef);
	if (write(fd[1], "x", 1) == 1 && p->spent) {
		struct epoll_event ready;
		epoll_wait(fd[2], &ready, 1, 0);
	}
}
static void look_polled(const void *data) { (void)data; say_events(fd[2]); say_flags(fd[2]); }
#define POLLED(name, how, ...)                                                                     \
	static const struct polled polled_##name = {__VA_ARGS__};                                  \
	ENTRY(name, "events", "epoll: " how, make_polled, look_polled, &polled_##name)
POLLED(epoll_level, "level-triggered, with data", EPOLLIN, false);
POLLED(epoll_once, "EPOLLONESHOT, spent", EPOLLIN | EPOLLONESHOT, true);
POLLED(epoll_exclusive, "EPOLLEXCLUSIVE", EPOLLIN | EPOLLEXCLUSIVE, false);
STATE(epoll_edge_spent, "events", "epoll: EPOLLET, with the event taken");
MAKE(epoll_edge_spent) { static const struct polled p = {EPOLLIN | EPOLLET, true}; make_polled(&p); }
OBSERVE(epoll_edge_spent) { struct epoll_event ready; say_flags(fd[2]); say("again %d", epoll_wait(fd[2], &ready, 1, 0) > 0); }
STATE(epoll_nested, "events", "epoll in epoll");
MAKE(epoll_nested) { static const struct polled p = {EPOLLIN, false}; make_polled(&p); fd[3] = epoll_create1(0); watch(fd[3], fd[2], EPOLLIN, 7); }
OBSERVE(epoll_nested) { say_events(fd[3]); say_events(fd[2]); }
STATE(epoll_closed, "events", "epoll: a watched descriptor closed, its duplicate open");
MAKE(epoll_closed) { static const struct polled p = {EPOLLIN, false}; make_polled(&p); fd[4] = dup2(fd[0], 90); close(fd[0]); }
OBSERVE(epoll_closed) { say_events(fd[2]); }
STATE(epoll_busy, "events", "epoll: EPIOCSPARAMS");
struct epoll_busy { uint32_t usecs; uint16_t budget; uint8_t prefer, pad; };
MAKE(epoll_busy) { struct epoll_busy b = {50, 8, 1, 0}; fd[0] = epoll_create1(0); must(ioctl(fd[0], _IOW(0x8A, 1, struct epoll_busy), &b)); }
OBSERVE(epoll_busy) { struct epoll_busy b = {0}; say_call("get", ioctl(fd[0], _IOR(0x8A, 2, struct epoll_busy), &b)); say("%u %u %u", b.usecs, b.budget, b.prefer); }

STATE(inotify_watch, "events", "inotify: watches with their masks");
MAKE(inotify_watch) { put("file", "x"); fd[0] = must(inotify_init1(IN_NONBLOCK)); must(inotify_add_watch(fd[0], "file", IN_MODIFY)); must(inotify_add_watch(fd[0], ".", IN_CREATE | IN_ONLYDIR)); }
OBSERVE(inotify_watch)
{
	char path[64], line[512];
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd[0]);
	FILE *file = fopen(path, "re");
	while (file && fgets(line, sizeof line, file)) {
		unsigned wd, mask;
		if (sscanf(line, "inotify wd:%x ino:%*x sdev:%*x mask:%x", &wd, &mask) == 2)
			say("%u %x|", wd, mask);
	}
	if (file)
		fclose(file);
	say_flags(fd[0]);
}
STATE(inotify_queue, "events", "inotify: events that were not read");
MAKE(inotify_queue) { fd[0] = must(inotify_init1(IN_NONBLOCK)); must(inotify_add_watch(fd[0], ".", IN_CREATE)); put("new", "x"); }
OBSERVE(inotify_queue) { int waiting = 0; ioctl(fd[0], FIONREAD, &waiting); say("%d", waiting); }
STATE(fanotify_group, "events", "fanotify_init");
MAKE(fanotify_group) { fd[0] = must(syscall(SYS_fanotify_init, 0x200, 0)); }
OBSERVE(fanotify_group) { }

STATE(memory_seals, "memory files", "memfd: content and seals");
MAKE(memory_seals) { fd[0] = must(memfd_create("crab", MFD_ALLOW_SEALING)); must(write(fd[0], "sealed", 6)); must(fcntl(fd[0], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)); }
OBSERVE(memory_seals) { char text[9] = ""; say_call("seals", fcntl(fd[0], F_GET_SEALS)); say_call("read", pread(fd[0], text, 8, 0)); say("%s ", text); say_call("at", lseek(fd[0], 0, SEEK_CUR)); }
STATE(memory_not_executable, "memory files", "memfd_create(MFD_NOEXEC_SEAL)");
MAKE(memory_not_executable) { fd[0] = must(memfd_create("crab", 8)); must(write(fd[0], "x", 1)); }
OBSERVE(memory_not_executable) { struct stat found; fstat(fd[0], &found); say_call("seals", fcntl(fd[0], F_GET_SEALS)); say("%o", found.st_mode); }
STATE(memory_mode, "memory files", "a memfd with another mode and owner, opened twice");
MAKE(memory_mode) { fd[0] = must(memfd_create("crab", 0)); must(write(fd[0], "x", 1)); must(fchmod(fd[0], 0640)); must(fchown(fd[0], 5, 6)); char path[64]; snprintf(path, sizeof path, "/proc/self/fd/%d", fd[0]); fd[1] = must(open(path, O_RDONLY)); }
OBSERVE(memory_mode) { struct stat found; fstat(fd[0], &found); say("%o %u %u ", found.st_mode, found.st_uid, found.st_gid); say_flags(fd[1]); }
STATE(memory_attributes, "memory files", "a memfd with an extended attribute");
MAKE(memory_attributes) { fd[0] = must(memfd_create("crab", 0)); must(fsetxattr(fd[0], "user.claw", "1", 1, 0)); }
OBSERVE(memory_attributes) { char value[8] = ""; say_call("size", fgetxattr(fd[0], "user.claw", value, sizeof value)); say("%s", value); }
STATE(memory_times, "memory files", "the times of a memfd");
MAKE(memory_times) { struct timespec times[2] = {{1000, 0}, {2000, 0}}; fd[0] = must(memfd_create("crab", 0)); must(futimens(fd[0], times)); }
OBSERVE(memory_times) { struct stat found; fstat(fd[0], &found); say("%ld %ld", found.st_atim.tv_sec, found.st_mtim.tv_sec); }
STATE(memory_ahead, "memory files", "memory that a memfd has beyond its end: fallocate(FALLOC_FL_KEEP_SIZE)");
MAKE(memory_ahead) { fd[0] = must(memfd_create("crab", 0)); must(fallocate(fd[0], 1, 0, 1 << 20)); }
OBSERVE(memory_ahead) { struct stat found; fstat(fd[0], &found); say("%ld %ld", (long)found.st_size, (long)found.st_blocks); }

/* ------------------------------------------------------------------ processes as descriptors */

static void say_pidfd(int descriptor) { char path[64]; snprintf(path, sizeof path, "/proc/self/fdinfo/%d", descriptor); say_lines(path, "Pid"); say_call("signal", syscall(SYS_pidfd_send_signal, descriptor, 0, NULL, 0)); }
STATE(process_descriptor, "process descriptors", "pidfd_open of a child");
MAKE(process_descriptor) { child = start_child(NULL); fd[0] = must(syscall(SYS_pidfd_open, child, 0)); }
OBSERVE(process_descriptor) { say_pidfd(fd[0]); say_flags(fd[0]); }
STATE(thread_descriptor, "process descriptors", "pidfd_open(PIDFD_THREAD)");
MAKE(thread_descriptor) { start_thread(false, false); fd[0] = must(syscall(SYS_pidfd_open, thread_id, O_EXCL)); }
OBSERVE(thread_descriptor) { say_pidfd(fd[0]); say_flags(fd[0]); }
STATE(dead_process_descriptor, "process descriptors", "a pidfd of a process that is gone");
MAKE(dead_process_descriptor) { child = fork(); if (!child) _exit(3); fd[0] = must(syscall(SYS_pidfd_open, child, 0)); waitpid(child, NULL, 0); }
OBSERVE(dead_process_descriptor) { say_pidfd(fd[0]); }
STATE(zombie_descriptor, "process descriptors", "a pidfd of a child that was not waited for");
MAKE(zombie_descriptor) { child = fork(); if (!child) _exit(3); fd[0] = must(syscall(SYS_pidfd_open, child, 0)); usleep(100000); }
OBSERVE(zombie_descriptor) { say_pidfd(fd[0]); siginfo_t info = {0}; say_call("wait", waitid(3, fd[0], &info, WEXITED | WNOHANG | WNOWAIT)); say("%d", info.si_status); }
STATE(proc_directory, "process descriptors", "/proc/PID of a child, open");
MAKE(proc_directory) { char path[64]; child = start_child(NULL); snprintf(path, sizeof path, "/proc/%d", child); fd[0] = must(open(path, O_RDONLY | O_DIRECTORY)); }
OBSERVE(proc_directory) { say_call("there", faccessat(fd[0], "status", F_OK, 0)); }

STATE(ring, "other descriptors", "io_uring_setup");
MAKE(ring) { char parameters[200] = {0}; fd[0] = must(syscall(425, 8, parameters)); }
OBSERVE(ring) { }
STATE(kernel_program, "other descriptors", "bpf");
MAKE(kernel_program) { char attributes[128] = {1, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 1}; fd[0] = must(syscall(SYS_bpf, 0, attributes, 72)); }
OBSERVE(kernel_program) { }
STATE(performance_counter, "other descriptors", "perf_event_open");
MAKE(performance_counter) { char attributes[128] = {1, 0, 0, 0, 112}; fd[0] = must(syscall(SYS_perf_event_open, attributes, 0, -1, -1, 0)); }
OBSERVE(performance_counter) { }
STATE(mount_descriptor, "other descriptors", "fsopen");
MAKE(mount_descriptor) { fd[0] = must(syscall(430, "tmpfs", 0)); }
OBSERVE(mount_descriptor) { }
STATE(asynchronous_files, "other descriptors", "io_setup");
MAKE(asynchronous_files) { unsigned long context = 0; must(syscall(SYS_io_setup, 16, &context)); area = (char *)context; }
OBSERVE(asynchronous_files) { say_mapping(area); say_call("events", syscall(SYS_io_getevents, area, 0, 0, NULL, NULL)); }
STATE(file_handle, "other descriptors", "open_by_handle_at");
MAKE(file_handle) { struct { unsigned size; int type; char bytes[128]; } handle = {.size = 128}; int mount; must(syscall(SYS_name_to_handle_at, AT_FDCWD, "/usr", &handle, &mount, 0)); fd[0] = must(syscall(SYS_open_by_handle_at, AT_FDCWD, &handle, O_RDONLY)); }
OBSERVE(file_handle) { }

/* ------------------------------------------------------------------ who is told about a descriptor */

static void handler(int number) { (void)number; }
STATE(owner, "fcntl", "fcntl(F_SETOWN, F_SETSIG) and O_ASYNC on a socket");
MAKE(owner)
{
	signal(SIGIO, handler), signal(50, handler);
	must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd));
	must(fcntl(fd[0], F_SETOWN, getpid())), must(fcntl(fd[0], F_SETSIG, 50)), must(fcntl(fd[0], F_SETFL, O_ASYNC));
}
OBSERVE(owner) { say_call("owner", fcntl(fd[0], F_GETOWN) == getpid()); say_call("signal", fcntl(fd[0], F_GETSIG)); say_flags(fd[0]); }
STATE(pipe_owner, "fcntl", "fcntl(F_SETOWN_EX, F_SETSIG) and O_ASYNC on a pipe");
MAKE(pipe_owner)
{
	struct f_owner_ex owner = {F_OWNER_PGRP, getpgrp()};
	signal(51, handler);
	must(pipe(fd));
	must(fcntl(fd[0], F_SETOWN_EX, &owner)), must(fcntl(fd[0], F_SETSIG, 51)), must(fcntl(fd[0], F_SETFL, O_ASYNC));
}
OBSERVE(pipe_owner) { struct f_owner_ex owner = {0}; fcntl(fd[0], F_GETOWN_EX, &owner); say("%d %d ", owner.type, owner.pid == getpgrp()); say_call("signal", fcntl(fd[0], F_GETSIG)); say_flags(fd[0]); }
STATE(owner_thread, "fcntl", "fcntl(F_SETOWN_EX, F_OWNER_TID)");
MAKE(owner_thread) { struct f_owner_ex owner = {F_OWNER_TID, 0}; start_thread(false, false); owner.pid = thread_id; must(pipe(fd)); must(fcntl(fd[0], F_SETOWN_EX, &owner)); }
OBSERVE(owner_thread) { struct f_owner_ex owner = {0}; fcntl(fd[0], F_GETOWN_EX, &owner); say("%d %d", owner.type, owner.pid && owner.pid == thread_id); }
STATE(lease, "locks", "fcntl(F_SETLEASE)");
MAKE(lease) { put("file", "x"); fd[0] = must(open("file", O_RDONLY)); must(fcntl(fd[0], F_SETLEASE, F_RDLCK)); }
OBSERVE(lease) { say_call("lease", fcntl(fd[0], F_GETLEASE)); }
STATE(directory_notice, "fcntl", "fcntl(F_NOTIFY)");
static volatile int noticed;
static void on_notice(int number) { (void)number; noticed = 1; }
MAKE(directory_notice) { signal(SIGIO, on_notice); fd[0] = must(open(".", O_RDONLY)); must(fcntl(fd[0], F_NOTIFY, DN_CREATE | DN_MULTISHOT)); }
OBSERVE(directory_notice) { noticed = 0; close(open("noticed", O_CREAT | O_WRONLY, 0644)); unlink("noticed"); say("%d", noticed); }

/* ------------------------------------------------------------------ locks: asked from a child, which holds none */

static void probe(void)
{
	int file = open("file", O_RDWR);
	struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	while (!fcntl(file, F_OFD_GETLK, &range) && range.l_type != F_UNLCK) {
		say("%s %ld+%ld %s|", range.l_type == F_WRLCK ? "write" : "read", (long)range.l_start, (long)range.l_len, range.l_pid == -1 ? "file's" : "process's");
		if (!range.l_len)
			break;
		range = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = range.l_start + range.l_len};
	}
	say_call("shared", flock(file, LOCK_SH | LOCK_NB));
	say_call("exclusive", flock(file, LOCK_EX | LOCK_NB));
}
static void say_locks(void)
{
	/* From a child, whose words come through a pipe: closing any descriptor of the file would drop its owner's locks. */
	int ends[2];
	char text[512] = "";
	if (pipe(ends))
		return;
	pid_t pid = fork();
	if (!pid) {
		probe();
		_exit(write(ends[1], said_by_child(), 500) != 500);
	}
	waitpid(pid, NULL, 0);
	if (read(ends[0], text, 500) > 0)
		say("%s", text);
	close(ends[0]), close(ends[1]);
}
static void lock(int command, short type, long start, long length)
{
	struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
	must(fcntl(fd[0], command, &range));
}
STATE(lock_posix, "locks", "fcntl(F_SETLK): two ranges");
MAKE(lock_posix) { put("file", "0123456789"); fd[0] = open("file", O_RDWR); lock(F_SETLK, F_WRLCK, 2, 3); lock(F_SETLK, F_RDLCK, 8, 0); }
OBSERVE(lock_posix) { say_locks(); }
STATE(lock_open_file, "locks", "fcntl(F_OFD_SETLK)");
MAKE(lock_open_file) { put("file", "0123456789"); fd[0] = open("file", O_RDWR); lock(F_OFD_SETLK, F_WRLCK, 1, 4); }
OBSERVE(lock_open_file) { say_locks(); }
STATE(lock_exclusive, "locks", "flock(LOCK_EX)");
MAKE(lock_exclusive) { put("file", "x"); fd[0] = open("file", O_RDWR); must(flock(fd[0], LOCK_EX)); }
OBSERVE(lock_exclusive) { say_locks(); }
STATE(lock_shared, "locks", "flock(LOCK_SH), held by a child, too");
MAKE(lock_shared) { put("file", "x"); fd[0] = open("file", O_RDONLY); must(flock(fd[0], LOCK_SH)); child = start_child(NULL); }
OBSERVE(lock_shared) { say_locks(); }
STATE(lock_of_mapped, "locks", "fcntl(F_SETLK) on a file that is also mapped, as databases do");
MAKE(lock_of_mapped) { put("file", "0123456789"); fd[0] = open("file", O_RDWR); lock(F_SETLK, F_RDLCK, 123, 1); area = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd[0], 0); }
OBSERVE(lock_of_mapped) { say_locks(); }

/* ------------------------------------------------------------------ terminals */

static void open_terminal(void)
{
	int number = 0;
	char path[64];
	fd[0] = must(open("/dev/ptmx", O_RDWR | O_NOCTTY));
	must(ioctl(fd[0], TIOCSPTLCK, &number));
	must(ioctl(fd[0], TIOCGPTN, &number));
	snprintf(path, sizeof path, "/dev/pts/%d", number);
	fd[1] = must(open(path, O_RDWR | O_NOCTTY));
}
static void say_terminal(int descriptor)
{
	struct termios settings = {0};
	struct winsize size = {0};
	tcgetattr(descriptor, &settings), ioctl(descriptor, TIOCGWINSZ, &size);
	say("%x %x %x %x %ux%u ", settings.c_iflag, settings.c_oflag, settings.c_cflag, settings.c_lflag, size.ws_row, size.ws_col);
	say_bytes(settings.c_cc, 19);
}
STATE(terminal, "terminals", "a pair with settings and a size");
MAKE(terminal)
{
	struct termios settings;
	open_terminal();
	tcgetattr(fd[1], &settings);
	cfmakeraw(&settings), settings.c_cc[VMIN] = 7, settings.c_cc[VEOF] = 3;
	must(tcsetattr(fd[1], TCSANOW, &settings));
	must(ioctl(fd[1], TIOCSWINSZ, &(struct winsize){.ws_row = 33, .ws_col = 99}));
}
OBSERVE(terminal) { say_terminal(fd[1]); }
STATE(terminal_input, "terminals", "typed and not read");
MAKE(terminal_input) { open_terminal(); must(write(fd[0], "typed\n", 6)); }
OBSERVE(terminal_input) { int waiting = 0; ioctl(fd[1], FIONREAD, &waiting); say("%d", waiting); }
STATE(terminal_output, "terminals", "printed and not read");
MAKE(terminal_output) { open_terminal(); must(write(fd[1], "printed", 7)); }
OBSERVE(terminal_output) { int waiting = 0; ioctl(fd[0], FIONREAD, &waiting); say("%d", waiting); }
STATE(terminal_exclusive, "terminals", "ioctl(TIOCEXCL)");
MAKE(terminal_exclusive) { open_terminal(); must(ioctl(fd[1], TIOCEXCL)); }
OBSERVE(terminal_exclusive) { int on = -1; ioctl(fd[1], TIOCGEXCL, &on); say("%d", on); }
STATE(terminal_packets, "terminals", "ioctl(TIOCPKT)");
MAKE(terminal_packets) { int on = 1; open_terminal(); must(ioctl(fd[0], TIOCPKT, &on)); }
OBSERVE(terminal_packets) { int on = -1; ioctl(fd[0], TIOCGPKT, &on); say("%d", on); }
STATE(terminal_locked, "terminals", "ioctl(TIOCSLCKTRMIOS)");
MAKE(terminal_locked) { struct termios locked = {.c_lflag = ECHO}; open_terminal(); must(ioctl(fd[1], TIOCSLCKTRMIOS, &locked)); }
OBSERVE(terminal_locked) { struct termios locked = {0}; ioctl(fd[1], TIOCGLCKTRMIOS, &locked); say("%x", locked.c_lflag); }
STATE(controlling_terminal, "terminals", "a session with its terminal and a foreground group");
static void lead(void) { setsid(); open_terminal(); ioctl(fd[1], TIOCSCTTY, 0); }
static void follow(void) { setpgid(0, 0); }
MAKE(controlling_terminal) { lead(); pid_t pid = start_child(follow); signal(SIGTTOU, SIG_IGN); must(tcsetpgrp(fd[1], pid)); child = pid; }
static void say_controlling(pid_t process)
{
	char path[64], line[1024] = ""; int number = 0, group = 0;
	snprintf(path, sizeof path, "/proc/%d/stat", process);
	FILE *file = fopen(path, "re");
	if (fgets(line, sizeof line, file))
		sscanf(strrchr(line, ')') + 2, "%*c %*d %*d %*d %d %d", &number, &group);
	fclose(file);
	say("%d %d ", number, group == child);
}
OBSERVE(controlling_terminal) { say_controlling(getpid()), say_controlling(child); say("%d", tcgetpgrp(fd[1]) == child); }
STATE(current_terminal, "terminals", "a group in the foreground that holds /dev/tty, and its parent, which does too");
MAKE(current_terminal) { lead(); fd[2] = must(open("/dev/tty", O_RDWR | O_CLOEXEC)); pid_t pid = start_child(follow); signal(SIGTTOU, SIG_IGN); must(tcsetpgrp(fd[2], pid)); child = pid; }
OBSERVE(current_terminal) { say_controlling(child), say_terminal(fd[2]); say("%d", tcgetpgrp(fd[2]) == child); }
STATE(terminal_discipline, "terminals", "ioctl(TIOCSETD)");
MAKE(terminal_discipline) { int number = 3; open_terminal(); must(ioctl(fd[1], TIOCSETD, &number)); }
OBSERVE(terminal_discipline) { int number = -1; ioctl(fd[1], TIOCGETD, &number); say("%d", number); }
STATE(terminal_hung_up, "terminals", "the other side closed");
MAKE(terminal_hung_up) { open_terminal(); close(fd[0]); }
OBSERVE(terminal_hung_up) { struct pollfd p = {fd[1], POLLIN, 0}; poll(&p, 1, 0); say("%x ", p.revents); char byte; say_call("read", read(fd[1], &byte, 1)); }
