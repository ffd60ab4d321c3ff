"""How the hub is reached: by default as the user has set up huggingface_hub."""

from __future__ import annotations

from dataclasses import dataclass, field

from huggingface_hub import HfApi, constants

_CONNECT_S = 15.0
_STALL_S = 60.0


def _stall_s() -> float:
    """What the user has set; huggingface_hub's own default gives up too soon on slow storage."""
    chosen = constants.HF_HUB_DOWNLOAD_TIMEOUT
    return _STALL_S if chosen == constants.DEFAULT_DOWNLOAD_TIMEOUT else float(chosen)


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Endpoint, token and patience of one server.

    Args:
        endpoint: Root address; None takes huggingface_hub's (``HF_ENDPOINT``).
        token: None takes huggingface_hub's (``HF_TOKEN``, or the one that `hf auth login` stored).
        stall_s: Seconds without a byte after which a connection is given up: those of
            ``HF_HUB_DOWNLOAD_TIMEOUT`` where it is set to other than its default, else 60.
    """

    endpoint: str | None = None
    token: str | None = None
    stall_s: float = field(default_factory=_stall_s)

    @property
    def api(self) -> HfApi:
        """A client of the hub's listing and metadata routes."""
        return HfApi(endpoint=self.endpoint, token=self.token, library_name="quantmill")

    @property
    def root(self) -> str:
        """The endpoint that is really used."""
        return self.endpoint or constants.ENDPOINT

    @property
    def timeouts(self) -> tuple[float, float, float, float]:
        """Seconds to connect, between two reads, between two writes, and for a free connection."""
        return min(_CONNECT_S, self.stall_s), self.stall_s, self.stall_s, self.stall_s
