/* The system calls that a sandbox may make; every other one below LAST_SYSCALL answers EPERM.
 *
 * Names and numbers are x86-64's. Kept as numbers so that the table does not shrink silently where
 * the C library is older than the kernel.
 */
#ifndef PAGURUS_SYSCALLS_H
#define PAGURUS_SYSCALLS_H

enum verdict {
    DENY,           /* EPERM */
    ALLOW,
    ABSENT,         /* ENOSYS */
    FAMILY,         /* socket(): Unix, IPv4, IPv6 but for multipath TCP, netlink but for uevents and programs' own */
    NO_VOLUMES,     /* ioctl(): of btrfs only what shares the content of files */
    CORES,          /* setrlimit(): the core limit stays, and nobody is told */
    CORES_OF,       /* prlimit64(): the same */
    PERSONALITY,    /* personality(): the values that Docker allows */
    NO_NAMESPACES,  /* clone(): without CLONE_NEW* */
    /* Less what a checkpoint could not bring back, and nobody could see (docs/checkpoints.md). */
    SETTINGS,       /* prctl() */
    PROCESSOR,      /* arch_prctl() */
    NO_NOTICE,      /* fcntl(): without F_NOTIFY */
    NO_KEYS,        /* setsockopt(): without the keys by which TCP signs its segments */
};

#define LAST_SYSCALL 467

