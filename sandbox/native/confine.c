/* What a process of a sandbox may do: resource limits, capabilities, system calls.
 *
 * The system-call filter allows what Docker's default profile allows to a container with Docker's
 * default capabilities, on x86-64 only, less what no dump could see and no restore bring back, and
 * socket families that it has no use for. It is a binary search over the call numbers, built once
 * per shim; the kernel's own cache answers for calls whose arguments do not matter.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ------------------------------------------------------------------ resource limits */

enum { QUEUED_SIGNALS = 4096, QUEUE_BYTES = 256 << 10 };

static int cores_are_files;  /* no program of the host takes them: then a limit of 0 means none */

void prepare_limits(void) {
    char first = '|';
    int fd = open("/proc/sys/kernel/core_pattern", O_RDONLY | O_CLOEXEC);
    cores_are_files = fd >= 0 && read(fd, &first, 1) == 1 && first != '|';
    if (fd >= 0) close(fd);
}

static int at_most(int resource, rlim_t most) {
    struct rlimit limit;
    if (getrlimit(resource, &limit) < 0) return -1;
    if (most > limit.rlim_max) most = limit.rlim_max;
    limit.rlim_cur = limit.rlim_max = most;
    return setrlimit(resource, &limit);
}

const char *set_limits(uint64_t open_files) {
    struct rlimit nofile, stack;
    if (getrlimit(RLIMIT_NOFILE, &nofile) < 0 || getrlimit(RLIMIT_STACK, &stack) < 0) return "read limits";
    if (open_files > nofile.rlim_max) open_files = nofile.rlim_max;  /* raising needs CAP_SYS_RESOURCE */
    nofile.rlim_cur = nofile.rlim_max = open_files;
    stack.rlim_cur = 8 << 20;
    if (stack.rlim_cur > stack.rlim_max) stack.rlim_cur = stack.rlim_max;
    /* A core_pattern that pipes starts its program on the host; 1 is the one value that prevents it. */
    struct rlimit core = {.rlim_cur = 1, .rlim_max = 1};
    /* sudo starts programs with 0, which only CAP_SYS_RESOURCE can raise. */
    if (setrlimit(RLIMIT_CORE, &core) < 0 && !(errno == EPERM && cores_are_files))
        return "raise the core limit (start the daemon with `ulimit -c 1`)";
    /* What a sandbox has of these counts to whoever made its user namespace as well, that is, to the host's root. */
    if (at_most(RLIMIT_SIGPENDING, QUEUED_SIGNALS) < 0) return "limit of queued signals";
    if (at_most(RLIMIT_MSGQUEUE, QUEUE_BYTES) < 0) return "limit of message queues";
    if (setrlimit(RLIMIT_STACK, &stack) < 0) return "stack limit";
    if (setrlimit(RLIMIT_NOFILE, &nofile) < 0) return "open files limit";
    return NULL;
}

/* ------------------------------------------------------------------ capabilities */

#define BIT(cap) (1ULL << (cap))
static const uint64_t kept =
    BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FOWNER) | BIT(CAP_FSETID) | BIT(CAP_KILL) | BIT(CAP_SETGID) |
    BIT(CAP_SETUID) | BIT(CAP_SETPCAP) | BIT(CAP_NET_BIND_SERVICE) | BIT(CAP_NET_RAW) | BIT(CAP_SYS_CHROOT) |
    BIT(CAP_MKNOD) | BIT(CAP_AUDIT_WRITE) | BIT(CAP_SETFCAP);

static int drop_bounding(void) {
    for (int cap = 0; cap <= 63; cap++) {
        if (kept & BIT(cap)) continue;
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) return errno == EINVAL ? 0 : -1;  /* past the last one */
    }
    return 0;
}

static int set_capabilities(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)kept, .permitted = (uint32_t)kept},
        {.effective = (uint32_t)(kept >> 32), .permitted = (uint32_t)(kept >> 32)},
    };
    return (int)syscall(SYS_capset, &header, data);
}

/* ------------------------------------------------------------------ system calls */

#include "syscalls.h"

#define NUMBER offsetof(struct seccomp_data, nr)
#define ARCH offsetof(struct seccomp_data, arch)
#define ARG(n) (offsetof(struct seccomp_data, args) + 8 * (n))
#define ERRNO(e) (SECCOMP_RET_ERRNO | (e))

static struct sock_filter code[1024];
static unsigned size;

static void emit(uint16_t op, uint8_t yes, uint8_t no, uint32_t k) {
    if (size == sizeof code / sizeof *code) abort();
    code[size++] = (struct sock_filter){op, yes, no, k};
}

