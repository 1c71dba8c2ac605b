/* What the kernel half of a composition's addresses knows of a service. Read by addresses.bpf.c and layout.py. */
#ifndef PAGURUS_ADDRESSES_H
#define PAGURUS_ADDRESSES_H

#define ADDRESSES_MAX 65536 /* services of all sandboxes of a host */
#define SERVICES_MAX 32     /* of one sandbox */

struct service_address {
    unsigned long long cgroup; /* of its sandbox: numbers of mounts are used again */
    unsigned int own;       /* its IPv4 address, as all here in the host's byte order */
    unsigned int first;     /* that of the sandbox's first service; the others follow */
    unsigned int reaches;   /* bit N: it may reach the Nth service */
    unsigned int outside;   /* whether it may reach what is not the sandbox's own */
    unsigned int gateway;   /* a port of 127.0.0.1 that is the host's, or 0 */
    unsigned int engine;    /* another one; where it is, what containers publish is found at 127.0.0.1 too */
};

/* A port by whose number at 127.0.0.1 programs find that of a service: those outside of all services, and those of one with an engine. */
struct published_port {
    unsigned long long cgroup;
    unsigned int port;
    unsigned int unused;
};

struct published_place {
    unsigned int address;
    unsigned int port;
};

#endif
