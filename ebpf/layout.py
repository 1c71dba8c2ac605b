"""The structures of inspector.h as ctypes. Made by scripts/sync_layout.py; do not edit.

Guarantee: a field exists here exactly when it exists in the kernel half, at the same offset; the loader compares the
sizes with the loaded maps.
"""

from __future__ import annotations

import ctypes

BUCKETS = 4
MAX_REPORTED_AT = 8
IPC_UNKNOWN = 0xFFFFFFFF
NAME_LENGTH = 64
PART_LENGTH = 32
DEPTH = 12
PARTS_LENGTH = 384
WHY_DATA = 0x1000
WHY_RAN = 0x1001
WHY_SIGNAL = 0x1002
WHY_URING = 0x1003


class FilesBucketLayout(ctypes.Structure):
    _fields_ = [
        ("epoch", ctypes.c_uint64),
        ("creates", ctypes.c_uint64),
        ("removes", ctypes.c_uint64),
        ("renames", ctypes.c_uint64),
        ("metadata", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("touched", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("temporary", ctypes.c_uint64),
        ("uring", ctypes.c_uint64),
        ("unknown", ctypes.c_uint64),
        ("explained", ctypes.c_uint64),
    ]


class ProcsBucketLayout(ctypes.Structure):
    _fields_ = [
        ("epoch", ctypes.c_uint64),
        ("forks", ctypes.c_uint64),
        ("execs", ctypes.c_uint64),
        ("exits", ctypes.c_uint64),
        ("fresh", ctypes.c_uint64),
        ("ran", ctypes.c_uint64),
        ("gone", ctypes.c_uint64),
        ("ipc", ctypes.c_uint64),
        ("keys", ctypes.c_uint64),
        ("listens", ctypes.c_uint64),
        ("foreign", ctypes.c_uint64),
        ("signals", ctypes.c_uint64),
        ("channels", ctypes.c_uint64),
        ("reported", ctypes.c_uint64 * MAX_REPORTED_AT),
        ("mounts", ctypes.c_uint64),
        ("tmpfs", ctypes.c_uint64),
        ("unknown", ctypes.c_uint64),
        ("explained", ctypes.c_uint64),
    ]


class SandboxLayout(ctypes.Structure):
    _fields_ = [
        ("cgroup_id", ctypes.c_uint64),
        ("files_epoch", ctypes.c_uint64),
        ("procs_epoch", ctypes.c_uint64),
        ("alive", ctypes.c_uint64),
        ("running", ctypes.c_uint64),
        ("untracked", ctypes.c_uint64),
        ("init_level", ctypes.c_uint64),
        ("has_patience", ctypes.c_uint64),
        ("has_tmpfs", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("tainted", ctypes.c_uint64),
        ("excluded", ctypes.c_uint64),
        ("ipc_before", ctypes.c_uint64),
        ("ipc_now", ctypes.c_uint64),
        ("ipc_space", ctypes.c_uint64),
        ("target_slot", ctypes.c_uint64),
        ("target_pid", ctypes.c_uint64),
        ("files", FilesBucketLayout * BUCKETS),
        ("procs", ProcsBucketLayout * BUCKETS),
    ]


class ExplanationLayout(ctypes.Structure):
    _fields_ = [
        ("slot", ctypes.c_uint64),
        ("cgroup_id", ctypes.c_uint64),
        ("what", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("depth", ctypes.c_uint32),
        ("complete", ctypes.c_uint32),
        ("comm", ctypes.c_char * 16),
        ("name", ctypes.c_char * NAME_LENGTH),
        ("parts", ctypes.c_char * PARTS_LENGTH),
    ]


class CensusLayout(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint32),
        ("tid", ctypes.c_uint32),
        ("fresh", ctypes.c_uint32),
        ("ran", ctypes.c_uint32),
        ("spoke", ctypes.c_uint32),
        ("comm", ctypes.c_char * 16),
    ]
