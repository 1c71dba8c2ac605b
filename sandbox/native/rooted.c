/* rooted.so, loaded into a CRIU that restores services: a Unix socket that a service bound by an absolute path is bound
 * again in the root of that service, and keeps its name.
 *
 * CRIU changes into the directory of a socket's record before it binds it, removes its file, or connects to it, and goes
 * back to its root and its directory after. A directory that ends with MARK (sandbox/criu/rewrite.py) is the root instead.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#define MARK "/./"

__attribute__((visibility("default"))) int chdir(const char *path) {
    static int (*next)(const char *);
    if (!next) next = (int (*)(const char *))dlsym(RTLD_NEXT, "chdir");
    size_t size = strlen(path), mark = sizeof MARK - 1;
    if (size <= mark || strcmp(path + size - mark, MARK) != 0) return next(path);
    return next(path) < 0 || chroot(".") < 0 ? -1 : 0;
}
