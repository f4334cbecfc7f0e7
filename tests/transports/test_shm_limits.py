"""Shm where the system grants little: each limit has an answer, and nothing hangs or leaks."""

from __future__ import annotations

import pytest
import transports.shm_children as children
from fork_server import fork_server
from transports.children import in_child

__all__ = ["fork_server"]


def test_a_sender_that_may_open_no_files_names_the_limit_and_goes_on_afterwards() -> None:
    error = in_child(children.sender_without_descriptors)
    assert "shared memory for a message to rank 1" in error
    assert "Too many open files" in error
    assert "(RLIMIT_NOFILE is " in error


@pytest.mark.parametrize("spare", [0, 1])
def test_a_receiver_that_may_open_no_files_names_the_limit_and_goes_on_afterwards(spare: int) -> None:
    errors = in_child(children.receiver_without_descriptors, spare)
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("a message of rank 0 was lost: ")
        assert "RLIMIT_NOFILE" in error or "Too many open files" in error


def test_no_memory_may_be_locked() -> None:
    in_child(children.without_locked_memory)


def test_without_a_thread_the_loop_copies() -> None:
    assert in_child(children.without_threads) == 1


@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_shared_memory_needs_no_room_in_dev_shm(options: str) -> None:
    in_child(children.with_full_shared_memory_folder, options)


def test_a_limit_of_the_size_of_files_is_named() -> None:
    error = in_child(children.with_small_files)
    assert "File too large" in error
    assert error.endswith("(RLIMIT_FSIZE is 1048576 bytes; ulimit -f)")


def test_auto_notices_a_limit_of_the_size_of_files() -> None:
    """The trial's slot has a page, and fits."""
    little, enough = in_child(children.hosts_with_small_files)
    assert little == "RLIMIT_FSIZE is 1048576 bytes (ulimit -f), and max_message_bytes is 4294967296"
    assert enough == ""


def test_auto_notices_a_system_that_reserves_no_memory() -> None:
    """A slot could be made and passed, and each message would fail."""
    obstacle = in_child(children.host_that_reserves_no_memory)
    assert obstacle.startswith("the system refuses what shared memory needs (memfd, pidfd): [Errno 1]")


def test_a_start_without_descriptors_names_the_limit_and_no_other_transport() -> None:
    error = in_child(children.start_without_descriptors)
    assert "Too many open files (RLIMIT_NOFILE is " in error
    assert "zmq" not in error


def test_a_limit_of_the_address_space_is_named_at_the_end_that_meets_it() -> None:
    sending, receiving = in_child(children.with_little_address_space)
    assert "shared memory for a message to rank 1" in sending
    assert "Cannot allocate memory" in sending
    assert "RLIMIT_AS, " in sending
    assert receiving.startswith("a message of rank 0 was lost: cannot map ")


def test_the_end_of_a_forked_child_gives_no_slot_back() -> None:
    in_child(children.fork_with_a_received_tensor)
