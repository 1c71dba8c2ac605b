"""What is promised of each state of a process that does not simply come back.

Owns: the promise and its reason, as docs/states.md says them. Does not own: making and looking (native/states,
:mod:`tests.conformance.states.classify`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """What becomes of a state.

    `kind`: restored; refused (`reason` is part of the hint that the refusal says); named (`reason` says why it does
    not matter); impossible (`reason` says why no program in a sandbox has it).
    """

    kind: str
    reason: str = ""


def _item(kind: str, **reasons: str) -> dict[str, Promise]:
    return {name: Promise(kind, reason) for names, reason in reasons.items() for name in names.split("__")}


_REFUSED = _item(
    "refused",
    proc_namespace="close it",
    event_semaphore="use a POSIX semaphore or a pipe",
    pressure_trigger="close it before the checkpoint",
    threads_directory="CLONE_FS",
    threads_descriptors="CLONE_FILES",
    shared_directory="CLONE_FS",
    shared_memory_space="CLONE_VM",
    personality__personality_32__thread_personality="setarch",
    end_reported_otherwise="SIGCHLD",
    pipe_both_ways="use a FIFO",
    deleted_file_in_the_way="remove it",
    memory_attributes="removexattr",
    owner_thread="F_SETOWN",
    proc_directory="hold a pidfd",
    thread_descriptor="PIDFD_THREAD",
    pipe_packets="O_DIRECT",
    queue__queue_notice="message queue",
    secret_memory="memfd_secret",
    udp_cork_option__udp_corked="UDP_CORK",
    netlink_answer="read the answer",
    netlink_member="bind it",
    unix_sender="read the message",
    unix_waiting="accept",
    traced_child="detach the debugger",
    tcp_waiting="accept",
    unix_urgent__tcp_urgent__unix_senders__unix_sender_gone="read it first",
)

_NAMED = _item(
    "named",
    inotify_queue="what happened to a watched file before the restore is not told again",
    epoll_edge_spent="an edge is told once more, as an edge may always be",
    epoll_once="it is disarmed, but an error or a hang-up of the descriptor is told",
    epoll_closed="it is listed under the number of the duplicate; what it tells is the same",
    epoll_busy="how busily epoll polls network devices: speed alone",
    write_hint="a hint about the life of data: speed alone",
    directory="it is a directory all the same; O_DIRECTORY matters when it is opened",
    file_temporary="O_TMPFILE matters when it is opened; afterwards it is a file without a name",
    memory_times="a file without a name is in no listing; its content is the same",
    memory_ahead="memory that holds nothing is taken when it is written",
    continued_child="a parent is told of a child that goes on once, before or after; not again",
    dead_clone="it is waited for as any dead child; how it ended is the same",
    dead_child_user="the wait tells how the child ended; whose it was is told as root's",
    semaphore_undo="the value is the same; a process that ends later does not undo what it did before",
    shared_anonymous="the memory is the same and shared; /proc/PID/maps names it otherwise",
    locked_in_future="memory that is mapped after the restore is not locked by itself; what was locked is",
    locked_on_fault="it is locked, and read in at once instead of at the first access",
    so_attach_reuseport="which socket of a group gets a packet is chosen by the kernel again",
    ipv6_mtu="nobody can ask for it; packets have the size that the route allows",
    tcp_quickack="the kernel changes it by itself (tcp(7))",
    tcp_maxseg_new="of a socket that neither listens nor is connected yet: its segments have the usual size",
    tcp_window_clamp="the kernel changes it by itself while data flow",
    so_reserve_mem="memory set aside for a socket is taken when data come: speed alone",
    so_incoming_cpu="the kernel notes the processor of the last packet there",
    udp_error="an error of a datagram that was sent before is not told",
    tcp_ended__tcp_reset__tcp_refused="it is over; its own address and an unfetched error are not told again",
    tcp_peer_gone="what was received can be read; then comes the end, or EPIPE",
    start_time__processor_time__dead_childrens_time__memory_peak__bytes_moved="the kernel counts from the restore on",
    auto_group="a session has its share of the processor as if it were new",
    core_filter="sandboxes write no core files",
    futex_hash="how the kernel sorts waiters: speed alone",
    merge_all_memory="whether the host may merge equal pages: memory alone",
    memory_errors="how a broken memory chip is told; the host's default",
)

_CONFINED = "not allowed in a sandbox"
_UNSEEN = "not allowed in a sandbox, since it could not be seen at the dump; programs find a kernel without it"
_LACKING = "this kernel or processor lacks it"

_IMPOSSIBLE = _item(
    "impossible",
    terminal_locked__mount_descriptor__performance_counter__kernel_program__ring__fanotify_group=_CONFINED,
    filter_listener__filter_logs__own_namespace__keyring__memory_policy__policy_deadline=_CONFINED,
    policy_round_robin__policy_fifo__user_faults__ipv6_transparent__ip_router_alert__ip_nodefrag=_CONFINED,
    ip_hdrincl__ip_transparent__so_debug__so_prefer_busy_poll__so_mark__machine_socket=_CONFINED,
    kernel_cipher__packet_socket__raw_socket__namespace_limits__io_ports__io_flusher=_CONFINED,
    landlock__landlock_rules__thread_landlock__sealed__protection_key=_UNSEEN,
    multipath_tcp="not allowed in a sandbox, since CRIU does not know it; programs fall back to TCP",
    local_descriptor_table__tile_permission__tagged_addresses__cpuid_fault__user_dispatch=_UNSEEN,
    no_huge_pages_unless_advised__timer_numbers__tcp_signed=_UNSEEN,
    core_scheduling__no_executable_gain__l1d_flush__indirect_branch__store_bypass=_UNSEEN,
    no_time_stamp_counter__directory_notice=_UNSEEN,
    terminal_discipline__file_handle__utilisation_clamp__huge_mapping__tcp_ulp=_LACKING,
    thread_area__shadow_stack__mapping_name=_LACKING,
)

PROMISES: dict[str, Promise] = _REFUSED | _NAMED | _IMPOSSIBLE

#: A process that did nothing sees the same: rows of what every process has, or of numbers that are the default here.
ALWAYS = {
    "limit_core": "the sandbox sets it",
    "limit_nice": "the sandbox sets it",
    "limit_priority": "the sandbox sets it",
    "restartable_sequence": "the C library registers it",
    "environment": "every process has it",
    "program_file": "every process has it",
    "start_time": "every process has it",
}