static void ret(uint32_t action) { emit(BPF_RET | BPF_K, 0, 0, action); }

static void load(uint32_t offset) { emit(BPF_LD | BPF_W | BPF_ABS, 0, 0, offset); }

static void one_of(const uint32_t *values, int count, uint32_t otherwise) {
    for (int i = 0; i < count; i++) emit(BPF_JMP | BPF_JEQ | BPF_K, (uint8_t)(count - i), 0, values[i]);
    ret(otherwise);
    ret(SECCOMP_RET_ALLOW);
}

static void none_of(const uint32_t *values, int count, uint32_t refusal) {
    for (int i = 0; i < count; i++) emit(BPF_JMP | BPF_JEQ | BPF_K, (uint8_t)(count - i), 0, values[i]);
    ret(SECCOMP_RET_ALLOW);
    ret(refusal);
}

#define COUNT(array) ((int)(sizeof array / sizeof *array))

static void decide(enum verdict what) {
    static const uint32_t families[] = {AF_UNIX, AF_INET, AF_INET6};
    const uint32_t multipath = 262;
    /* Set and not seen from outside: PR_SET_TSC, PR_SET_SPECULATION_CTRL, PR_SET_SYSCALL_USER_DISPATCH, PR_SCHED_CORE,
     * PR_SET_MDWE, PR_TIMER_CREATE_RESTORE_IDS. An older kernel, or another processor, gives the same answer. */
    static const uint32_t unseen[] = {26, 53, 59, 62, 65, 77};
    const uint32_t huge_pages = 41; /* PR_SET_THP_DISABLE; since Linux 6.18 it takes flags, which no dump tells */
    /* TCP_MD5SIG, TCP_MD5SIG_EXT, TCP_AO_ADD_KEY, TCP_AO_DEL_KEY, TCP_AO_INFO, TCP_AO_REPAIR */
    static const uint32_t keys[] = {14, 32, 38, 39, 40, 42};
    /* Subvolumes of a scratch mount would lie outside its limit, and nobody could remove them with it. */
    static const uint32_t sharing[] = {FICLONE, FICLONERANGE, FIDEDUPERANGE};
    const uint32_t btrfs = 0x9400, kind = 0xff00;
    /* ARCH_SET_GS and its like, what only asks, shadow stacks: CRIU brings them back. Not: faults of CPUID, tiles, tags. */
    static const uint32_t registers[] = {0x1001, 0x1002, 0x1003, 0x1004, 0x1011, 0x1021, 0x1022,
                                         0x3001, 0x5001, 0x5002, 0x5003, 0x5005};
    static const uint32_t notice[] = {1026};
    static const uint32_t personalities[] = {0, 0x0008, 0x20000, 0x20008, 0xffffffff};
    switch (what) {
    case ALLOW: ret(SECCOMP_RET_ALLOW); break;
    case ABSENT: ret(ERRNO(ENOSYS)); break;
    case DENY: ret(ERRNO(EPERM)); break;
    case FAMILY:
        load(ARG(2));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, multipath);
        ret(ERRNO(EPROTONOSUPPORT));
        load(ARG(0));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 6, AF_NETLINK);
        load(ARG(2));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, NETLINK_USERSOCK);
        ret(ERRNO(EPROTONOSUPPORT)); /* programs would keep messages there, in memory that counts to nobody */
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, NETLINK_KOBJECT_UEVENT);
        ret(ERRNO(EPERM)); /* the host's devices would tell of themselves: its namespaces are the host's to the kernel */
        ret(SECCOMP_RET_ALLOW);
        one_of(families, COUNT(families), ERRNO(EAFNOSUPPORT));
        break;
    case PERSONALITY:
        load(ARG(0));
        one_of(personalities, COUNT(personalities), ERRNO(EPERM));
        break;
    case SETTINGS:
        load(ARG(0));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 4, huge_pages);
        load(ARG(2));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, 0);
        ret(ERRNO(EINVAL));
        ret(SECCOMP_RET_ALLOW);
        none_of(unseen, COUNT(unseen), ERRNO(EINVAL));
        break;
    case NO_KEYS:
        load(ARG(1));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, IPPROTO_TCP);
        ret(SECCOMP_RET_ALLOW);
        load(ARG(2));
        none_of(keys, COUNT(keys), ERRNO(ENOPROTOOPT));
        break;
    case CORES:
        /* A process that lowered it to 0 would have a core_pattern that pipes start its program on the host. */
        load(ARG(0));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, RLIMIT_CORE);
        ret(ERRNO(0));
        ret(SECCOMP_RET_ALLOW);
        break;
    case CORES_OF:
        load(ARG(1));
        emit(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, RLIMIT_CORE);
        ret(SECCOMP_RET_ALLOW);
        load(ARG(2)); /* the new limit: none is only asked */
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 3, 0);
        load(ARG(2) + 4);
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0);
        ret(SECCOMP_RET_ALLOW);
        load(ARG(3)); /* where the old one goes, which nobody would write there */
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 3, 0);
        load(ARG(3) + 4);
        emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0);
        ret(ERRNO(0));
        ret(ERRNO(EPERM));
        break;
    case NO_VOLUMES:
        load(ARG(1));
        emit(BPF_ALU | BPF_AND | BPF_K, 0, 0, kind);
        emit(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, btrfs);
        ret(SECCOMP_RET_ALLOW);
        load(ARG(1));
        one_of(sharing, COUNT(sharing), ERRNO(ENOTTY));
        break;
    case PROCESSOR:
        load(ARG(0));
        one_of(registers, COUNT(registers), ERRNO(EINVAL));
        break;
    case NO_NOTICE:
        load(ARG(1));
        none_of(notice, COUNT(notice), ERRNO(EINVAL));
        break;
    case NO_NAMESPACES:
        load(ARG(0));
        emit(BPF_JMP | BPF_JSET | BPF_K, 0, 1,
             CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWCGROUP);
        ret(ERRNO(EPERM));
        ret(SECCOMP_RET_ALLOW);
        break;
    }
}

