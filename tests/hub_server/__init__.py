"""A model hub on loopback: the routes that the hub's client asks for, and faults on demand."""

from tests.hub_server.effects import (
    Cut,
    Delay,
    ExpiredLink,
    Flip,
    Hangup,
    IgnoredRange,
    Slow,
    Stall,
    Status,
    Truncated,
)
from tests.hub_server.faults import Fault
from tests.hub_server.log import Request
from tests.hub_server.server import HubServer

__all__ = [
    "Cut",
    "Delay",
    "ExpiredLink",
    "Fault",
    "Flip",
    "Hangup",
    "HubServer",
    "IgnoredRange",
    "Request",
    "Slow",
    "Stall",
    "Status",
    "Truncated",
]
