/* waits: enters blocking calls and tells how each came out. For tests/conformance/transparency.py.
 *
 * usage: waits SECONDS RESULTS [CALL...]
 *
 * Each call is made in a process of its own, by its main thread and by another one, and is to last SECONDS: that is its
 * time-out, or then a helper does what it waits for. When it returns, a line is added to RESULTS:
 *
 *     CALL PLACE EXPECTED ERROR MICROSECONDS END
 *
 * PLACE is main or thread. EXPECTED is 1 when the call returned what it should have, 0 when it did not, 2 when it cannot
 * be made here. END is when it returned, by CLOCK_REALTIME in microseconds, of a call that waits for an instant of that
 * clock; 0 of all others. RESULTS.ready is made when all processes wait. CLOCK_MONOTONIC of the sandbox measures, which
 * goes on in a restore where it was; CLOCK_REALTIME where the call waits for an instant of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000ll
#define PATH_ROOM 256
#define SIGSET_SIZE 8

static long long length; /* of each wait, ns */
static const char *results;
static char folder[PATH_ROOM / 2];

/* One wait, in memory that it shares with its helper. */
struct run {
    long long began, lasted; /* 0: not yet */
    long long ended;         /* by CLOCK_REALTIME, where that measures */
    clockid_t clock;         /* that measures */
    long long first;         /* what it said at the beginning */
    int word, other;        /* for futexes */
    pid_t tid;
    const char *name, *place;
    char path[PATH_ROOM];
    sem_t semaphore;
    pthread_mutex_t mutex;
    pthread_cond_t condition;
};

static long long now_on(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

static long long now(void) { return now_on(CLOCK_MONOTONIC); }

static void sleep_until(long long instant) {
    struct timespec time = {instant / SECOND, instant % SECOND};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL)) continue;
}

static struct timespec relative(void) { return (struct timespec){length / SECOND, length % SECOND}; }

static struct timespec absolute(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    long long sum = time.tv_sec * SECOND + time.tv_nsec + length;
    return (struct timespec){sum / SECOND, sum % SECOND};
}

static int milliseconds(void) { return (int)(length / 1000000); }

static void add_line(struct run *run, int expected, int error) {
    char line[256];
    int size = snprintf(line, sizeof line, "%s %s %d %d %lld %lld\n", run->name, run->place, expected, error,
                        run->lasted / 1000, run->ended / 1000);
    int fd = open(results, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, line, (size_t)size) != size) _exit(4);
    close(fd);
    if (!run->began) run->began = 1; /* nobody need wait for it to begin */
}

static struct run *current; /* of this process */

/* What cannot be tried says so in the place of its outcome. */
static void check(bool good, const char *what) {
    if (good) return;
    fprintf(stderr, "waits: %s: %s\n", what, strerror(errno));
    if (current) add_line(current, 2, errno);
    _exit(3);
}

/* A process that acts when the wait has lasted long enough. */
#define AT_THE_END(action)                                                    \
    do {                                                                      \
        if (fork() == 0) {                                                    \
            prctl(PR_SET_PDEATHSIG, SIGKILL);                                 \
            while (!__atomic_load_n(&run->began, __ATOMIC_SEQ_CST)) usleep(1000); \
            sleep_until(run->began + length);                                 \
            action;                                                           \
            _exit(0);                                                         \
        }                                                                     \
    } while (0)

static long timed(struct run *run, long returned) {
    int error = errno;
    run->lasted = now_on(run->clock) - run->first;
    if (run->clock == CLOCK_REALTIME) run->ended = run->first + run->lasted;
    errno = error;
    return returned;
}

static void begin(struct run *run) {
    run->first = now_on(run->clock);
    __atomic_store_n(&run->began, now(), __ATOMIC_SEQ_CST);
}

/* The call itself: between two looks at the clock. */
#define WAIT(call) (begin(run), timed(run, (call)))
#define TEST(name) static bool name(struct run *run)
#define ENDS_WITH(number) (errno == (number))

static sigset_t mask_of(int signal) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal);
    return set;
}

static void on_signal(int number) { (void)number; }

static void handle(int signal) {
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(signal, &action, NULL);
}

static void send_signal(struct run *run, int signal) { syscall(SYS_tkill, run->tid, signal); }

/* ------------------------------------------------------------------ sleeps */

