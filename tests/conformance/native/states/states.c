/* SPDX-License-Identifier: Apache-2.0 */
/* states list                        the rows: name, group and how, by tabs
 * states start DIRECTORY NAME...     a process in each of these states, below DIRECTORY
 * states plain DIRECTORY NAME...     a process that looks for each of them, and has none
 * states wait                        a program that waits for ever, for the rows about programs
 * states ask DIRECTORY NAME...       what each of them sees of itself: name and text, by a tab
 *
 * For bench/_states.py. Each process waits in read() for the next question: what a wait looks like after a restore is
 * not asked here.
 */
#include "states.h"

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define TIMEOUT 60000 /* milliseconds for an answer */
#define QUESTIONS 1000 /* descriptors out of the way of the states' own */
#define ANSWERS 1001

extern const struct state *const __start_states[], *const __stop_states[];

int fd[16];
char *area;
pid_t child, thread_id;

static char said[32768];
static size_t length;

/* ------------------------------------------------------------------ saying */

void say(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	int more = vsnprintf(said + length, sizeof said - length - 2, format, arguments);
	va_end(arguments);
	for (int i = 0; i < more && said[length]; i++, length++)
		if (said[length] == '\n' || said[length] == '\t')
			said[length] = said[length] == '\n' ? '|' : ' ';
}

const char *said_by_child(void) { return said; }

static void tell(int descriptor)
{
	said[length++] = '\n';
	for (size_t done = 0; done < length;) {
		ssize_t more = write(descriptor, said + done, length - done);
		if (more <= 0)
			_exit(3);
		done += more;
	}
	length = 0;
	memset(said, 0, sizeof said);
}

void impossible(const char *what)
{
	int error = errno;

	length = 0;
	say("impossible: %s: %s", what, strerror(error));
	tell(ANSWERS);
	_exit(0);
}

void say_bytes(const void *bytes, size_t size)
{
	for (size_t i = 0; i < size; i++)
		say("%02x", ((const unsigned char *)bytes)[i]);
	say(" ");
}

void say_result(const char *name, long value)
{
	if (value == -1 && errno)
		say("%s=%s ", name, strerrorname_np(errno));
	else
		say("%s=%ld ", name, value);
}

void say_lines(const char *path, const char *word)
{
	char line[4096];
	FILE *file = fopen(path, "re");

	if (!file) {
		say("%s: %s ", path, strerrorname_np(errno));
		return;
	}
	while (fgets(line, sizeof line, file))
		if (strstr(line, word))
			say("%s", line);
	fclose(file);
}

void say_mapping(const void *address)
{
	char line[4096], rights[8], flags[256] = "";
	unsigned long first, last, offset;
	int inside = 0, at = 0;
	FILE *file = fopen("/proc/self/smaps", "re");

	while (file && fgets(line, sizeof line, file)) {
		if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %n", &first, &last, rights, &offset, &at) >= 4) {
			inside = first <= (unsigned long)address && (unsigned long)address < last;
			if (inside)
				say("%s+%lx %s", rights, offset, line + at);
		} else if (inside && sscanf(line, "VmFlags: %255[^\n]", flags) == 1) {
			char *dirty = strstr(flags, "sd"); /* soft-dirty, where the kernel has it */
			if (dirty)
				memcpy(dirty, "  ", 2);
			say("flags %s ", flags);
		} else if (inside && !strncmp(line, "Locked:", 7)) {
			say("%s", line);
		}
	}
	if (file)
		fclose(file);
}

void say_fdinfo(int descriptor)
{
	char path[64], line[1024];
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", descriptor);
	FILE *file = fopen(path, "re");

	while (file && fgets(line, sizeof line, file))
		if (strncmp(line, "mnt_id:", 7) && strncmp(line, "ino:", 4) && strncmp(line, "eventfd-id:", 11))
			say("%s", line);
	if (file)
		fclose(file);
}

/* ------------------------------------------------------------------ helpers of rows */

static int orders[2], replies[2];

static int serve(void *unused)
{
	void (*function)(void);

	while (read(orders[0], &function, sizeof function) == sizeof function) {
		function();
		if (write(replies[1], "", 1) != 1)
			break;
	}
	(void)unused;
	_exit(4);
}

static void high_pipe(int ends[2], int number)
{
	int low[2];

	must(pipe(low));
	for (int i = 0; i < 2; i++) {
		ends[i] = must(dup2(low[i], number + i));
		close(low[i]);
	}
}

static void note_thread(void) { thread_id = syscall(SYS_gettid); }

static void *serve_pthread(void *unused) { return (void *)(long)serve(unused); }

void start_thread(bool own_fs, bool own_files)
{
	high_pipe(orders, 1010);
	high_pipe(replies, 1012);
	if (own_fs || own_files) {
		char *stack = malloc(1 << 18);
		int flags = CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
		if (!own_fs)
			flags |= CLONE_FS;
		if (!own_files)
			flags |= CLONE_FILES;
		must(clone(serve, stack + (1 << 18), flags, NULL));
	} else {
		pthread_t thread;
		errno = pthread_create(&thread, NULL, serve_pthread, NULL);
		if (errno)
			impossible("pthread_create");
	}
	in_thread(note_thread);
}

