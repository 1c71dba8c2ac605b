/* SPDX-License-Identifier: Apache-2.0 */
/* Each option of options.c on each kind of socket, in each state of it: a row is a family, a type and a state, in which
 * a process has one socket for every option that such a socket takes. */
#include "states.h"

#include <arpa/inet.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <sys/socket.h>
#include <sys/un.h>

#ifndef SO_PASSPIDFD
#define SO_PASSPIDFD 76
#endif
#define MAX_OPTIONS 400

extern const struct state *const __start_states[], *const __stop_states[];

enum stage { NEW, BOUND, LISTENING, CLIENT, SERVER, INHERITED, PAIR, UNREAD, SHUT, PEER_SHUT, PEER_CLOSED, BOTH_SHUT };

struct place {
	int family, type, protocol;
	enum stage stage;
};

static struct {
	const char *name;
	const struct option *option;
	int fd;
} held[MAX_OPTIONS];
static int count, paths;
static int opened[4], opened_count; /* for one option */

/* Rows of their own say what becomes of these, and why. */
static const struct { int level, number; } left_out[] = {
	{SOL_SOCKET, SO_INCOMING_CPU}, {SOL_SOCKET, 73 /* SO_RESERVE_MEM */}, {IPPROTO_TCP, TCP_QUICKACK},
	{IPPROTO_TCP, TCP_WINDOW_CLAMP}, {IPPROTO_TCP, TCP_ULP}, {IPPROTO_UDP, UDP_CORK},
};

static bool crossed(const struct option *o, const struct place *place)
{
	for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++)
		if (o->level == left_out[i].level && o->number == left_out[i].number)
			return false;
	if (o->level == IPPROTO_TCP && o->number == TCP_MAXSEG) /* tcp_maxseg_new */
		return place->stage == LISTENING;
	/* tcp_fastopen_inherited */
	if (o->level == IPPROTO_TCP && (o->number == TCP_FASTOPEN_CONNECT || o->number == TCP_FASTOPEN_NO_COOKIE))
		return place->stage != INHERITED;
	/* unix_sender, unix_time: with these, a message that waits holds who sent it, or when */
	bool unread = place->stage == UNREAD || place->stage == PEER_CLOSED;
	bool in_message = o->number == SO_PASSCRED || o->number == SO_PASSSEC || o->number == SO_PASSPIDFD ||
			  o->number == SO_TIMESTAMP || o->number == SO_TIMESTAMPNS || o->number == SO_TIMESTAMPING;
	if (place->family == AF_UNIX && o->level == SOL_SOCKET && in_message)
		return !unread;
	if (place->type == SOCK_STREAM && place->family != AF_UNIX && o->number == SO_PEEK_OFF) /* tcp_peek_offset */
		return !unread || o->level != SOL_SOCKET;
	return true;
}

