/* SPDX-License-Identifier: Apache-2.0 */
/* What a task sets about itself: prctl, arch_prctl, /proc, names and numbers of its processor. */
#include "states.h"

#include <asm/prctl.h>
#include <cpuid.h>
#include <linux/membarrier.h>
#include <linux/prctl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/times.h>
#include <sys/wait.h>
#include <time.h>

/* ------------------------------------------------------------------ prctl: a number that is set and got */

struct control {
	int set, get;
	unsigned long value, second;
	unsigned long asks; /* what `get` wants as its argument */
	bool by_pointer;
	bool thread; /* in a second thread, not in the main one */
};

static const struct control *control;

static void set_control(void)
{
	must(prctl(control->set, control->value, control->second, 0, 0));
}

static void make_control(const void *data)
{
	control = data;
	if (control->thread)
		start_thread(false, false);
	control->thread ? in_thread(set_control) : set_control();
}

static void get_control(void)
{
	int value = -1;

	if (control->by_pointer)
		say_call("pointed", prctl(control->get, &value, 0, 0, 0)), say("value %d ", value);
	else
		say_call("value", prctl(control->get, control->asks, 0, 0, 0));
}

static void look_control(const void *data)
{
	control = data;
	get_control();
	if (control->thread)
		in_thread(get_control);
}

#define CONTROL(name, what, ...)                                                                   \
	static const struct control control_##name = {__VA_ARGS__};                                \
	ENTRY(name, "prctl", what, make_control, look_control, &control_##name)

CONTROL(pdeathsig, "prctl(PR_SET_PDEATHSIG)", PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, 10, .by_pointer = true);
CONTROL(not_dumpable, "prctl(PR_SET_DUMPABLE, 0)", PR_SET_DUMPABLE, PR_GET_DUMPABLE, 0);
CONTROL(child_subreaper, "prctl(PR_SET_CHILD_SUBREAPER)", PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER, 1, .by_pointer = true);
CONTROL(keep_capabilities, "prctl(PR_SET_KEEPCAPS)", PR_SET_KEEPCAPS, PR_GET_KEEPCAPS, 1);
CONTROL(securebits, "prctl(PR_SET_SECUREBITS, SECBIT_NOROOT with its lock)", PR_SET_SECUREBITS, PR_GET_SECUREBITS, 3);
CONTROL(no_new_privileges, "prctl(PR_SET_NO_NEW_PRIVS)", PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS, 1);
CONTROL(timer_slack, "prctl(PR_SET_TIMERSLACK)", PR_SET_TIMERSLACK, PR_GET_TIMERSLACK, 7000000);
CONTROL(thread_timer_slack, "prctl(PR_SET_TIMERSLACK) in a second thread", PR_SET_TIMERSLACK, PR_GET_TIMERSLACK, 9000000, .thread = true);
CONTROL(no_huge_pages, "prctl(PR_SET_THP_DISABLE)", PR_SET_THP_DISABLE, PR_GET_THP_DISABLE, 1);
CONTROL(no_huge_pages_unless_advised, "prctl(PR_SET_THP_DISABLE, PR_THP_DISABLE_EXCEPT_ADVISED)", PR_SET_THP_DISABLE, PR_GET_THP_DISABLE, 1, 2);
CONTROL(timer_numbers, "prctl(PR_TIMER_CREATE_RESTORE_IDS)", 77, 77, 1, .asks = 2);
CONTROL(no_time_stamp_counter, "prctl(PR_SET_TSC, PR_TSC_SIGSEGV)", PR_SET_TSC, PR_GET_TSC, PR_TSC_SIGSEGV, .by_pointer = true);
CONTROL(store_bypass, "prctl(PR_SET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, disable)", PR_SET_SPECULATION_CTRL, PR_GET_SPECULATION_CTRL, PR_SPEC_STORE_BYPASS, PR_SPEC_DISABLE, PR_SPEC_STORE_BYPASS);
CONTROL(indirect_branch, "prctl(PR_SET_SPECULATION_CTRL, PR_SPEC_INDIRECT_BRANCH, disable)", PR_SET_SPECULATION_CTRL, PR_GET_SPECULATION_CTRL, PR_SPEC_INDIRECT_BRANCH, PR_SPEC_DISABLE, PR_SPEC_INDIRECT_BRANCH);
CONTROL(l1d_flush, "prctl(PR_SET_SPECULATION_CTRL, PR_SPEC_L1D_FLUSH, enable)", PR_SET_SPECULATION_CTRL, PR_GET_SPECULATION_CTRL, 2, PR_SPEC_ENABLE, 2);
CONTROL(memory_errors, "prctl(PR_MCE_KILL, early)", PR_MCE_KILL, PR_MCE_KILL_GET, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY);
CONTROL(merge_all_memory, "prctl(PR_SET_MEMORY_MERGE)", 67, 68, 1);
CONTROL(no_executable_gain, "prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN)", 65, 66, 1);
CONTROL(io_flusher, "prctl(PR_SET_IO_FLUSHER)", 57, 58, 1);
CONTROL(futex_hash, "prctl(PR_FUTEX_HASH, set 16 slots)", 78, 78, 1, 16, 2);

STATE(task_name, "prctl", "prctl(PR_SET_NAME)");
MAKE(task_name) { must(prctl(PR_SET_NAME, "a crab")); }
OBSERVE(task_name) { char name[16] = ""; prctl(PR_GET_NAME, name); say("%s", name); }

static void name_thread(void) { prctl(PR_SET_NAME, "a claw"); }
static void say_name(void) { char name[16] = ""; prctl(PR_GET_NAME, name); say("%s ", name); }
STATE(thread_name, "prctl", "prctl(PR_SET_NAME) in a second thread");
MAKE(thread_name) { start_thread(false, false); in_thread(name_thread); }
OBSERVE(thread_name) { in_thread(say_name); say_name(); }

STATE(core_scheduling, "prctl", "prctl(PR_SCHED_CORE, create)");
MAKE(core_scheduling) { must(prctl(62, 1, 0, 0, 0)); }
OBSERVE(core_scheduling) { unsigned long cookie = 0; say_call("get", prctl(62, 0, 0, 0, &cookie)); say("%d", !!cookie); }

STATE(mapping_name, "prctl", "prctl(PR_SET_VMA_ANON_NAME)");
MAKE(mapping_name)
{
	area = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, area, 8192, "shell"));
}
OBSERVE(mapping_name) { say_mapping(area); }