void in_thread(void (*function)(void))
{
	char done;

	if (write(orders[1], &function, sizeof function) != sizeof function || read(replies[0], &done, 1) != 1)
		_exit(5);
}

pid_t start_child(void (*function)(void))
{
	int ready[2];
	char done;

	must(pipe(ready));
	pid_t pid = must(fork());
	if (!pid) {
		close(ready[0]);
		if (function)
			function();
		close(QUESTIONS);
		close(ANSWERS);
		if (write(ready[1], "", 1) != 1)
			_exit(6);
		close(ready[1]);
		for (;;)
			pause();
	}
	close(ready[1]);
	if (read(ready[0], &done, 1) != 1)
		done = 1;
	close(ready[0]);
	return pid;
}

void fill(void *memory, size_t size)
{
	uint32_t x = 2463534242u;

	for (size_t i = 0; i < size; i++) {
		x ^= x << 13, x ^= x >> 17, x ^= x << 5;
		((unsigned char *)memory)[i] = x;
	}
}

void put(const char *path, const char *content)
{
	int file = must(open(path, O_WRONLY | O_CREAT, 0644));

	must(write(file, content, strlen(content)));
	close(file);
}

/* ------------------------------------------------------------------ the program */

static const struct state *row(const char *name)
{
	for (const struct state *const *entry = __start_states; entry < __stop_states; entry++)
		if (!strcmp((*entry)->name, name))
			return *entry;
	fprintf(stderr, "no state is called %s\n", name);
	exit(2);
}

static void open_ends(const char *directory, const char *name, bool make, int ends[2])
{
	static const char *const kinds[] = {"ask", "tell"};
	char path[512];

	for (int i = 0; i < 2; i++) {
		snprintf(path, sizeof path, "%s/%s.%s", directory, name, kinds[i]);
		if (make && mkfifo(path, 0666) && errno != EEXIST)
			exit(2);
		ends[i] = open(path, O_RDWR | O_CLOEXEC);
		if (ends[i] < 0)
			exit(2);
	}
}

static void hold(const struct state *state, const char *directory, const int ends[2], bool plain)
{
	char path[512], question;
	/* Nothing of whoever starts it: its shell waits for the end of its output. */
	int null = open("/dev/null", O_RDWR);

	for (int i = 0; i < 3; i++)
		dup2(null, i);
	dup3(ends[0], QUESTIONS, O_CLOEXEC);
	dup3(ends[1], ANSWERS, O_CLOEXEC);
	close_range(3, QUESTIONS - 1, 0);
	snprintf(path, sizeof path, "%s/%s.d", directory, state->name);
	if (mkdir(path, 0777) && errno != EEXIST)
		_exit(2);
	if (chdir(path))
		_exit(2);
	if (!plain)
		state->make(state->data);
	say("made");
	tell(ANSWERS);
	while (read(QUESTIONS, &question, 1) == 1) {
		state->look(state->data);
		tell(ANSWERS);
	}
	_exit(7);
}

/* What it says; nothing any more once it is dead, and nobody has the other end of its FIFO. */
static void hear(const char *directory, const char *name, int end)
{
	char path[512];
	snprintf(path, sizeof path, "%s/%s.tell", directory, name);
	int from = open(path, O_RDONLY | O_NONBLOCK);
	close(end);
	struct pollfd ready = {.fd = from, .events = POLLIN};
	char text[65536];
	size_t got = 0;

	while (!got || text[got - 1] != '\n') {
		ssize_t more = poll(&ready, 1, TIMEOUT) == 1 ? read(from, text + got, sizeof text - got) : 0;
		if (more <= 0) {
			printf("%s\tno answer\n", name);
			close(from);
			return;
		}
		got += more;
	}
	printf("%s\t%.*s", name, (int)got, text);
	close(from);
}

static void start(const char *directory, const char *name, bool plain)
{
	const struct state *state = row(name);
	int ends[2];

	open_ends(directory, name, true, ends);
	fflush(stdout);
	pid_t pid = fork();
	if (!pid) {
		pid = getpid();
		setsid();
		if (!fork()) {
			while (getppid() == pid) /* pid 1 adopts it */
				usleep(1000);
			hold(state, directory, ends, plain);
		}
		_exit(0);
	}
	waitpid(pid, NULL, 0);
	close(ends[0]);
	hear(directory, name, ends[1]);
}

static void ask(const char *directory, const char *name)
{
	int ends[2];

	open_ends(directory, name, false, ends);
	if (write(ends[0], "?", 1) != 1)
		exit(2);
	close(ends[0]);
	hear(directory, name, ends[1]);
}

int main(int count, char **words)
{
	if (count == 2 && !strcmp(words[1], "list")) {
		for (const struct state *const *entry = __start_states; entry < __stop_states; entry++)
			printf("%s\t%s\t%s\n", (*entry)->name, (*entry)->group, (*entry)->how);
		return 0;
	}
	if (count == 2 && !strcmp(words[1], "wait"))
		for (;;)
			pause();
	if (count < 4)
		return 2;
	umask(022);
	for (int i = 3; i < count; i++)
		if (!strcmp(words[1], "ask"))
			ask(words[2], words[i]);
		else
			start(words[2], words[i], !strcmp(words[1], "plain"));
	return 0;
}
