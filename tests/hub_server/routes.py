"""Which path asks for what."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_server import api, resolve
from tests.hub_server.access import check_gate, check_token
from tests.hub_server.call import Call, Origin
from tests.hub_server.reply import Refusal, Reply, json_reply, refusal
from tests.hub_server.state import HubState

Answer = Callable[[HubState, Call], Reply]

_READ = ("GET", "HEAD")
_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_PATH = r"(?P<path>.+)"


@dataclass(frozen=True, slots=True)
class Route:
    """A pattern of undecoded paths; ``file`` names the route where no file of a repo is meant."""

    origin: Origin
    methods: tuple[str, ...]
    pattern: str
    answer: Answer
    file: str = ""


def _auth_check(state: HubState, call: Call) -> Reply:
    state.repo_of(call)
    check_gate(state, call)
    return json_reply({})


_MODELS = rf"/api/models/{_REPO}"
_ROUTES = (
    Route("hub", _READ, _MODELS, api.model_info, "api/model"),
    Route("hub", _READ, rf"{_MODELS}/revision/{_REVISION}", api.model_info, "api/revision"),
    Route("hub", _READ, rf"{_MODELS}/tree/{_REVISION}(?:/{_PATH})?", api.tree, "api/tree"),
    Route("hub", ("POST",), rf"{_MODELS}/paths-info/{_REVISION}", api.paths_info, "api/paths-info"),
    Route("hub", _READ, rf"{_MODELS}/refs", api.refs, "api/refs"),
    Route("hub", _READ, rf"{_MODELS}/auth-check", _auth_check, "api/auth-check"),
    Route(
        "hub",
        _READ,
        rf"/api/resolve-cache/models/{_REPO}/{_REVISION}/{_PATH}",
        resolve.resolve_cache,
    ),
    Route("hub", _READ, rf"/{_REPO}/resolve/{_REVISION}/{_PATH}", resolve.resolve),
    Route("cdn", _READ, rf"/{_REPO}/{_REVISION}/{_PATH}", resolve.cdn),
)


def _nothing_here(state: HubState, call: Call) -> Reply:
    raise refusal(404, "Sorry, we can't find the page you are looking for.")


def route(
    origin: Origin, method: str, url: str, headers: Mapping[str, str], body: bytes
) -> tuple[Call, Answer]:
    """The request in parts, and what answers it."""
    parts = urlsplit(url)
    query = parse_qs(parts.query, keep_blank_values=True)
    for each in _ROUTES:
        match = re.fullmatch(each.pattern, parts.path)
        if match and each.origin == origin and method in each.methods:
            found = {name: unquote(text or "") for name, text in match.groupdict().items()}
            found.setdefault("revision", "main")
            file = each.file or found["path"]
            call = Call(origin, method, parts.path, query, headers, body, file, **found)
            return call, each.answer
    return Call(origin, method, parts.path, query, headers, body, parts.path), _nothing_here


def answered(state: HubState, call: Call, answer: Answer) -> Reply:
    """What the hub, or its CDN, says to ``call`` when nothing goes wrong."""
    try:
        if call.origin == "hub":
            check_token(state, call)
        return answer(state, call)
    except Refusal as refused:
        return refused.reply
