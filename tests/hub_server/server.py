"""Two listeners on loopback, one for the hub and one for its CDN, with everything behind them."""

from __future__ import annotations

import os
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hub_server.call import Origin
from tests.hub_server.handler import Handler
from tests.hub_server.state import HubState

_POLL_S = 0.01
_MAX_STOP_S = 5.0


class _Listener(ThreadingHTTPServer):
    """One port of the server; knows its open connections, so that it can end them."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, origin: Origin, state: HubState) -> None:
        self.origin = origin
        self.state = state
        self.stopping = threading.Event()
        self.errors: list[BaseException] = []
        self._connections: set[socket.socket] = set()
        self._changed = threading.Condition()
        super().__init__(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name=f"hub server: {origin}", daemon=True
        )

    @property
    def url(self) -> str:
        """Scheme, address and port."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more, end what is open, and wait for the handlers."""
        self.stopping.set()
        self.shutdown()
        self._thread.join(_MAX_STOP_S)
        self.server_close()
        with self._changed:
            for connection in self._connections:
                _hang_up(connection)
            self._changed.wait_for(lambda: not self._connections, _MAX_STOP_S)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], address: object
    ) -> None:
        """Remember the connection before its thread starts."""
        assert isinstance(request, socket.socket)
        with self._changed:
            self._connections.add(request)
        super().process_request(request, address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """End the connection and forget it."""
        assert isinstance(request, socket.socket)
        super().shutdown_request(request)
        with self._changed:
            self._connections.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: object, address: object) -> None:
        """Keep what a handler did not expect; that a client went away is no error."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            self.errors.append(error)


class HubServer(HubState):
    """A hub that runs inside ``with``: see `HubState` for what can be set and asked.

    ``url`` is the endpoint for a client; ``cdn_url`` is another origin, as in life, so that a
    client can be seen to keep its token from it.

    Raises:
        Exception: On leaving, what a handler stumbled over (unless the test fails anyway).
    """

    def __enter__(self) -> Self:
        self._listeners = [_Listener("hub", self), _Listener("cdn", self)]
        self.url, self.cdn_url = (listener.url for listener in self._listeners)
        for listener in self._listeners:
            listener.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for listener in self._listeners:
            listener.stop()
        stumbled = [error for listener in self._listeners for error in listener.errors]
        if error is None and stumbled:
            raise stumbled[0]

    def client_environment(self, home: Path) -> dict[str, str]:
        """The environment of a process whose client talks to this hub and keeps all in ``home``."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
