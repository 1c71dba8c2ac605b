/* SPDX-License-Identifier: Apache-2.0 */
/* Options of sockets, level by level: each is set on a fresh socket and asked for again. */
#include "states.h"

#include <arpa/inet.h>
#include <linux/errqueue.h>
#include <linux/filter.h>
#include <linux/in6.h>
#include <linux/net_tstamp.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>

/* Of kernels newer than the C library, or of headers that exclude others. */
#ifndef SO_PASSPIDFD
#define SO_PASSPIDFD 76
#endif
#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif
#ifndef SO_PREFER_BUSY_POLL
#define SO_PREFER_BUSY_POLL 69
#endif
#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72
#endif
#ifndef SO_TXREHASH
#define SO_TXREHASH 74
#endif
#ifndef SO_RCVMARK
#define SO_RCVMARK 75
#endif
#ifndef SO_RCVPRIORITY
#define SO_RCVPRIORITY 82
#endif
#ifndef SO_RESERVE_MEM
#define SO_RESERVE_MEM 73
#endif
#ifndef IP_RECVERR_RFC4884
#define IP_RECVERR_RFC4884 26
#endif
#ifndef IP_LOCAL_PORT_RANGE
#define IP_LOCAL_PORT_RANGE 51
#endif
#ifndef IPV6_MULTICAST_ALL
#define IPV6_MULTICAST_ALL 29
#endif
#ifndef IPV6_UNICAST_IF
#define IPV6_UNICAST_IF 76
#endif
#ifndef IPV6_RECVORIGDSTADDR
#define IPV6_RECVORIGDSTADDR 74
#endif
#ifndef IPV6_RECVFRAGSIZE
#define IPV6_RECVFRAGSIZE 77
#endif
#ifndef IPV6_FLOWINFO
#define IPV6_FLOWINFO 11
#endif
#ifndef IPV6_FLOWINFO_SEND
#define IPV6_FLOWINFO_SEND 33
#endif
#ifndef IPV6_AUTOFLOWLABEL
#define IPV6_AUTOFLOWLABEL 70
#endif
#ifndef IPV6_ADDR_PREFERENCES
#define IPV6_ADDR_PREFERENCES 72
#endif
#ifndef IPV6_MINHOPCOUNT
#define IPV6_MINHOPCOUNT 73
#endif
#ifndef IPV6_FREEBIND
#define IPV6_FREEBIND 78
#endif
#ifndef IPV6_TRANSPARENT
#define IPV6_TRANSPARENT 75
#endif
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif
#ifndef TCP_RTO_MIN_US
#define TCP_RTO_MIN_US 45
#endif
#ifndef TCP_DELACK_MAX_US
#define TCP_DELACK_MAX_US 46
#endif
#ifndef UDP_CORK
#define UDP_CORK 1
#endif
#ifndef UDP_ENCAP
#define UDP_ENCAP 100
#endif
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef UDP_NO_CHECK6_TX
#define UDP_NO_CHECK6_TX 101
#endif
#ifndef UDP_NO_CHECK6_RX
#define UDP_NO_CHECK6_RX 102
#endif
#ifndef SOL_UDP
#define SOL_UDP 17
#endif

enum kind { UDP, UDP6, UDP_LITE, TCP, TCP6, LISTENER, CONNECTED, STREAM, DATAGRAM, NETLINK, RAW };

static int loopback(int type)
{
	struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
	int one = must(socket(AF_INET, type, 0));

	must(bind(one, (struct sockaddr *)&address, sizeof address));
	return one;
}

static void open_socket(enum kind kind)
{
	struct sockaddr_in address;
	socklen_t size = sizeof address;

	switch (kind) {
	case UDP: fd[0] = must(socket(AF_INET, SOCK_DGRAM, 0)); break;
	case UDP6: fd[0] = must(socket(AF_INET6, SOCK_DGRAM, 0)); break;
	case UDP_LITE: fd[0] = must(socket(AF_INET, SOCK_DGRAM, IPPROTO_UDPLITE)); break;
	case TCP: fd[0] = must(socket(AF_INET, SOCK_STREAM, 0)); break;
	case TCP6: fd[0] = must(socket(AF_INET6, SOCK_STREAM, 0)); break;
	case LISTENER: fd[0] = loopback(SOCK_STREAM); must(listen(fd[0], 3)); break;
	case CONNECTED:
		fd[1] = loopback(SOCK_STREAM);
		must(listen(fd[1], 3));
		must(getsockname(fd[1], (struct sockaddr *)&address, &size));
		fd[0] = must(socket(AF_INET, SOCK_STREAM, 0));
		must(connect(fd[0], (struct sockaddr *)&address, size));
		fd[2] = must(accept(fd[1], NULL, NULL));
		break;
	case STREAM: must(socketpair(AF_UNIX, SOCK_STREAM, 0, fd)); break;
	case DATAGRAM: must(socketpair(AF_UNIX, SOCK_DGRAM, 0, fd)); break;
	case NETLINK: fd[0] = must(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)); break;
	case RAW: fd[0] = must(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP)); break;
	}
}

