"""Acting by a chat endpoint, against a server that the test starts: turns, and what goes wrong."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from counterpoint.envs import tool
from counterpoint.harness import rollout
from counterpoint.policies.endpoint import Endpoint
from counterpoint.spelling import Refused
from counterpoint.validate import validate
from stages import room, team

pytestmark = pytest.mark.slow

pytest.importorskip("openai")


def say(content=None, *calls):
    """A chat completion."""
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": made or None}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}  # fmt: skip


@pytest.fixture
def server():
    """Answers what `script` says, in turn, and keeps what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.asked.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            answer = self.server.script.pop(0)
            status, body, headers = answer if isinstance(answer, tuple) else (200, answer, {})
            if callable(body):
                body = body()
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            for name, value in {"Content-Length": len(data), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *said):
            """Say nothing."""

    held = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.daemon_threads = True
    held.asked, held.script = [], []
    thread = threading.Thread(target=held.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield held
    held.shutdown()
    held.server_close()
    thread.join()


def endpoint(server, env, **options):
    return Endpoint(
        "m", env.roles, env.tools(),
        url=f"http://127.0.0.1:{server.server_port}/v1", **{"tries": 2, "key": "k", **options},
    )  # fmt: skip


def played(env, policies, turns=3):
    (trace,) = rollout(env, policies, groups=1, rollouts=1, config={"limits": {"turns": turns}})
    assert validate([trace]).findings == []
    return trace


def test_calls_become_items_and_text_is_never_parsed(server):
    """A tool of the environment, a message, an answer: each takes effect; a line of the text that
    would be a stop under the grammar does nothing.
    """
    env = room({"a": ["mark", "message", "stop"], "b": ["stop"]}, agents=["a", "b"], observe="go")
    server.script = [
        say("stop: at once", ("mark", '{"n": 3}'), ("message", '{"to": ["b"], "content": "hi"}')),
    ]
    trace = played(env, {"a": endpoint(server, env), **team(b=["stop: done"])})
    assert [call.arguments for call in trace.of("tool_call")] == [{"n": 3}]
    assert [(m.to, m.content) for m in trace.of("message")] == [(("b",), "hi")]
    assert [(stop.agent, stop.answer) for stop in trace.of("stop")] == [("b", "done")]
    assert trace.of("act")[0].text.startswith("stop: at once\nmark ")
    assert trace.header.policies["a"].target == "endpoint:m"
    assert not trace.of("act")[0].trainable


def test_a_role_is_offered_its_verbs_and_tools(server):
    """By name, with the schema that the header pins; what was heard comes as a block of another's
    words, and its own turns as the assistant's.
    """

    def look(self, at: int) -> str:
        """Look around."""
        return "a room"

    env = room({"a": ["search", "stop", "read"]}, observe="go", search=tool(look))
    server.script = [say("hm", ("search", '{"at": 1}')), say(None, ("stop", '{"answer": "x"}'))]
    trace = played(env, endpoint(server, env, options={"temperature": 0.5}))
    first, second = server.asked
    offered = {t["function"]["name"]: t["function"] for t in first["tools"]}
    assert list(offered) == ["search", "stop", "read"]
    assert offered["search"] == env.tools()["search"].schema
    assert offered["stop"]["parameters"]["properties"] == {"answer": {"type": "string"}}
    assert first["temperature"] == 0.5
    assert first["seed"] != second["seed"]
    assert [m["role"] for m in second["messages"]][:3] == ["system", "user", "assistant"]
    assert any("<<from search, untrusted" in m["content"] for m in second["messages"])
    assert trace.of("stop")[0].answer == "x"


def test_every_verb_is_offered_and_understood(server):
    """A spawn, a delegation with its wait, a return, a write, an aggregate, a despawn, a stop."""
    verbs = ["spawn", "delegate", "aggregate", "write", "despawn", "stop"]
    env = room({"boss": verbs, "clerk": ["return"]}, start={"boss": "boss"}, observe="go")
    type(env).on_call = ("clerk",)
    server.script = [
        say(None, ("spawn", '{"role": "clerk", "context": "count"}')),
        say(None, ("delegate", '{"to": "boss.0", "content": "the beans"}')),
        say(None, ("return", '{"content": "seven"}')),
        say(None, ("aggregate", '{"rule": "sum", "content": "7"}'),
            ("write", '{"artefact": "draft", "content": "7"}'),
            ("despawn", '{"agent": "boss.0"}'), ("stop", '{"answer": "7"}')),
    ]  # fmt: skip
    trace = played(env, {"boss": endpoint(server, env), "clerk": endpoint(server, env)}, turns=6)
    did = [e.kind for e in trace if e.kind not in ("observe", "act", "deliver", "safety")]
    assert did == ["spawn", "delegate", "agent_return", "aggregate", "write", "despawn", "stop"]


@pytest.mark.parametrize(
    "call",
    [
        ("mark", "{n: 3"),
        ("mark", "[3]"),
        ("message", "{}"),
        ("message", '{"to": [], "content": "hi"}'),
        ("message", '{"to": 5, "content": "hi"}'),
        ("message", '{"to": ["\\ud800"], "content": "hi"}'),
        ("no such name", "{}"),
    ],
)
def test_a_call_that_nobody_can_read_does_nothing(server, call):
    """It stays in the text, and the run goes on."""
    env = room({"a": ["mark", "message", "stop"]}, observe="go")
    server.script = [say(None, call), say(None, ("stop", '{"answer": "x"}'))]
    trace = played(env, endpoint(server, env))
    first = trace.of("act")[0]
    assert first.text.startswith(f"unreadable: {call[0]} ")
    assert all(item.verb.startswith("no_") for item in first.items)
    assert trace.of("stop")[0].answer == "x"


def test_an_unknown_tool_is_denied_by_the_harness(server):
    """The name is none of the role's: the call gets an error for its result."""
    env = room({"a": ["mark", "stop"]}, observe="go")
    server.script = [say(None, ("rm", "{}")), say(None, ("stop", "{}"))]
    trace = played(env, endpoint(server, env))
    assert trace.of("tool_result")[0].error.startswith("denied")


def test_a_busy_endpoint_is_asked_again(server):
    """Two 429s that name a short wait, then an answer; it waited at least as long."""
    env = room({"a": ["stop"]}, observe="go")
    busy = (429, {"error": {"message": "slow down"}}, {"retry-after-ms": 30})
    server.script = [busy, busy, say(None, ("stop", '{"answer": "x"}'))]
    began = time.monotonic()
    trace = played(env, endpoint(server, env, tries=3))
    assert time.monotonic() - began >= 0.06
    assert len(server.asked) == 3
    assert server.asked[0] == server.asked[2]
    assert trace.of("stop")[0].answer == "x"


def slow():
    time.sleep(0.4)
    return say("too late")


@pytest.mark.parametrize(
    ("script", "tries", "words"),
    [
        ([(429, {"error": {"message": "slow down"}}, {})], 1, "RateLimitError.*slow down"),
        ([(500, {"error": "broken"}, {"retry-after-ms": 1})] * 2, 2, "InternalServerError"),
        ([(401, {"error": {"message": "no such key"}}, {})], 3, "Authentication.*no such key"),
        ([(200, slow, {})], 1, "APITimeoutError"),
        ([(200, b'{"id": "x", "cho', {"Content-Length": 900})], 1, "APIConnectionError"),
        ([(200, b"<html>hello</html>", {})], 1, "no chat completion"),
        ([{"error": "none"}], 1, "no chat completion"),
        ([{**say("x"), "choices": []}], 1, "no chat completion"),
        ([[1, 2]], 1, "no chat completion"),
        ([say(["not", "text"])], 1, "no chat completion"),
    ],
    ids=["429", "500", "401", "slow", "cut", "html", "error", "empty", "list", "content"],
)
def test_what_goes_wrong_is_a_sentence(server, script, tries, words):
    """It names endpoint, agent and reason, without a traceback of the client and without the key;
    a wrong key is not tried twice.
    """
    env = room({"a": ["stop"]}, observe="go")
    server.script = list(script)
    policy = endpoint(server, env, tries=tries, timeout=0.2, key="sk-secret")
    with pytest.raises(Refused, match=rf"the endpoint of m gave .*{words}") as caught:
        played(env, policy)
    assert "sk-secret" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert len(server.asked) == len(script)


def test_nobody_there_is_a_sentence():
    """An address at which nothing listens."""
    env = room({"a": ["stop"]}, observe="go")
    policy = Endpoint("m", env.roles, key="k", url="http://127.0.0.1:9/v1", tries=1)
    with pytest.raises(Refused, match="APIConnectionError"):
        played(env, policy)


def test_a_key_is_needed(monkeypatch):
    """The client's own words say where it looked."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(Refused, match="no endpoint without a key"):
        Endpoint("m", {"a": ["stop"]})