static volatile char selector;
static volatile int caught;
static void on_blocked_call(int number) { (void)number; selector = 0; caught = 1; }
STATE(user_dispatch, "restrictions", "prctl(PR_SET_SYSCALL_USER_DISPATCH)");
MAKE(user_dispatch)
{
	signal(SIGSYS, on_blocked_call);
	must(prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 0, 0, &selector));
}
OBSERVE(user_dispatch) { caught = 0; selector = 1; syscall(SYS_getppid); selector = 0; say("%d", caught); }

/* ------------------------------------------------------------------ arch_prctl and the processor */

STATE(gs_base, "processor", "arch_prctl(ARCH_SET_GS)");
MAKE(gs_base) { must(syscall(SYS_arch_prctl, ARCH_SET_GS, 0x123456000)); }
OBSERVE(gs_base) { unsigned long base = 0; syscall(SYS_arch_prctl, ARCH_GET_GS, &base); say("%lx", base); }

STATE(cpuid_fault, "processor", "arch_prctl(ARCH_SET_CPUID, 0)");
MAKE(cpuid_fault) { must(syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)); }
OBSERVE(cpuid_fault) { say_call("get", syscall(SYS_arch_prctl, ARCH_GET_CPUID, 0)); }

STATE(shadow_stack, "processor", "arch_prctl(ARCH_SHSTK_ENABLE)");
MAKE(shadow_stack) { must(syscall(SYS_arch_prctl, 0x5001, 1)); }
OBSERVE(shadow_stack) { unsigned long on = 0; syscall(SYS_arch_prctl, 0x5005, &on); say("%lx", on); }