static socklen_t address_of(const struct place *place, struct sockaddr_storage *address)
{
	memset(address, 0, sizeof *address);
	address->ss_family = place->family;
	if (place->family == AF_INET)
		((struct sockaddr_in *)address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	else if (place->family == AF_INET6)
		((struct sockaddr_in6 *)address)->sin6_addr = in6addr_loopback;
	else if (place->family == AF_UNIX)
		sprintf(((struct sockaddr_un *)address)->sun_path, "socket%d", paths++);
	return place->family == AF_INET    ? sizeof(struct sockaddr_in)
	       : place->family == AF_INET6 ? sizeof(struct sockaddr_in6)
	       : place->family == AF_UNIX  ? sizeof(struct sockaddr_un)
					   : sizeof(struct sockaddr_nl);
}

static int note(int one) { return opened[opened_count++] = one; }

static int open_one(const struct place *place)
{
	return note(must(socket(place->family, place->type, place->protocol)));
}

static int bound_one(const struct place *place)
{
	struct sockaddr_storage address;
	socklen_t size = address_of(place, &address);
	int one = open_one(place);

	must(bind(one, (struct sockaddr *)&address, size));
	return one;
}

static int connected_to(const struct place *place, int other)
{
	struct sockaddr_storage address;
	socklen_t size = sizeof address;
	int one = open_one(place);

	must(getsockname(other, (struct sockaddr *)&address, &size));
	must(connect(one, (struct sockaddr *)&address, size));
	return one;
}

static bool set(int one, const struct option *o)
{
	return !setsockopt(one, o->level, o->number, o->value, o->size);
}

/* A socket in the state of this row with this option; -1 where it does not take it. What else is needed stays open. */
static int with_option(const struct place *place, const struct option *o)
{
	int ends[2], one, other;

	switch (place->stage) {
	case NEW: one = open_one(place); return set(one, o) ? one : -1;
	case BOUND: one = bound_one(place); return set(one, o) ? one : -1;
	case LISTENING: one = bound_one(place); must(listen(one, 3)); return set(one, o) ? one : -1;
	case PAIR:
		must(socketpair(place->family, place->type, 0, ends));
		note(ends[1]);
		return set(note(ends[0]), o) ? ends[0] : -1;
	default: break;
	}
	other = bound_one(place);
	if (place->type == SOCK_DGRAM) {
		one = connected_to(place, other);
		if (place->stage == CLIENT)
			return set(one, o) ? one : -1;
		must(send(one, "data", 4, 0));
		return set(other, o) ? other : -1;
	}
	if (place->stage == INHERITED && !set(other, o))
		return -1;
	must(listen(other, 3));
	ends[0] = connected_to(place, other);
	ends[1] = note(must(accept(other, NULL, NULL)));
	close(other);
	if (place->stage == SERVER || place->stage == INHERITED)
		return place->stage == INHERITED || set(ends[1], o) ? ends[1] : -1;
	if (place->stage == UNREAD || place->stage == PEER_CLOSED)
		must(send(ends[1], "data", 4, 0));
	if (!set(ends[0], o))
		return -1;
	if (place->stage == SHUT || place->stage == BOTH_SHUT)
		must(shutdown(ends[0], SHUT_WR));
	if (place->stage == PEER_SHUT || place->stage == BOTH_SHUT)
		must(shutdown(ends[1], SHUT_WR));
	if (place->stage == PEER_CLOSED)
		close(ends[1]);
	return ends[0];
}

static void make_every(const void *data)
{
	const struct place *place = data;

	for (const struct state *const *entry = __start_states; entry < __stop_states; entry++) {
		const struct option *o = (*entry)->data;
		int taken = -1;

		opened_count = 0;
		if ((*entry)->make == make_option && crossed(o, place))
			taken = with_option(place, o);
		if (taken >= 0)
			held[count].name = (*entry)->name, held[count].option = o, held[count++].fd = taken;
		else
			while (opened_count) /* a descriptor that is closed already is nobody else's yet */
				close(opened[--opened_count]);
	}
}

static void look_every(const void *data)
{
	(void)data;
	for (int i = 0; i < count; i++) {
		char value[64] = {0};
		socklen_t size = sizeof value;

		say("%s ", held[i].name);
		say_call("get", getsockopt(held[i].fd, held[i].option->level, held[i].option->number, value, &size));
		say_bytes(value, size > sizeof value ? sizeof value : size);
	}
}

#define EVERY(name, family, type, protocol, stage)                                                          \
	static const struct place place_##name = {family, type, protocol, stage};                           \
	ENTRY(options_##name, "every option", #family ", " #type ", " #stage, make_every, look_every, &place_##name)
#define TCP_STATES(name, family)                                                                            \
	EVERY(name##_new, family, SOCK_STREAM, 0, NEW);                                                     \
	EVERY(name##_bound, family, SOCK_STREAM, 0, BOUND);                                                 \
	EVERY(name##_both_shut, family, SOCK_STREAM, 0, BOTH_SHUT);                                         \
	STREAM_STATES(name, family, SOCK_STREAM)
#define STREAM_STATES(name, family, type)                                                                   \
	EVERY(name##_listening, family, type, 0, LISTENING);                                                \
	EVERY(name##_client, family, type, 0, CLIENT);                                                      \
	EVERY(name##_server, family, type, 0, SERVER);                                                      \
	EVERY(name##_inherited, family, type, 0, INHERITED);                                                \
	EVERY(name##_unread, family, type, 0, UNREAD);                                                      \
	EVERY(name##_shut, family, type, 0, SHUT);                                                          \
	EVERY(name##_peer_shut, family, type, 0, PEER_SHUT);                                                \
	EVERY(name##_peer_closed, family, type, 0, PEER_CLOSED)
#define DATAGRAM_STATES(name, family, protocol)                                                             \
	EVERY(name##_new, family, SOCK_DGRAM, protocol, NEW);                                               \
	EVERY(name##_bound, family, SOCK_DGRAM, protocol, BOUND);                                           \
	EVERY(name##_client, family, SOCK_DGRAM, protocol, CLIENT);                                         \
	EVERY(name##_unread, family, SOCK_DGRAM, protocol, UNREAD)

TCP_STATES(tcp, AF_INET);
TCP_STATES(tcp6, AF_INET6);
TCP_STATES(unix_stream, AF_UNIX);
STREAM_STATES(packet, AF_UNIX, SOCK_SEQPACKET);
DATAGRAM_STATES(udp, AF_INET, 0);
DATAGRAM_STATES(udp6, AF_INET6, 0);
DATAGRAM_STATES(udp_lite, AF_INET, IPPROTO_UDPLITE);
DATAGRAM_STATES(udp_lite6, AF_INET6, IPPROTO_UDPLITE);
DATAGRAM_STATES(unix_datagram, AF_UNIX, 0);
EVERY(unix_stream_pair, AF_UNIX, SOCK_STREAM, 0, PAIR);
EVERY(unix_datagram_pair, AF_UNIX, SOCK_DGRAM, 0, PAIR);
EVERY(packet_new, AF_UNIX, SOCK_SEQPACKET, 0, NEW);
EVERY(packet_bound, AF_UNIX, SOCK_SEQPACKET, 0, BOUND);
EVERY(packet_pair, AF_UNIX, SOCK_SEQPACKET, 0, PAIR);
EVERY(ping_new, AF_INET, SOCK_DGRAM, IPPROTO_ICMP, NEW);
EVERY(ping6_new, AF_INET6, SOCK_DGRAM, IPPROTO_ICMPV6, NEW);
EVERY(netlink_new, AF_NETLINK, SOCK_RAW, NETLINK_ROUTE, NEW);
EVERY(netlink_bound, AF_NETLINK, SOCK_RAW, NETLINK_ROUTE, BOUND);
