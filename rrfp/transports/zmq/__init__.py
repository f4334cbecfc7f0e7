"""Messages over ZeroMQ: tcp between hosts, ipc within one."""
