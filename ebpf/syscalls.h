/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each system call of x86-64 can change, by number. A number that is not listed is unknown, and
 * an unknown call that succeeds makes the verdict the safest one: a new kernel cannot hide an effect.
 */
#ifndef PAGURUS_SYSCALLS_H
#define PAGURUS_SYSCALLS_H

enum kind {
	K_UNKNOWN = 0,
	K_NONE,		/* changes nothing beyond the calling process */
	K_OPEN,		/* returns a descriptor; may have created or truncated */
	K_WRITE,	/* writes to descriptor argument 0 */
	K_WRITE_1,	/* writes to descriptor argument 1 */
	K_WRITE_2,	/* writes to descriptor argument 2 */
	K_SUBMIT,	/* writes to the descriptors that its requests name */
	K_CREATE,	/* makes a name */
	K_REMOVE,	/* removes a name */
	K_RENAME,	/* moves or links names */
	K_META_PATH,	/* metadata of a path */
	K_META_FD,	/* metadata of descriptor argument 0 */
	K_UTIMENSAT,	/* of argument 1, or of descriptor argument 0 when that is null */
	K_UTIMES,	/* times of a path */
	K_MOUNT,	/* mounts, and other state of namespaces */
	K_FSCONFIG,	/* changes a file system that there is, by its command */
	K_OPEN_TREE,	/* changes a mount, unless it is a copy */
	K_IPC,		/* changes an IPC object */
	K_KEYS,		/* changes a key ring */
	K_IPC_GET_1,	/* makes an IPC object when IPC_CREAT is in argument 1 */
	K_IPC_GET_2,	/* the same in argument 2 */
	K_IPC_CTL_1,	/* command in argument 1 */
	K_IPC_CTL_2,	/* command in argument 2 */
	K_SHMAT,
	K_MQ_OPEN,
	K_LISTEN,
	K_BIND,
	K_CONNECT,
	K_SENDTO,
	K_SENDMSG,
	K_FOREIGN,	/* changes another process */
	K_FOREIGN_0,	/* the one that argument 0 names */
	K_FOREIGN_IF_0,	/* the same, 0 being the caller */
	K_FOREIGN_IF_1,	/* when argument 1 names one */
	K_PRLIMIT,
	K_PTRACE,
	K_CHANNEL,	/* takes hold of something that another process holds */
	K_IOCTL,
	K_SIGRETURN,
};

#define SYSCALLS 512

