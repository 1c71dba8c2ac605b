/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the kernel half of the inspector notes of a thread's waits, by the thread's number: the value of its map `waits`.
 * ebpf/waits.h writes all but the last three fields, which are those of rearm.c. Times are of the host's CLOCK_MONOTONIC
 * in nanoseconds, except `ends`, which is of the clock that the call waits by.
 */
#ifndef PAGURUS_WAIT_H
#define PAGURUS_WAIT_H

struct wait {
	unsigned long long nr;	    /* the system call, */
	unsigned long long ip, sp;  /* and where: behind its instruction */
	unsigned long long entered; /* when, of calls that the kernel does not take up again by itself */
	unsigned long long entries; /* how many of these there were */
	unsigned long long ends;    /* when the call ends that was interrupted last and that the kernel takes up again; or,
				     * where it told the program what is left of it, when it was interrupted */
	unsigned long long due;	    /* when the call ends in truth: each dump adds a little to what the kernel knows */
	unsigned long long of;	    /* the call that `due` is about: its `ends`, or its number among the entries */
	unsigned long long whole;   /* the time-out of the socket that this call waits for */
};

#endif
