/* SPDX-License-Identifier: Apache-2.0 */
/* Limits, scheduling, users and restrictions. */
#include "states.h"

#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <grp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* ------------------------------------------------------------------ resource limits */

struct bound {
	int which;
	unsigned long soft, hard;
};

static void make_bound(const void *data)
{
	const struct bound *b = data;
	struct rlimit limit;

	must(getrlimit(b->which, &limit));
	limit.rlim_cur = b->soft < limit.rlim_max ? b->soft : limit.rlim_max;
	limit.rlim_max = b->hard < limit.rlim_max ? b->hard : limit.rlim_max;
	must(setrlimit(b->which, &limit));
}

static void look_bound(const void *data)
{
	const struct bound *b = data;
	struct rlimit limit = {0};

	getrlimit(b->which, &limit);
	say("%lu %lu", (long)limit.rlim_cur, (long)limit.rlim_max);
}

#define BOUND(name, which, soft, hard)                                                             \
	static const struct bound bound_##name = {which, soft, hard};                              \
	ENTRY(name, "limits", "setrlimit(" #which ")", make_bound, look_bound, &bound_##name)

BOUND(limit_address_space, RLIMIT_AS, 3UL << 30, 4UL << 30);
BOUND(limit_core, RLIMIT_CORE, 0, 1);
BOUND(limit_processor_time, RLIMIT_CPU, 5000, 6000);
BOUND(limit_data, RLIMIT_DATA, 1UL << 30, 2UL << 30);
BOUND(limit_file_size, RLIMIT_FSIZE, 1UL << 32, 1UL << 33);
BOUND(limit_locked_memory, RLIMIT_MEMLOCK, 4096, 8192);
BOUND(limit_queues, RLIMIT_MSGQUEUE, 4000, 5000);
BOUND(limit_nice, RLIMIT_NICE, 0, 0);
BOUND(limit_descriptors, RLIMIT_NOFILE, 1100, 1200);
BOUND(limit_processes, RLIMIT_NPROC, 3000, 4000);
BOUND(limit_resident, RLIMIT_RSS, 1UL << 30, 2UL << 30);
BOUND(limit_priority, RLIMIT_RTPRIO, 0, 0);
BOUND(limit_real_time, RLIMIT_RTTIME, 1000000, 2000000);
BOUND(limit_signals, RLIMIT_SIGPENDING, 100, 200);
BOUND(limit_stack, RLIMIT_STACK, 1 << 20, 4 << 20);
BOUND(limit_locks, RLIMIT_LOCKS, 10, 20);

/* ------------------------------------------------------------------ scheduling */

STATE(nice_value, "scheduling", "setpriority");
MAKE(nice_value) { must(setpriority(PRIO_PROCESS, 0, 7)); }
OBSERVE(nice_value) { say_call("nice", getpriority(PRIO_PROCESS, 0)); }

static void be_nice(void) { setpriority(PRIO_PROCESS, 0, 11); }
static void say_nice(void) { say_call("nice", getpriority(PRIO_PROCESS, 0)); }
STATE(thread_nice_value, "scheduling", "setpriority in a second thread");
MAKE(thread_nice_value) { start_thread(false, false); in_thread(be_nice); }
OBSERVE(thread_nice_value) { in_thread(say_nice); say_nice(); }
STATE(first_thread_nice_value, "scheduling", "setpriority in the first of two threads");
MAKE(first_thread_nice_value) { start_thread(false, false); be_nice(); }
OBSERVE(first_thread_nice_value) { in_thread(say_nice); say_nice(); }

static struct attributes { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; uint32_t least, most; } got;
static void say_schedule(void)
{
	memset(&got, 0, sizeof got);
	say_call("attr", syscall(SYS_sched_getattr, 0, &got, sizeof got, 0));
	say("policy %u flags %lx nice %d priority %u runtime %lu clamp %u %u ", got.policy, (long)got.flags, got.nice, got.priority,
	    (long)got.runtime, got.least, got.most);
}

struct policy { int number, priority; };
static void make_policy(const void *data)
{
	const struct policy *p = data;
	struct sched_param parameter = {.sched_priority = p->priority};
	must(sched_setscheduler(0, p->number, &parameter));
}
static void look_schedule(const void *data) { (void)data; say_schedule(); }
#define POLICY(name, which, priority)                                                             \
	static const struct policy chosen_##name = {which, priority};                             \
	ENTRY(name, "scheduling", "sched_setscheduler(" #which ")", make_policy, look_schedule, &chosen_##name)
POLICY(policy_batch, SCHED_BATCH, 0);
POLICY(policy_idle, SCHED_IDLE, 0);
POLICY(policy_fifo, SCHED_FIFO, 1);
POLICY(policy_round_robin, SCHED_RR, 1);
POLICY(policy_reset_on_fork, SCHED_OTHER | SCHED_RESET_ON_FORK, 0);

static void be_idle(void) { struct sched_param parameter = {0}; sched_setscheduler(0, SCHED_IDLE, &parameter); }
STATE(thread_policy, "scheduling", "sched_setscheduler in a second thread");
MAKE(thread_policy) { start_thread(false, false); in_thread(be_idle); }
OBSERVE(thread_policy) { in_thread(say_schedule); say_schedule(); }

static void set_attributes(struct attributes attributes) { attributes.size = sizeof attributes; must(syscall(SYS_sched_setattr, 0, &attributes, 0)); }
STATE(policy_deadline, "scheduling", "sched_setattr(SCHED_DEADLINE)");
MAKE(policy_deadline) { set_attributes((struct attributes){.policy = 6, .runtime = 1000000, .deadline = 10000000, .period = 10000000}); }
OBSERVE(policy_deadline) { say_schedule(); }
STATE(time_slice, "scheduling", "sched_setattr with a slice of its own");
MAKE(time_slice) { set_attributes((struct attributes){.policy = 0, .runtime = 20000000}); }
OBSERVE(time_slice) { say_schedule(); }
STATE(utilisation_clamp, "scheduling", "sched_setattr with bounds of utilisation");
MAKE(utilisation_clamp) { set_attributes((struct attributes){.policy = 0, .flags = 0x60, .least = 100, .most = 500}); }
OBSERVE(utilisation_clamp) { say_schedule(); }

static void bind_to_second(void)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(1, &set);
	sched_setaffinity(0, sizeof set, &set);
}
static void say_processors(void) { unsigned long set[16] = {0}; syscall(SYS_sched_getaffinity, 0, sizeof set, set); say("%lx ", set[0]); }
STATE(affinity, "scheduling", "sched_setaffinity");
MAKE(affinity) { bind_to_second(); }
OBSERVE(affinity) { say_processors(); }
STATE(thread_affinity, "scheduling", "sched_setaffinity in a second thread");
MAKE(thread_affinity) { start_thread(false, false); in_thread(bind_to_second); }
OBSERVE(thread_affinity) { in_thread(say_processors); say_processors(); }

STATE(io_priority, "scheduling", "ioprio_set");
MAKE(io_priority) { must(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6)); }
OBSERVE(io_priority) { say_call("ioprio", syscall(SYS_ioprio_get, 1, 0)); }
static void be_idle_io(void) { syscall(SYS_ioprio_set, 1, 0, 3 << 13); }
static void say_io(void) { say_call("ioprio", syscall(SYS_ioprio_get, 1, 0)); }
STATE(thread_io_priority, "scheduling", "ioprio_set in a second thread");
MAKE(thread_io_priority) { start_thread(false, false); in_thread(be_idle_io); }
OBSERVE(thread_io_priority) { in_thread(say_io); say_io(); }
STATE(memory_policy, "scheduling", "set_mempolicy");
MAKE(memory_policy) { unsigned long node = 1; must(syscall(SYS_set_mempolicy, 2, &node, 64)); }
OBSERVE(memory_policy) { int mode = 0; syscall(SYS_get_mempolicy, &mode, NULL, 0, NULL, 0); say("%d", mode); }