TEST(t_nanosleep) {
    static struct timespec time;
    time = relative();
    long returned = WAIT(syscall(SYS_nanosleep, &time, NULL));
    return returned == 0 && time.tv_sec == length / SECOND; /* what it was asked for has not changed */
}
TEST(t_nanosleep_rest) {
    struct timespec time = relative(), rest;
    return WAIT(syscall(SYS_nanosleep, &time, &rest)) == 0;
}
TEST(t_nanosleep_same) {
    struct timespec time = relative();
    return WAIT(syscall(SYS_nanosleep, &time, &time)) == 0;
}
static const struct timespec read_only = {3, 0};
TEST(t_nanosleep_read_only) {
    length = read_only.tv_sec * SECOND;
    return WAIT(syscall(SYS_nanosleep, &read_only, NULL)) == 0;
}
TEST(t_clock_nanosleep) {
    struct timespec time = relative();
    return WAIT(syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &time, NULL)) == 0;
}
TEST(t_clock_nanosleep_realtime) {
    struct timespec time = relative();
    return WAIT(syscall(SYS_clock_nanosleep, CLOCK_REALTIME, 0, &time, NULL)) == 0;
}
TEST(t_clock_nanosleep_boottime) {
    struct timespec time = relative();
    return WAIT(syscall(SYS_clock_nanosleep, CLOCK_BOOTTIME, 0, &time, NULL)) == 0;
}
TEST(t_clock_nanosleep_absolute) {
    struct timespec time = absolute(CLOCK_MONOTONIC);
    return WAIT(syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL)) == 0;
}
TEST(t_usleep) { return WAIT(usleep((useconds_t)(length / 1000))) == 0; }
TEST(t_sleep) { return WAIT(sleep((unsigned)(length / SECOND))) == 0; }

/* ------------------------------------------------------------------ poll, select, epoll */

static void pipe_of(int ends[2]) { check(pipe(ends) == 0, "pipe"); }
static void put(int fd) { check(write(fd, "1", 1) == 1, "write"); }

TEST(t_poll) { return WAIT(syscall(SYS_poll, NULL, 0, milliseconds())) == 0; }
TEST(t_poll_pipe) {
    int ends[2];
    pipe_of(ends);
    struct pollfd one = {ends[0], POLLIN, 0};
    return WAIT(syscall(SYS_poll, &one, 1, milliseconds())) == 0;
}
TEST(t_poll_forever) {
    int ends[2];
    pipe_of(ends);
    AT_THE_END(put(ends[1]));
    struct pollfd one = {ends[0], POLLIN, 0};
    return WAIT(syscall(SYS_poll, &one, 1, -1)) == 1;
}
TEST(t_poll_woken) {
    int ends[2];
    pipe_of(ends);
    AT_THE_END(put(ends[1]));
    struct pollfd one = {ends[0], POLLIN, 0};
    return WAIT(syscall(SYS_poll, &one, 1, 1000000)) == 1;
}
TEST(t_ppoll) {
    struct timespec time = relative();
    return WAIT(syscall(SYS_ppoll, NULL, 0, &time, NULL, SIGSET_SIZE)) == 0;
}
TEST(t_ppoll_mask) {
    struct timespec time = relative();
    sigset_t mask = mask_of(SIGUSR1);
    return WAIT(syscall(SYS_ppoll, NULL, 0, &time, &mask, SIGSET_SIZE)) == 0;
}
TEST(t_ppoll_signal) { /* blocked but for the wait: what it waits for is the signal */
    sigset_t block = mask_of(SIGUSR1), none;
    sigemptyset(&none);
    handle(SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &block, NULL);
    AT_THE_END(send_signal(run, SIGUSR1));
    return WAIT(syscall(SYS_ppoll, NULL, 0, NULL, &none, SIGSET_SIZE)) == -1 && ENDS_WITH(EINTR);
}
TEST(t_select) {
    struct timeval time = {length / SECOND, length % SECOND / 1000};
    return WAIT(syscall(SYS_select, 0, NULL, NULL, NULL, &time)) == 0;
}
TEST(t_select_forever) {
    int ends[2];
    fd_set set;
    pipe_of(ends);
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    AT_THE_END(put(ends[1]));
    return WAIT(syscall(SYS_select, ends[0] + 1, &set, NULL, NULL, NULL)) == 1;
}
TEST(t_pselect) {
    struct timespec time = relative();
    return WAIT(syscall(SYS_pselect6, 0, NULL, NULL, NULL, &time, NULL)) == 0;
}
TEST(t_pselect_mask) {
    struct timespec time = relative();
    sigset_t mask = mask_of(SIGUSR1);
    struct {
        sigset_t *mask;
        size_t size;
    } sixth = {&mask, SIGSET_SIZE};
    return WAIT(syscall(SYS_pselect6, 0, NULL, NULL, NULL, &time, &sixth)) == 0;
}

