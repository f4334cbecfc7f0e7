"""A hint and a transport for RRFP, made to be copied: `ShortQueue` and `UdsTransport`."""

from rrfp_plugin_example.short_queue import ShortQueue
from rrfp_plugin_example.uds.transport import UdsTransport

__all__ = ["ShortQueue", "UdsTransport"]
