/* pagurus-shim: the per-sandbox helper. Shared declarations.
 *
 * shim.c     socket, commands, children, drained pipes
 * mounts.c   idmapped overlay; the sandbox's view of its root
 * unneeded.c the host's mounts that our namespace lets go of
 * spawn.c    pid 1, adopted commands, host programs
 * confine.c  capabilities, seccomp, limits
 */
#ifndef PAGURUS_SHIM_H
#define PAGURUS_SHIM_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define PACKET_MAX (2 << 20)  /* one command with its arguments: what Linux lets a program have */
#define FIELDS_MAX 16384
#define PASSED_MAX 16         /* descriptors per message */
#define V1_MAX 8
#define ID_RANGE 65536
#define MAX_GROUPS 256      /* supplementary groups of a command */
#define BINDS_MAX 24          /* directories of the host below a sandbox's root: 16, and what it sees of the kernel */
#define URGENT (-10)          /* nice value of the shim and of CRIU; a sandbox's own processes get 0 */

struct bind {
    char source[PATH_MAX];    /* where it lies in our mount namespace: an idmapped clone */
    char target[PATH_MAX];    /* in the sandbox, absolute */
    bool view;                /* of the kernel: its mount point lies in the runtime layer, or in another view */
};

/* A directory or file that the sandbox has at a second place too. */
struct join {
    char *from, *to;          /* in the sandbox, absolute */
    bool read_only;
    bool recursive;           /* with what is mounted in it */
};

struct shim {
    int cgroup;               /* O_PATH of the sandbox's v2 cgroup */
    int leaf;                 /* of the one below it in which commands start; -1: that one itself */
    int v1_count;
    char *v1[V1_MAX];         /* the v1 cgroups that the shim has joined */
    char root[PATH_MAX];      /* mount point of the overlay in our mount namespace */
    char layer[PATH_MAX];     /* runtime layer */
    char hostname[65];
    char machine[65];         /* machine id: the NIS domain name, where /etc/machine-id leads */
    uid_t uid_base;
    uint64_t open_files;
    bool no_new_privs;        /* set-user-ID programs and file capabilities give nothing */
    int idmap;                /* user namespace that maps 0.. to uid_base.. */
    char tree[PATH_MAX], image[PATH_MAX];  /* what is mounted, or was last */
    bool mounted, left;       /* left: the mounts of the host that nobody here needs */
    int64_t leave_at;         /* when to, on the monotonic clock in ms; 0: not yet known */
    int bind_count;
    struct bind bind[BINDS_MAX];
    int join_count;
    struct join *join;
    bool spared;              /* last in the OOM killer's queue; what we start must not inherit that */
    pid_t init;               /* host pid of the sandbox's pid 1, or 0 */
    int init_pidfd;
};

/* What a child says before it dies without having become the program. */
struct failure {
    char stage[24];
    int error;
};

struct started {
    pid_t pid, middle;
    pid_t inner;              /* its number in the sandbox */
    int pidfd;
    struct failure failure;   /* stage[0] == 0: the program runs */
};

struct command {
    char **argv, **envp;      /* NULL-terminated */
    const char *cwd;
    const char *root;         /* of a service; NULL: that of the sandbox */
    uid_t uid;
    gid_t gid;
    gid_t groups[MAX_GROUPS];  /* supplementary */
    int group_count;
    int fd[3];                /* -1: the sandbox's own /dev/null */
    const int *group;         /* the cgroup.procs of the groups of a service */
    int in_groups;            /* how many */
};

struct host_command {
    char **argv, **envp;
    bool in_cgroup;
    bool fresh;               /* in ipc and uts namespaces of its own, which what it restores inherits */
    int join;                 /* CLONE_NEW* of pid 1's namespaces */
    int count;
    int fd[PASSED_MAX], target[PASSED_MAX];
};

/* spawn.c */
pid_t clone_child(uint64_t flags, int cgroup, int *pidfd);
int status_pair(int pair[2]);
void give_up(int status, const char *stage) __attribute__((noreturn));
void await_status(int status, pid_t helper, struct started *out);
void start_init(struct shim *s, struct started *out);
void change_mounts(struct shim *s, const struct join *joins, int count, const char *parted, struct started *out);
void start_command(struct shim *s, const struct command *c, struct started *out);
void start_host(struct shim *s, const struct host_command *c, struct started *out);
void set_slice(uint64_t nanoseconds, int nice);
pid_t pid_of(int pidfd);

/* mounts.c: 0 or a stage name with errno set */
const char *make_idmap(struct shim *s);
const char *mount_overlay(struct shim *s, const char *tree, const char *image);
const char *share_root(const struct shim *s);
const char *make_bind(struct shim *s, const char *from, bool read_only, struct bind *bind);
const char *make_view(const char *from, struct bind *bind);
const char *make_targets(const struct shim *s);
const char *open_binds(const struct shim *s, int sources[BINDS_MAX]);
const char *join_here(const struct join *joins, int count);
const char *part_here(const char *path);
const char *enter_root(const struct shim *s, int sources[BINDS_MAX]);

/* unneeded.c */
void leave_unneeded(const struct shim *s);

/* confine.c: likewise */
void prepare_filter(void);
int write_filter(void);
void prepare_limits(void);
const char *set_limits(uint64_t open_files);
const char *confine(bool no_new_privs, uid_t uid, gid_t gid, const gid_t *groups, int count);

#endif
