/* The relay of an agent of keys: a socket in the sandbox, the agent elsewhere (RUN --mount=type=ssh).
 *
 *   relay PATH MODE UID GID          MODE in octal digits
 *
 * What a program asks on a connection to PATH is written to stdout as a frame, and what comes on stdin is the answer:
 *
 *   uint32 connection, uint32 size, then the message of the agent's protocol, its own length in front
 *
 * One question is under way at a time. Size 0 says that the connection has ended, or is to end. The first frame, of
 * connection READY, says that the socket is there. It lives as long as its stdin.
 *
 * No libc: it runs in any image.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SYS_read = 0, SYS_write = 1, SYS_close = 3, SYS_poll = 7, SYS_socket = 41, SYS_sendto = 44, SYS_bind = 49,
    SYS_listen = 50, SYS_exit = 60, SYS_chmod = 90, SYS_chown = 92, SYS_accept4 = 288,
};
enum { AF_UNIX = 1, SOCK_STREAM = 1, CLOEXEC = 02000000, POLLIN = 1, NO_SIGNAL = 0x4000, EINTR = 4 };

#define CONNECTIONS 16
#define MAX_MESSAGE ((256 << 10) + 4)
#define READY 0xffffffffU

static struct connection {
    int fd;   /* 0: none */
    uint32_t size;
    unsigned char data[MAX_MESSAGE];
} connections[CONNECTIONS];
static unsigned char answer[MAX_MESSAGE];
static struct { uint16_t family; char path[108]; } address;

static long call6(long n, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#define call(n, a, b, c, d) call6(n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)

__attribute__((noreturn)) static void leave(int code) {
    for (;;) call(SYS_exit, code, 0, 0, 0);
}

static long number(const char *text, long base) {
    long result = 0;
    while (*text >= '0' && *text < '0' + base) result = result * base + *text++ - '0';
    return result;
}

/* All of it, or the end. */
static void say(const void *data, size_t size) {
    for (const char *at = data; size;) {
        long done = call(SYS_write, 1, at, size, 0);
        if (done == -EINTR) continue;
        if (done <= 0) leave(0);
        at += done, size -= (size_t)done;
    }
}

static void hear(void *data, size_t size) {
    for (char *at = data; size;) {
        long done = call(SYS_read, 0, at, size, 0);
        if (done == -EINTR) continue;
        if (done <= 0) leave(0);
        at += done, size -= (size_t)done;
    }
}

static bool send_all(int fd, const unsigned char *data, size_t size) {
    while (size) {
        long done = call6(SYS_sendto, fd, (long)data, (long)size, NO_SIGNAL, 0, 0);
        if (done == -EINTR) continue;
        if (done <= 0) return false;
        data += done, size -= (size_t)done;
    }
    return true;
}

static void end(struct connection *one) {
    uint32_t frame[2] = {(uint32_t)(one - connections), 0};
    call(SYS_close, one->fd, 0, 0, 0);
    one->fd = 0;
    say(frame, sizeof frame);
}

static void ask(struct connection *one) {
    uint32_t frame[2] = {(uint32_t)(one - connections), one->size};
    say(frame, sizeof frame);
    say(one->data, one->size);
    one->size = 0;
    hear(frame, sizeof frame);
    if (frame[1] > MAX_MESSAGE) leave(1);
    hear(answer, frame[1]);
    if (!frame[1] || !send_all(one->fd, answer, frame[1])) end(one);
}

/* Of the message that begins here, its length included; 4 until that is known. */
static uint64_t wanted(const struct connection *one) {
    const unsigned char *head = one->data;
    if (one->size < 4) return 4;
    return 4 + ((uint64_t)head[0] << 24 | (uint64_t)head[1] << 16 | (uint64_t)head[2] << 8 | (uint64_t)head[3]);
}

static void take(struct connection *one) {
    long got = call(SYS_read, one->fd, one->data + one->size, wanted(one) - one->size, 0);
    if (got == -EINTR) return;
    if (got <= 0) return end(one);
    one->size += (uint32_t)got;
    if (one->size < 4) return;
    uint64_t size = wanted(one);
    if (size == 4 || size > MAX_MESSAGE) return end(one);
    if (one->size == size) ask(one);
}

static void welcome(int listener) {
    long fd = call(SYS_accept4, listener, 0, 0, CLOEXEC);
    for (int i = 0; fd > 0 && i < CONNECTIONS; i++)
        if (!connections[i].fd) {
            connections[i].fd = (int)fd, connections[i].size = 0;
            return;
        }
}

__attribute__((used)) static void start(long *stack) {
    char **argv = (char **)(stack + 1);
    if (stack[0] != 5) leave(2);
    address.family = AF_UNIX;
    for (size_t i = 0; argv[1][i]; i++) {
        if (i + 1 >= sizeof address.path) leave(3);
        address.path[i] = argv[1][i];
    }
    long listener = call(SYS_socket, AF_UNIX, SOCK_STREAM | CLOEXEC, 0, 0);
    if (listener < 0 || call(SYS_bind, listener, &address, sizeof address, 0) < 0) leave(4);
    if (call(SYS_chown, argv[1], number(argv[3], 10), number(argv[4], 10), 0) < 0) leave(5);
    if (call(SYS_chmod, argv[1], number(argv[2], 8), 0, 0) < 0) leave(5);
    if (call(SYS_listen, listener, CONNECTIONS, 0, 0) < 0) leave(4);
    uint32_t ready[2] = {READY, 0};
    say(ready, sizeof ready);
    for (;;) {
        struct { int fd; short events, got; } set[CONNECTIONS + 2];
        bool full = true;
        for (int i = 0; i < CONNECTIONS; i++) {
            set[i].fd = connections[i].fd ? connections[i].fd : -1, set[i].events = POLLIN, set[i].got = 0;
            full = full && connections[i].fd;
        }
        set[CONNECTIONS].fd = full ? -1 : (int)listener, set[CONNECTIONS].events = POLLIN, set[CONNECTIONS].got = 0;
        set[CONNECTIONS + 1].fd = 0, set[CONNECTIONS + 1].events = 0, set[CONNECTIONS + 1].got = 0;
        if (call(SYS_poll, set, CONNECTIONS + 2, -1, 0) < 0) continue;
        if (set[CONNECTIONS + 1].got) leave(0);   /* nobody writes to our stdin any more */
        for (int i = 0; i < CONNECTIONS; i++)
            if (set[i].got && connections[i].fd) take(&connections[i]);
        if (set[CONNECTIONS].got) welcome((int)listener);
    }
}

__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall start\n");