STATE(tagged_addresses, "processor", "arch_prctl(ARCH_ENABLE_TAGGED_ADDR)");
MAKE(tagged_addresses) { must(syscall(SYS_arch_prctl, 0x4002, 6)); }
OBSERVE(tagged_addresses) { unsigned long mask = 0; syscall(SYS_arch_prctl, 0x4001, &mask); say("%lx", mask); }

STATE(tile_permission, "processor", "arch_prctl(ARCH_REQ_XCOMP_PERM, tiles)");
MAKE(tile_permission) { must(syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, 18)); }
OBSERVE(tile_permission) { unsigned long mask = 0; syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &mask); say("%lx", mask); }

struct descriptor { unsigned number, base, limit, flags; };
STATE(local_descriptor_table, "processor", "modify_ldt");
MAKE(local_descriptor_table)
{
	struct descriptor one = {.number = 5, .base = 0x1000, .limit = 0xfff, .flags = 0x51};
	must(syscall(SYS_modify_ldt, 0x11, &one, sizeof one));
}
OBSERVE(local_descriptor_table)
{
	char table[512];
	long size = syscall(SYS_modify_ldt, 0, table, sizeof table);
	say("size %ld ", size);
	if (size > 0)
		say_bytes(table, size);
}

STATE(thread_area, "processor", "set_thread_area");
MAKE(thread_area) { struct descriptor one = {.number = -1, .flags = 0x51}; must(syscall(SYS_set_thread_area, &one)); }
OBSERVE(thread_area) { }

STATE(io_ports, "processor", "ioperm");
MAKE(io_ports) { must(syscall(SYS_ioperm, 0x80, 1, 1)); }
OBSERVE(io_ports) { }

/* Registers that survive the calls in between: nothing here uses the upper ones. */
static unsigned char vector[64];
static uint32_t mxcsr;
static uint16_t control_word;
static void store_vectors(void)
{
	__asm__ volatile("vmovdqu %%ymm13, %0; stmxcsr %1; fnstcw %2" : "=m"(vector), "=m"(mxcsr), "=m"(control_word));
}
STATE(vector_registers, "processor", "AVX registers, MXCSR and the x87 control word");
MAKE(vector_registers)
{
	if (!__builtin_cpu_supports("avx"))
		errno = ENODEV, impossible("AVX");
	fill(vector, 32);
	mxcsr = 0x5f80, control_word = 0x0f7f;
	__asm__ volatile("vmovdqu %0, %%ymm13; ldmxcsr %1; fldcw %2" : : "m"(vector), "m"(mxcsr), "m"(control_word));
}
OBSERVE(vector_registers) { store_vectors(); say_bytes(vector, 32); say("%x %x", mxcsr, control_word); }

STATE(wide_registers, "processor", "AVX-512 registers and masks");
MAKE(wide_registers)
{
	if (!__builtin_cpu_supports("avx512bw"))
		errno = ENODEV, impossible("AVX-512");
	fill(vector, 64);
	__asm__ volatile("vmovdqu64 %0, %%zmm29; kmovq %1, %%k5" : : "m"(vector), "r"(0x123456789abcdefUL));
}
OBSERVE(wide_registers)
{
	unsigned long mask;
	__asm__ volatile("vmovdqu64 %%zmm29, %0; kmovq %%k5, %1" : "=m"(vector), "=r"(mask));
	say_bytes(vector, 64);
	say("%lx", mask);
}

STATE(robust_list, "processor", "set_robust_list");
MAKE(robust_list)
{
	static void *head[3];
	head[0] = head;
	must(syscall(SYS_set_robust_list, head, sizeof head));
}
OBSERVE(robust_list)
{
	void *head = NULL;
	size_t size = 0;
	syscall(SYS_get_robust_list, 0, &head, &size);
	say("%p %zu", head, size);
}

