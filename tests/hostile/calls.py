"""System calls that must not work, tried by the sandbox's root."""

from __future__ import annotations

from tests.hostile.act import program

_REFUSED = {
    "create a user namespace (unshare)": "syscall('unshare', 272, 0x10000000)",
    "create a mount namespace (unshare)": "syscall('unshare', 272, 0x20000)",
    "create a network namespace (unshare)": "syscall('unshare', 272, 0x40000000)",
    "create a user namespace (clone)": "syscall('clone', 56, 0x10000000 | 17, 0, 0, 0, 0)",
    "create a process by clone3": "b=(ctypes.c_uint64*11)(); b[0]=0x10000000; b[4]=17; syscall('clone3', 435, b, 88)",
    "join a namespace (setns)": "syscall('setns', 308, os.open('/proc/1/ns/mnt', 0), 0)",
    "mount a tmpfs": "syscall('mount', 165, b'none', b'/mnt', b'tmpfs', 0, 0)",
    "mount proc once more": "syscall('mount', 165, b'none', b'/mnt', b'proc', 0, 0)",
    "mount sysfs": "syscall('mount', 165, b'none', b'/mnt', b'sysfs', 0, 0)",
    "mount a cgroup hierarchy (release_agent)": "syscall('mount', 165, b'none', b'/mnt', b'cgroup', 0, b'memory')",
    "bind-mount over a masked path": "syscall('mount', 165, b'/etc', b'/proc/acpi', 0, 4096, 0)",
    "remount proc/sys writable": "syscall('mount', 165, 0, b'/proc/sys', 0, 32 | 4096, 0)",
    "unmount a mask": "syscall('umount2', 166, b'/proc/keys', 2)",
    "pivot_root": "syscall('pivot_root', 155, b'/', b'/mnt')",
    "new mount API: fsopen": "syscall('fsopen', 430, b'tmpfs', 0)",
    "new mount API: open_tree": "syscall('open_tree', 428, -100, b'/', 1)",
    "new mount API: move_mount": "syscall('move_mount', 429, -100, b'/etc', -100, b'/mnt', 0)",
    "new mount API: mount_setattr": "syscall('mount_setattr', 442, -100, b'/proc/sys', 0, bytes(32), 32)",
    "load a kernel module": "syscall('init_module', 175, bytes(64), 64, b'')",
    "load a kernel module by descriptor": "syscall('finit_module', 313, 0, b'', 0)",
    "unload a kernel module": "syscall('delete_module', 176, b'overlay', 0)",
    "load another kernel (kexec)": "syscall('kexec_load', 246, 0, 0, 0, 0)",
    "reboot the host": "syscall('reboot', 169, 0xfee1dead, 672274793, 0x1234567, 0)",
    "set the clock": "syscall('settimeofday', 164, struct.pack('qq', 1, 0), 0)",
    "set the clock (clock_settime)": "syscall('clock_settime', 227, 0, struct.pack('qq', 1, 0))",
    "adjust the clock": "syscall('adjtimex', 159, struct.pack('I', 1) + bytes(256))",
    "set the host name": "syscall('sethostname', 170, b'evil', 4)",
    "set the domain name": "syscall('setdomainname', 171, b'evil', 4)",
    "turn swapping on": "syscall('swapon', 167, b'/etc/passwd', 0)",
    "turn swapping off": "syscall('swapoff', 168, b'/etc/passwd')",
    "process accounting": "syscall('acct', 163, b'/tmp/acct')",
    "I/O port privileges": "syscall('iopl', 172, 3); syscall('ioperm', 173, 0, 8, 1)",
    "read the kernel log (syslog)": "syscall('syslog', 103, 3, bytes(64), 64)",
    "load a BPF program": "syscall('bpf', 321, 5, bytes(128), 128)",
    "make a BPF map": "syscall('bpf', 321, 0, struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(100), 72)",
    "open a performance counter": "syscall('perf_event_open', 298, struct.pack('IIQ', 1, 112, 0)+bytes(96), 0,-1,-1,0)",
    "io_uring": "syscall('io_uring_setup', 425, 8, bytes(120))",
    "userfaultfd": "syscall('userfaultfd', 323, 1)",
    "keyring: add a key": "syscall('add_key', 248, b'user', b'k', b'v', 1, -3)",
    "keyring: read the session's": "syscall('keyctl', 250, 0, -3, 0, 0)",
    "keyring: request a key": "syscall('request_key', 249, b'user', b'k', 0, 0)",
    "open by file handle (shocker)": "syscall('open_by_handle_at', 304, 3, struct.pack('IIQ', 8, 1, 2), 0)",
    "suspend the filter of a traced process": "child = waiting(); syscall('suspend', 101, 0x4206, child, 0, 1 << 21)",
    "read the filter of a traced process": (
        "child = waiting(); libc.ptrace(0x4206, child, None, None); libc.ptrace(0x4207, child, None, None)\n"
        "os.waitpid(child, 0x40000000); syscall('get filter', 101, 0x420c, child, 0, bytes(8192))"
    ),
    "steal a descriptor (pidfd_getfd)": "p = os.pidfd_open(1); syscall('pidfd_getfd', 438, p, 0, 0)",
    "compare kernel objects (kcmp)": "syscall('kcmp', 312, 1, 1, 0, 0, 0)",
    "fanotify": "syscall('fanotify_init', 300, 0, 0)",
    "disk quota control": "syscall('quotactl', 179, 0x80000100, b'/dev/vda', 0, 0)",
    "switch address randomisation off": "syscall('personality', 135, 0x0040000)",
    "hang up the terminal": "syscall('vhangup', 153)",
    "NUMA: move pages": "syscall('move_pages', 279, 1, 0, 0, 0, 0, 0)",
    "x32 system call": "syscall('x32 getpid', 0x40000000 + 39)",
    "a system call that is newer than the profile": "syscall('future', 600)",
    "nice below zero": "attempt('nice', os.setpriority, os.PRIO_PROCESS, 0, -10)",
    "real-time scheduling": "attempt('fifo', os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10))",
    "real-time disk priority": "syscall('ioprio_set', 251, 1, 0, (1 << 13) | 0)",
    "lock memory without bound": (
        "attempt('memlock', resource.setrlimit, resource.RLIMIT_MEMLOCK, (1 << 40, 1 << 40))"
    ),
    "raise the limit of open files": "attempt('nofile', resource.setrlimit, resource.RLIMIT_NOFILE, (1 << 20,) * 2)",
    "change the core limit (core_pattern program)": (  # it succeeds and changes nothing
        "before = resource.getrlimit(resource.RLIMIT_CORE)\n"
        "for new in ((1 << 20, 1 << 20), (0, 1), (0, 0)):\n"
        " print('tried core', new, flush=True)\n"
        " resource.setrlimit(resource.RLIMIT_CORE, new)\n"
        " if resource.getrlimit(resource.RLIMIT_CORE) != before: print('BREACH core', new, flush=True)"
    ),
    "gain CAP_SYS_ADMIN by capset": (
        "all = struct.pack('IIIIII', *[0xffffffff, 0xffffffff, 0] * 2);"
        "syscall('capset', 126, struct.pack('Ii', 0x20080522, 0), all)"
    ),
    "gain ambient capabilities": "syscall('ambient', 157, 47, 2, 21, 0, 0)",
}