/* Segment i covers the numbers from start[i] up to start[i + 1]. */
static uint32_t start[LAST_SYSCALL + 3];
static enum verdict action[LAST_SYSCALL + 3];

static void search(int low, int high) {
    if (low == high) {
        decide(action[low]);
        return;
    }
    int middle = (low + high + 1) / 2;
    unsigned branch = size;
    emit(BPF_JMP | BPF_JGE | BPF_K, 0, 1, start[middle]);
    emit(BPF_JMP | BPF_JA, 0, 0, 0);
    search(low, middle - 1);
    code[branch + 1].k = size - (branch + 2);
    search(middle, high);
}

void prepare_filter(void) {
    static enum verdict table[LAST_SYSCALL + 1];
    for (int i = 0; i <= LAST_SYSCALL; i++) table[i] = DENY;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) table[rules[i].number] = rules[i].verdict;
    int segments = 0;
    for (int i = 0; i <= LAST_SYSCALL; i++) {
        bool plain = table[i] == ALLOW || table[i] == DENY || table[i] == ABSENT;
        if (i > 0 && plain && table[i] == table[i - 1]) continue;
        start[segments] = (uint32_t)i;
        action[segments++] = table[i];
    }
    /* Calls newer than this table do not exist for the sandbox: libraries then use their fallback. The
     * same answer covers the x32 numbers, which lie far above. */
    start[segments] = LAST_SYSCALL + 1;
    action[segments++] = ABSENT;

    size = 0;
    load(ARCH);
    emit(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, AUDIT_ARCH_X86_64);
    ret(SECCOMP_RET_KILL_PROCESS);
    load(NUMBER);
    search(0, segments - 1);
}

/* To stdout, as the kernel tells it of a process: imported images must have the same. */
int write_filter(void) {
    prepare_filter();
    ssize_t bytes = (ssize_t)(size * sizeof *code);
    return write(1, code, (size_t)bytes) == bytes ? 0 : -1;
}

static int set_filter(void) {
    struct sock_fprog program = {.len = (unsigned short)size, .filter = code};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}

/* ------------------------------------------------------------------ all together */

/* The order matters: dropping from the bounding set, and a filter without no_new_privs, need capabilities that the end
 * takes away. Set-user-ID programs give root of the sandbox at most, and what the bounding set has. */
const char *confine(bool no_new_privs, uid_t uid, gid_t gid, const gid_t *groups, int count) {
    if (drop_bounding() < 0) return "bounding set";
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0) return "ambient set";
    if (no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) return "no_new_privs";
    if (setgroups((size_t)count, groups) < 0) return "groups";
    if (setresgid(gid, gid, gid) < 0) return "gid";
    if (uid == 0) {
        if (setresuid(0, 0, 0) < 0) return "uid";
        if (set_filter() < 0) return "seccomp";
        if (set_capabilities() < 0) return "capabilities";
        return NULL;
    }
    if (set_filter() < 0) return "seccomp";
    if (setresuid(uid, uid, uid) < 0) return "uid";
    return NULL;
}