STATE(clear_child_tid, "processor", "set_tid_address");
MAKE(clear_child_tid) { static int number; syscall(SYS_set_tid_address, &number); }
OBSERVE(clear_child_tid) { int *address = NULL; say_call("get", prctl(PR_GET_TID_ADDRESS, &address)); say("%p", address); }

STATE(restartable_sequence, "processor", "rseq, as the C library registers it");
MAKE(restartable_sequence) { }
OBSERVE(restartable_sequence)
{
	extern const unsigned __rseq_size;
	/* Registering it again elsewhere is refused as long as it is registered. */
	static char other[64] __attribute__((aligned(64)));
	say("%d ", __rseq_size > 0);
	say_call("again", syscall(SYS_rseq, other, 32, 0, 0x53053053));
}

STATE(memory_barriers, "processor", "membarrier(REGISTER_PRIVATE_EXPEDITED, SYNC_CORE, RSEQ)");
MAKE(memory_barriers)
{
	must(syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0));
	must(syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0));
	must(syscall(SYS_membarrier, 1 << 6, 0, 0));
}
OBSERVE(memory_barriers) { say_call("registered", syscall(SYS_membarrier, 1 << 9, 0, 0)); }

/* ------------------------------------------------------------------ /proc */

struct setting {
	const char *path, *value;
};

static void make_setting(const void *data) { const struct setting *s = data; put(s->path, s->value); }
static void look_setting(const void *data) { const struct setting *s = data; say_lines(s->path, ""); }