void make_option(const void *data)
{
	const struct option *o = data;

	open_socket(o->kind);
	must(setsockopt(fd[0], o->level, o->number, o->value, o->size));
}

static void look_option(const void *data)
{
	const struct option *o = data;
	char value[64] = {0};
	socklen_t size = sizeof value;

	say_call("get", getsockopt(fd[0], o->level, o->number, value, &size));
	say_bytes(value, size > sizeof value ? sizeof value : size);
}

#define ROW(name, group, how, level, kind, number, type, ...)                                      \
	static const __typeof__(type) value_##name = __VA_ARGS__;                                  \
	static const struct option option_##name = {kind, level, number, &value_##name, sizeof(type)}; \
	ENTRY(name, group, how, make_option, look_option, &option_##name)
#define SET(name, level, kind, number, type, ...) ROW(name, #level, #number, level, kind, number, type, __VA_ARGS__)
#define NUMBER(name, level, kind, number, value) ROW(name, #level, #number, level, kind, number, int, value)
#define ON(name, level, kind, number) ROW(name, #level, #number, level, kind, number, int, 1)

/* ------------------------------------------------------------------ SOL_SOCKET */

static struct sock_filter take_all[] = {BPF_STMT(BPF_RET | BPF_K, 0xffff)};
ON(so_broadcast, SOL_SOCKET, UDP, SO_BROADCAST);
ON(so_keepalive, SOL_SOCKET, TCP, SO_KEEPALIVE);
SET(so_linger, SOL_SOCKET, TCP, SO_LINGER, struct linger, {1, 7});
ON(so_oobinline, SOL_SOCKET, TCP, SO_OOBINLINE);
ON(so_passcred, SOL_SOCKET, STREAM, SO_PASSCRED);
ON(so_passsec, SOL_SOCKET, STREAM, SO_PASSSEC);
ON(so_passpidfd, SOL_SOCKET, STREAM, SO_PASSPIDFD);
NUMBER(so_passrights, SOL_SOCKET, STREAM, SO_PASSRIGHTS, 0);
NUMBER(so_peek_off, SOL_SOCKET, STREAM, SO_PEEK_OFF, 3);
NUMBER(so_priority, SOL_SOCKET, UDP, SO_PRIORITY, 4);
NUMBER(so_rcvbuf, SOL_SOCKET, UDP, SO_RCVBUF, 30000);
NUMBER(so_sndbuf, SOL_SOCKET, UDP, SO_SNDBUF, 30000);
NUMBER(so_rcvbuf_tcp, SOL_SOCKET, LISTENER, SO_RCVBUF, 50000);
NUMBER(so_sndbuf_unix, SOL_SOCKET, STREAM, SO_SNDBUF, 50000);
NUMBER(so_rcvlowat, SOL_SOCKET, TCP, SO_RCVLOWAT, 9);
SET(so_rcvtimeo, SOL_SOCKET, UDP, SO_RCVTIMEO, struct timeval, {3, 500000});
SET(so_sndtimeo, SOL_SOCKET, UDP, SO_SNDTIMEO, struct timeval, {4, 0});
ON(so_reuseaddr, SOL_SOCKET, TCP, SO_REUSEADDR);
ON(so_reuseport, SOL_SOCKET, UDP, SO_REUSEPORT);
ON(so_timestamp, SOL_SOCKET, UDP, SO_TIMESTAMP);
ON(so_timestampns, SOL_SOCKET, UDP, SO_TIMESTAMPNS);
NUMBER(so_timestamping, SOL_SOCKET, UDP, SO_TIMESTAMPING, SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE);
ON(so_rxq_ovfl, SOL_SOCKET, UDP, SO_RXQ_OVFL);
NUMBER(so_mark, SOL_SOCKET, UDP, SO_MARK, 6);
SET(so_bindtodevice, SOL_SOCKET, UDP, SO_BINDTODEVICE, char[3], "lo");
NUMBER(so_busy_poll, SOL_SOCKET, UDP, SO_BUSY_POLL, 50);
ON(so_prefer_busy_poll, SOL_SOCKET, UDP, SO_PREFER_BUSY_POLL);
NUMBER(so_max_pacing_rate, SOL_SOCKET, UDP, SO_MAX_PACING_RATE, 100000);
ON(so_dontroute, SOL_SOCKET, UDP, SO_DONTROUTE);
ON(so_no_check, SOL_SOCKET, UDP, SO_NO_CHECK);
NUMBER(so_incoming_cpu, SOL_SOCKET, UDP, SO_INCOMING_CPU, 1);
ON(so_zerocopy, SOL_SOCKET, TCP, SO_ZEROCOPY);
SET(so_txtime, SOL_SOCKET, UDP, SO_TXTIME, struct sock_txtime, {1, 2});
NUMBER(so_buf_lock, SOL_SOCKET, UDP, SO_BUF_LOCK, 3);
NUMBER(so_txrehash, SOL_SOCKET, TCP, SO_TXREHASH, 0);
ON(so_rcvmark, SOL_SOCKET, UDP, SO_RCVMARK);
ON(so_rcvpriority, SOL_SOCKET, UDP, SO_RCVPRIORITY);
ON(so_select_err_queue, SOL_SOCKET, UDP, SO_SELECT_ERR_QUEUE);
ON(so_wifi_status, SOL_SOCKET, UDP, SO_WIFI_STATUS);
ON(so_debug, SOL_SOCKET, UDP, SO_DEBUG);
NUMBER(so_reserve_mem, SOL_SOCKET, TCP, SO_RESERVE_MEM, 65536);
SET(so_attach_filter, SOL_SOCKET, UDP, SO_ATTACH_FILTER, struct sock_fprog, {1, take_all});
ON(so_lock_filter, SOL_SOCKET, UDP, SO_LOCK_FILTER);

/* ------------------------------------------------------------------ IPPROTO_IP */

NUMBER(ip_tos, IPPROTO_IP, UDP, IP_TOS, 0x10);
NUMBER(ip_ttl, IPPROTO_IP, UDP, IP_TTL, 33);
ON(ip_pktinfo, IPPROTO_IP, UDP, IP_PKTINFO);
ON(ip_recvtos, IPPROTO_IP, UDP, IP_RECVTOS);
ON(ip_recvttl, IPPROTO_IP, UDP, IP_RECVTTL);
ON(ip_recvopts, IPPROTO_IP, UDP, IP_RECVOPTS);
ON(ip_retopts, IPPROTO_IP, UDP, IP_RETOPTS);
ON(ip_recverr, IPPROTO_IP, UDP, IP_RECVERR);
ON(ip_recverr_rfc4884, IPPROTO_IP, UDP, IP_RECVERR_RFC4884);
NUMBER(ip_mtu_discover, IPPROTO_IP, UDP, IP_MTU_DISCOVER, IP_PMTUDISC_DO);
NUMBER(ip_mtu_discover_tcp, IPPROTO_IP, CONNECTED, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE);
NUMBER(ip_tos_tcp, IPPROTO_IP, CONNECTED, IP_TOS, 0x08);
ON(ip_freebind, IPPROTO_IP, UDP, IP_FREEBIND);
ON(ip_transparent, IPPROTO_IP, UDP, IP_TRANSPARENT);
SET(ip_options, IPPROTO_IP, UDP, IP_OPTIONS, char[4], {1, 1, 1, 0});
NUMBER(ip_multicast_ttl, IPPROTO_IP, UDP, IP_MULTICAST_TTL, 9);
NUMBER(ip_multicast_loop, IPPROTO_IP, UDP, IP_MULTICAST_LOOP, 0);
NUMBER(ip_multicast_all, IPPROTO_IP, UDP, IP_MULTICAST_ALL, 0);
SET(ip_multicast_if, IPPROTO_IP, UDP, IP_MULTICAST_IF, struct in_addr, {0x0100007f});
NUMBER(ip_unicast_if, IPPROTO_IP, UDP, IP_UNICAST_IF, 0x01000000);
NUMBER(ip_minttl, IPPROTO_IP, TCP, IP_MINTTL, 5);
ON(ip_recvorigdstaddr, IPPROTO_IP, UDP, IP_RECVORIGDSTADDR);
ON(ip_checksum, IPPROTO_IP, UDP, IP_CHECKSUM);
ON(ip_bind_address_no_port, IPPROTO_IP, TCP, IP_BIND_ADDRESS_NO_PORT);
ON(ip_recvfragsize, IPPROTO_IP, UDP, IP_RECVFRAGSIZE);
NUMBER(ip_local_port_range, IPPROTO_IP, UDP, IP_LOCAL_PORT_RANGE, 50000 | 60000 << 16);
ON(ip_hdrincl, IPPROTO_IP, RAW, IP_HDRINCL);
ON(ip_nodefrag, IPPROTO_IP, RAW, IP_NODEFRAG);
ON(ip_router_alert, IPPROTO_IP, RAW, IP_ROUTER_ALERT);
ON(ip_passsec, IPPROTO_IP, UDP, IP_PASSSEC);

/* ------------------------------------------------------------------ IPPROTO_IPV6 */

ON(ipv6_v6only, IPPROTO_IPV6, TCP6, IPV6_V6ONLY);
NUMBER(ipv6_unicast_hops, IPPROTO_IPV6, UDP6, IPV6_UNICAST_HOPS, 44);
NUMBER(ipv6_multicast_hops, IPPROTO_IPV6, UDP6, IPV6_MULTICAST_HOPS, 5);
NUMBER(ipv6_multicast_loop, IPPROTO_IPV6, UDP6, IPV6_MULTICAST_LOOP, 0);
NUMBER(ipv6_multicast_if, IPPROTO_IPV6, UDP6, IPV6_MULTICAST_IF, 1);
NUMBER(ipv6_multicast_all, IPPROTO_IPV6, UDP6, IPV6_MULTICAST_ALL, 0);
NUMBER(ipv6_unicast_if, IPPROTO_IPV6, UDP6, IPV6_UNICAST_IF, 0x01000000);
NUMBER(ipv6_tclass, IPPROTO_IPV6, UDP6, IPV6_TCLASS, 0x20);
ON(ipv6_recvpktinfo, IPPROTO_IPV6, UDP6, IPV6_RECVPKTINFO);
ON(ipv6_recvhoplimit, IPPROTO_IPV6, UDP6, IPV6_RECVHOPLIMIT);
ON(ipv6_recvtclass, IPPROTO_IPV6, UDP6, IPV6_RECVTCLASS);
ON(ipv6_recvrthdr, IPPROTO_IPV6, UDP6, IPV6_RECVRTHDR);
ON(ipv6_recvhopopts, IPPROTO_IPV6, UDP6, IPV6_RECVHOPOPTS);
ON(ipv6_recvdstopts, IPPROTO_IPV6, UDP6, IPV6_RECVDSTOPTS);
ON(ipv6_recvpathmtu, IPPROTO_IPV6, UDP6, IPV6_RECVPATHMTU);
ON(ipv6_recvorigdstaddr, IPPROTO_IPV6, UDP6, IPV6_RECVORIGDSTADDR);
ON(ipv6_recvfragsize, IPPROTO_IPV6, UDP6, IPV6_RECVFRAGSIZE);
ON(ipv6_recverr, IPPROTO_IPV6, UDP6, IPV6_RECVERR);
NUMBER(ipv6_mtu_discover, IPPROTO_IPV6, UDP6, IPV6_MTU_DISCOVER, 2);
ON(ipv6_dontfrag, IPPROTO_IPV6, UDP6, IPV6_DONTFRAG);
ON(ipv6_flowinfo, IPPROTO_IPV6, UDP6, IPV6_FLOWINFO);
ON(ipv6_flowinfo_send, IPPROTO_IPV6, UDP6, IPV6_FLOWINFO_SEND);
NUMBER(ipv6_autoflowlabel, IPPROTO_IPV6, UDP6, IPV6_AUTOFLOWLABEL, 0);
NUMBER(ipv6_addr_preferences, IPPROTO_IPV6, UDP6, IPV6_ADDR_PREFERENCES, 4);
NUMBER(ipv6_minhopcount, IPPROTO_IPV6, TCP6, IPV6_MINHOPCOUNT, 3);
ON(ipv6_freebind, IPPROTO_IPV6, UDP6, IPV6_FREEBIND);
ON(ipv6_transparent, IPPROTO_IPV6, UDP6, IPV6_TRANSPARENT);
SET(ipv6_tcp_hops, IPPROTO_IPV6, TCP6, IPV6_UNICAST_HOPS, int, 41);

/* ------------------------------------------------------------------ IPPROTO_TCP */

ON(tcp_nodelay, IPPROTO_TCP, CONNECTED, TCP_NODELAY);
ON(tcp_cork, IPPROTO_TCP, CONNECTED, TCP_CORK);
NUMBER(tcp_maxseg, IPPROTO_TCP, LISTENER, TCP_MAXSEG, 1200);
NUMBER(tcp_maxseg_new, IPPROTO_TCP, TCP, TCP_MAXSEG, 1200);
NUMBER(tcp_keepidle, IPPROTO_TCP, CONNECTED, TCP_KEEPIDLE, 111);
NUMBER(tcp_keepintvl, IPPROTO_TCP, CONNECTED, TCP_KEEPINTVL, 22);
NUMBER(tcp_keepcnt, IPPROTO_TCP, CONNECTED, TCP_KEEPCNT, 4);
NUMBER(tcp_syncnt, IPPROTO_TCP, TCP, TCP_SYNCNT, 3);
NUMBER(tcp_linger2, IPPROTO_TCP, CONNECTED, TCP_LINGER2, 17);
NUMBER(tcp_defer_accept, IPPROTO_TCP, LISTENER, TCP_DEFER_ACCEPT, 9);
NUMBER(tcp_window_clamp, IPPROTO_TCP, CONNECTED, TCP_WINDOW_CLAMP, 40000);
NUMBER(tcp_quickack, IPPROTO_TCP, CONNECTED, TCP_QUICKACK, 0);
SET(tcp_congestion, IPPROTO_TCP, CONNECTED, TCP_CONGESTION, char[5], "reno");
SET(tcp_congestion_listener, IPPROTO_TCP, LISTENER, TCP_CONGESTION, char[5], "reno");
ON(tcp_thin, IPPROTO_TCP, CONNECTED, TCP_THIN_LINEAR_TIMEOUTS);
NUMBER(tcp_user_timeout, IPPROTO_TCP, CONNECTED, TCP_USER_TIMEOUT, 54321);
NUMBER(tcp_user_timeout_listener, IPPROTO_TCP, LISTENER, TCP_USER_TIMEOUT, 54321);
NUMBER(tcp_fastopen, IPPROTO_TCP, LISTENER, TCP_FASTOPEN, 5);
ON(tcp_fastopen_connect, IPPROTO_TCP, TCP, TCP_FASTOPEN_CONNECT);
ON(tcp_fastopen_no_cookie, IPPROTO_TCP, LISTENER, TCP_FASTOPEN_NO_COOKIE);
NUMBER(tcp_notsent_lowat, IPPROTO_TCP, CONNECTED, TCP_NOTSENT_LOWAT, 16384);
ON(tcp_save_syn, IPPROTO_TCP, LISTENER, TCP_SAVE_SYN);
ON(tcp_inq, IPPROTO_TCP, CONNECTED, TCP_INQ);
NUMBER(tcp_tx_delay, IPPROTO_TCP, CONNECTED, TCP_TX_DELAY, 1000);
NUMBER(tcp_rto_max, IPPROTO_TCP, CONNECTED, TCP_RTO_MAX_MS, 5000);
NUMBER(tcp_rto_min, IPPROTO_TCP, CONNECTED, TCP_RTO_MIN_US, 50000);
NUMBER(tcp_delack_max, IPPROTO_TCP, CONNECTED, TCP_DELACK_MAX_US, 30000);
SET(tcp_ulp, IPPROTO_TCP, CONNECTED, TCP_ULP, char[4], "tls");

/* ------------------------------------------------------------------ UDP, netlink */

ON(udp_cork_option, SOL_UDP, UDP, UDP_CORK);
NUMBER(udp_encap, SOL_UDP, UDP, UDP_ENCAP, 2);
NUMBER(udp_segment, SOL_UDP, UDP, UDP_SEGMENT, 500);
ON(udp_gro, SOL_UDP, UDP, UDP_GRO);
ON(udp_no_check6_tx, SOL_UDP, UDP6, UDP_NO_CHECK6_TX);
ON(udp_no_check6_rx, SOL_UDP, UDP6, UDP_NO_CHECK6_RX);
NUMBER(udp_lite_sent, IPPROTO_UDPLITE, UDP_LITE, 10 /* UDPLITE_SEND_CSCOV */, 20);
NUMBER(udp_lite_received, IPPROTO_UDPLITE, UDP_LITE, 11 /* UDPLITE_RECV_CSCOV */, 20);
ON(netlink_pktinfo, SOL_NETLINK, NETLINK, NETLINK_PKTINFO);
ON(netlink_broadcast_error, SOL_NETLINK, NETLINK, NETLINK_BROADCAST_ERROR);
ON(netlink_no_enobufs, SOL_NETLINK, NETLINK, NETLINK_NO_ENOBUFS);
ON(netlink_cap_ack, SOL_NETLINK, NETLINK, NETLINK_CAP_ACK);
ON(netlink_ext_ack, SOL_NETLINK, NETLINK, NETLINK_EXT_ACK);
ON(netlink_strict, SOL_NETLINK, NETLINK, NETLINK_GET_STRICT_CHK);

/* ------------------------------------------------------------------ groups that a socket joined */

STATE(ip_membership, "IPPROTO_IP", "IP_ADD_MEMBERSHIP");
MAKE(ip_membership) { struct ip_mreqn group = {{inet_addr("239.1.2.3")}, {htonl(INADDR_LOOPBACK)}, 1}; open_socket(UDP); must(setsockopt(fd[0], IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof group)); }
OBSERVE(ip_membership) { struct ip_mreqn group = {{inet_addr("239.1.2.3")}, {htonl(INADDR_LOOPBACK)}, 1}; int again = setsockopt(fd[0], IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof group); say_result("again", again); if (!again) setsockopt(fd[0], IPPROTO_IP, IP_DROP_MEMBERSHIP, &group, sizeof group); }
STATE(ipv6_membership, "IPPROTO_IPV6", "IPV6_ADD_MEMBERSHIP");
static const struct ipv6_mreq group_6 = {{{{0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 9}}}, 1};
MAKE(ipv6_membership) { open_socket(UDP6); must(setsockopt(fd[0], IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, &group_6, sizeof group_6)); }
OBSERVE(ipv6_membership) { int again = setsockopt(fd[0], IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, &group_6, sizeof group_6); say_result("again", again); if (!again) setsockopt(fd[0], IPPROTO_IPV6, IPV6_DROP_MEMBERSHIP, &group_6, sizeof group_6); }

/* ------------------------------------------------------------------ options that nobody can ask for */

STATE(ipv6_mtu, "IPPROTO_IPV6", "IPV6_MTU");
MAKE(ipv6_mtu)
{
	int size = 1400, on = 1;
	struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT, .sin6_port = htons(9)};
	open_socket(UDP6);
	must(setsockopt(fd[0], IPPROTO_IPV6, IPV6_MTU, &size, sizeof size));
	must(setsockopt(fd[0], IPPROTO_IPV6, IPV6_DONTFRAG, &on, sizeof on));
	must(connect(fd[0], (struct sockaddr *)&address, sizeof address));
}
OBSERVE(ipv6_mtu) { static char block[2000]; send(fd[0], block, 1, 0); send(fd[0], block, 1, 0); say_call("send", send(fd[0], block, sizeof block, 0)); }
STATE(so_attach_reuseport, "SOL_SOCKET", "SO_ATTACH_REUSEPORT_CBPF: the second socket of a group gets all");
MAKE(so_attach_reuseport)
{
	static struct sock_filter second[] = {BPF_STMT(BPF_RET | BPF_K, 1)};
	struct sock_fprog chooser = {1, second};
	struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
	socklen_t size = sizeof address;
	int on = 1;
	for (int i = 0; i < 2; i++) {
		fd[i] = must(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0));
		must(setsockopt(fd[i], SOL_SOCKET, SO_REUSEPORT, &on, sizeof on));
		must(bind(fd[i], (struct sockaddr *)&address, size));
		must(getsockname(fd[i], (struct sockaddr *)&address, &size));
	}
	must(setsockopt(fd[0], SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &chooser, sizeof chooser));
}
OBSERVE(so_attach_reuseport)
{
	struct sockaddr_in address;
	socklen_t size = sizeof address;
	int got[2] = {0, 0};
	char byte;
	getsockname(fd[0], (struct sockaddr *)&address, &size);
	for (int i = 0; i < 16; i++) {
		int one = socket(AF_INET, SOCK_DGRAM, 0);
		sendto(one, "x", 1, 0, (struct sockaddr *)&address, size);
		close(one);
	}
	for (int i = 0; i < 2; i++)
		while (recv(fd[i], &byte, 1, 0) == 1)
			got[i]++;
	say("%d", got[1] == 16 && !got[0]);
}
