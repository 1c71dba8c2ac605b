/* SPDX-License-Identifier: Apache-2.0 */
/* What each file of states uses: the shape of a row, and ways to say what a process sees of itself.
 *
 * A row is a state that a process can have: `make` brings the process into it, `look` says how it looks from inside,
 * as text that is equal as long as the state is. A look changes nothing, so that it can be repeated.
 */
#ifndef PAGURUS_STATES_H
#define PAGURUS_STATES_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

struct state {
	const char *name, *group, *how;
	void (*make)(const void *);
	void (*look)(const void *);
	const void *data; /* of rows that share their functions */
};

#define ENTRY(name, group, how, make, look, data)                                                  \
	static const struct state state_##name = {#name, group, how, make, look, data};            \
	static const struct state *const entry_##name                                              \
		__attribute__((section("states"), used)) = &state_##name

#define STATE(name, group, how)                                                                    \
	static void make_##name(const void *);                                                     \
	static void look_##name(const void *);                                                     \
	ENTRY(name, group, how, make_##name, look_##name, NULL)
#define MAKE(name) static void make_##name(const void *data __attribute__((unused)))
#define OBSERVE(name) static void look_##name(const void *data __attribute__((unused)))

/* One process holds one state: these are free for it. */
extern int fd[16];
extern char *area;
extern pid_t child;

/* The kernel lets no program have this: ends the row. `must` is for calls that set errno. */
void impossible(const char *what);
#define must(call) ({ long result_ = (long)(call); if (result_ == -1) impossible(#call); result_; })

void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Lines of a file that contain `word`; the whole of it where `word` is empty. */
void say_lines(const char *path, const char *word);
/* In a child: what it has said, which nobody else hears. At least 500 bytes. */
const char *said_by_child(void);
void say_bytes(const void *bytes, size_t size);
/* What a call answered: its value or its error. */
void say_result(const char *name, long value);
#define say_call(name, call) ({ errno = 0; say_result(name, (long)(call)); })
/* The mapping that holds an address: its rights, path and flags. */
void say_mapping(const void *address);
/* What is behind a descriptor: /proc/self/fdinfo without its numbers that are handed out anew. */
void say_fdinfo(int descriptor);

/* An option of sockets that a row sets: `make` of these rows is `make_option`, `data` points to it. */
struct option {
	int kind, level, number;
	const void *value;
	unsigned size;
};
void make_option(const void *data);

/* A second thread, with which of CLONE_FS and CLONE_FILES; `in_thread` runs a function in it and waits. */
void start_thread(bool own_fs, bool own_files);
void in_thread(void (*function)(void));
extern pid_t thread_id;

/* A child that waits for ever after `function`. */
pid_t start_child(void (*function)(void));
void fill(void *memory, size_t size);
void put(const char *path, const char *content);

#endif
