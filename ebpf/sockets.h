/* SPDX-License-Identifier: Apache-2.0 */
/* What a system call that ended did with sockets: who may be at the other end. Included by inspector.bpf.c. */
#ifndef PAGURUS_SOCKETS_H
#define PAGURUS_SOCKETS_H

/* A socket that has a name in the file tree. */
static __always_inline bool bound_to_name(struct task_struct *p, u32 fd)
{
	struct file *file = file_at(p, fd);
	struct unix_sock *sock;
	struct socket *socket;

	if (!file)
		return true; /* closed meanwhile: count it */
	if ((BPF_CORE_READ(file, f_inode, i_mode) & 0170000) != 0140000)
		return false;
	socket = BPF_CORE_READ(file, private_data);
	if (BPF_CORE_READ(socket, sk, __sk_common.skc_family) != AF_UNIX)
		return false;
	if (!bpf_core_type_exists(struct unix_sock))
		return true;
	sock = (void *)BPF_CORE_READ(socket, sk);
	return BPF_CORE_READ(sock, path.dentry) != NULL;
}

/* The socket of a descriptor, NULL when it is none (any more). */
static __always_inline struct sock *socket_at(struct task_struct *p, u32 fd)
{
	struct file *file = file_at(p, fd);
	struct socket *socket;

	if (!file || (BPF_CORE_READ(file, f_inode, i_mode) & 0170000) != 0140000)
		return NULL;
	socket = BPF_CORE_READ(file, private_data);
	return BPF_CORE_READ(socket, sk);
}

static __always_inline bool is_tcp(struct sock *sk)
{
	return BPF_CORE_READ(sk, __sk_common.skc_family) == AF_INET && BPF_CORE_READ(sk, sk_protocol) == IPPROTO_TCP;
}

static __always_inline bool by_younger(struct sandbox *s, struct tcp_port *port)
{
	struct birth *b = bpf_map_lookup_elem(&ports, port);

	return b && b->cgroup_id == s->cgroup_id && b->epoch == s->procs_epoch;
}

static __always_inline void listens(struct sandbox *s, struct task *t, struct sock *sk)
{
	struct tcp_port port = {};
	struct birth birth = { .cgroup_id = s->cgroup_id, .epoch = s->procs_epoch };

	if (!sk || t->apart || t->born != s->procs_epoch || !is_tcp(sk))
		return;
	if (BPF_CORE_READ_BITFIELD_PROBED(sk, __sk_common.skc_reuseport) ||
	    BPF_CORE_READ(sk, __sk_common.skc_bound_dev_if))
		return;
	port.space = (u64)BPF_CORE_READ(sk, __sk_common.skc_net.net);
	port.address = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	port.number = BPF_CORE_READ(sk, __sk_common.skc_num);
	bpf_map_update_elem(&ports, &port, &birth, BPF_ANY);
}

/*
 * Connected to a task that is younger than the mark. Nobody older can hold that listener as well: it would have run
 * to hand it on, or it was taken from it, which counts by itself.
 */
static __always_inline bool connected_to_younger(struct sandbox *s, struct sock *sk)
{
	struct tcp_port port = {};
	struct number number;
	struct pid *pid;
	u32 source;

	if (BPF_CORE_READ(sk, __sk_common.skc_family) == AF_UNIX) {
		pid = BPF_CORE_READ(sk, sk_peer_pid);
		if (!pid)
			return false;
		number = number_of(pid);
		return younger_than_mark(s, &number);
	}
	if (!is_tcp(sk))
		return false;
	source = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	port.space = (u64)BPF_CORE_READ(sk, __sk_common.skc_net.net);
	port.address = BPF_CORE_READ(sk, __sk_common.skc_daddr);
	port.number = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	if (by_younger(s, &port))
		return true;
	/* One that listens on every address, where the connection stays in the namespace. */
	if (port.address != source && (bpf_ntohl(port.address) >> 24) != 127)
		return false;
	port.address = 0;
	return by_younger(s, &port);
}

static __always_inline void call_sockets(struct sandbox *s, struct task *t, struct task_struct *p,
					 struct pt_regs *regs, u64 nr, u8 kind, long result)
{
	struct sock *sk = socket_at(p, ARG0);
	u16 family;

	switch (kind) {
	case K_LISTEN:
		count(procs_of(s)->listens);
		listens(s, t, sk);
		return;
	case K_BIND:
		if (bound_to_name(p, ARG0)) {
			created_by_birth(s, t);
			named(s);
			explain_file(nr, NULL, (void *)(ARG1 + 2));
		}
		return;
	case K_SENDTO:
		if (!ARG4) { /* connected: its connect counted, or it was inherited */
			struct file *file = file_at(p, ARG0);

			if (file)
				spoken(s, t, p, file);
			return;
		}
		break;
	}
	family = sk ? BPF_CORE_READ(sk, __sk_common.skc_family) : 0;
	if (family == AF_NETLINK)
		return;
	/* The other end of an agent's connection is not in a checkpoint that leaves the agent out. */
	if (t->apart & APART_AGENT && (family == AF_INET || family == AF_INET6))
		return;
	if (kind == K_CONNECT && sk && connected_to_younger(s, sk))
		return;
	count(procs_of(s)->channels);
}

#endif
