/* SPDX-License-Identifier: Apache-2.0 */
/* Sockets: kinds, conditions, what is queued in them. */
#include "states.h"

#include <arpa/inet.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static struct sockaddr_in bound(int descriptor)
{
	struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
	socklen_t size = sizeof address;
	must(bind(descriptor, (struct sockaddr *)&address, size));
	must(getsockname(descriptor, (struct sockaddr *)&address, &size));
	return address;
}

static int option(int descriptor, int level, int number)
{
	int value = -1;
	socklen_t size = sizeof value;
	getsockopt(descriptor, level, number, &value, &size);
	return value;
}

static void say_addresses(int descriptor)
{
	struct sockaddr_storage address;
	socklen_t size = sizeof address;
	memset(&address, 0, sizeof address);
	say_call("name", getsockname(descriptor, (struct sockaddr *)&address, &size));
	say_bytes(&address, size > 8 ? 8 : size);
	size = sizeof address;
	memset(&address, 0, sizeof address);
	say_call("peer", getpeername(descriptor, (struct sockaddr *)&address, &size));
	say_bytes(&address, size > 8 ? 8 : size);
}

static void say_ready(int descriptor)
{
	struct pollfd ready = {descriptor, POLLIN | POLLOUT | POLLRDHUP | POLLPRI, 0};
	poll(&ready, 1, 0);
	say("ready %x ", ready.revents);
}

static void say_peeked(int descriptor)
{
	char text[65] = "";
	say_call("peek", recv(descriptor, text, 64, MSG_PEEK | MSG_DONTWAIT));
	say("%s ", text);
}

static void say_state(int descriptor)
{
	struct tcp_info info = {0};
	socklen_t size = sizeof info;
	getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size);
	say("state %d ", info.tcpi_state);
}

static void listen_tcp(void) { fd[0] = must(socket(AF_INET, SOCK_STREAM, 0)); bound(fd[0]); must(listen(fd[0], 7)); }
static int connect_tcp(void)
{
	struct sockaddr_in address;
	socklen_t size = sizeof address;
	must(getsockname(fd[0], (struct sockaddr *)&address, &size));
	int one = must(socket(AF_INET, SOCK_STREAM, 0));
	must(connect(one, (struct sockaddr *)&address, size));
	return one;
}
static void pair_tcp(void) { listen_tcp(); fd[1] = connect_tcp(); fd[2] = must(accept(fd[0], NULL, NULL)); }
static void say_tcp(void) { for (int i = 0; i < 3; i++) { say_state(fd[i]); say_addresses(fd[i]); if (i) say_ready(fd[i]), say_peeked(fd[i]); } }