/* ------------------------------------------------------------------ users */

static void say_users(void)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/self/task/%ld/status", syscall(SYS_gettid));
	say_lines(path, "id:\t1"), say_lines(path, "Groups"), say_lines(path, "Cap");
}
STATE(users, "credentials", "setresuid, setresgid: real, effective and saved ones differ");
MAKE(users) { must(setresgid(1001, 1002, 1003)); must(setresuid(1001, 1002, 1003)); }
OBSERVE(users) { uid_t a, b, c; getresuid(&a, &b, &c); say("%u %u %u ", a, b, c); getresgid(&a, &b, &c); say("%u %u %u ", a, b, c); say_users(); }
STATE(file_users, "credentials", "setfsuid, setfsgid");
MAKE(file_users) { setfsgid(1001); setfsuid(1002); }
OBSERVE(file_users) { say("%d %d ", setfsuid(-1), setfsgid(-1)); }
STATE(groups, "credentials", "setgroups");
MAKE(groups) { gid_t list[] = {7, 1005, 60000}; must(setgroups(3, list)); }
OBSERVE(groups) { say_users(); }
static void change_user(void) { syscall(SYS_setresuid, 1004, 1004, 1004); }
STATE(thread_user, "credentials", "a thread with a user of its own");
MAKE(thread_user) { start_thread(false, false); in_thread(change_user); }
OBSERVE(thread_user) { in_thread(say_users); say_users(); }