#define SETTING(name, path, value)                                                                 \
	static const struct setting setting_##name = {path, value};                                \
	ENTRY(name, "proc", path, make_setting, look_setting, &setting_##name)

SETTING(oom_score, "/proc/self/oom_score_adj", "321");
SETTING(core_filter, "/proc/self/coredump_filter", "0x11");
SETTING(auto_group, "/proc/self/autogroup", "7");
SETTING(login_user, "/proc/self/loginuid", "1000");
SETTING(slack_by_file, "/proc/self/timerslack_ns", "123456");
SETTING(namespace_limits, "/proc/sys/user/max_inotify_watches", "77");

STATE(title, "proc", "the words of the command line overwritten in memory");
MAKE(title)
{
	extern char *program_invocation_name;
	memset(program_invocation_name, 'z', strlen(program_invocation_name));
}
OBSERVE(title) { say_lines("/proc/self/cmdline", ""); }

STATE(environment, "proc", "/proc/self/environ");
MAKE(environment) { }
OBSERVE(environment)
{
	char text[8192] = "";
	int file = open("/proc/self/environ", O_RDONLY);
	ssize_t size = read(file, text, sizeof text);
	close(file);
	say("%zd ", size);
	if (size > 0)
		say_bytes(text, size > 200 ? 200 : size);
}

STATE(program_file, "proc", "/proc/self/exe and the auxiliary vector");
MAKE(program_file) { }
OBSERVE(program_file)
{
	char link[256] = "", vector[512];
	say_call("link", readlink("/proc/self/exe", link, 255));
	int file = open("/proc/self/auxv", O_RDONLY);
	ssize_t size = read(file, vector, sizeof vector);
	close(file);
	say("%s ", link);
	say_bytes(vector, size > 0 ? size : 0);
}

STATE(program_break, "proc", "brk");
MAKE(program_break) { must(sbrk(123 << 12)); }
OBSERVE(program_break) { say("%p", sbrk(0)); }

STATE(deleted_program, "proc", "a program whose file was removed");
MAKE(deleted_program)
{
	char buffer[65536];
	int from = must(open("/proc/self/exe", O_RDONLY)), to = must(open("copy", O_WRONLY | O_CREAT, 0755));
	for (ssize_t more; (more = read(from, buffer, sizeof buffer)) > 0;)
		must(write(to, buffer, more));
	close(from), close(to);
	child = must(fork());
	if (!child) {
		execl("./copy", "copy", "wait", NULL);
		_exit(1);
	}
	usleep(200000);
	must(unlink("copy"));
}
OBSERVE(deleted_program)
{
	char path[64], link[256] = "";
	snprintf(path, sizeof path, "/proc/%d/exe", child);
	say_call("link", readlink(path, link, 255));
	say("%s", link);
}

STATE(processor_time, "proc", "the processor time used, by times() and /proc/self/stat");
MAKE(processor_time)
{
	clock_t began = clock();
	while (clock() - began < CLOCKS_PER_SEC / 5) { }
}
OBSERVE(processor_time) { struct tms used; times(&used); say("%d", used.tms_utime + used.tms_stime >= 15); }

STATE(dead_childrens_time, "proc", "getrusage(RUSAGE_CHILDREN)");
MAKE(dead_childrens_time)
{
	pid_t pid = fork();
	if (!pid) {
		clock_t began = clock();
		while (clock() - began < CLOCKS_PER_SEC / 5) { }
		_exit(0);
	}
	waitpid(pid, NULL, 0);
}
OBSERVE(dead_childrens_time) { struct rusage used; getrusage(RUSAGE_CHILDREN, &used); say("%d", used.ru_utime.tv_usec + used.ru_stime.tv_usec + (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000 > 100000); }

STATE(bytes_moved, "proc", "/proc/self/io");
MAKE(bytes_moved) { static char block[1 << 20]; int null = open("/dev/null", O_WRONLY); must(write(null, block, sizeof block)); close(null); }
OBSERVE(bytes_moved)
{
	unsigned long written = 0;
	char line[128];
	FILE *file = fopen("/proc/self/io", "re");
	while (file && fgets(line, sizeof line, file))
		sscanf(line, "wchar: %lu", &written);
	if (file)
		fclose(file);
	say("%d", written >= 1 << 20);
}

STATE(memory_peak, "proc", "VmHWM of /proc/self/status");
MAKE(memory_peak) { char *block = malloc(32 << 20); fill(block, 32 << 20); free(block); }
OBSERVE(memory_peak) { struct rusage used; getrusage(RUSAGE_SELF, &used); say("%d", used.ru_maxrss >= 32 << 10); }

STATE(start_time, "proc", "the time of the start, by /proc/self/stat");
MAKE(start_time) { }
OBSERVE(start_time)
{
	char line[1024] = "";
	unsigned long start = 0;
	FILE *file = fopen("/proc/self/stat", "re");
	if (fgets(line, sizeof line, file))
		sscanf(strrchr(line, ')') + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lu", &start);
	fclose(file);
	say("%lu", start);
}

static struct timespec noted[3];
STATE(clocks, "proc", "CLOCK_MONOTONIC and CLOCK_BOOTTIME go on, and not back");
MAKE(clocks) { clock_gettime(CLOCK_MONOTONIC, &noted[0]); clock_gettime(CLOCK_BOOTTIME, &noted[1]); clock_gettime(CLOCK_REALTIME, &noted[2]); }
OBSERVE(clocks)
{
	struct timespec now[3];
	clock_gettime(CLOCK_MONOTONIC, &now[0]), clock_gettime(CLOCK_BOOTTIME, &now[1]), clock_gettime(CLOCK_REALTIME, &now[2]);
	for (int i = 0; i < 3; i++)
		say("%d ", now[i].tv_sec >= noted[i].tv_sec && now[i].tv_sec - noted[i].tv_sec < 3600);
}

/* ------------------------------------------------------------------ others */

STATE(personality, "task", "personality(UNAME26)");
MAKE(personality) { must(syscall(SYS_personality, UNAME26)); }
OBSERVE(personality) { say_call("personality", syscall(SYS_personality, 0xffffffff)); }

STATE(personality_32, "task", "personality(PER_LINUX32)");
MAKE(personality_32) { must(syscall(SYS_personality, PER_LINUX32)); }
OBSERVE(personality_32) { say_call("personality", syscall(SYS_personality, 0xffffffff)); }

STATE(file_mode_mask, "task", "umask");
MAKE(file_mode_mask) { umask(0137); }
OBSERVE(file_mode_mask) { mode_t mask = umask(0); umask(mask); say("%o", mask); }

STATE(working_directory, "task", "chdir");
MAKE(working_directory) { must(mkdir("deeper", 0755)); must(chdir("deeper")); }
OBSERVE(working_directory) { char path[512] = ""; say_call("getcwd", getcwd(path, sizeof path) ? 0 : -1); say("%s", path); }

STATE(root_directory, "task", "chroot");
MAKE(root_directory) { must(mkdir("root", 0755)); put("root/inside", "x"); must(chroot("root")); must(chdir("/")); }
OBSERVE(root_directory) { say_call("inside", access("/inside", F_OK)); say_call("outside", access("/etc", F_OK)); }

static void go_elsewhere(void) { if (chdir("/usr") == 0) umask(0123); }
static void say_place(void) { char path[256] = ""; say("%s ", getcwd(path, 255) ? path : "?"); mode_t mask = umask(0); umask(mask); say("%o ", mask); }
STATE(threads_directory, "task", "a thread made without CLONE_FS: its own working directory and mask");
MAKE(threads_directory) { start_thread(true, false); in_thread(go_elsewhere); }
OBSERVE(threads_directory) { in_thread(say_place); say_place(); }

static void open_null(void) { fd[1] = open("/dev/zero", O_RDONLY); fd[1] = dup2(fd[1], 700); }
static void say_null(void) { say_call("700", fcntl(700, F_GETFD)); }
STATE(threads_descriptors, "task", "a thread made without CLONE_FILES: its own table of descriptors");
MAKE(threads_descriptors) { start_thread(false, true); in_thread(open_null); }
OBSERVE(threads_descriptors) { in_thread(say_null); say_null(); }

static void make_relative(int flags)
{
	char *stack = malloc(1 << 16);
	child = must(syscall(SYS_clone, flags | 17, flags & CLONE_VM ? stack + (1 << 16) - 64 : NULL, NULL, NULL, NULL));
	while (!child)
		pause();
}
STATE(shared_descriptors, "task", "a child made with CLONE_FILES: one table of descriptors");
MAKE(shared_descriptors) { make_relative(CLONE_FILES); }
OBSERVE(shared_descriptors)
{
	char path[64];
	int one = open("/dev/null", O_RDONLY);
	snprintf(path, sizeof path, "/proc/%d/fd/%d", child, one);
	say_call("there", access(path, F_OK));
	close(one);
}

STATE(shared_directory, "task", "a child made with CLONE_FS: one working directory");
MAKE(shared_directory) { make_relative(CLONE_FS); }
OBSERVE(shared_directory)
{
	char path[64], link[256] = "", here[256] = "";
	if (!getcwd(here, 255) || chdir("/usr"))
		return;
	snprintf(path, sizeof path, "/proc/%d/cwd", child);
	say_call("link", readlink(path, link, 255));
	say("%s", link);
	if (chdir(here)) { }
}

STATE(shared_io_context, "task", "a child made with CLONE_IO");
MAKE(shared_io_context) { must(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 1)); make_relative(CLONE_IO); }
OBSERVE(shared_io_context) { say_call("child", syscall(SYS_ioprio_get, 1, child)); }

static volatile int shared_word;
static int count_up(void *unused)
{
	shared_word = 5;
	while (!unused)
		pause();
	return 0;
}
STATE(shared_memory_space, "task", "a child made with CLONE_VM: one memory");
MAKE(shared_memory_space)
{
	char *stack = malloc(1 << 16);
	child = must(clone(count_up, stack + (1 << 16), CLONE_VM | 17, NULL));
	while (shared_word != 5)
		usleep(1000);
}
OBSERVE(shared_memory_space)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/mem", child);
	int file = open(path, O_RDONLY);
	shared_word++;
	int there = -1;
	if (pread(file, &there, sizeof there, (off_t)&shared_word) < 0)
		say("unreadable ");
	close(file);
	say("%d", there == shared_word);
	shared_word--;
}

STATE(process_tree, "task", "children of children, in sessions and groups of their own");
static void lead_group(void) { setpgid(0, 0); }
static void lead_session(void) { setsid(); start_child(lead_group); }
MAKE(process_tree) { child = start_child(lead_session); }
OBSERVE(process_tree)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/task/%d/children", child, child);
	say("%d %d %d|", getpgid(child), getsid(child), getppid());
	say_lines(path, "");
}