STATE(tcp_new, "tcp", "a socket that is neither bound nor connected");
MAKE(tcp_new) { fd[0] = must(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)); }
OBSERVE(tcp_new) { say_state(fd[0]); say_addresses(fd[0]); }
static void say_socket_owner(int descriptor) { struct stat found; fstat(descriptor, &found); say("%o %u %u", found.st_mode, found.st_uid, found.st_gid); }
STATE(tcp_owner, "tcp", "fchown and fchmod of a socket, as a server has it that is not root's");
MAKE(tcp_owner) { fd[0] = must(socket(AF_INET, SOCK_STREAM, 0)); must(fchown(fd[0], 1000, 1001)); must(fchmod(fd[0], 0600)); }
OBSERVE(tcp_owner) { say_socket_owner(fd[0]); }
STATE(tcp_signed, "tcp", "TCP_MD5SIG: a key that signs segments");
MAKE(tcp_signed) { char key[256] = {0}; fd[0] = must(socket(AF_INET, SOCK_STREAM, 0)); key[0] = AF_INET; key[4] = 127; key[7] = 1; key[130] = 4; memcpy(key + 136, "crab", 4); must(setsockopt(fd[0], IPPROTO_TCP, 14, key, 216)); }
OBSERVE(tcp_signed) { say_state(fd[0]); }
STATE(tcp_fastopen_key, "tcp", "TCP_FASTOPEN_KEY: a key for the cookies of a listener");
MAKE(tcp_fastopen_key) { listen_tcp(); must(setsockopt(fd[0], IPPROTO_TCP, 33, "a key for cookies", 16)); }
OBSERVE(tcp_fastopen_key) { char key[33] = ""; socklen_t size = 32; say_call("get", getsockopt(fd[0], IPPROTO_TCP, 33, key, &size)); say("%u %s", size, key); }
STATE(tcp_bound, "tcp", "a bound socket");
MAKE(tcp_bound) { fd[0] = must(socket(AF_INET, SOCK_STREAM, 0)); bound(fd[0]); }
OBSERVE(tcp_bound) { say_state(fd[0]); say_addresses(fd[0]); }
STATE(tcp_listening, "tcp", "listen, with its backlog");
MAKE(tcp_listening) { listen_tcp(); }
OBSERVE(tcp_listening) { say_state(fd[0]); say_addresses(fd[0]); struct tcp_info info = {0}; socklen_t size = sizeof info; getsockopt(fd[0], IPPROTO_TCP, TCP_INFO, &info, &size); say("backlog %u", info.tcpi_sacked); }
STATE(tcp_waiting, "tcp", "a connection that was not accepted yet");
MAKE(tcp_waiting) { listen_tcp(); fd[1] = connect_tcp(); must(write(fd[1], "early", 5)); }
OBSERVE(tcp_waiting) { say_state(fd[1]); say_ready(fd[0]); say_ready(fd[1]); }
STATE(tcp_connected, "tcp", "a connection inside, with bytes to be read at both ends");
MAKE(tcp_connected) { pair_tcp(); must(write(fd[1], "ping", 4)); must(write(fd[2], "pong", 4)); }
OBSERVE(tcp_connected) { say_tcp(); }
STATE(tcp_version_6, "tcp", "a connection over IPv6");
MAKE(tcp_version_6)
{
	struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	socklen_t size = sizeof address;
	fd[0] = must(socket(AF_INET6, SOCK_STREAM, 0));
	must(bind(fd[0], (struct sockaddr *)&address, size));
	must(getsockname(fd[0], (struct sockaddr *)&address, &size));
	must(listen(fd[0], 5));
	fd[1] = must(socket(AF_INET6, SOCK_STREAM, 0));
	must(connect(fd[1], (struct sockaddr *)&address, size));
	fd[2] = must(accept(fd[0], NULL, NULL));
	must(write(fd[1], "six", 3));
}
OBSERVE(tcp_version_6) { say_tcp(); }
STATE(tcp_half_closed, "tcp", "shutdown(SHUT_WR) of one end");
MAKE(tcp_half_closed) { pair_tcp(); must(write(fd[1], "last", 4)); must(shutdown(fd[1], SHUT_WR)); usleep(50000); }
OBSERVE(tcp_half_closed) { say_tcp(); }
STATE(tcp_closing, "tcp", "shutdown(SHUT_WR) of both ends");
MAKE(tcp_closing) { pair_tcp(); must(shutdown(fd[1], SHUT_WR)); must(shutdown(fd[2], SHUT_WR)); usleep(50000); }
OBSERVE(tcp_closing) { say_ready(fd[1]); say_ready(fd[2]); }
STATE(tcp_peer_gone, "tcp", "the other end closed, bytes not read");
MAKE(tcp_peer_gone) { pair_tcp(); must(write(fd[2], "bye", 3)); close(fd[2]); usleep(50000); }
OBSERVE(tcp_peer_gone) { say_state(fd[1]); say_ready(fd[1]); say_peeked(fd[1]); }
STATE(tcp_ended, "tcp", "the other end closed, then shutdown(SHUT_WR)");
MAKE(tcp_ended) { pair_tcp(); close(fd[2]); usleep(50000); must(shutdown(fd[1], SHUT_WR)); usleep(50000); }
OBSERVE(tcp_ended) { say_state(fd[1]); say_addresses(fd[1]); say_ready(fd[1]); say_peeked(fd[1]); }
STATE(tcp_reset, "tcp", "the other end reset the connection");
MAKE(tcp_reset) { struct linger now = {1, 0}; char byte; pair_tcp(); must(setsockopt(fd[2], SOL_SOCKET, SO_LINGER, &now, sizeof now)); close(fd[2]); usleep(50000); recv(fd[1], &byte, 1, 0); }
OBSERVE(tcp_reset) { say_state(fd[1]); say_addresses(fd[1]); say_ready(fd[1]); say_peeked(fd[1]); }
STATE(tcp_reset_unread, "tcp", "the other end reset the connection, bytes not read");
MAKE(tcp_reset_unread) { pair_tcp(); must(write(fd[1], "no", 2)); must(write(fd[2], "bye", 3)); close(fd[2]); usleep(50000); }
OBSERVE(tcp_reset_unread) { say_state(fd[1]); char text[9] = ""; say_call("peek", recv(fd[1], text, 8, MSG_PEEK | MSG_DONTWAIT)); say("%s", text); }
STATE(tcp_refused, "tcp", "connect without waiting, refused");
MAKE(tcp_refused)
{
	struct sockaddr_in there;
	listen_tcp();
	socklen_t size = sizeof there;
	must(getsockname(fd[0], (struct sockaddr *)&there, &size));
	close(fd[0]);
	fd[1] = must(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
	connect(fd[1], (struct sockaddr *)&there, size);
}
OBSERVE(tcp_refused) { say_state(fd[1]); say_addresses(fd[1]); say_ready(fd[1]); }
STATE(tcp_urgent, "tcp", "urgent data that was not read");
MAKE(tcp_urgent) { pair_tcp(); must(send(fd[1], "ab", 2, 0)); must(send(fd[1], "!", 1, MSG_OOB)); usleep(50000); }
OBSERVE(tcp_urgent) { int mark = -1; char byte = 0; say_ready(fd[2]); ioctl(fd[2], SIOCATMARK, &mark); say_call("urgent", recv(fd[2], &byte, 1, MSG_OOB | MSG_PEEK | MSG_DONTWAIT)); say("%d %d", byte, mark); }
STATE(tcp_peek_offset, "tcp", "SO_PEEK_OFF with unread bytes");
MAKE(tcp_peek_offset) { int offset = 3; pair_tcp(); must(write(fd[2], "ping", 4)); must(setsockopt(fd[1], SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof offset)); }
OBSERVE(tcp_peek_offset) { say("%d", option(fd[1], SOL_SOCKET, SO_PEEK_OFF)); }
STATE(tcp_fastopen_inherited, "tcp", "TCP_FASTOPEN_CONNECT of an accepted connection, from its listener");
MAKE(tcp_fastopen_inherited) { int on = 1; fd[0] = must(socket(AF_INET, SOCK_STREAM, 0)); bound(fd[0]); must(setsockopt(fd[0], IPPROTO_TCP, 30, &on, sizeof on)); must(listen(fd[0], 1)); fd[1] = connect_tcp(); fd[2] = must(accept(fd[0], NULL, NULL)); }
OBSERVE(tcp_fastopen_inherited) { say("%d", option(fd[2], IPPROTO_TCP, 30)); }
STATE(tcp_unsent, "tcp", "a connection with TCP_CORK and bytes that were not sent yet");
MAKE(tcp_unsent) { int on = 1; pair_tcp(); must(setsockopt(fd[1], IPPROTO_TCP, TCP_CORK, &on, sizeof on)); must(write(fd[1], "held back", 9)); fd[3] = dup(fd[1]); }
OBSERVE(tcp_unsent) { say_state(fd[1]); say("%d ", option(fd[1], IPPROTO_TCP, TCP_CORK)); int queued = 0, unread = 0; ioctl(fd[1], TIOCOUTQ, &queued), ioctl(fd[2], FIONREAD, &unread); say("%d ", queued + unread); }
STATE(tcp_behind, "tcp", "a connection whose reader is a little behind: its window is closed");
MAKE(tcp_behind)
{
	static char block[4096];
	int size = 4096;
	pair_tcp();
	setsockopt(fd[2], SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
	fcntl(fd[1], F_SETFL, O_NONBLOCK);
	fill(block, sizeof block);
	for (int queued = 0; queued < 3 * 65536 && write(fd[1], block, sizeof block) > 0;)
		ioctl(fd[1], TIOCOUTQ, &queued);
}
OBSERVE(tcp_behind) { usleep(100000); int queued = 0, unread = 0; ioctl(fd[1], TIOCOUTQ, &queued), ioctl(fd[2], FIONREAD, &unread); say("%d ", queued + unread); say_peeked(fd[2]); }
STATE(tcp_full, "tcp", "a connection whose buffers are full");
MAKE(tcp_full)
{
	static char block[65536];
	pair_tcp();
	fcntl(fd[1], F_SETFL, O_NONBLOCK);
	fill(block, sizeof block);
	while (write(fd[1], block, sizeof block) > 0) { }
}
OBSERVE(tcp_full) { usleep(100000); int queued = 0, unread = 0; ioctl(fd[1], TIOCOUTQ, &queued), ioctl(fd[2], FIONREAD, &unread); say("%d ", queued + unread); say_peeked(fd[2]); }

/* ------------------------------------------------------------------ UDP */

static void say_datagrams(int descriptor)
{
	int first = 0;
	ioctl(descriptor, FIONREAD, &first);
	say("first %d ", first);
	say_peeked(descriptor);
}
STATE(udp_bound, "udp", "a bound socket");
MAKE(udp_bound) { fd[0] = must(socket(AF_INET, SOCK_DGRAM, 0)); bound(fd[0]); }
OBSERVE(udp_bound) { say_addresses(fd[0]); }
STATE(udp_connected, "udp", "a connected socket");
MAKE(udp_connected) { fd[0] = must(socket(AF_INET, SOCK_DGRAM, 0)); struct sockaddr_in there = bound(fd[0]); fd[1] = must(socket(AF_INET, SOCK_DGRAM, 0)); must(connect(fd[1], (struct sockaddr *)&there, sizeof there)); }
OBSERVE(udp_connected) { say_addresses(fd[0]); say_addresses(fd[1]); }
STATE(udp_unread, "udp", "datagrams that were not read");
MAKE(udp_unread)
{
	fd[0] = must(socket(AF_INET, SOCK_DGRAM, 0));
	struct sockaddr_in there = bound(fd[0]);
	fd[1] = must(socket(AF_INET, SOCK_DGRAM, 0));
	must(sendto(fd[1], "one", 3, 0, (struct sockaddr *)&there, sizeof there));
	must(sendto(fd[1], "three", 5, 0, (struct sockaddr *)&there, sizeof there));
}
OBSERVE(udp_unread) { say_datagrams(fd[0]); }
STATE(udp_corked, "udp", "UDP_CORK with a datagram that was not finished");
MAKE(udp_corked)
{
	int on = 1;
	fd[0] = must(socket(AF_INET, SOCK_DGRAM, 0));
	struct sockaddr_in there = bound(fd[0]);
	fd[1] = must(socket(AF_INET, SOCK_DGRAM, 0));
	must(connect(fd[1], (struct sockaddr *)&there, sizeof there));
	must(setsockopt(fd[1], IPPROTO_UDP, UDP_CORK, &on, sizeof on));
	must(send(fd[1], "half", 4, 0));
}
OBSERVE(udp_corked) { int queued = 0; ioctl(fd[1], TIOCOUTQ, &queued); say("%d %d", queued > 0, option(fd[1], IPPROTO_UDP, UDP_CORK)); }
STATE(udp_error, "udp", "an error that was not fetched");
MAKE(udp_error) { fd[0] = must(socket(AF_INET, SOCK_DGRAM, 0)); struct sockaddr_in there = bound(fd[0]); close(fd[0]); fd[1] = must(socket(AF_INET, SOCK_DGRAM, 0)); must(connect(fd[1], (struct sockaddr *)&there, sizeof there)); must(send(fd[1], "x", 1, 0)); usleep(20000); }
OBSERVE(udp_error) { say_ready(fd[1]); }
STATE(udp_lite, "udp", "UDP-Lite");
MAKE(udp_lite) { fd[0] = must(socket(AF_INET, SOCK_DGRAM, 136)); bound(fd[0]); }
OBSERVE(udp_lite) { say_addresses(fd[0]); }

/* ------------------------------------------------------------------ Unix sockets */

static struct sockaddr_un path(const char *name) { struct sockaddr_un address = {.sun_family = AF_UNIX}; strcpy(address.sun_path, name); return address; }
struct unix_pair { int type; };
static void make_unix(const void *data)
{
	must(socketpair(AF_UNIX, ((const struct unix_pair *)data)->type, 0, fd));
	must(write(fd[0], "first", 5));
	must(write(fd[0], "second", 6));
}
static void look_unix(const void *data) { (void)data; say_ready(fd[0]); say_ready(fd[1]); say_peeked(fd[1]); int size = 0; ioctl(fd[1], FIONREAD, &size); say("%d", size); }
#define UNIX(name, which)                                                                          \
	static const struct unix_pair unix_##name = {which};                                       \
	ENTRY(name, "unix", "socketpair(" #which ") with data", make_unix, look_unix, &unix_##name)
UNIX(unix_stream, SOCK_STREAM);
UNIX(unix_datagram, SOCK_DGRAM);
UNIX(unix_packet, SOCK_SEQPACKET);
STATE(unix_half_closed, "unix", "shutdown(SHUT_WR) of one end");
MAKE(unix_half_closed) { must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd)); must(write(fd[0], "x", 1)); must(shutdown(fd[0], SHUT_WR)); }
OBSERVE(unix_half_closed) { say_ready(fd[0]); say_ready(fd[1]); say_peeked(fd[1]); }
STATE(unix_peer_gone, "unix", "the other end closed, with data");
MAKE(unix_peer_gone) { must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd)); must(write(fd[0], "x", 1)); close(fd[0]); }
OBSERVE(unix_peer_gone) { say_ready(fd[1]); say_peeked(fd[1]); }
STATE(unix_listening, "unix", "a listener at a path");
MAKE(unix_listening) { struct sockaddr_un address = path("listener"); fd[0] = must(socket(AF_UNIX, SOCK_STREAM, 0)); must(bind(fd[0], (struct sockaddr *)&address, sizeof address)); must(listen(fd[0], 3)); }
OBSERVE(unix_listening) { struct sockaddr_un address = path("listener"); say_addresses(fd[0]); int one = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0); say_call("connect", connect(one, (struct sockaddr *)&address, sizeof address)); close(accept(fd[0], NULL, NULL)); close(one); }
STATE(unix_waiting, "unix", "a connection that was not accepted yet");
MAKE(unix_waiting) { make_unix_listening(NULL); struct sockaddr_un address = path("listener"); fd[1] = must(socket(AF_UNIX, SOCK_STREAM, 0)); must(connect(fd[1], (struct sockaddr *)&address, sizeof address)); must(write(fd[1], "early", 5)); }
OBSERVE(unix_waiting) { say_ready(fd[0]); say_ready(fd[1]); }
STATE(unix_abstract, "unix", "a name without a path");
MAKE(unix_abstract) { struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "\0crab"}; fd[0] = must(socket(AF_UNIX, SOCK_DGRAM, 0)); must(bind(fd[0], (struct sockaddr *)&address, 7)); }
OBSERVE(unix_abstract) { say_addresses(fd[0]); }
STATE(unix_credentials, "unix", "SO_PEERCRED of a connection");
MAKE(unix_credentials) { make_unix_listening(NULL); struct sockaddr_un address = path("listener"); fd[1] = must(socket(AF_UNIX, SOCK_STREAM, 0)); must(connect(fd[1], (struct sockaddr *)&address, sizeof address)); fd[2] = must(accept(fd[0], NULL, NULL)); must(setresuid(1001, 1001, 0)); }
OBSERVE(unix_credentials) { for (int i = 1; i < 3; i++) { struct ucred who = {0}; socklen_t size = sizeof who; getsockopt(fd[i], SOL_SOCKET, SO_PEERCRED, &who, &size); say("%d %u %u ", who.pid == getpid(), who.uid, who.gid); } }
STATE(unix_pair_credentials, "unix", "SO_PEERCRED of a socketpair made by another process");
static void share_pair(void) { }
MAKE(unix_pair_credentials) { must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd)); child = start_child(share_pair); close(fd[0]); }
OBSERVE(unix_pair_credentials) { struct ucred who = {0}; socklen_t size = sizeof who; getsockopt(fd[1], SOL_SOCKET, SO_PEERCRED, &who, &size); say("%d %u %u", who.pid == getpid(), who.uid, who.gid); }
STATE(unix_descriptor, "unix", "a descriptor in flight");
static void send_one(int what)
{
	char byte = 'x', space[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec part = {&byte, 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(head), &what, sizeof what);
	must(sendmsg(fd[0], &message, 0));
}
static void say_received(int peek)
{
	char byte = 0, space[256] = {0};
	struct iovec part = {&byte, 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
	say_call("received", recvmsg(fd[1], &message, peek | MSG_DONTWAIT));
	for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
		say("type %d ", head->cmsg_type);
		if (head->cmsg_type == SCM_CREDENTIALS)
			say_bytes(CMSG_DATA(head) + 4, 8);
		if (head->cmsg_type == SCM_RIGHTS) {
			int got;
			memcpy(&got, CMSG_DATA(head), sizeof got);
			say_call("offset", lseek(got, 0, SEEK_CUR));
			close(got);
		}
	}
}
MAKE(unix_descriptor) { must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd)); put("file", "0123456789"); fd[2] = open("file", O_RDONLY); lseek(fd[2], 6, SEEK_SET); send_one(fd[2]); close(fd[2]); }
OBSERVE(unix_descriptor) { say_received(MSG_PEEK); }
STATE(unix_sender, "unix", "SO_PASSCRED with a message in flight");
MAKE(unix_sender) { int on = 1; must(socketpair(AF_UNIX, SOCK_DGRAM, 0, fd)); must(setsockopt(fd[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on)); must(write(fd[0], "x", 1)); }
OBSERVE(unix_sender) { say_received(MSG_PEEK); }
static void connect_by_name(const char *listener, const char *own, bool credentials)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	socklen_t size = offsetof(struct sockaddr_un, sun_path) + 8;
	int on = 1;
	memcpy(name.sun_path + 1, listener, 7);
	fd[0] = must(socket(AF_UNIX, SOCK_STREAM, 0));
	must(bind(fd[0], (void *)&name, size)), must(listen(fd[0], 1));
	fd[1] = must(socket(AF_UNIX, SOCK_STREAM, 0));
	if (credentials)
		must(setsockopt(fd[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on));
	if (own) {
		struct sockaddr_un mine = {.sun_family = AF_UNIX};
		memcpy(mine.sun_path + 1, own, strlen(own));
		must(bind(fd[1], (void *)&mine, offsetof(struct sockaddr_un, sun_path) + 1 + strlen(own)));
	}
	must(connect(fd[1], (void *)&name, size));
	fd[2] = must(accept(fd[0], NULL, NULL));
}
static void say_names(void)
{
	struct sockaddr_un name = {0};
	socklen_t size = sizeof name;
	say_call("own", getsockname(fd[1], (void *)&name, &size)), say_bytes(name.sun_path, size - 2);
	size = sizeof name;
	say_call("peer", getpeername(fd[2], (void *)&name, &size)), say_bytes(name.sun_path, size - 2);
}
STATE(unix_autobound, "unix", "SO_PASSCRED of a stream, which connect() then gives a name");
MAKE(unix_autobound) { connect_by_name("listen1", NULL, true); }
OBSERVE(unix_autobound) { say_names(); }
STATE(unix_named_client, "unix", "a stream that was bound to an abstract name and connected");
MAKE(unix_named_client) { connect_by_name("listen2", "client", false); }
OBSERVE(unix_named_client) { say_names(); }
static void connect_by_path(int type, const char *listener, const char *client)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX}, own = {.sun_family = AF_UNIX};
	strcpy(name.sun_path, listener), strcpy(own.sun_path, client);
	fd[0] = must(socket(AF_UNIX, type, 0)), fd[1] = must(socket(AF_UNIX, type, 0));
	must(bind(fd[0], (void *)&name, sizeof name)), must(listen(fd[0], 1));
	must(bind(fd[1], (void *)&own, sizeof own)), must(connect(fd[1], (void *)&name, sizeof name));
	fd[2] = must(accept(fd[0], NULL, NULL));
}
STATE(unix_path_client, "unix", "a stream that was bound to a path and connected");
MAKE(unix_path_client) { connect_by_path(SOCK_STREAM, "listens", "client"); }
OBSERVE(unix_path_client) { say_names(); }
STATE(unix_packet_client, "unix", "a SOCK_SEQPACKET socket that was bound to a path and connected");
MAKE(unix_packet_client) { connect_by_path(SOCK_SEQPACKET, "accepts", "packets"); }
OBSERVE(unix_packet_client) { say_names(); }
STATE(unix_client_file, "unix", "the file of a connected stream that was bound to it");
MAKE(unix_client_file) { connect_by_path(SOCK_STREAM, "listens2", "client2"); close(fd[0]); }
OBSERVE(unix_client_file) { struct stat status; say_call("client", lstat("client2", &status)), say_call("listener", lstat("listens2", &status)); }
STATE(unix_packet_names, "unix", "names that the kernel gave a pair of SOCK_SEQPACKET sockets");
MAKE(unix_packet_names)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	must(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fd + 1));
	must(bind(fd[1], (void *)&name, sizeof name.sun_family)), must(bind(fd[2], (void *)&name, sizeof name.sun_family));
}
OBSERVE(unix_packet_names) { say_names(); }
STATE(unix_time, "unix", "SO_TIMESTAMP of a datagram socket with a message in flight");
MAKE(unix_time) { int on = 1; must(socketpair(AF_UNIX, SOCK_DGRAM, 0, fd)); must(setsockopt(fd[1], SOL_SOCKET, SO_TIMESTAMP, &on, sizeof on)); must(write(fd[0], "x", 1)); }
OBSERVE(unix_time) { say_received(MSG_PEEK); }
STATE(unix_urgent, "unix", "urgent data of a stream");
MAKE(unix_urgent) { must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd)); must(send(fd[0], "ab", 2, 0)); must(send(fd[0], "!", 1, MSG_OOB)); }
OBSERVE(unix_urgent) { char byte = 0; say_call("urgent", recv(fd[1], &byte, 1, MSG_OOB | MSG_PEEK | MSG_DONTWAIT)); say("%d", byte); }
static void send_letters(void)
{
	for (int i = 0; i < 3; i++) {
		struct sockaddr_un name = {.sun_family = AF_UNIX};
		snprintf(name.sun_path, sizeof name.sun_path, "crab%d", i);
		fd[i] = must(socket(AF_UNIX, SOCK_DGRAM, 0));
		must(bind(fd[i], (void *)&name, sizeof name));
		name.sun_path[4] = '0';
		if (i)
			must(sendto(fd[i], "claw", 4, 0, (void *)&name, sizeof name));
	}
}
static void look_at_letter(void)
{
	struct sockaddr_un name = {0};
	socklen_t size = sizeof name;
	char text[8] = "";
	say_call("peek", recvfrom(fd[0], text, sizeof text, MSG_PEEK | MSG_DONTWAIT, (void *)&name, &size));
	say("%s from %s", text, name.sun_path);
}
STATE(unix_senders, "unix", "datagrams of two senders, with their names");
MAKE(unix_senders) { send_letters(); }
OBSERVE(unix_senders) { look_at_letter(); }
STATE(unix_sender_gone, "unix", "a datagram of a sender that has closed its socket since");
MAKE(unix_sender_gone) { send_letters(); close(fd[1]); }
OBSERVE(unix_sender_gone) { look_at_letter(); }
STATE(unix_connected_datagram, "unix", "datagram sockets at paths, connected one way");
MAKE(unix_connected_datagram)
{
	struct sockaddr_un address = path("receiver");
	fd[0] = must(socket(AF_UNIX, SOCK_DGRAM, 0));
	must(bind(fd[0], (struct sockaddr *)&address, sizeof address));
	fd[1] = must(socket(AF_UNIX, SOCK_DGRAM, 0));
	must(connect(fd[1], (struct sockaddr *)&address, sizeof address));
	must(send(fd[1], "letter", 6, 0));
}
OBSERVE(unix_connected_datagram) { say_addresses(fd[0]); say_addresses(fd[1]); say_peeked(fd[0]); }
STATE(unix_removed, "unix", "a listener whose path was removed");
MAKE(unix_removed) { make_unix_listening(NULL); must(unlink("listener")); }
OBSERVE(unix_removed) { say_addresses(fd[0]); say_call("path", access("listener", F_OK)); }

