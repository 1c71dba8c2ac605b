// SPDX-License-Identifier: Apache-2.0
/*
 * Addresses of the services of a composition, which share one network namespace.
 *
 * A service binds to its own address of 127.1.0.0/16 wherever it names all addresses or the loopback one, so that two
 * may listen on the same port; what it asks for at the loopback address is its own; it is connected from its own
 * address, so that others see who asks; and it reaches the services with which it shares a network, and no other.
 *
 * A task belongs to the service in whose root it is. That root is a mount of its own, whose number the daemon writes into
 * the map: a restore brings it back, a program that changes its root within keeps it. The daemon removes the number
 * before a restore begins: CRIU, in the same control group, may have it in a mount of its own.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addresses.h"

char LICENSE[] SEC("license") = "GPL";

#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define IPPROTO_TCP 6
#define ALLOW 1
#define REFUSE 0

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, ADDRESSES_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u64); /* number of a mount */
    __type(value, struct service_address);
} services SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, ADDRESSES_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct published_port);
    __type(value, struct published_place);
} published SEC(".maps");

/* The verifier takes fields of the context by their offset alone; the compiler would keep pointers to them. */
#define FIELD(field) (*({ asm volatile("" : "+r"(ctx)); (volatile typeof(ctx->field) *)&ctx->field; }))

/* On a host with v2 alone a program may be in a group below its sandbox's. */
static __always_inline __u64 group_above(struct task_struct *task)
{
    int level = BPF_CORE_READ(task, cgroups, dfl_cgrp, level);
    return bpf_get_current_ancestor_cgroup_id(level - 1);
}

static __always_inline struct service_address *caller(void)
{
    struct task_struct *task = (void *)bpf_get_current_task();
    struct vfsmount *root = BPF_CORE_READ(task, fs, root.mnt);
    struct mount *mount = (void *)root - bpf_core_field_offset(struct mount, mnt);
    __u64 number = (__u32)BPF_CORE_READ(mount, mnt_id);
    struct service_address *service = bpf_map_lookup_elem(&services, &number);
    if (!service || (service->cgroup != bpf_get_current_cgroup_id() && service->cgroup != group_above(task))) return NULL;
    return service;
}

/* What programs take for their own host: the loopback address, and that of the host name in /etc/hosts. */
static __always_inline bool is_own_host(__u32 address)
{
    return address == 0x7f000001 || address == 0x7f000101;
}

static __always_inline bool is_local(__u32 address) { return address >> 24 == 127; }

static __always_inline bool is_service(const struct service_address *service, __u32 address)
{
    return address - service->first < SERVICES_MAX;
}

/* Where a service's own packets to this address go; 0: nowhere. */
static __always_inline __u32 destination(const struct service_address *service, __u32 address, __u16 port)
{
    if (!address || is_own_host(address)) {
        if (address == 0x7f000001 && port && (port == service->gateway || port == service->engine)) return address;
        return service->own;
    }
    if (is_service(service, address)) return service->reaches >> (address - service->first) & 1 ? address : 0;
    if (is_local(address)) return address;
    return service->outside ? address : 0;
}

/* The address to bind to instead. A UDP socket without a port asks others, inside and outside: it stays as it is. */
static __always_inline __u32 bound(const struct service_address *service, __u32 address, __u16 port, __u32 type)
{
    if (!address && !port && type != SOCK_STREAM) return 0;
    if (!address || is_local(address)) return service->own;
    return address;
}

SEC("cgroup/bind4")
int bind4(struct bpf_sock_addr *ctx)
{
    struct service_address *service = caller();
    if (!service) return ALLOW;
    __u32 address = bpf_ntohl(FIELD(user_ip4));
    FIELD(user_ip4) = bpf_htonl(bound(service, address, bpf_ntohs(FIELD(user_port)), FIELD(type)));
    return ALLOW;
}

/* A loopback, wildcard or mapped IPv6 address as IPv4; false: neither. */
static __always_inline bool as_ipv4(struct bpf_sock_addr *ctx, __u32 *address)
{
    __u32 a = FIELD(user_ip6[0]), b = FIELD(user_ip6[1]), c = bpf_ntohl(FIELD(user_ip6[2])), d = bpf_ntohl(FIELD(user_ip6[3]));
    if (a || b) return false;
    if (c == 0xffff) {
        *address = d;
        return true;
    }
    if (c || d > 1) return false;
    *address = d ? 0x7f000001 : 0;
    return true;
}

static __always_inline void set_mapped(struct bpf_sock_addr *ctx, __u32 address)
{
    FIELD(user_ip6[0]) = 0;
    FIELD(user_ip6[1]) = 0;
    FIELD(user_ip6[2]) = bpf_htonl(0xffff);
    FIELD(user_ip6[3]) = bpf_htonl(address);
}