_WAITING = """
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
def waiting():
    child = os.fork()
    if not child:
        signal.alarm(20)
        while True: signal.pause()
    return child
"""

for _name, _code in _REFUSED.items():
    program(_name, _WAITING + _code if "waiting()" in _code else _code)

# A tracer gives the call of its child another number and other arguments, after the child has entered it.
program(
    "change a call for a forbidden one by tracing",
    _WAITING
    + """
R = ctypes.c_ulonglong * 27  # struct user_regs_struct: rax is word 10, rdx 12, rsi 13, rdi 14, orig_rax 15
def forced(number, *args):
    child = os.fork()
    if not child:
        libc.ptrace(0, 0, None, None); os.kill(os.getpid(), signal.SIGSTOP); os.getppid(); os._exit(0)
    os.waitpid(child, 0)
    libc.ptrace(0x4200, child, None, ctypes.c_void_p(1 | 1 << 20))  # PTRACE_O_TRACESYSGOOD, PTRACE_O_EXITKILL
    regs, entry = R(), True
    while True:
        libc.ptrace(24, child, None, None)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status): return None
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80: continue
        libc.ptrace(12, child, None, ctypes.addressof(regs))
        if entry and regs[15] == 110:
            regs[15] = number; regs[14], regs[13], regs[12] = args
            libc.ptrace(13, child, None, ctypes.addressof(regs)); changed = True
        elif not entry and regs[15] == number:
            result = ctypes.c_longlong(regs[10]).value; os.kill(child, 9); return result
        entry = not entry
for name, number, args in (('unshare', 272, (0x10000000, 0, 0)), ('bpf', 321, (0, 0, 0)), ('setns', 308, (0, 0, 0)),
                           ('keyctl', 250, (0, 0, 0)), ('io_uring_setup', 425, (8, 0, 0)), ('future', 600, (0, 0, 0))):
    got = forced(number, *args)
    print('tried', name, got, flush=True)
    if got not in (-1, -38): print('BREACH', name, got, flush=True)
""",
)

program(
    "32-bit system calls",
    "c = bytes.fromhex('b814000000cd80c3')  # mov eax, getpid; int 0x80; ret\n"
    "m = mmap.mmap(-1, 4096, prot=7); m.write(c); a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
    "pid = os.fork()\n"
    "if pid == 0: r = ctypes.CFUNCTYPE(ctypes.c_int)(a)(); print('BREACH int80', r, flush=True); os._exit(0)\n"
    "print('tried', os.waitpid(pid, 0)[1])",
)