/* ------------------------------------------------------------------ others */

STATE(netlink_group, "netlink", "a bound socket with a group");
MAKE(netlink_group) { struct sockaddr_nl address = {.nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK}; fd[0] = must(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)); must(bind(fd[0], (struct sockaddr *)&address, sizeof address)); }
OBSERVE(netlink_group) { struct sockaddr_nl address = {0}; socklen_t size = sizeof address; getsockname(fd[0], (struct sockaddr *)&address, &size); say("%u %u", address.nl_pid, address.nl_groups); }
STATE(netlink_member, "netlink", "NETLINK_ADD_MEMBERSHIP");
MAKE(netlink_member) { int group = RTNLGRP_IPV4_IFADDR; fd[0] = must(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)); must(setsockopt(fd[0], SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &group, sizeof group)); }
OBSERVE(netlink_member) { unsigned groups[4] = {0}; socklen_t size = sizeof groups; getsockopt(fd[0], SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, groups, &size); say("%x", groups[0]); }
STATE(netlink_answer, "netlink", "an answer that was not read");
MAKE(netlink_answer)
{
	struct { struct nlmsghdr head; struct rtgenmsg message; } ask = {{sizeof ask, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, 1, 0}, {AF_UNSPEC}};
	fd[0] = must(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	must(send(fd[0], &ask, sizeof ask, 0));
}
OBSERVE(netlink_answer) { say_addresses(fd[0]); say_ready(fd[0]); }
STATE(raw_socket, "raw", "socket(SOCK_RAW, IPPROTO_ICMP)");
MAKE(raw_socket) { fd[0] = must(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP)); struct { uint32_t data; } filter = {1 << ICMP_ECHOREPLY}; must(setsockopt(fd[0], SOL_RAW, 1, &filter, sizeof filter)); }
OBSERVE(raw_socket) { say("%x ", option(fd[0], SOL_RAW, 1)); say_addresses(fd[0]); }
STATE(ping_socket, "raw", "socket(SOCK_DGRAM, IPPROTO_ICMP)");
MAKE(ping_socket) { fd[0] = must(socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP)); }
OBSERVE(ping_socket) { say_addresses(fd[0]); }
STATE(packet_socket, "raw", "socket(AF_PACKET)");
MAKE(packet_socket) { fd[0] = must(socket(AF_PACKET, SOCK_RAW, 0)); }
OBSERVE(packet_socket) { }
STATE(multipath_tcp, "tcp", "socket(IPPROTO_MPTCP)");
MAKE(multipath_tcp) { fd[0] = must(socket(AF_INET, SOCK_STREAM, 262)); bound(fd[0]); must(listen(fd[0], 1)); }
OBSERVE(multipath_tcp) { say_addresses(fd[0]); say("%d", option(fd[0], SOL_SOCKET, SO_PROTOCOL)); }
STATE(kernel_cipher, "raw", "socket(AF_ALG)");
MAKE(kernel_cipher) { fd[0] = must(socket(38, SOCK_SEQPACKET, 0)); }
OBSERVE(kernel_cipher) { }
STATE(machine_socket, "raw", "socket(AF_VSOCK)");
MAKE(machine_socket) { fd[0] = must(socket(40, SOCK_STREAM, 0)); }
OBSERVE(machine_socket) { }
