/* SPDX-License-Identifier: Apache-2.0 */
/* System V and POSIX objects. */
#include "states.h"

#include <mqueue.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/stat.h>

static int object;

static void say_shm(void)
{
	struct shmid_ds found = {0};
	say_call("stat", shmctl(object, IPC_STAT, &found));
	say("key %x mode %o owner %u size %zu attached %lu ", found.shm_perm.__key, found.shm_perm.mode, found.shm_perm.uid, found.shm_segsz, (long)found.shm_nattch);
}
STATE(shm_attached, "ipc", "shmat");
MAKE(shm_attached) { object = must(shmget(0x1111, 65536, IPC_CREAT | 0640)); area = shmat(object, NULL, 0); fill(area, 65536); }
OBSERVE(shm_attached) { unsigned sum = 0; for (int i = 0; i < 65536; i++) sum = sum * 31 + (unsigned char)area[i]; say("%x ", sum); say_shm(); }
STATE(shm_alone, "ipc", "shmget, attached by nobody");
MAKE(shm_alone) { object = must(shmget(0x1112, 8192, IPC_CREAT | 0600)); char *there = shmat(object, NULL, 0); fill(there, 8192); shmdt(there); }
OBSERVE(shm_alone) { char *there = shmat(object, NULL, SHM_RDONLY); unsigned sum = 0; for (int i = 0; i < 8192; i++) sum = sum * 31 + (unsigned char)there[i]; shmdt(there); say("%x ", sum); say_shm(); }
STATE(shm_read_only, "ipc", "shmat(SHM_RDONLY)");
MAKE(shm_read_only) { object = must(shmget(0x1113, 8192, IPC_CREAT | 0600)); area = shmat(object, NULL, SHM_RDONLY); }
OBSERVE(shm_read_only) { say_mapping(area); say_shm(); }
STATE(shm_removed, "ipc", "shmctl(IPC_RMID) of an attached segment");
MAKE(shm_removed) { object = must(shmget(0x1114, 8192, IPC_CREAT | 0600)); area = shmat(object, NULL, 0); fill(area, 8192); must(shmctl(object, IPC_RMID, NULL)); }
OBSERVE(shm_removed) { unsigned sum = 0; for (int i = 0; i < 8192; i++) sum = sum * 31 + (unsigned char)area[i]; say("%x ", sum); say_shm(); }
STATE(shm_locked, "ipc", "shmctl(SHM_LOCK)");
MAKE(shm_locked) { object = must(shmget(0x1115, 8192, IPC_CREAT | 0600)); must(shmctl(object, SHM_LOCK, NULL)); }
OBSERVE(shm_locked) { say_shm(); }

STATE(semaphores, "ipc", "semget with values");
MAKE(semaphores) { object = must(semget(0x1121, 3, IPC_CREAT | 0640)); for (int i = 0; i < 3; i++) must(semctl(object, i, SETVAL, 5 + i)); }
OBSERVE(semaphores) { struct semid_ds found = {0}; say_call("stat", semctl(object, 0, IPC_STAT, &found)); say("%x %o ", found.sem_perm.__key, found.sem_perm.mode); for (int i = 0; i < 3; i++) say_call("value", semctl(object, i, GETVAL)); }
STATE(semaphore_undo, "ipc", "semop(SEM_UNDO)");
static void take_undone(void) { struct sembuf down = {0, -2, SEM_UNDO}; must(semop(object, &down, 1)); }
MAKE(semaphore_undo) { object = must(semget(0x1122, 1, IPC_CREAT | 0600)); semctl(object, 0, SETVAL, 9); take_undone(); }
OBSERVE(semaphore_undo)
{
	/* A copy of this process has no undo list; whether this one has is seen from its end alone. So: the value. */
	say_call("value", semctl(object, 0, GETVAL));
	say_call("holder", semctl(object, 0, GETPID) == getpid());
}

static struct { long type; char text[16]; } message;
STATE(messages, "ipc", "msgsnd: messages of two types");
MAKE(messages) { object = must(msgget(0x1131, IPC_CREAT | 0640)); for (int i = 0; i < 3; i++) { message.type = 1 + i % 2; snprintf(message.text, 16, "message %d", i); must(msgsnd(object, &message, 10, 0)); } }
OBSERVE(messages)
{
	struct msqid_ds found = {0};
	say_call("stat", msgctl(object, IPC_STAT, &found));
	say("%x %o %lu messages limit %lu ", found.msg_perm.__key, found.msg_perm.mode, (long)found.msg_qnum, (long)found.msg_qbytes);
	for (int i = 0; i < 3; i++)
		if (msgrcv(object, &message, 16, i, 040000 /* MSG_COPY */ | IPC_NOWAIT) > 0)
			say("%ld %s|", message.type, message.text);
}
STATE(message_limit, "ipc", "msgctl(IPC_SET): the limit of a queue");
MAKE(message_limit) { struct msqid_ds found; object = must(msgget(0x1132, IPC_CREAT | 0600)); msgctl(object, IPC_STAT, &found); found.msg_qbytes = 5000; must(msgctl(object, IPC_SET, &found)); }
OBSERVE(message_limit) { struct msqid_ds found = {0}; msgctl(object, IPC_STAT, &found); say("%lu", (long)found.msg_qbytes); }

static void open_queue(const char *name)
{
	struct mq_attr attributes = {.mq_maxmsg = 4, .mq_msgsize = 32};
	fd[0] = must(mq_open(name, O_RDWR | O_CREAT | O_NONBLOCK, 0600, &attributes));
}
STATE(queue, "ipc", "mq_open: a queue with a message");
MAKE(queue) { open_queue("/filled"); must(mq_send(fd[0], "message", 7, 3)); }
OBSERVE(queue) { struct mq_attr found = {0}; say_call("get", mq_getattr(fd[0], &found)); say("%ld %ld %ld %ld", found.mq_flags, found.mq_maxmsg, found.mq_msgsize, found.mq_curmsgs); }
STATE(queue_notice, "ipc", "mq_notify");
MAKE(queue_notice) { struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = 40}; open_queue("/noticed"); must(mq_notify(fd[0], &event)); }
OBSERVE(queue_notice) { struct sigevent event = {.sigev_notify = SIGEV_NONE}; say_call("again", mq_notify(fd[0], &event)); }
STATE(semaphore_file, "ipc", "sem_open");
MAKE(semaphore_file) { sem_t *one = sem_open("/states", O_CREAT, 0600, 6); if (one == SEM_FAILED) impossible("sem_open"); area = (char *)one; }
OBSERVE(semaphore_file) { int value = -1; sem_getvalue((sem_t *)area, &value); say("%d", value); }
