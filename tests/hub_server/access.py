"""Who is let in, and what the hub says to the others."""

from __future__ import annotations

from tests.hub_server.call import Call
from tests.hub_server.reply import refusal
from tests.hub_server.state import HubState


def check_token(state: HubState, call: Call) -> None:
    """Refuse a wrong, an expired and, where one is needed, a missing token: always 401.

    Without a token the hub gives no error code, so that nobody learns whether a private repository
    is there.
    """
    if state.token is None and call.token not in state.expired_tokens:
        return
    if call.token is None:
        challenge = {"WWW-Authenticate": 'Bearer realm="Authentication required"'}
        raise refusal(401, "Invalid username or password.", headers=challenge)
    if call.token in state.expired_tokens:
        raise refusal(401, 'User Access Token "test" is expired')
    if call.token != state.token:
        raise refusal(401, "Invalid credentials in Authorization header")


def check_gate(state: HubState, call: Call) -> None:
    """Refuse files of a gated repository: 401 to strangers, 403 to those whose token is known."""
    if not state.gated:
        return
    restricted = f"Access to model {call.repo} is restricted"
    if call.token is None:
        how = "You must have access to it and be authenticated to access it. Please log in."
        raise refusal(401, f"{restricted}. {how}", "GatedRepo")
    raise refusal(403, f"{restricted} and you are not in the authorized list.", "GatedRepo")