static int watched(int *other) {
    int ends[2], set = epoll_create1(EPOLL_CLOEXEC);
    pipe_of(ends);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = ends[0]};
    check(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll_ctl");
    *other = ends[1];
    return set;
}
TEST(t_epoll_wait) {
    int other, set = watched(&other);
    struct epoll_event event;
    return WAIT(syscall(SYS_epoll_wait, set, &event, 1, milliseconds())) == 0;
}
TEST(t_epoll_wait_forever) {
    int other, set = watched(&other);
    struct epoll_event event;
    AT_THE_END(put(other));
    return WAIT(syscall(SYS_epoll_wait, set, &event, 1, -1)) == 1;
}
TEST(t_epoll_wait_woken) {
    int other, set = watched(&other);
    struct epoll_event event;
    AT_THE_END(put(other));
    return WAIT(syscall(SYS_epoll_wait, set, &event, 1, 1000000)) == 1;
}
TEST(t_epoll_pwait) {
    int other, set = watched(&other);
    struct epoll_event event;
    sigset_t mask = mask_of(SIGUSR1);
    return WAIT(syscall(SYS_epoll_pwait, set, &event, 1, milliseconds(), &mask, SIGSET_SIZE)) == 0;
}
TEST(t_epoll_pwait2) {
    int other, set = watched(&other);
    struct epoll_event event;
    struct timespec time = relative();
    return WAIT(syscall(SYS_epoll_pwait2, set, &event, 1, &time, NULL, SIGSET_SIZE)) == 0;
}
TEST(t_epoll_pwait2_mask) {
    int other, set = watched(&other);
    struct epoll_event event;
    struct timespec time = relative();
    sigset_t mask = mask_of(SIGUSR1);
    return WAIT(syscall(SYS_epoll_pwait2, set, &event, 1, &time, &mask, SIGSET_SIZE)) == 0;
}

/* ------------------------------------------------------------------ futexes, and what is made of them */

static long futex(int *word, int command, int value, void *time, int *other, unsigned bits) {
    return syscall(SYS_futex, word, command, value, time, other, bits);
}
TEST(t_futex) {
    struct timespec time = relative();
    return WAIT(futex(&run->word, FUTEX_WAIT, 0, &time, NULL, 0)) == -1 && ENDS_WITH(ETIMEDOUT);
}
TEST(t_futex_forever) {
    AT_THE_END(run->word = 1; futex(&run->word, FUTEX_WAKE, 1, NULL, NULL, 0));
    return WAIT(futex(&run->word, FUTEX_WAIT, 0, NULL, NULL, 0)) == 0;
}
TEST(t_futex_woken) {
    struct timespec time = {1000, 0};
    AT_THE_END(run->word = 1; futex(&run->word, FUTEX_WAKE, 1, NULL, NULL, 0));
    /* Where the one who wakes was let go first, the word has changed before the wait goes on, as after SIGCONT. */
    return WAIT(futex(&run->word, FUTEX_WAIT, 0, &time, NULL, 0)) == 0 || (run->word == 1 && ENDS_WITH(EAGAIN));
}
TEST(t_futex_bitset) {
    struct timespec time = absolute(CLOCK_MONOTONIC);
    return WAIT(futex(&run->word, FUTEX_WAIT_BITSET, 0, &time, NULL, ~0u)) == -1 && ENDS_WITH(ETIMEDOUT);
}
TEST(t_futex_pi) {
    struct timespec time = absolute(run->clock = CLOCK_REALTIME);
    run->word = getppid(); /* has it, and never gives it back */
    return WAIT(futex(&run->word, FUTEX_LOCK_PI, 0, &time, NULL, 0)) == -1 && ENDS_WITH(ETIMEDOUT);
}
TEST(t_futex_waitv) {
    struct {
        uint64_t value, address;
        uint32_t flags, reserved;
    } one = {0, (uint64_t)(uintptr_t)&run->word, 2 /* 32 bits */, 0};
    struct timespec time = absolute(CLOCK_MONOTONIC);
    return WAIT(syscall(449, &one, 1, 0, &time, CLOCK_MONOTONIC)) == -1 && ENDS_WITH(ETIMEDOUT);
}
TEST(t_sem_timedwait) {
    struct timespec time = absolute(run->clock = CLOCK_REALTIME);
    sem_init(&run->semaphore, 1, 0);
    return WAIT(sem_timedwait(&run->semaphore, &time)) == -1 && ENDS_WITH(ETIMEDOUT);
}
TEST(t_sem_wait) {
    sem_init(&run->semaphore, 1, 0);
    AT_THE_END(sem_post(&run->semaphore));
    return WAIT(sem_wait(&run->semaphore)) == 0;
}
TEST(t_cond_timedwait) {
    pthread_condattr_t kind;
    pthread_condattr_init(&kind);
    pthread_condattr_setclock(&kind, CLOCK_MONOTONIC);
    pthread_cond_init(&run->condition, &kind);
    pthread_mutex_init(&run->mutex, NULL);
    pthread_mutex_lock(&run->mutex);
    struct timespec time = absolute(CLOCK_MONOTONIC);
    return WAIT(pthread_cond_timedwait(&run->condition, &run->mutex, &time)) == ETIMEDOUT;
}
static void *sleeper(void *given) {
    struct run *run = given;
    while (!__atomic_load_n(&run->began, __ATOMIC_SEQ_CST)) usleep(1000);
    sleep_until(run->began + length);
    return NULL;
}
TEST(t_pthread_join) {
    pthread_t other;
    pthread_create(&other, NULL, sleeper, run);
    return WAIT(pthread_join(other, NULL)) == 0;
}

