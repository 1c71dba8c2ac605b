"""What is run in a sandbox and in Docker's default container, to be compared: name -> a line for /bin/sh.

What differs by nature (numbers of processes, addresses, times, the host's name) is kept out of the output by the line
itself.
"""

from __future__ import annotations

_HELLO = '#include <stdio.h>\\n#include <stdlib.h>\\nint main(void) { puts("hello"); return 0; }\\n'
_LEAK = "#include <stdlib.h>\\nint main(void) { volatile char *p = malloc(77); p = 0; return 0; }\\n"
_OVER = "#include <stdlib.h>\\nint main(void) { volatile char *p = malloc(8); p[8] = 1; return 0; }\\n"
_RACE = (
    "#include <pthread.h>\\nint x;\\nvoid *f(void *a) { x++; return a; }\\n"
    "int main(void) { pthread_t t; pthread_create(&t, 0, f, 0); x++; pthread_join(t, 0); return 0; }\\n"
)
_SUDO = "useradd -m dev 2>/dev/null; echo 'dev ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/dev; "


def _built(flags: str, source: str, then: str) -> str:
    return f"cd /tmp && printf '{source}' > p.c && gcc -g {flags} p.c -o p -pthread && {then}"


PROGRAMS: dict[str, str] = {
    "faultless with AddressSanitizer": _built("-fsanitize=address", _HELLO, "./p"),
    "leak with AddressSanitizer": _built("-fsanitize=address", _LEAK, "./p 2>&1 | grep -c '77 byte(s) leaked'"),
    "leak with LeakSanitizer alone": _built("-fsanitize=leak", _LEAK, "./p 2>/dev/null; echo $?"),
    "overflow with AddressSanitizer": _built("-fsanitize=address", _OVER, "./p 2>&1 | grep -c heap-buffer-overflow"),
    "faultless with UndefinedBehaviorSanitizer": _built("-fsanitize=undefined", _HELLO, "./p"),
    "race with ThreadSanitizer": _built("-fsanitize=thread", _RACE, "./p >/dev/null 2>&1; echo $?"),
    "gdb runs a program": _built(
        "-O0",
        _HELLO,
        "gdb -q -batch -ex 'break main' -ex run -ex 'info line' -ex cont ./p"
        " 2>/dev/null | grep -E 'Breakpoint 1, main|^hello|exited normally' | sed 's/process [0-9]*/process/'",
    ),
    "gdb attaches": "sleep 100 & gdb -q -batch -p $! -ex 'print 1 + 1' 2>/dev/null | grep '^.1 = 2'; kill $!",
    "strace of a child": "strace -f -e trace=execve -o /tmp/t sh -c /bin/true; echo $?; grep -c 'execve(' /tmp/t",
    "strace attaches": "sleep 1 & timeout 5 strace -p $! -o /tmp/t2 2>/dev/null; echo $?; grep -c exit_group /tmp/t2",
    "valgrind": _built("-O0", _LEAK, "valgrind -q --leak-check=full --error-exitcode=9 ./p >/dev/null 2>&1; echo $?"),
    "ccache": _built("", _HELLO, "ccache gcc -c p.c -o p.o && ccache gcc -c p.c -o p.o && ccache -s | grep -c Hits"),
    "sudo to root": _SUDO + "su dev -c 'sudo -n id -u'",
    "sudo to another user": _SUDO + "su dev -c 'sudo -n -u nobody id -un'",
    "sudo keeps what it may": _SUDO + "su dev -c 'sudo -n grep -E Cap[PEB] /proc/self/status'",
    "su to a user": "useradd -m other 2>/dev/null; su - other -c 'id -un; pwd'",
    "a set-user-ID program": "cp /usr/bin/id /tmp/rootid; chmod 4755 /tmp/rootid;"
    " su nobody -s /bin/sh -c '/tmp/rootid -u'",
    "ping as root": "ping -c 1 -W 2 127.0.0.1 | grep -c '1 received'",
    "ping as a user": "su nobody -s /bin/sh -c 'ping -c 1 -W 2 127.0.0.1' | grep -c '1 received'",
    "capabilities of root": "grep Cap /proc/self/status",
    "privileges may be gained": "grep -E 'NoNewPrivs|^Seccomp:' /proc/self/status",
    "perf is refused": "python3 -c 'import ctypes; print(ctypes.CDLL(None).syscall(298, 0, 0, -1, -1, 0))'",
    "io_uring is refused": "python3 -c 'import ctypes; l = ctypes.CDLL(None); print(l.syscall(425, 8, bytes(120)))'",
    "mount is refused": "mount -t tmpfs none /mnt 2>/dev/null; echo $?",
    "unshare is refused": "unshare -U true 2>/dev/null; echo $?",
    "chown to an id above 65,536": "touch /tmp/c; chown 100000 /tmp/c 2>/dev/null; echo $?",
    "F_NOTIFY": "python3 -c 'import fcntl, os; f = os.open(\"/tmp\", 0); print(fcntl.fcntl(f, 1026, 0))' 2>/dev/null;"
    " echo $?",
    "a JVM's memory": "java -XshowSettings:system -version 2>&1 | grep -E 'Provider|Memory Limit|CPU Quota'",
    "a JVM's heap": "java -XX:+PrintFlagsFinal -version 2>/dev/null | awk '/ MaxHeapSize /{print $4}'",
    "a JVM's processors": """printf 'class H { public static void main(String[] a) {
        System.out.println(Runtime.getRuntime().availableProcessors()); } }' > /tmp/H.java && java /tmp/H.java""",
    "Node's processors": """node -p 'require("os").cpus().length'""",
    "Node's heap": "node -p 'v8.getHeapStatistics().heap_size_limit'",
    "processors": "nproc; getconf _NPROCESSORS_ONLN; python3 -c 'import os; print(os.cpu_count())'",
    "lscpu": r"lscpu | grep -E '^(CPU\(s\)|Thread|Socket|NUMA)'",
    "huge pages": "cat /sys/kernel/mm/transparent_hugepage/enabled",
    "firmware is hidden": "ls -A /sys/firmware 2>/dev/null",
    "sysfs is read-only": "echo 1 > /sys/kernel/mm/ksm/run; echo $?",
    "memory limit of its group": "cat /sys/fs/cgroup/memory/memory.limit_in_bytes || cat /sys/fs/cgroup/memory.max",
    "Go builds and runs": """mkdir -p /tmp/g && cd /tmp/g && export HOME=/tmp
        printf 'package main\nimport "fmt"\nfunc main() { fmt.Println("go") }\n' > m.go && go run m.go""",
    "Go's detector of races": """mkdir -p /tmp/g && cd /tmp/g && export HOME=/tmp
        printf 'package main\nvar x int\nfunc main() {\nc := make(chan bool)\ngo func() { x++; c <- true }()\n' > r.go
        printf 'x++\n<-c\n}\n' >> r.go && go run -race r.go 2>&1 | grep -c 'DATA RACE'""",
    "cargo": "export HOME=/tmp; cd /tmp && cargo -q init --vcs none crate 2>/dev/null && cd crate && cargo -q run",
    "mariadb": """mkdir -p /run/mysqld; chown mysql /run/mysqld; mariadbd-safe --user=mysql >/dev/null 2>&1 &
        until mysqladmin ping >/dev/null 2>&1; do sleep 0.2; done; mysql -NBe 'select 6*7'; mysqladmin shutdown""",
    "chromium": """echo '<script>document.title = 6 * 7</script>' > /tmp/page.html
        chromium --headless --no-sandbox --disable-gpu --dump-dom file:///tmp/page.html 2>/dev/null | grep -c 42""",
    "a virtual environment of Python": "python3 -m venv /tmp/v && /tmp/v/bin/pip --version | cut -c 1-4",
    "cmake": "mkdir -p /tmp/k && cd /tmp/k && echo 'project(p C)' > CMakeLists.txt && cmake . | tail -n 1",
    "git": """cd /tmp && git init -q r && cd r &&
        git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git log --format=%s""",
    "perl": """perl -e 'print join(",", map { $_ * 2 } 1..3), "\\n"'""",
    "cron": "cron; sleep 0.2; pgrep -c cron; pkill cron",
    "tmux": "tmux new-session -d 'sleep 100' && tmux list-sessions | wc -l; tmux kill-server",
    "sshd": "ssh-keygen -A 2>/dev/null | wc -l; mkdir -p /run/sshd; /usr/sbin/sshd -t; echo $?",
    "sqlite": """sqlite3 /tmp/a.db 'pragma journal_mode=wal; create table t(a);
        insert into t values (7); select * from t'""",
    "attributes of files": """touch /tmp/x && setfattr -n user.a -v 1 /tmp/x &&
        getfattr -n user.a /tmp/x | grep -c user.a""",
    "access lists": "touch /tmp/y && setfacl -m u:1000:r /tmp/y && getfacl -c /tmp/y 2>/dev/null",
    "postgres": """pg_ctlcluster 15 main start; echo $?
        for i in 1 2 3 4 5 6 7 8 9; do su postgres -c 'psql -Atc "select 6*7"' 2>/dev/null && break; sleep 1; done""",
    "redis": """redis-server --daemonize yes > /dev/null
        until redis-cli ping 2>/dev/null | grep -q PONG; do sleep 0.1; done; redis-cli set a 1; redis-cli get a""",
    "nginx": "nginx; pgrep -c nginx > /dev/null; bash -c 'exec 3<>/dev/tcp/127.0.0.1/80'; echo $?",
    "sysfs": "test -d /sys/class/net/lo; echo $?",
    "its own cgroup": "ls /sys/fs/cgroup | head -c 1 | wc -c",
    "no terminal": "(echo > /dev/tty) 2>&1; echo $?",
    "a terminal by its name": "script -qec 'echo hi > /dev/tty' /dev/null; echo $?",
    "locale and shells": "printf '%s\\n' a B c | sort | tr -d '\\n'; echo; sh -c 'echo $0'",
    "python's subprocess": 'python3 -c \'import subprocess as s; print(s.run(["sh", "-c", "exit 3"]).returncode)\'',
    "python's multiprocessing": "python3 -c 'import multiprocessing as m; print(m.Pool(2).map(abs, [-1, -2]))'",
    "shared memory": "python3 -c 'from multiprocessing import shared_memory as s; a = s.SharedMemory(None, True, 9);"
    " print(a.size >= 9); a.close(); a.unlink()'",
    "landlock": "python3 -c 'import ctypes; print(ctypes.CDLL(None).syscall(444, 0, 0, 1) > 0)'",
}

#: Those that differ, with the reason, as docs/parity.md says it.
DIFFERENCES: dict[str, str] = {
    "io_uring is refused": "Debian 12's Docker (20.10) still allows it; Docker refuses it since version 25, as we do",
    "chown to an id above 65,536": "a sandbox has 65,536 ids of its own; Docker without user namespaces has the host's",
    "F_NOTIFY": "nothing in /proc shows such a notice, so no dump could bring it back; inotify works",
    "landlock": "nothing in /proc shows a rule that is in force, so a restore would lose it",
}