static const volatile unsigned char syscall_kinds[SYSCALLS] = {
	[0] = K_NONE, /* read */ [1] = K_WRITE, /* write */ [2] = K_OPEN, /* open */ [3 ... 14] = K_NONE,
	[15] = K_SIGRETURN, [16] = K_IOCTL, [17] = K_NONE, /* pread64 */ [18] = K_WRITE, /* pwrite64 */
	[19] = K_NONE, /* readv */ [20] = K_WRITE, /* writev */ [21 ... 28] = K_NONE,
	[29] = K_IPC_GET_2, /* shmget */ [30] = K_SHMAT, [31] = K_IPC_CTL_1, /* shmctl */
	[32 ... 39] = K_NONE, [40] = K_WRITE, /* sendfile */ [41] = K_NONE, [42] = K_CONNECT, [43] = K_NONE,
	[44] = K_SENDTO, [45] = K_NONE, [46] = K_SENDMSG, [47 ... 48] = K_NONE, [49] = K_BIND, [50] = K_LISTEN,
	[51 ... 63] = K_NONE, /* signals are seen where they are generated */
	[64] = K_IPC_GET_2, /* semget */ [65] = K_IPC, /* semop */ [66] = K_IPC_CTL_2, /* semctl */
	[67] = K_NONE, /* shmdt */ [68] = K_IPC_GET_1, /* msgget */ [69 ... 70] = K_IPC, /* msgsnd, msgrcv */
	[71] = K_IPC_CTL_1, /* msgctl */ [72 ... 75] = K_NONE, [76] = K_META_PATH, /* truncate */
	[77] = K_META_FD, /* ftruncate */ [78 ... 81] = K_NONE, [82] = K_RENAME, [83] = K_CREATE, /* mkdir */
	[84] = K_REMOVE, /* rmdir */ [85] = K_OPEN, /* creat */ [86] = K_RENAME, /* link */ [87] = K_REMOVE,
	[88] = K_CREATE, /* symlink */ [89] = K_NONE, [90] = K_META_PATH, /* chmod */ [91] = K_META_FD,
	[92] = K_META_PATH, /* chown */ [93] = K_META_FD, [94] = K_META_PATH, /* lchown */ [95 ... 100] = K_NONE,
	[101] = K_PTRACE, [102 ... 108] = K_NONE, [109] = K_FOREIGN_IF_0, /* setpgid */ [110 ... 128] = K_NONE,
	[129] = K_NONE, [130 ... 131] = K_NONE, [132] = K_UTIMES, [133] = K_CREATE, /* mknod */
	[135] = K_NONE, [136 ... 140] = K_NONE, [141] = K_FOREIGN_IF_1, /* setpriority */
	[142] = K_FOREIGN_IF_0, [143] = K_NONE, [144] = K_FOREIGN_IF_0, [145 ... 152] = K_NONE,
	[153] = K_NONE, [154] = K_NONE, [155] = K_MOUNT, /* pivot_root */ [157 ... 158] = K_NONE,
	[159] = K_NONE, [160 ... 162] = K_NONE, [165 ... 166] = K_MOUNT, /* mount, umount2 */
	[170 ... 171] = K_MOUNT, /* sethostname, setdomainname */ [172 ... 173] = K_NONE, [179] = K_MOUNT,
	[186 ... 187] = K_NONE, [188 ... 189] = K_META_PATH, /* setxattr */ [190] = K_META_FD,
	[191 ... 196] = K_NONE, [197 ... 198] = K_META_PATH, /* removexattr */ [199] = K_META_FD,
	[200 ... 202] = K_NONE, [203] = K_FOREIGN_IF_0, /* sched_setaffinity */ [204] = K_NONE,
	[206 ... 208] = K_NONE, [209] = K_SUBMIT, /* io_submit */
	[210] = K_NONE, [213] = K_NONE, [216 ... 219] = K_NONE, [220] = K_IPC, /* semtimedop */
	[221 ... 234] = K_NONE, [235] = K_UTIMES, [237 ... 239] = K_NONE, [240] = K_MQ_OPEN,
	[241] = K_IPC, /* mq_unlink */ [242 ... 243] = K_IPC, [244] = K_NONE, [245] = K_IPC, [247] = K_NONE,
	[248 ... 250] = K_KEYS, [251] = K_FOREIGN_IF_1, /* ioprio_set */ [252 ... 255] = K_NONE,
	[256] = K_FOREIGN_IF_0, [257] = K_OPEN, /* openat */ [258] = K_CREATE, /* mkdirat */
	[259] = K_CREATE, /* mknodat */ [260] = K_META_PATH, /* fchownat */ [261] = K_UTIMES, /* futimesat */
	[262] = K_NONE, [263] = K_REMOVE, /* unlinkat */ [264] = K_RENAME, [265] = K_RENAME, /* linkat */
	[266] = K_CREATE, /* symlinkat */ [267] = K_NONE, [268] = K_META_PATH, /* fchmodat */
	[269 ... 274] = K_NONE, [275] = K_WRITE_2, /* splice */ [276] = K_WRITE_1, /* tee */ [277] = K_NONE, [278] = K_WRITE, /* vmsplice */
	[279] = K_FOREIGN_IF_0, /* move_pages */ [280] = K_UTIMENSAT, [281 ... 284] = K_NONE,
	[285] = K_WRITE, /* fallocate */ [286 ... 295] = K_NONE, [296] = K_WRITE, /* pwritev */
	[297] = K_NONE, [298] = K_NONE, [299 ... 301] = K_NONE, [302] = K_PRLIMIT, [303] = K_NONE,
	[304] = K_OPEN, /* open_by_handle_at */ [306] = K_NONE, [307] = K_SENDMSG, /* sendmmsg */
	[308 ... 309] = K_NONE, [310] = K_NONE, [311] = K_FOREIGN_0, /* process_vm_writev */ [312] = K_NONE,
	[314] = K_FOREIGN_IF_0, [315] = K_NONE, [316] = K_RENAME, [317 ... 319] = K_NONE, [322 ... 325] = K_NONE, [326] = K_WRITE_2,
	[327] = K_NONE, [328] = K_WRITE, /* pwritev2 */ [329 ... 334] = K_NONE, [424] = K_NONE,
	[425 ... 427] = K_NONE, /* io_uring: requests are seen at their submission */
	[428] = K_NONE, /* open_tree: its move_mount counts */ [429] = K_MOUNT, [430] = K_NONE, [431] = K_FSCONFIG,
	[432] = K_NONE, [433 ... 436] = K_NONE, [437] = K_OPEN, /* openat2 */ [438] = K_CHANNEL, /* pidfd_getfd */
	[439] = K_NONE, [440] = K_FOREIGN, /* process_madvise */ [441] = K_NONE, [442] = K_MOUNT,
	[444 ... 447] = K_NONE, [448] = K_FOREIGN, [449 ... 451] = K_NONE, [452] = K_META_PATH, /* fchmodat2 */
	[453 ... 459] = K_NONE, [461 ... 462] = K_NONE, [463] = K_META_PATH, /* setxattrat */
	[464 ... 465] = K_NONE, [466] = K_META_PATH, /* removexattrat */ [467] = K_OPEN_TREE, /* open_tree_attr */
	[468] = K_NONE, /* file_getattr */ [469] = K_META_PATH, /* file_setattr */
};

#define NR_FALLOCATE 285
#define NR_RESTART_SYSCALL 219
#define NR_TRUNCATE 76
#define NR_FTRUNCATE 77
#define NR_CREAT 85
#define NR_UTIME 132
#define NR_UTIMES 235
#define NR_FUTIMESAT 261
#define NR_UTIMENSAT 280
#define NR_SETPRIORITY 141
#define NR_RENAME 82
#define NR_LINK 86
#define NR_SYMLINK 88
#define NR_RENAMEAT 264
#define NR_LINKAT 265
#define NR_SYMLINKAT 266
#define NR_RENAMEAT2 316
#define NR_OPEN 2
#define NR_OPENAT 257
#define NR_OPENAT2 437

#endif
