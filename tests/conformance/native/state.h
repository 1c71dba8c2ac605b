/* SPDX-License-Identifier: Apache-2.0 */
/* The state that operations start from, and how it is reached again. Included by effects.c. */
#ifndef PAGURUS_BENCH_STATE_H
#define PAGURUS_BENCH_STATE_H

static const unsigned char acl[] = { /* user::rw- user:1:r-- group::r-- mask::r-- other::r-- */
	2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 1, 0, 0, 0, 4, 0, 4, 0, 255, 255, 255, 255,
	16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255,
};

/* No shell in the image: remove by hand what operations can have made. */
static void remove_all(const char *directory)
{
	int dir = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	char buffer[4096];
	long got;
	int again;

	if (dir < 0)
		return;
	do {
		again = 0;
		lseek(dir, 0, SEEK_SET);
		while ((got = syscall(SYS_getdents64, dir, buffer, sizeof(buffer))) > 0) {
			for (long at = 0; at < got;) {
				unsigned short length;
				char *name = buffer + at + 19, path[512];

				memcpy(&length, buffer + at + 16, 2);
				at += length;
				if (!strcmp(name, ".") || !strcmp(name, ".."))
					continue;
				snprintf(path, sizeof(path), "%s/%s", directory, name);
				if (unlink(path) == 0)
					again = 1;
				else {
					remove_all(path);
					if (rmdir(path) == 0)
						again = 1;
				}
			}
		}
	} while (again);
	close(dir);
}

static void reset(void)
{
	static const char *const files[] = { "file", "other", "third", "mapped", "full/inside" };
	char page[4097];

	remove_all(".");
	mkdir("empty", 0755);
	mkdir("full", 0755);
	for (unsigned i = 0; i < sizeof(files) / sizeof(*files); i++)
		fill(files[i], old_bytes);
	memset(page, 'p', 4096);
	page[4096] = 0;
	fill("mapped", page);
	fill("big", page);
	fill("nothing", "");
	symlink("file", "link");
	link("other", "twin");
	mkfifo("fifo", 0644);
	setxattr("third", "user.before", "1", 1, 0);
	shm_unlink("/there");
	shm_unlink("/fresh");
	for (unsigned i = 0; i < sizeof(files) / sizeof(*files); i++)
		age(files[i]);
	age("big");
	age("nothing");
	age("link");
	age("fifo");
}

#endif