/* ------------------------------------------------------------------ signals */

TEST(t_sigtimedwait) {
    sigset_t set = mask_of(SIGUSR1);
    struct timespec time = relative();
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    return WAIT(syscall(SYS_rt_sigtimedwait, &set, NULL, &time, SIGSET_SIZE)) == -1 && ENDS_WITH(EAGAIN);
}
TEST(t_sigwaitinfo) {
    sigset_t set = mask_of(SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    AT_THE_END(send_signal(run, SIGUSR1));
    return WAIT(syscall(SYS_rt_sigtimedwait, &set, NULL, NULL, SIGSET_SIZE)) == SIGUSR1;
}
TEST(t_pause) {
    handle(SIGUSR1);
    AT_THE_END(send_signal(run, SIGUSR1));
    return WAIT(pause()) == -1 && ENDS_WITH(EINTR);
}
TEST(t_sigsuspend) {
    sigset_t block = mask_of(SIGUSR1), none;
    sigemptyset(&none);
    handle(SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &block, NULL);
    AT_THE_END(send_signal(run, SIGUSR1));
    return WAIT(syscall(SYS_rt_sigsuspend, &none, SIGSET_SIZE)) == -1 && ENDS_WITH(EINTR);
}
TEST(t_nanosleep_signal) { /* a real signal still ends it */
    struct timespec time = {1000, 0};
    handle(SIGUSR1);
    AT_THE_END(send_signal(run, SIGUSR1));
    return WAIT(syscall(SYS_nanosleep, &time, NULL)) == -1 && ENDS_WITH(EINTR);
}
TEST(t_epoll_wait_signal) {
    int other, set = watched(&other);
    struct epoll_event event;
    handle(SIGUSR1);
    AT_THE_END(send_signal(run, SIGUSR1));
    return WAIT(syscall(SYS_epoll_wait, set, &event, 1, 1000000)) == -1 && ENDS_WITH(EINTR);
}

/* ------------------------------------------------------------------ System V */

static int one_semaphore(void) {
    int set = semget(IPC_PRIVATE, 1, 0600);
    check(set >= 0, "semget");
    return set;
}
TEST(t_semtimedop) {
    struct sembuf take = {0, -1, 0};
    struct timespec time = relative();
    int set = one_semaphore();
    return WAIT(syscall(SYS_semtimedop, set, &take, 1, &time)) == -1 && ENDS_WITH(EAGAIN);
}
TEST(t_semop) {
    struct sembuf take = {0, -1, 0}, give = {0, 1, 0};
    int set = one_semaphore();
    AT_THE_END(semop(set, &give, 1));
    return WAIT(syscall(SYS_semop, set, &take, 1)) == 0;
}
struct letter {
    long kind;
    char text[4096];
};
TEST(t_msgrcv) {
    struct letter letter = {1, "x"};
    int queue = msgget(IPC_PRIVATE, 0600);
    AT_THE_END(msgsnd(queue, &letter, 1, 0));
    return WAIT(msgrcv(queue, &letter, sizeof letter.text, 0, 0)) == 1;
}
TEST(t_msgsnd) {
    struct letter letter = {1, "x"};
    int queue = msgget(IPC_PRIVATE, 0600);
    while (msgsnd(queue, &letter, sizeof letter.text, IPC_NOWAIT) == 0) continue;
    AT_THE_END(msgrcv(queue, &letter, sizeof letter.text, 0, 0));
    return WAIT(msgsnd(queue, &letter, sizeof letter.text, 0)) == 0;
}

/* ------------------------------------------------------------------ sockets */

static void pair_of(int ends[2]) { check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair"); }
static void limit(int fd, int option) {
    struct timeval time = {length / SECOND, length % SECOND / 1000};
    check(setsockopt(fd, SOL_SOCKET, option, &time, sizeof time) == 0, "setsockopt");
}
static void fill(int fd) {
    char block[4096] = {0};
    while (send(fd, block, sizeof block, MSG_DONTWAIT) > 0) continue;
}
static void drain(int fd) {
    char block[4096];
    while (recv(fd, block, sizeof block, MSG_DONTWAIT) > 0) continue;
}
static int listener(struct sockaddr_in *address) {
    socklen_t size = sizeof *address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    check(bind(fd, (struct sockaddr *)address, size) == 0 && listen(fd, 1) == 0, "listen");
    getsockname(fd, (struct sockaddr *)address, &size);
    return fd;
}
static void connect_to(struct sockaddr_in *address) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(fd, (struct sockaddr *)address, sizeof *address) == 0, "connect");
    pause();
}
TEST(t_recv) {
    int ends[2];
    char byte;
    pair_of(ends);
    AT_THE_END(put(ends[1]));
    return WAIT(recv(ends[0], &byte, 1, 0)) == 1;
}
TEST(t_recv_timed) {
    int ends[2];
    char byte;
    pair_of(ends);
    limit(ends[0], SO_RCVTIMEO);
    return WAIT(recv(ends[0], &byte, 1, 0)) == -1 && ENDS_WITH(EAGAIN);
}
TEST(t_read_timed) {
    int ends[2];
    char byte;
    pair_of(ends);
    limit(ends[0], SO_RCVTIMEO);
    return WAIT(read(ends[0], &byte, 1)) == -1 && ENDS_WITH(EAGAIN);
}
TEST(t_recvmsg_udp_timed) {
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    char byte;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    check(bind(fd, (struct sockaddr *)&address, sizeof address) == 0, "bind");
    limit(fd, SO_RCVTIMEO);
    return WAIT(recvmsg(fd, &message, 0)) == -1 && ENDS_WITH(EAGAIN);
}
TEST(t_send) {
    int ends[2];
    char block[1] = {0};
    pair_of(ends);
    fill(ends[0]);
    AT_THE_END(drain(ends[1]));
    return WAIT(send(ends[0], block, sizeof block, 0)) == sizeof block;
}
TEST(t_send_timed) {
    int ends[2];
    char block[1] = {0};
    pair_of(ends);
    fill(ends[0]);
    limit(ends[0], SO_SNDTIMEO);
    return WAIT(send(ends[0], block, sizeof block, 0)) == -1 && ENDS_WITH(EAGAIN);
}
TEST(t_accept) {
    struct sockaddr_in address;
    int fd = listener(&address);
    AT_THE_END(connect_to(&address));
    return WAIT(accept(fd, NULL, NULL)) >= 0;
}
TEST(t_accept_timed) {
    struct sockaddr_in address;
    int fd = listener(&address);
    limit(fd, SO_RCVTIMEO);
    return WAIT(accept(fd, NULL, NULL)) == -1 && ENDS_WITH(EAGAIN);
}