STATE(dead_child, "task", "a child that ended with 42 and was not waited for");
MAKE(dead_child) { child = must(fork()); if (!child) _exit(42); usleep(100000); }
OBSERVE(dead_child)
{
	siginfo_t info = {0};
	say_call("waitid", waitid(P_PID, child, &info, WEXITED | WNOHANG | WNOWAIT));
	say("%d %d", info.si_code, info.si_status);
}

STATE(stopped_child, "task", "a child that was stopped");
MAKE(stopped_child) { child = start_child(NULL); kill(child, 19); waitpid(child, NULL, WUNTRACED); }
OBSERVE(stopped_child) { char path[64]; snprintf(path, sizeof path, "/proc/%d/status", child); say_lines(path, "State:"); }

static void wait_for_ever(void) { while (1) pause(); }
STATE(end_reported_otherwise, "task", "a child that ends with SIGUSR1: only waits for clones see it");
MAKE(end_reported_otherwise) { child = must(syscall(SYS_clone, SIGUSR1, 0, 0, 0, 0)); if (!child) wait_for_ever(); }
OBSERVE(end_reported_otherwise) { say_call("wait", waitpid(child, NULL, WNOHANG)); say_call("clones", waitpid(child, NULL, WNOHANG | __WCLONE)); }

STATE(dead_clone, "task", "a dead child that ended with SIGUSR1");
MAKE(dead_clone) { signal(SIGUSR1, SIG_IGN); child = must(syscall(SYS_clone, SIGUSR1, 0, 0, 0, 0)); if (!child) _exit(3); siginfo_t told; waitid(P_PID, child, &told, WEXITED | WNOWAIT | __WALL); }
OBSERVE(dead_clone) { siginfo_t told = {0}; say_call("wait", waitid(P_PID, child, &told, WEXITED | WNOHANG | WNOWAIT)); say("%d %d", told.si_code, told.si_status); }

