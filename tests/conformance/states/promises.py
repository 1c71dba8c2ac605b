"""The promised outcome of each process state that is not restored, with the reason printed in docs/states.md."""

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
    unix_sender__unix_time="read the message",
    unix_waiting="accept",
    tcp_peek_offset="SO_PEEK_OFF",
    traced_child="detach the debugger",
    tcp_waiting="accept",
    unix_urgent__tcp_urgent__unix_senders__unix_sender_gone="read it first",
)

_NAMED = _item(
    "named",
    inotify_queue="events from before the restore are lost",
    epoll_edge_spent="the edge is reported once more, which epoll allows",
    epoll_once="disarmed, but errors and hang-ups are still reported",
    epoll_closed="listed under the number of the duplicate; events are the same",
    epoll_busy="affects speed only",
    write_hint="affects speed only",
    directory="O_DIRECTORY matters only to open()",
    file_temporary="the unnamed file is restored; linkat() cannot name it any more",
    memory_times="content is the same",
    memory_ahead="allocated when it is written",
    continued_child="the parent sees WCONTINUED once, before or after the restore",
    dead_clone="waited for like any dead child; exit status is the same",
    dead_child_user="exit status is the same; si_uid is root",
    semaphore_undo="the value is the same; earlier operations are not undone at exit",
    shared_anonymous="same shared memory; /proc/PID/maps shows another name",
    locked_in_future="locked mappings stay locked; new ones are not locked automatically",
    locked_on_fault="locked and populated at once instead of on fault",
    so_attach_reuseport="the kernel chooses the receiving socket again",
    ipv6_mtu="not readable; packets follow the route MTU",
    tcp_quickack="the kernel changes it itself (tcp(7))",
    tcp_maxseg_new="on a new socket only: segments have the default size",
    tcp_fastopen_inherited="has no effect once a connection is accepted, when it cannot be set either",
    tcp_window_clamp="the kernel changes it while data flows",
    so_reserve_mem="affects speed only",
    so_incoming_cpu="the kernel stores the CPU of the last packet",
    udp_error="errors of earlier datagrams are lost",
    tcp_ended__tcp_reset__tcp_refused="closed connection; local address and pending error are lost",
    unix_named_client__unix_path_client__unix_packet_client="the connection is the same; getsockname() gives no name",
    tcp_peer_gone="received bytes can be read; then EOF or EPIPE",
    start_time__processor_time__dead_childrens_time__memory_peak__bytes_moved="counted from the restore",
    auto_group="treated as a new session",
    core_filter="sandboxes write no core files",
    futex_hash="affects speed only",
    merge_all_memory="affects memory use only",
    memory_errors="the host's default applies",
)

_CONFINED = "forbidden"
_UNSEEN = "hidden"
_LACKING = "unsupported"

_IMPOSSIBLE = _item(
    "impossible",
    terminal_locked__mount_descriptor__performance_counter__kernel_program__ring__fanotify_group=_CONFINED,
    filter_listener__filter_logs__own_namespace__keyring__memory_policy__policy_deadline=_CONFINED,
    policy_round_robin__policy_fifo__user_faults__ipv6_transparent__ip_router_alert__ip_nodefrag=_CONFINED,
    ip_hdrincl__ip_transparent__so_debug__so_prefer_busy_poll__so_mark__machine_socket=_CONFINED,
    kernel_cipher__packet_socket__raw_socket__namespace_limits__io_ports__io_flusher=_CONFINED,
    landlock__landlock_rules__thread_landlock__sealed__protection_key=_UNSEEN,
    multipath_tcp="forbidden, since CRIU does not support it; programs fall back to TCP",
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
