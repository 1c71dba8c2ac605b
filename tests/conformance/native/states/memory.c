/* SPDX-License-Identifier: Apache-2.0 */
/* Memory: kinds of mappings, advice and locks. */
#include "states.h"

#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/wait.h>

#define PAGE 4096L
#define SIZE (16 * PAGE)

static char *map(int flags, int file, int rights)
{
	char *found = mmap(NULL, SIZE, rights, flags, file, 0);
	if (found == MAP_FAILED)
		impossible("mmap");
	return found;
}

static char *memory(void)
{
	char *found = map(MAP_PRIVATE | MAP_ANONYMOUS, -1, PROT_READ | PROT_WRITE);
	fill(found, SIZE);
	return found;
}

static void say_sum(const char *bytes, size_t size)
{
	unsigned sum = 0;
	for (size_t i = 0; i < size; i++)
		sum = sum * 31 + (unsigned char)bytes[i];
	say("sum %x ", sum);
}

/* ------------------------------------------------------------------ advice, by its number */

struct advice { int number; bool content; };
static void make_advice(const void *data)
{
	area = memory();
	must(madvise(area, SIZE, ((const struct advice *)data)->number));
}
static void look_advice(const void *data)
{
	say_mapping(area);
	if (((const struct advice *)data)->content)
		say_sum(area, SIZE);
}
#define ADVICE(name, which, content)                                                               \
	static const struct advice advice_##name = {which, content};                               \
	ENTRY(name, "memory", "madvise(" #which ")", make_advice, look_advice, &advice_##name)
ADVICE(advice_dont_fork, MADV_DONTFORK, true);
ADVICE(advice_wipe_on_fork, MADV_WIPEONFORK, true);
ADVICE(advice_dont_dump, MADV_DONTDUMP, true);
ADVICE(advice_huge, MADV_HUGEPAGE, true);
ADVICE(advice_no_huge, MADV_NOHUGEPAGE, true);
ADVICE(advice_merge, MADV_MERGEABLE, true);
ADVICE(advice_random, MADV_RANDOM, true);
ADVICE(advice_sequential, MADV_SEQUENTIAL, true);
ADVICE(advice_cold, MADV_COLD, true);
ADVICE(advice_free, MADV_FREE, false);
ADVICE(advice_dont_need, MADV_DONTNEED, true);

STATE(guard_pages, "memory", "madvise(MADV_GUARD_INSTALL)");
MAKE(guard_pages) { area = memory(); must(madvise(area + 4 * PAGE, PAGE, 102)); }
OBSERVE(guard_pages)
{
	/* A write out of a guarded page fails; no signal. */
	int null = open("/dev/null", O_WRONLY), ends[2];
	if (pipe(ends)) return;
	say_call("before", write(ends[1], area + 3 * PAGE, 16));
	say_call("guarded", write(ends[1], area + 4 * PAGE, 16));
	say_call("behind", write(ends[1], area + 5 * PAGE, 16));
	close(null), close(ends[0]), close(ends[1]);
}

/* ------------------------------------------------------------------ locks */

#define say_locked() say_lines("/proc/self/status", "VmLck")
STATE(locked, "memory", "mlock");
MAKE(locked) { area = memory(); must(mlock(area, SIZE / 2)); }
OBSERVE(locked) { say_mapping(area); say_locked(); say_sum(area, SIZE); }
STATE(locked_on_fault, "memory", "mlock2(MLOCK_ONFAULT)");
MAKE(locked_on_fault) { area = map(MAP_PRIVATE | MAP_ANONYMOUS, -1, PROT_READ | PROT_WRITE); must(mlock2(area, SIZE, MLOCK_ONFAULT)); }
OBSERVE(locked_on_fault) { say_mapping(area); say_locked(); }
STATE(locked_in_future, "memory", "mlockall(MCL_FUTURE)");
MAKE(locked_in_future) { must(mlockall(MCL_FUTURE)); }
OBSERVE(locked_in_future)
{
	char *fresh = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	say_mapping(fresh);
	munmap(fresh, PAGE);
}
STATE(sealed, "restrictions", "mseal");
MAKE(sealed) { area = memory(); must(syscall(462, area, SIZE, 0)); }
OBSERVE(sealed) { say_call("mprotect", mprotect(area, SIZE, PROT_READ | PROT_WRITE)); say_sum(area, SIZE); }

/* ------------------------------------------------------------------ kinds of mappings */

STATE(private_memory, "memory", "private anonymous memory, some of it read-only, some without access");
MAKE(private_memory) { area = memory(); must(mprotect(area, PAGE, PROT_READ)); must(mprotect(area + 2 * PAGE, PAGE, PROT_NONE)); }
OBSERVE(private_memory) { say_mapping(area); say_mapping(area + PAGE); say_mapping(area + 2 * PAGE); say_sum(area, 2 * PAGE); }
STATE(executable_memory, "memory", "memory that may be executed");
MAKE(executable_memory) { area = memory(); memcpy(area, "\xb8\x2a\0\0\0\xc3", 6); must(mprotect(area, SIZE, PROT_READ | PROT_EXEC)); }
OBSERVE(executable_memory) { say_mapping(area); say("%d", ((int (*)(void))area)()); }
STATE(growing_memory, "memory", "mmap(MAP_GROWSDOWN)");
MAKE(growing_memory) { area = map(MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, PROT_READ | PROT_WRITE); fill(area, SIZE); }
OBSERVE(growing_memory) { say_mapping(area + PAGE); say_sum(area, SIZE); }
STATE(unreserved_memory, "memory", "mmap(MAP_NORESERVE)");
MAKE(unreserved_memory) { area = map(MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, PROT_READ | PROT_WRITE); area[0] = 1; }
OBSERVE(unreserved_memory) { say_mapping(area); }
STATE(huge_mapping, "memory", "mmap(MAP_HUGETLB)");
MAKE(huge_mapping) { area = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0); if (area == MAP_FAILED) impossible("mmap"); area[0] = 1; }
OBSERVE(huge_mapping) { say_mapping(area); }
STATE(droppable_memory, "memory", "mmap(MAP_DROPPABLE)");
MAKE(droppable_memory) { area = map(8 | MAP_ANONYMOUS, -1, PROT_READ | PROT_WRITE); area[0] = 1; }
OBSERVE(droppable_memory) { say_mapping(area); }
STATE(shared_anonymous, "memory", "mmap(MAP_SHARED | MAP_ANONYMOUS), shared with a child");
static void add_to_area(void) { area[5] = 77; }
MAKE(shared_anonymous) { area = map(MAP_SHARED | MAP_ANONYMOUS, -1, PROT_READ | PROT_WRITE); fill(area, SIZE); child = start_child(add_to_area); }
OBSERVE(shared_anonymous)
{
	char path[64], there = 0;
	snprintf(path, sizeof path, "/proc/%d/mem", child);
	int file = open(path, O_RDONLY);
	area[9]++;
	if (pread(file, &there, 1, (off_t)(area + 9)) != 1) say("unreadable ");
	say("%d ", there == area[9]);
	area[9]--;
	close(file);
	say_sum(area, SIZE);
	say_mapping(area);
}
static void make_file(const char *name)
{
	char block[SIZE];
	fill(block, SIZE);
	fd[0] = must(open(name, O_RDWR | O_CREAT, 0644));
	must(write(fd[0], block, SIZE));
}
STATE(private_file, "memory", "a private mapping of a file, changed in part");
MAKE(private_file) { make_file("mapped"); area = map(MAP_PRIVATE, fd[0], PROT_READ | PROT_WRITE); area[PAGE] = 7; close(fd[0]); }
OBSERVE(private_file) { say_mapping(area); say_sum(area, SIZE); }
STATE(shared_file, "memory", "a shared mapping of a file");
MAKE(shared_file) { make_file("mapped"); area = map(MAP_SHARED, fd[0], PROT_READ | PROT_WRITE); area[PAGE] = 7; close(fd[0]); }
OBSERVE(shared_file) { say_mapping(area); say_sum(area, SIZE); }
STATE(read_only_file, "memory", "a shared mapping of a file that was opened for reading: it cannot become writable");
MAKE(read_only_file) { make_file("mapped"); close(fd[0]); fd[0] = open("mapped", O_RDONLY); area = map(MAP_SHARED, fd[0], PROT_READ); close(fd[0]); }
OBSERVE(read_only_file) { say_mapping(area); say_call("mprotect", mprotect(area, PAGE, PROT_READ | PROT_WRITE)); }
STATE(deleted_file_mapping, "memory", "a mapping of a file that was removed");
MAKE(deleted_file_mapping) { make_file("mapped"); area = map(MAP_SHARED, fd[0], PROT_READ | PROT_WRITE); unlink("mapped"); close(fd[0]); }
OBSERVE(deleted_file_mapping) { say_sum(area, SIZE); }
STATE(nonlinear_mapping, "memory", "remap_file_pages");
MAKE(nonlinear_mapping)
{
	make_file("mapped");
	area = map(MAP_SHARED, fd[0], PROT_READ | PROT_WRITE);
	must(syscall(SYS_remap_file_pages, area, PAGE, 0, 5, 0));
}
OBSERVE(nonlinear_mapping) { say_mapping(area); say_sum(area, SIZE); }
STATE(memory_file, "memory", "a mapping of a memfd");
MAKE(memory_file) { fd[0] = must(memfd_create("crab", 0)); must(ftruncate(fd[0], SIZE)); area = map(MAP_SHARED, fd[0], PROT_READ | PROT_WRITE); fill(area, SIZE); }
OBSERVE(memory_file) { char block[SIZE]; if (pread(fd[0], block, SIZE, 0) != SIZE) return; say_sum(block, SIZE); say_mapping(area); }
STATE(memory_directory, "memory", "a mapping of a file of /dev/shm");
MAKE(memory_directory) { make_file("/dev/shm/states"); area = map(MAP_SHARED, fd[0], PROT_READ | PROT_WRITE); area[3] = 9; }
OBSERVE(memory_directory) { say_mapping(area); say_sum(area, SIZE); }
STATE(zero_device, "memory", "a private mapping of /dev/zero");
MAKE(zero_device) { fd[0] = open("/dev/zero", O_RDWR); area = map(MAP_PRIVATE, fd[0], PROT_READ | PROT_WRITE); fill(area, PAGE); }
OBSERVE(zero_device) { say_sum(area, SIZE); say_mapping(area); }
STATE(secret_memory, "memory", "memfd_secret");
MAKE(secret_memory) { fd[0] = must(syscall(447, 0)); must(ftruncate(fd[0], SIZE)); area = map(MAP_SHARED, fd[0], PROT_READ | PROT_WRITE); fill(area, SIZE); }
OBSERVE(secret_memory) { say_sum(area, SIZE); say_mapping(area); }
STATE(protection_key, "memory", "pkey_mprotect");
MAKE(protection_key) { int key = must(pkey_alloc(0, 0)); area = memory(); must(pkey_mprotect(area, SIZE, PROT_READ | PROT_WRITE, key)); }
OBSERVE(protection_key) { say_mapping(area); }
STATE(user_faults, "memory", "userfaultfd");
MAKE(user_faults) { fd[0] = must(syscall(SYS_userfaultfd, 1)); }
OBSERVE(user_faults) { }
STATE(moved_memory, "memory", "mremap(MREMAP_DONTUNMAP)");
MAKE(moved_memory) { char *old = memory(); area = mremap(old, SIZE, SIZE, MREMAP_MAYMOVE | 4, NULL); if (area == MAP_FAILED) impossible("mremap"); }
OBSERVE(moved_memory) { say_sum(area, SIZE); say_mapping(area); }
STATE(low_memory, "memory", "mmap(MAP_32BIT)");
MAKE(low_memory) { area = map(MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, PROT_READ | PROT_WRITE); fill(area, SIZE); }
OBSERVE(low_memory) { say_sum(area, SIZE); say_mapping(area); }
STATE(shared_mapping_of_sealed, "memory", "a memfd with F_SEAL_FUTURE_WRITE that is mapped for writing");
MAKE(shared_mapping_of_sealed)
{
	fd[0] = must(memfd_create("crab", MFD_ALLOW_SEALING));
	must(ftruncate(fd[0], SIZE));
	area = map(MAP_SHARED, fd[0], PROT_READ | PROT_WRITE);
	fill(area, SIZE);
	must(fcntl(fd[0], F_ADD_SEALS, 0x10));
}
OBSERVE(shared_mapping_of_sealed) { say_sum(area, SIZE); say_mapping(area); say_call("seals", fcntl(fd[0], F_GET_SEALS)); say_call("write", pwrite(fd[0], "x", 1, 0)); }