STATE(continued_child, "task", "a child that was continued, which its parent has not seen yet");
MAKE(continued_child) { child = start_child(NULL); kill(child, SIGSTOP); waitpid(child, NULL, WUNTRACED); kill(child, SIGCONT); usleep(100000); }
OBSERVE(continued_child) { siginfo_t told = {0}; say_call("wait", waitid(P_PID, child, &told, WCONTINUED | WNOHANG | WNOWAIT)); say("%d %d", told.si_code, told.si_status); }

STATE(dead_child_user, "task", "a dead child of another user");
MAKE(dead_child_user) { child = must(fork()); if (!child) { setuid(1000); _exit(3); } siginfo_t told; waitid(P_PID, child, &told, WEXITED | WNOWAIT); }
OBSERVE(dead_child_user) { siginfo_t told = {0}; say_call("wait", waitid(P_PID, child, &told, WEXITED | WNOHANG | WNOWAIT)); say("%d %d %u", told.si_code, told.si_status, told.si_uid); }

static void be_older(void) { must(personality(UNAME26)); }
static void say_personality(void) { say("%x ", personality(0xffffffff)); }
STATE(thread_personality, "task", "personality(UNAME26) in a second thread");
MAKE(thread_personality) { start_thread(false, false); in_thread(be_older); }
OBSERVE(thread_personality) { in_thread(say_personality); say_personality(); }

STATE(traced_child, "task", "ptrace of a child");
MAKE(traced_child) { child = start_child(NULL); must(syscall(SYS_ptrace, 0x4206, child, 0, 0)); }
OBSERVE(traced_child) { char path[64]; snprintf(path, sizeof path, "/proc/%d/status", child); say_lines(path, "TracerPid"); }