static void keep(uint32_t effective, uint32_t permitted, uint32_t inheritable)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{effective, permitted, inheritable}, {0, 0, 0}};
	must(syscall(SYS_capset, &header, data));
}
STATE(capabilities, "credentials", "capset: fewer effective, permitted and inheritable ones");
MAKE(capabilities) { keep(1 << CAP_CHOWN, 1 << CAP_CHOWN | 1 << CAP_KILL, 1 << CAP_KILL); }
OBSERVE(capabilities) { say_users(); }
STATE(ambient_capabilities, "credentials", "prctl(PR_CAP_AMBIENT)");
MAKE(ambient_capabilities) { keep(0x21, 0x21, 0x21); must(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_KILL, 0, 0)); }
OBSERVE(ambient_capabilities) { say_users(); }
STATE(bounding_set, "credentials", "prctl(PR_CAPBSET_DROP)");
MAKE(bounding_set) { must(prctl(PR_CAPBSET_DROP, CAP_MKNOD, 0, 0, 0)); }
OBSERVE(bounding_set) { say_users(); }
static void drop_all(void) { keep(0, 0, 0); }
STATE(thread_capabilities, "credentials", "capset in a second thread");
MAKE(thread_capabilities) { start_thread(false, false); in_thread(drop_all); }
OBSERVE(thread_capabilities) { in_thread(say_users); say_users(); }
STATE(keyring, "credentials", "keyctl: a session keyring");
MAKE(keyring) { must(syscall(SYS_keyctl, 1, "crab")); }
OBSERVE(keyring) { }
STATE(own_namespace, "credentials", "unshare(CLONE_NEWUSER)");
MAKE(own_namespace) { must(syscall(SYS_unshare, CLONE_NEWUSER)); }
OBSERVE(own_namespace) { }

/* ------------------------------------------------------------------ restrictions */

static struct sock_filter no_sync[] = {
	BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sync, 0, 1),
	BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 77),
	BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
};
static struct sock_fprog program = {4, no_sync};
static long filter_flags;
static void add_filter(void)
{
	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	if (filter_flags)
		fd[0] = must(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, filter_flags, &program));
	else
		must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}
static void try_sync(void) { say_call("sync", syscall(SYS_sync)); }
STATE(filter, "restrictions", "prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER)");
MAKE(filter) { add_filter(); }
OBSERVE(filter) { try_sync(); say_lines("/proc/self/status", "Seccomp"); }
STATE(thread_filter, "restrictions", "prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER) in a second thread");
MAKE(thread_filter) { start_thread(false, false); in_thread(add_filter); }
OBSERVE(thread_filter) { in_thread(try_sync); say_lines("/proc/self/status", "Seccomp"); }
STATE(filter_logs, "restrictions", "seccomp with SECCOMP_FILTER_FLAG_LOG and SPEC_ALLOW");
MAKE(filter_logs) { filter_flags = SECCOMP_FILTER_FLAG_LOG | SECCOMP_FILTER_FLAG_SPEC_ALLOW; add_filter(); }
OBSERVE(filter_logs) { try_sync(); say_lines("/proc/self/status", "Seccomp"); say_lines("/proc/self/status", "Specul"); }
STATE(filter_listener, "restrictions", "seccomp with SECCOMP_FILTER_FLAG_NEW_LISTENER");
MAKE(filter_listener) { filter_flags = SECCOMP_FILTER_FLAG_NEW_LISTENER; no_sync[2].k = SECCOMP_RET_USER_NOTIF; add_filter(); }
OBSERVE(filter_listener) { say("%d", fd[0]); }
static void be_strict(void) { prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT); }
static void strict_child(void) { start_thread(false, false); in_thread(be_strict); }
STATE(strict_mode, "restrictions", "prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT), in a thread");
MAKE(strict_mode) { strict_child(); }
OBSERVE(strict_mode) { char path[64]; snprintf(path, sizeof path, "/proc/self/task/%d/status", thread_id); say_lines(path, "Seccomp:"); }

static void restrict_self(void)
{
	struct { uint64_t files, net; } rules = {1 << 7 /* make directories */, 0};
	fd[0] = must(syscall(444, &rules, 8, 0));
	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	must(syscall(446, fd[0], 0));
	close(fd[0]);
}
static void try_mkdir(void) { say_call("mkdir", mkdir("new", 0755)); rmdir("new"); }
STATE(landlock, "restrictions", "landlock_restrict_self");
MAKE(landlock) { restrict_self(); }
OBSERVE(landlock) { try_mkdir(); }
STATE(thread_landlock, "restrictions", "landlock_restrict_self in a second thread");
MAKE(thread_landlock) { start_thread(false, false); in_thread(restrict_self); }
OBSERVE(thread_landlock) { in_thread(try_mkdir); try_mkdir(); }
STATE(landlock_rules, "restrictions", "a ruleset of landlock that is not in force yet");
MAKE(landlock_rules) { struct { uint64_t files; } rules = {1 << 7}; fd[0] = must(syscall(444, &rules, 8, 0)); }
OBSERVE(landlock_rules) { say_call("fd", fcntl(fd[0], F_GETFD)); }