/* ------------------------------------------------------------------ descriptors */

TEST(t_read_pipe) {
    int ends[2];
    char byte;
    pipe_of(ends);
    AT_THE_END(put(ends[1]));
    return WAIT(read(ends[0], &byte, 1)) == 1;
}
TEST(t_write_pipe) {
    int ends[2];
    char block[4096] = {0};
    pipe_of(ends);
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    while (write(ends[1], block, sizeof block) > 0) continue;
    fcntl(ends[1], F_SETFL, 0);
    AT_THE_END(for (int i = 0; i < 16; i++) if (read(ends[0], block, sizeof block) < 0) _exit(1));
    return WAIT(write(ends[1], block, 1)) == 1;
}
TEST(t_open_fifo) {
    check(mkfifo(run->path, 0600) == 0, "mkfifo");
    AT_THE_END(open(run->path, O_WRONLY); pause());
    return WAIT(open(run->path, O_RDONLY)) >= 0;
}
TEST(t_read_eventfd) {
    int fd = eventfd(0, 0);
    uint64_t value = 1;
    AT_THE_END(check(write(fd, &value, sizeof value) == sizeof value, "eventfd"));
    return WAIT(read(fd, &value, sizeof value)) == sizeof value;
}
TEST(t_read_timerfd) {
    int fd = timerfd_create(CLOCK_MONOTONIC, 0);
    struct itimerspec time = {.it_value = relative()};
    uint64_t value;
    timerfd_settime(fd, 0, &time, NULL);
    return WAIT(read(fd, &value, sizeof value)) == sizeof value;
}
TEST(t_read_signalfd) {
    sigset_t set = mask_of(SIGUSR1);
    struct signalfd_siginfo info;
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    int fd = signalfd(-1, &set, 0);
    AT_THE_END(send_signal(run, SIGUSR1));
    return WAIT(read(fd, &info, sizeof info)) == sizeof info;
}
TEST(t_read_inotify) {
    char events[4096];
    check(mkdir(run->path, 0700) == 0, "mkdir");
    int fd = inotify_init1(0);
    check(inotify_add_watch(fd, run->path, IN_CREATE) >= 0, "inotify");
    AT_THE_END(char name[PATH_ROOM + 8]; snprintf(name, sizeof name, "%s/file", run->path); close(creat(name, 0600)));
    return WAIT(read(fd, events, sizeof events)) > 0;
}
TEST(t_read_terminal) {
    int master = posix_openpt(O_RDWR | O_NOCTTY), slave;
    char line[16];
    check(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0, "pty");
    slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    check(slave >= 0, "open the terminal");
    AT_THE_END(check(write(master, "\n", 1) == 1, "type"));
    return WAIT(read(slave, line, sizeof line)) == 1;
}
TEST(t_io_getevents) {
    aio_context_t context = 0;
    struct io_event event;
    struct timespec time = relative();
    check(syscall(SYS_io_setup, 8, &context) == 0, "io_setup");
    return WAIT(syscall(SYS_io_getevents, context, 1, 1, &event, &time)) == 0;
}