static const struct { uint16_t number; uint8_t verdict; } rules[] = {
    {0, ALLOW} /* read */, {1, ALLOW} /* write */, {2, ALLOW} /* open */, {3, ALLOW} /* close */,
    {4, ALLOW} /* stat */, {5, ALLOW} /* fstat */, {6, ALLOW} /* lstat */, {7, ALLOW} /* poll */,
    {8, ALLOW} /* lseek */, {9, ALLOW} /* mmap */, {10, ALLOW} /* mprotect */, {11, ALLOW} /* munmap */,
    {12, ALLOW} /* brk */, {13, ALLOW} /* rt_sigaction */, {14, ALLOW} /* rt_sigprocmask */,
    {15, ALLOW} /* rt_sigreturn */, {16, NO_VOLUMES} /* ioctl */, {17, ALLOW} /* pread64 */, {18, ALLOW} /* pwrite64 */,
    {19, ALLOW} /* readv */, {20, ALLOW} /* writev */, {21, ALLOW} /* access */, {22, ALLOW} /* pipe */,
    {23, ALLOW} /* select */, {24, ALLOW} /* sched_yield */, {25, ALLOW} /* mremap */, {26, ALLOW} /* msync */,
    {27, ALLOW} /* mincore */, {28, ALLOW} /* madvise */, {29, ALLOW} /* shmget */, {30, ALLOW} /* shmat */,
    {31, ALLOW} /* shmctl */, {32, ALLOW} /* dup */, {33, ALLOW} /* dup2 */, {34, ALLOW} /* pause */,
    {35, ALLOW} /* nanosleep */, {36, ALLOW} /* getitimer */, {37, ALLOW} /* alarm */, {38, ALLOW} /* setitimer */,
    {39, ALLOW} /* getpid */, {40, ALLOW} /* sendfile */, {41, FAMILY} /* socket */, {42, ALLOW} /* connect */,
    {43, ALLOW} /* accept */, {44, ALLOW} /* sendto */, {45, ALLOW} /* recvfrom */, {46, ALLOW} /* sendmsg */,
    {47, ALLOW} /* recvmsg */, {48, ALLOW} /* shutdown */, {49, ALLOW} /* bind */, {50, ALLOW} /* listen */,
    {51, ALLOW} /* getsockname */, {52, ALLOW} /* getpeername */, {53, ALLOW} /* socketpair */,
    {54, NO_KEYS} /* setsockopt */, {55, ALLOW} /* getsockopt */, {56, NO_NAMESPACES} /* clone */,
    {57, ALLOW} /* fork */, {58, ALLOW} /* vfork */, {59, ALLOW} /* execve */, {60, ALLOW} /* exit */,
    {61, ALLOW} /* wait4 */, {62, ALLOW} /* kill */, {63, ALLOW} /* uname */, {64, ALLOW} /* semget */,
    {65, ALLOW} /* semop */, {66, ALLOW} /* semctl */, {67, ALLOW} /* shmdt */, {68, ALLOW} /* msgget */,
    {69, ALLOW} /* msgsnd */, {70, ALLOW} /* msgrcv */, {71, ALLOW} /* msgctl */, {72, NO_NOTICE} /* fcntl */,
    {73, ALLOW} /* flock */, {74, ALLOW} /* fsync */, {75, ALLOW} /* fdatasync */, {76, ALLOW} /* truncate */,
    {77, ALLOW} /* ftruncate */, {78, ALLOW} /* getdents */, {79, ALLOW} /* getcwd */, {80, ALLOW} /* chdir */,
    {81, ALLOW} /* fchdir */, {82, ALLOW} /* rename */, {83, ALLOW} /* mkdir */, {84, ALLOW} /* rmdir */,
    {85, ALLOW} /* creat */, {86, ALLOW} /* link */, {87, ALLOW} /* unlink */, {88, ALLOW} /* symlink */,
    {89, ALLOW} /* readlink */, {90, ALLOW} /* chmod */, {91, ALLOW} /* fchmod */, {92, ALLOW} /* chown */,
    {93, ALLOW} /* fchown */, {94, ALLOW} /* lchown */, {95, ALLOW} /* umask */, {96, ALLOW} /* gettimeofday */,
    {97, ALLOW} /* getrlimit */, {98, ALLOW} /* getrusage */, {99, ALLOW} /* sysinfo */, {100, ALLOW} /* times */,
    {101, ALLOW} /* ptrace */,
    {102, ALLOW} /* getuid */, {104, ALLOW} /* getgid */, {105, ALLOW} /* setuid */, {106, ALLOW} /* setgid */,
    {107, ALLOW} /* geteuid */, {108, ALLOW} /* getegid */, {109, ALLOW} /* setpgid */, {110, ALLOW} /* getppid */,
    {111, ALLOW} /* getpgrp */, {112, ALLOW} /* setsid */, {113, ALLOW} /* setreuid */, {114, ALLOW} /* setregid */,
    {115, ALLOW} /* getgroups */, {116, ALLOW} /* setgroups */, {117, ALLOW} /* setresuid */,
    {118, ALLOW} /* getresuid */, {119, ALLOW} /* setresgid */, {120, ALLOW} /* getresgid */,
    {121, ALLOW} /* getpgid */, {122, ALLOW} /* setfsuid */, {123, ALLOW} /* setfsgid */, {124, ALLOW} /* getsid */,
    {125, ALLOW} /* capget */, {126, ALLOW} /* capset */, {127, ALLOW} /* rt_sigpending */,
    {128, ALLOW} /* rt_sigtimedwait */, {129, ALLOW} /* rt_sigqueueinfo */, {130, ALLOW} /* rt_sigsuspend */,
    {131, ALLOW} /* sigaltstack */, {132, ALLOW} /* utime */, {133, ALLOW} /* mknod */,
    {135, PERSONALITY} /* personality */, {137, ALLOW} /* statfs */, {138, ALLOW} /* fstatfs */,
    {140, ALLOW} /* getpriority */, {141, ALLOW} /* setpriority */, {142, ALLOW} /* sched_setparam */,
    {143, ALLOW} /* sched_getparam */, {144, ALLOW} /* sched_setscheduler */, {145, ALLOW} /* sched_getscheduler */,
    {146, ALLOW} /* sched_get_priority_max */, {147, ALLOW} /* sched_get_priority_min */,
    {148, ALLOW} /* sched_rr_get_interval */, {149, ALLOW} /* mlock */, {150, ALLOW} /* munlock */,
    {151, ALLOW} /* mlockall */, {152, ALLOW} /* munlockall */, {154, ABSENT} /* modify_ldt */,
    {157, SETTINGS} /* prctl */, {158, PROCESSOR} /* arch_prctl */, {159, ALLOW} /* adjtimex */,
    {160, CORES} /* setrlimit */, {161, ALLOW} /* chroot */, {162, ALLOW} /* sync */, {186, ALLOW} /* gettid */,
    {187, ALLOW} /* readahead */, {188, ALLOW} /* setxattr */, {189, ALLOW} /* lsetxattr */,
    {190, ALLOW} /* fsetxattr */, {191, ALLOW} /* getxattr */, {192, ALLOW} /* lgetxattr */,
    {193, ALLOW} /* fgetxattr */, {194, ALLOW} /* listxattr */, {195, ALLOW} /* llistxattr */,
    {196, ALLOW} /* flistxattr */, {197, ALLOW} /* removexattr */, {198, ALLOW} /* lremovexattr */,
    {199, ALLOW} /* fremovexattr */, {200, ALLOW} /* tkill */, {201, ALLOW} /* time */, {202, ALLOW} /* futex */,
    {203, ALLOW} /* sched_setaffinity */, {204, ALLOW} /* sched_getaffinity */, {205, ALLOW} /* set_thread_area */,
    {206, ALLOW} /* io_setup */, {207, ALLOW} /* io_destroy */, {208, ALLOW} /* io_getevents */,
    {209, ALLOW} /* io_submit */, {210, ALLOW} /* io_cancel */, {211, ALLOW} /* get_thread_area */,
    {213, ALLOW} /* epoll_create */, {214, ALLOW} /* epoll_ctl_old */, {215, ALLOW} /* epoll_wait_old */,
    {216, ALLOW} /* remap_file_pages */, {217, ALLOW} /* getdents64 */, {218, ALLOW} /* set_tid_address */,
    {219, ALLOW} /* restart_syscall */, {220, ALLOW} /* semtimedop */, {221, ALLOW} /* fadvise64 */,
    {222, ALLOW} /* timer_create */, {223, ALLOW} /* timer_settime */, {224, ALLOW} /* timer_gettime */,
    {225, ALLOW} /* timer_getoverrun */, {226, ALLOW} /* timer_delete */, {228, ALLOW} /* clock_gettime */,
    {229, ALLOW} /* clock_getres */, {230, ALLOW} /* clock_nanosleep */, {231, ALLOW} /* exit_group */,
    {232, ALLOW} /* epoll_wait */, {233, ALLOW} /* epoll_ctl */, {234, ALLOW} /* tgkill */,
    {235, ALLOW} /* utimes */, {240, ALLOW} /* mq_open */, {241, ALLOW} /* mq_unlink */,
    {242, ALLOW} /* mq_timedsend */, {243, ALLOW} /* mq_timedreceive */, {244, ALLOW} /* mq_notify */,
    {245, ALLOW} /* mq_getsetattr */, {247, ALLOW} /* waitid */, {251, ALLOW} /* ioprio_set */,
    {252, ALLOW} /* ioprio_get */, {253, ALLOW} /* inotify_init */, {254, ALLOW} /* inotify_add_watch */,
    {255, ALLOW} /* inotify_rm_watch */, {257, ALLOW} /* openat */, {258, ALLOW} /* mkdirat */,
    {259, ALLOW} /* mknodat */, {260, ALLOW} /* fchownat */, {261, ALLOW} /* futimesat */,
    {262, ALLOW} /* newfstatat */, {263, ALLOW} /* unlinkat */, {264, ALLOW} /* renameat */,
    {265, ALLOW} /* linkat */, {266, ALLOW} /* symlinkat */, {267, ALLOW} /* readlinkat */,
    {268, ALLOW} /* fchmodat */, {269, ALLOW} /* faccessat */, {270, ALLOW} /* pselect6 */,
    {271, ALLOW} /* ppoll */, {273, ALLOW} /* set_robust_list */, {274, ALLOW} /* get_robust_list */,
    {275, ALLOW} /* splice */, {276, ALLOW} /* tee */, {277, ALLOW} /* sync_file_range */,
    {278, ALLOW} /* vmsplice */, {280, ALLOW} /* utimensat */, {281, ALLOW} /* epoll_pwait */,
    {282, ALLOW} /* signalfd */, {283, ALLOW} /* timerfd_create */, {284, ALLOW} /* eventfd */,
    {285, ALLOW} /* fallocate */, {286, ALLOW} /* timerfd_settime */, {287, ALLOW} /* timerfd_gettime */,
    {288, ALLOW} /* accept4 */, {289, ALLOW} /* signalfd4 */, {290, ALLOW} /* eventfd2 */,
    {291, ALLOW} /* epoll_create1 */, {292, ALLOW} /* dup3 */, {293, ALLOW} /* pipe2 */,
    {294, ALLOW} /* inotify_init1 */, {295, ALLOW} /* preadv */, {296, ALLOW} /* pwritev */,
    {297, ALLOW} /* rt_tgsigqueueinfo */, {299, ALLOW} /* recvmmsg */, {301, ALLOW} /* fanotify_mark */,
    {302, CORES_OF} /* prlimit64 */, {303, ALLOW} /* name_to_handle_at */, {305, ALLOW} /* clock_adjtime */,
    {306, ALLOW} /* syncfs */, {307, ALLOW} /* sendmmsg */, {309, ALLOW} /* getcpu */,
    {310, ALLOW} /* process_vm_readv */, {311, ALLOW} /* process_vm_writev */, {314, ALLOW} /* sched_setattr */,
    {315, ALLOW} /* sched_getattr */, {316, ALLOW} /* renameat2 */, {318, ALLOW} /* getrandom */,
    {319, ALLOW} /* memfd_create */, {322, ALLOW} /* execveat */, {324, ALLOW} /* membarrier */,
    {325, ALLOW} /* mlock2 */, {326, ALLOW} /* copy_file_range */, {327, ALLOW} /* preadv2 */,
    {328, ALLOW} /* pwritev2 */, {329, ALLOW} /* pkey_mprotect */, {330, ABSENT} /* pkey_alloc */,
    {331, ALLOW} /* pkey_free */, {332, ALLOW} /* statx */, {333, ALLOW} /* io_pgetevents */,
    {334, ALLOW} /* rseq */, {335, ALLOW} /* uretprobe */, {424, ALLOW} /* pidfd_send_signal */,
    {434, ALLOW} /* pidfd_open */, {435, ABSENT} /* clone3 */, {436, ALLOW} /* close_range */,
    {437, ALLOW} /* openat2 */, {439, ALLOW} /* faccessat2 */, {441, ALLOW} /* epoll_pwait2 */,
    {444, ABSENT} /* landlock_create_ruleset */, {445, ABSENT} /* landlock_add_rule */,
    {446, ABSENT} /* landlock_restrict_self */, {447, ALLOW} /* memfd_secret */, {448, ALLOW} /* process_mrelease */,
    {449, ALLOW} /* futex_waitv */, {451, ALLOW} /* cachestat */, {452, ALLOW} /* fchmodat2 */,
    {453, ALLOW} /* map_shadow_stack */, {454, ALLOW} /* futex_wake */, {455, ALLOW} /* futex_wait */,
    {456, ALLOW} /* futex_requeue */, {457, ALLOW} /* statmount */, {458, ALLOW} /* listmount */,
    {462, ABSENT} /* mseal */, {463, ALLOW} /* setxattrat */, {464, ALLOW} /* getxattrat */,
    {465, ALLOW} /* listxattrat */, {466, ALLOW} /* removexattrat */,
};

#endif