static __always_inline bool only_ipv6(struct bpf_sock_addr *ctx)
{
    if (!ctx->sk) return false;
    if (FIELD(protocol) == IPPROTO_TCP) {
        struct tcp6_sock *tcp = bpf_skc_to_tcp6_sock(ctx->sk);
        return tcp && BPF_CORE_READ_BITFIELD_PROBED((struct sock *)tcp, __sk_common.skc_ipv6only);
    }
    struct udp6_sock *udp = bpf_skc_to_udp6_sock(ctx->sk);
    return udp && BPF_CORE_READ_BITFIELD_PROBED((struct sock *)udp, __sk_common.skc_ipv6only);
}

/* A socket that takes IPv6 alone stands beside one of IPv4 that others reach: it gets a port that nobody asks for. */
SEC("cgroup/bind6")
int bind6(struct bpf_sock_addr *ctx)
{
    struct service_address *service = caller();
    __u32 address, own;
    if (!service || !as_ipv4(ctx, &address)) return ALLOW;
    own = bound(service, address, bpf_ntohs(FIELD(user_port)), FIELD(type));
    if (!own) return ALLOW;
    if (only_ipv6(ctx)) {
        FIELD(user_ip6[0]) = 0;
        FIELD(user_ip6[1]) = 0;
        FIELD(user_ip6[2]) = 0;
        FIELD(user_ip6[3]) = bpf_htonl(1);
        FIELD(user_port) = 0;
        return ALLOW;
    }
    set_mapped(ctx, own);
    return ALLOW;
}

/* Where a port of the loopback address leads that a service publishes; NULL: to itself. */
static __always_inline struct published_place *publisher(__u32 address, __u16 port)
{
    struct published_port key = {.cgroup = bpf_get_current_cgroup_id(), .port = port};
    struct published_place *place;
    if (address != 0x7f000001) return NULL;
    if ((place = bpf_map_lookup_elem(&published, &key))) return place;
    key.cgroup = group_above((void *)bpf_get_current_task());
    return bpf_map_lookup_elem(&published, &key);
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
    struct service_address *service = caller();
    struct published_place *place = NULL;
    __u32 address = bpf_ntohl(FIELD(user_ip4));
    if (!service || service->engine) place = publisher(address, bpf_ntohs(FIELD(user_port)));
    if (place) {
        address = place->address;
        FIELD(user_port) = bpf_htons(place->port);
    }
    if (!service) {
        FIELD(user_ip4) = bpf_htonl(address);
        return ALLOW;
    }
    if (!place) address = destination(service, address, bpf_ntohs(FIELD(user_port)));
    if (!address) return REFUSE;
    if (is_service(service, address)) { /* refused where the program has bound it already */
        struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = bpf_htonl(service->own)};
        bpf_bind(ctx, (struct sockaddr *)&own, sizeof own);
    }
    FIELD(user_ip4) = bpf_htonl(address);
    return ALLOW;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
    struct service_address *service = caller();
    struct published_place *place = NULL;
    __u32 asked, address;
    bool local = as_ipv4(ctx, &asked);
    if (local && (!service || service->engine) && !only_ipv6(ctx)) place = publisher(asked, bpf_ntohs(FIELD(user_port)));
    if (place) {
        set_mapped(ctx, place->address);
        FIELD(user_port) = bpf_htons(place->port);
    }
    if (!service) return ALLOW;
    if (!local) return service->outside ? ALLOW : REFUSE;
    address = place ? place->address : destination(service, asked, bpf_ntohs(FIELD(user_port)));
    if (!address) return REFUSE;
    if (is_service(service, address)) {
        struct sockaddr_in6 own = {.sin6_family = AF_INET6};
        own.sin6_addr.in6_u.u6_addr32[2] = bpf_htonl(0xffff);
        own.sin6_addr.in6_u.u6_addr32[3] = bpf_htonl(service->own);
        bpf_bind(ctx, (struct sockaddr *)&own, sizeof own);
    }
    set_mapped(ctx, address);
    return ALLOW;
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
    struct service_address *service = caller();
    if (!service) return ALLOW;
    __u32 address = destination(service, bpf_ntohl(FIELD(user_ip4)), bpf_ntohs(FIELD(user_port)));
    if (!address) return REFUSE;
    if (is_service(service, address)) FIELD(msg_src_ip4) = bpf_htonl(service->own);
    FIELD(user_ip4) = bpf_htonl(address);
    return ALLOW;
}

/* The kernel takes no IPv4 address here; one in the form of IPv6 has come by sendmsg4. */
SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
    struct service_address *service = caller();
    __u32 asked;
    return !service || service->outside || as_ipv4(ctx, &asked) ? ALLOW : REFUSE;
}