/* ------------------------------------------------------------------ locks and processes */

static int opened(struct run *run) {
    int fd = open(run->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    check(fd >= 0, run->path);
    return fd;
}
static void hold(struct run *run, bool whole) { /* a process that has the lock until the end */
    int told[2];
    char byte;
    pipe_of(told);
    if (fork() == 0) {
        struct flock lock = {.l_type = F_WRLCK};
        int fd = opened(run);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        check((whole ? flock(fd, LOCK_EX) : fcntl(fd, F_SETLK, &lock)) == 0, "lock");
        put(told[1]);
        while (!__atomic_load_n(&run->began, __ATOMIC_SEQ_CST)) usleep(1000);
        sleep_until(run->began + length);
        _exit(0);
    }
    check(read(told[0], &byte, 1) == 1, "the holder");
}
TEST(t_flock) {
    hold(run, true);
    return WAIT(flock(opened(run), LOCK_EX)) == 0;
}
TEST(t_fcntl_lock) {
    struct flock lock = {.l_type = F_WRLCK};
    hold(run, false);
    return WAIT(fcntl(opened(run), F_SETLKW, &lock)) == 0;
}
TEST(t_fcntl_ofd_lock) {
    struct flock lock = {.l_type = F_WRLCK};
    hold(run, false);
    return WAIT(fcntl(opened(run), F_OFD_SETLKW, &lock)) == 0;
}
TEST(t_wait4) {
    AT_THE_END((void)0);
    return WAIT(waitpid(-1, NULL, 0)) > 0;
}
TEST(t_waitid) {
    siginfo_t info;
    AT_THE_END((void)0);
    return WAIT(waitid(P_ALL, 0, &info, WEXITED)) == 0;
}
TEST(t_poll_pidfd) {
    pid_t child = fork();
    if (child == 0) {
        while (!__atomic_load_n(&run->began, __ATOMIC_SEQ_CST)) usleep(1000);
        sleep_until(run->began + length);
        _exit(0);
    }
    struct pollfd one = {(int)syscall(SYS_pidfd_open, child, 0), POLLIN, 0};
    check(one.fd >= 0, "pidfd_open");
    return WAIT(poll(&one, 1, 1000000)) == 1;
}

static const struct {
    const char *name;
    bool (*run)(struct run *run);
} tests[] = {
#define T(name) {#name, t_##name}
    T(nanosleep), T(nanosleep_rest), T(nanosleep_same), T(nanosleep_read_only), T(clock_nanosleep),
    T(clock_nanosleep_realtime), T(clock_nanosleep_boottime), T(clock_nanosleep_absolute), T(usleep), T(sleep), T(poll),
    T(poll_pipe), T(poll_forever), T(poll_woken), T(ppoll), T(ppoll_mask), T(ppoll_signal), T(select), T(select_forever),
    T(pselect), T(pselect_mask), T(epoll_wait), T(epoll_wait_forever), T(epoll_wait_woken), T(epoll_pwait),
    T(epoll_pwait2), T(epoll_pwait2_mask), T(futex), T(futex_forever), T(futex_woken), T(futex_bitset), T(futex_pi),
    T(futex_waitv), T(sem_timedwait), T(sem_wait), T(cond_timedwait), T(pthread_join), T(sigtimedwait), T(sigwaitinfo),
    T(pause), T(sigsuspend), T(nanosleep_signal), T(epoll_wait_signal), T(semtimedop), T(semop), T(msgrcv), T(msgsnd),
    T(recv), T(recv_timed), T(read_timed), T(recvmsg_udp_timed), T(send), T(send_timed), T(accept), T(accept_timed),
    T(read_pipe), T(write_pipe), T(open_fifo), T(read_eventfd), T(read_timerfd), T(read_signalfd), T(read_inotify),
    T(read_terminal), T(io_getevents), T(flock), T(fcntl_lock), T(fcntl_ofd_lock), T(wait4), T(waitid), T(poll_pidfd),
};
#define TESTS (sizeof tests / sizeof *tests)

struct job {
    struct run *run;
    size_t number;
};

static void *perform(void *given) {
    struct job *job = given;
    struct run *run = job->run;
    run->tid = (pid_t)syscall(SYS_gettid);
    errno = 0;
    bool expected = tests[job->number].run(run);
    add_line(run, expected, errno);
    return NULL;
}

static struct run *start(size_t number, bool in_thread) {
    struct run *run = mmap(NULL, sizeof *run, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(run != MAP_FAILED, "mmap");
    snprintf(run->path, sizeof run->path, "%s/%s-%s", folder, tests[number].name, in_thread ? "thread" : "main");
    run->clock = CLOCK_MONOTONIC;
    run->name = tests[number].name;
    run->place = in_thread ? "thread" : "main";
    if (fork() == 0) {
        struct job job = {run, number};
        pthread_t thread;
        current = run;
        if (in_thread) {
            check(pthread_create(&thread, NULL, perform, &job) == 0, "thread");
            pthread_join(thread, NULL);
        } else {
            perform(&job);
        }
        _exit(0);
    }
    return run;
}

static bool wanted(const char *name, int count, char **names) {
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0) return true;
    return count == 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    length = (long long)(atof(argv[1]) * (double)SECOND);
    results = argv[2];
    snprintf(folder, sizeof folder, "%s.d", results);
    mkdir(folder, 0700);
    struct run *runs[2 * TESTS];
    size_t count = 0;
    for (size_t i = 0; i < TESTS; i++)
        for (int in_thread = 0; in_thread < 2 && wanted(tests[i].name, argc - 3, argv + 3); in_thread++)
            runs[count++] = start(i, in_thread);
    for (size_t i = 0; i < count; i++)
        while (!__atomic_load_n(&runs[i]->began, __ATOMIC_SEQ_CST)) usleep(1000);
    char ready[PATH_ROOM];
    snprintf(ready, sizeof ready, "%s.ready", results);
    close(creat(ready, 0600));
    while (wait(NULL) > 0 || errno == EINTR) continue;
    snprintf(ready, sizeof ready, "%s.done", results);
    close(creat(ready, 0600));
    return 0;
}
