/* SPDX-License-Identifier: Apache-2.0 */
/* Unread bytes of terminals, in a CRIU that dumps or restores (part of written.so, rooted.so and terminals.so).
 *
 * CRIU reads what was written to one side of a terminal and not read yet at the other, and writes it to the first side
 * again: after a dump, and at a restore. The terminal would process it a second time: add a CR to each line, echo what was
 * typed, take control characters for signals; and in packet mode each read begins with a byte of the kernel's.
 *
 * Guarantee: what is written to a terminal arrives as it is, still in lines; its settings are the same after that.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

static struct termios without_processing(struct termios settings) {
    const int characters[] = {VINTR, VQUIT, VERASE, VKILL, VEOF, VSUSP, VREPRINT, VDISCARD, VWERASE, VLNEXT};
    settings.c_oflag &= ~(tcflag_t)OPOST;
    settings.c_lflag &= ~(tcflag_t)(ECHO | ECHOE | ECHOK | ECHONL | ECHOCTL | ECHOKE | ISIG);
    settings.c_iflag &= ~(tcflag_t)(ICRNL | INLCR | IGNCR | ISTRIP | IUCLC | PARMRK); /* IXON is told in packet mode */
    for (size_t i = 0; i < sizeof characters / sizeof *characters; i++) settings.c_cc[characters[i]] = _POSIX_VDISABLE;
    return settings;
}

/* The kernel processes what a master writes later, by the settings of that moment; at the latest when the other side
 * is polled, which has nothing else to read. */
static void have_processed(int master) {
    int peer = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (peer < 0) return; /* it is no master */
    struct pollfd one = {.fd = peer, .events = POLLIN};
    poll(&one, 1, 0);
    close(peer);
}

EXPORTED ssize_t write(int fd, const void *content, size_t size) {
    struct termios settings, plain;
    int before = errno;
    bool terminal = tcgetattr(fd, &settings) == 0;
    if (terminal) {
        plain = without_processing(settings);
        tcsetattr(fd, TCSANOW, &plain);
    }
    errno = before;
    ssize_t result = syscall(SYS_write, fd, content, size);
    before = errno;
    if (terminal) {
        have_processed(fd);
        tcsetattr(fd, TCSANOW, &settings);
    }
    errno = before;
    return result;
}

EXPORTED ssize_t read(int fd, void *into, size_t size) {
    int before = errno, packets = 0, off = 0;
    if (ioctl(fd, TIOCGPKT, &packets) < 0) packets = 0; /* it is no master of a terminal */
    if (packets) ioctl(fd, TIOCPKT, &off);
    errno = before;
    ssize_t result = syscall(SYS_read, fd, into, size);
    before = errno;
    if (packets) ioctl(fd, TIOCPKT, &packets);
    errno = before;
    return result;
}
