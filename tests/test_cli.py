"""The command line, run as a stranger runs it: as a process, on real files."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from counterpoint import Recorder, Steps, gigpo
from counterpoint.credit import METHODS
from counterpoint.formats import FORMATS
from counterpoint.games import GAMES

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parent.parent
TAU = DATA / "tau_bench" / "gpt-4o-airline.json.gz"


def run(*arguments, cwd=None, **options):
    """Run the command line and return the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "counterpoint.cli", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def as_json(*arguments, cwd=None, status=0):
    """Run a command with --json and decode what it prints."""
    done = run(*arguments, "--json", cwd=cwd)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four recorded runs of one task: one failed, three succeeded."""
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    with Recorder(path) as rec:
        for i in range(4):
            with rec.trace(task_id="capital") as t:
                t.act("planner", "look it up")
                t.message("planner", to="worker", content="look it up \x1b[31m$x$ <b>")
                t.act("worker", "search")
                call = t.tool_call("worker", "search", {"q": "Peru"})
                t.tool_result(call, "Lima")
                t.act("worker", "Lima")
                t.stop("worker", answer="Lima")
                t.reward(float(i > 0))
    return path


@pytest.fixture(scope="module")
def tau(tmp_path_factory):
    """The whole of tau-bench's airline runs, imported, and what the import said."""
    path = tmp_path_factory.mktemp("tau") / "tau.jsonl"
    return path, as_json("import", "openai_chat", TAU, "-o", path)


def assert_sentence(done, status=1):
    """Bad input ends in one line on stderr and in no traceback."""
    assert done.returncode == status, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


# -- real runs


def test_import_of_tau_bench_counts_what_its_readme_counts(tau):
    """200 runs, 5,308 messages, every call with its own result though 49 runs reuse ids."""
    path, told = tau
    assert (told["traces"], told["records"]) == (200, 5308)
    reused = {finding["trace_id"] for finding in told["findings"]}
    assert {finding["rule"] for finding in told["findings"]} == {"W03"}
    assert len(reused) == 49
    kinds = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert kinds.count("tool_call") == kinds.count("tool_result") == 1164


def test_grpo_on_tau_bench_gives_the_published_figures(tau):
    """104 of 200 runs earn credit, 24 of 50 tasks teach nothing, and the values are known."""
    path, _ = tau
    told = as_json("credit", "grpo", path)
    nonzero = {unit["trace_id"] for unit in told["units"] if unit["value"]}
    assert len(nonzero) == 104
    assert told["diagnostics"]["groups_without_signal"] == 24
    values = {round(unit["value"], 6) for unit in told["units"]}
    # k successes of 4, ddof 1: one success (1 - .25)/(.5 + 1e-6), and so on
    assert values == {1.499997, -0.499999, 0.866024, -0.866024, 0.499999, -1.499997, 0.0}
    assert (told["unit"], told["estimand"], told["identified"]) == ("turn", "outcome", "heuristic")


def test_who_and_when_labels_are_checked_against_the_runs(tmp_path):
    """W02 names just the three files in which the blamed agent is silent at the blamed step."""
    folder = DATA / "who_and_when" / "algorithm_generated"
    told = as_json("import", "who_and_when", folder, "-o", tmp_path / "ww.jsonl")
    assert (told["traces"], told["records"]) == (126, 1099)
    odd = {Path(f["file"]).name for f in told["findings"] if f["rule"] == "W02"}
    assert odd == {"14.json", "15.json", "59.json"}


def test_raised_trust_in_the_surveys_example_is_found(tmp_path):
    """The survey's only example trusts a return that came from an untrusted result: V10, once."""
    path = tmp_path / "ex.jsonl"
    done = run("import", "mas_rl_v1", DATA / "mas_rl_v1" / "example_trace.json", "-o", path)
    assert done.returncode == 0
    told = as_json("validate", path, status=1)
    assert [(f["rule"], f["seq"]) for f in told["findings"]] == [("V10", 6)]
    lines = path.read_text().splitlines()
    assert json.loads(lines[1 + 6])["type"] == "agent_return"


def test_survey_format_comes_back_as_it_went_in(tmp_path):
    """Import and export give back 8 events, 8 typed edges, rewards and costs."""
    source = DATA / "mas_rl_v1" / "example_trace.json"
    run("import", "mas_rl_v1", source, "-o", tmp_path / "ex.jsonl")
    out = tmp_path / "out.json"
    assert run("export", "mas_rl_v1", tmp_path / "ex.jsonl", "-o", out).returncode == 0
    before, after = json.loads(source.read_text()), json.loads(out.read_text())
    assert len(after["events"]) == len(after["edges"]) == 8
    edges = [{(e["src"], e["dst"], e["type"]) for e in d["edges"]} for d in (before, after)]
    assert edges[0] == edges[1]
    for name in ("rewards", "costs", "metrics"):
        assert after[name] == before[name]


# -- one row of every table


@pytest.mark.parametrize(
    ("what", "table"), [("methods", METHODS), ("formats", FORMATS), ("games", GAMES)]
)
def test_list_shows_every_row_of_its_table(what, table):
    """`list` reads the tables that the library reads."""
    assert [row["name"] for row in as_json("list", what)] == list(table)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_credits_or_refuses_real_runs(tau, method):
    """A method whose needs are met gives one number per turn; another says what it needs."""
    path, _ = tau
    done = run("credit", method, path, "--json")
    if done.returncode == 0:
        assert len(json.loads(done.stdout)["units"]) == 2454
    else:
        assert_sentence(done)
        assert "needs" in done.stderr


def test_list_methods_has_the_promised_keys():
    """Other programs may rely on these keys."""
    keys = ["name", "family", "unit", "estimand", "needs", "conserves", "unbiased", "paper"]
    assert list(as_json("list", "methods")[0]) == keys


# -- credit


def test_several_methods_give_a_list(runs):
    """Two methods on one file are two results, in the order asked."""
    told = as_json("credit", "grpo,reinforce", runs)
    assert [result["method"] for result in told] == ["grpo", "reinforce"]


def test_explain_puts_every_intermediate_beside_the_number(runs):
    """(outcome − mean)/(std + eps) can be recomputed from what --explain prints."""
    told = as_json("credit", "grpo", runs, "--explain")
    for unit in told["units"]:
        expected = (unit["outcome"] - unit["mean"]) / (unit["std"] + told["params"]["eps"])
        assert unit["value"] == pytest.approx(expected, abs=1e-12)


def test_options_reach_the_method(runs):
    """Without the standard deviation three successes of four earn 1/4."""
    told = as_json("credit", "grpo", runs, "--set", "normalize_std=false")
    assert sorted({unit["value"] for unit in told["units"]}) == [-0.75, 0.25]
    assert told["params"]["normalize_std"] is False


def test_users_own_method_runs_by_file_and_name(runs):
    """A function of one's own needs no row in any table."""
    mine = f"{ROOT / 'examples' / 'my_method.py'}:centred"
    told = as_json("credit", mine, runs)
    assert sorted({unit["value"] for unit in told["units"]}) == [-0.75, 0.25]


def test_error_inside_a_users_method_shows_where(runs, tmp_path):
    """Somebody's own bug is shown with its traceback; it is not bad input."""
    (tmp_path / "mine.py").write_text("def broken(steps):\n    return steps.nothing_of_the_kind\n")
    done = run("credit", f"{tmp_path / 'mine.py'}:broken", runs)
    assert done.returncode == 1
    assert "nothing_of_the_kind" in done.stderr
    assert "Traceback" in done.stderr


COSAC = ["cosac", "T2", "--set", "ridge=0.1", "--set", "continuations=2"]


@pytest.mark.parametrize("asks", [["hcapo", "T3"], COSAC])
def test_score_asks_the_game_where_a_method_needs_a_policy(asks):
    """The game says what its agents would choose, and how likely they find what they chose."""
    told = as_json("score", *asks, "--groups", "4")
    assert told["n"] == 4 * 8 * 4
    assert -1 < told["pearson"] < 1


def test_credit_file_says_which_unit_received_what(runs, tmp_path):
    """The credit file names trace, digest, unit and value, and scores against itself perfectly."""
    out = tmp_path / "credit.jsonl"
    told = as_json("credit", "grpo", runs, "-o", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("value", 0.0) for line in lines] == [u["value"] or 0.0 for u in told["units"]]
    assert {line["type"] for line in lines} == {"credit"}
    same = as_json("score", out, out)
    assert same["pearson"] == pytest.approx(1.0)
    assert same["only_in_first"] == same["only_in_second"] == 0
    rows = as_json("show", runs, "--summary", "--credit", out)
    assert [row["credited_units"] for row in rows] == [3, 3, 3, 3]


def test_late_rewards_join_by_digest(runs, tmp_path):
    """A judge's reward that came later counts, unless the trace was changed since."""
    lines = runs.read_text().splitlines()
    seals = [json.loads(line) for line in lines if '"type":"seal"' in line]
    late = tmp_path / "late.jsonl"
    line = {"type": "late_reward", "trace_id": seals[0]["trace_id"], "amount": 2.0}
    late.write_text(json.dumps({**line, "digest": seals[0]["digest"]}) + "\n")
    told = as_json("credit", "reinforce", runs, "--late", late)
    assert told["units"][0]["value"] == 2.0
    late.write_text(json.dumps({**line, "digest": "00"}) + "\n")
    assert_sentence(run("credit", "reinforce", runs, "--late", late))


# -- a trainer's batch


@pytest.fixture
def batch():
    """Two tasks of two trajectories in verl-agent's columns."""
    return {
        "uid": np.array(["q1"] * 6 + ["q2"] * 4),
        "traj_uid": np.array(["a", "a", "a", "b", "b", "b", "c", "c", "d", "d"]),
        "anchor_obs": np.array(["s0", "s1", "s2", "s0", "s1", "s1", "s0", "s3", "s0", "s3"]),
        "rewards": np.array([0, 0, 1, 0, 0, 0, 0, 0.5, 0, 1.0]),
        "step_rewards": np.array([0.9025, 0.95, 1, 0, 0, 0, 0.475, 0.5, 0.95, 1]),
        "response_mask": np.array([[1, 1, 0]] * 9 + [[1, 1, 1]]),
    }


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_batch_comes_back_with_advantages(batch, tmp_path, suffix):
    """The same rows in the same order, and GiGPO's advantages on the tokens of the mask."""
    import pyarrow
    import pyarrow.parquet

    path, out = tmp_path / f"batch.{suffix}", tmp_path / f"out.{suffix}"
    if suffix == "npz":
        np.savez(path, **batch)
    else:
        columns = {k: list(v) if v.ndim == 2 else v for k, v in batch.items()}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert run("credit", "gigpo", path, "-o", out).returncode == 0
    if suffix == "npz":
        with np.load(out) as held:
            given = {name: held[name] for name in held.files}
    else:
        table = pyarrow.parquet.read_table(out)
        given = {name: np.array(table[name].to_pylist()) for name in table.column_names}
    assert list(given) == [*batch, "advantages"]
    for name, values in batch.items():
        assert (given[name] == values).all()
    steps = Steps.from_columns(
        group=batch["uid"],
        rollout=batch["traj_uid"],
        anchor=batch["anchor_obs"],
        reward=batch["rewards"],
        step_return=batch["step_rewards"],
    )
    expected = gigpo(steps).values[:, None] * batch["response_mask"]
    assert given["advantages"] == pytest.approx(expected, abs=1e-12)
    again = as_json("credit", "gigpo", out)
    assert again["difference_from_batch"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("damage", ["no column", "short", "pickled", "not a zip", "absent"])
def test_damaged_batch_is_one_sentence(batch, tmp_path, damage):
    """A batch that cannot be read names what is wrong with it."""
    path = tmp_path / "batch.npz"
    if damage == "no column":
        del batch["traj_uid"]
    elif damage == "short":
        batch["rewards"] = batch["rewards"][:-1]
    elif damage == "pickled":
        batch["uid"] = batch["uid"].astype(object)
    if damage == "not a zip":
        path.write_bytes(b"PK\x03\x04 nothing")
    elif damage != "absent":
        np.savez(path, **batch)
    assert_sentence(run("credit", "gigpo", path))


# -- reading a run


def test_world_says_what_each_agent_had_seen(runs):
    """After event 5 the worker has seen the message and its result waits in the mailbox."""
    world = as_json("show", runs, "--world", "--at", 5)
    worker = next(agent for agent in world["agents"] if agent["id"] == "worker")
    assert (worker["seen"], worker["inbox"], worker["alive"]) == ([1], [5], True)
    assert world["open_calls"] == []
    assert set(world) == {"agents", "artefacts", "open_calls", "digest"}
    told = run("show", runs, "--world", "--at", 5).stdout
    assert "worker knows 1, message by planner: → worker: look it up" in told


def test_hostile_text_reaches_a_terminal_spelled_out(runs):
    """An escape sequence in a message is shown as text, never sent to the terminal."""
    done = run("show", runs)
    assert "\x1b" not in done.stdout
    assert "\\u001b[31m" in done.stdout


def test_summary_has_a_row_per_run(runs):
    """One row of facts per run, with what the survey asks of a trace."""
    rows = as_json("show", runs, "--summary")
    assert len(rows) == 4
    first = rows[0]
    assert (first["messages"], first["tool_calls"], first["events"]) == (1, 1, 10)
    assert first["roles"] == ["planner", "worker"]
    assert first["untrusted_inputs"] == 1
    assert first["human_interventions"] == 0
    assert (first["linear"], first["branch_points"], first["joins"]) == (True, 0, 0)
    assert first["critical_path"] == first["events"]


def test_summary_tells_a_team_from_a_line(tmp_path):
    """A lead that asks two and reads both has one branch point and one join."""
    with Recorder(tmp_path / "team.jsonl") as rec, rec.trace() as t:
        t.act("lead", "both of you: go")
        asked = t.message("lead", to=("x", "y"), content="go")
        for agent in ("x", "y"):
            t.act(agent, "done", sees=[asked])
            t.message(agent, to="lead", content="done")
        t.act("lead", "both are done")
    (row,) = as_json("show", tmp_path / "team.jsonl", "--summary")
    assert (row["linear"], row["branch_points"], row["joins"]) == (False, 1, 1)
    # act, message, one of the two observations, its act, its message, observation, act
    assert (row["events"], row["critical_path"]) == (10, 7)


def test_report_is_one_page_that_runs_nothing(runs, tmp_path):
    """The page escapes what traces say and holds no script and no address."""
    out = tmp_path / "page"
    assert run("report", runs, "-o", out).returncode == 0
    page = (out / "report.html").read_text()
    assert "<script" not in page
    assert set(re.findall(r"https?://[^/\"]*", page)) <= {"http://www.w3.org"}
    assert "reinforce" in page
    assert "<svg" in page
    assert_sentence(run("report", runs, "-o", out))


@pytest.mark.slow
def test_demo_writes_the_page_and_its_figures(tmp_path):
    """The demo's figures are complete, and those of the real runs are counted independently."""
    told = as_json("demo", "-o", tmp_path / "demo")
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == told
    assert {row["env"] for row in told["methods"]} == {"research-v0", "T2", "T11"}
    recorded = tmp_path / "demo" / "research-v0.jsonl"
    assert as_json("replay", recorded)["identical"] == 256
    names = {"reinforce", "gae", "grpo", "gigpo"}
    assert {row["method"] for row in told["methods"]} == names
    keys = {"env", "method", "estimand", "n", "effective_sample_size", "pearson", "spearman"}
    assert keys | {"truth", "sign_accuracy", "coverage", "false_alarms"} == set(told["methods"][0])
    # by hand from the excerpt: tasks 1, 2, 5, 6, 7, 11 have one success of four, the others none;
    # every Who&When run is alone in its group
    assert told["real"] == {"traces": 48 + 11, "nonzero": 6 * 4, "groups_without_signal": 6 + 11}
    assert [row["seeds"] for row in told["learning"]] == [3, 3, 3]
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


# -- wrong usage and bad input


def test_wrong_usage_is_status_two(runs):
    """An unknown command or option is wrong usage."""
    assert run("nonsense").returncode == 2
    assert run("credit", "grpo", runs, "--nonsense").returncode == 2
    assert run("credit", "grpo", runs, "--set", "eps").returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("credit", "no_such_method", "RUNS"),
        ("credit", "grpo", "RUNS", "--set", "foo=1"),
        ("credit", "grpo", "/no/such/file"),
        ("credit", "no_such_file.py:f", "RUNS"),
        ("validate", "/no/such/file"),
        ("show", "RUNS", "--trace", "nobody"),
        ("show", "RUNS", "--world", "--at", "999"),
        ("score", "grpo", "T99"),
        ("score", "RUNS", "RUNS"),
        ("import", "no_such_format", "RUNS", "-o", "OUT"),
        ("import", "openai_chat", "RUNS", "-o", "RUNS"),
        ("import", "openai_chat", "/no/such/file", "-o", "OUT"),
        ("import", "openai_chat", "RUNS", "-o", "/no/such/folder/out.jsonl"),
        ("export", "openai_chat", "RUNS", "-o", "OUT"),
        ("credit", "grpo", "FOLDER"),
    ],
)
def test_bad_input_is_one_sentence(runs, tmp_path, arguments):
    """Whatever is wrong, the exit status is 1, and the last line says why; nothing is touched."""
    names = {"RUNS": runs, "OUT": tmp_path / "out.jsonl", "FOLDER": tmp_path}
    before = runs.read_bytes()
    done = run(*(names.get(a, a) for a in arguments))
    assert_sentence(done)
    *notes, last = done.stderr.strip().splitlines()
    assert last.startswith("refused: ")
    assert len(notes) <= 1
    assert runs.read_bytes() == before
    assert not (tmp_path / "out.jsonl").exists()


def test_existing_output_is_kept_unless_told(runs, tmp_path):
    """-o refuses an existing file; --append adds to it; --force replaces it."""
    out = tmp_path / "credit.jsonl"
    assert run("credit", "grpo", runs, "-o", out).returncode == 0
    once = out.read_bytes()
    assert_sentence(run("credit", "grpo", runs, "-o", out))
    assert out.read_bytes() == once
    assert run("credit", "grpo", runs, "-o", out, "--append").returncode == 0
    assert out.read_bytes() == once + once
    assert run("credit", "grpo", runs, "-o", out, "--force").returncode == 0
    assert out.read_bytes() == once


def test_unreadable_lines_are_said_and_the_rest_is_credited(runs, tmp_path):
    """One torn line costs its own event, is mentioned, and makes the status 1."""
    lines = runs.read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b"".join([*lines[:2], lines[2][:40] + b"\n", *lines[3:]]))
    done = run("credit", "grpo", torn, "--json")
    assert done.returncode == 1
    assert len(json.loads(done.stdout)["units"]) == 12
    assert "1 lines could not be read" in done.stderr


def test_closed_pipe_ends_quietly(runs):
    """A reader that has seen enough is no error."""
    command = f"{sys.executable} -m counterpoint.cli show {runs} --summary --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[\n"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_many_findings_are_cut_on_a_terminal_and_whole_in_json(runs, tmp_path):
    """People see the first twenty and the totals by rule; programs see all."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(runs.read_bytes() + b"nonsense\n" * 30)
    done = run("validate", path)
    assert done.returncode == 1
    assert done.stdout.count("V01 ") == 20 + 1
    assert "V01 30" in done.stdout
    assert len(as_json("validate", path, status=1)["findings"]) == 30
    assert run("validate", path, "-v").stdout.count("not JSON") == 30


def test_import_needs_no_network_no_torch_no_home(tmp_path):
    """A run in an empty environment works: nothing is fetched, nothing is written elsewhere."""
    shutil.copy(TAU, tmp_path / "runs.json.gz")
    bare = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    done = run("import", "openai_chat", "runs.json.gz", "-o", "x.jsonl", cwd=tmp_path, env=bare)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs.json.gz", "x.jsonl"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("record", "research-v0", "--set", "facts=x", "-o", "OUT"),
        ("record", "research-v0", "--set", "noise={}", "-o", "OUT"),
        ("report", "RUNS", "-o", "RUNS"),
        ("demo", "-o", "RUNS"),
        ("credit", "grpo", "RUNS", "-o", "LINK", "--force"),
        ("credit", "grpo", "RUNS", "-o", "/dev/full", "--append"),
    ],
)
def test_odd_options_and_outputs_are_one_sentence(runs, tmp_path, arguments):
    """An option of a wrong type, an output that is a file, a link or a device: each is refused."""
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "elsewhere")
    names = {"RUNS": runs, "OUT": tmp_path / "out.jsonl", "LINK": link}
    assert_sentence(run(*(names.get(a, a) for a in arguments)))
    assert link.is_symlink()


def test_full_disk_behind_stdout_is_one_sentence(runs):
    """Output that cannot be written ends in a sentence, not in a traceback."""
    command = f"{sys.executable} -m counterpoint.cli show {runs} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "no space" in done.stderr


@pytest.mark.parametrize("shape", [(10, 7), (3,), (10, 0)])
def test_advantages_of_another_shape_are_refused(batch, tmp_path, shape):
    """Advantages that do not belong to the rows are named with their shape."""
    np.savez(tmp_path / "batch.npz", **batch, advantages=np.zeros(shape))
    done = run("credit", "gigpo", tmp_path / "batch.npz")
    assert_sentence(done)
    assert "column advantages has shape" in done.stderr


def test_decisions_of_a_recorded_log_are_credited(tmp_path):
    """The effect of spawning can be told from a log that recorded how likely it was."""
    path = tmp_path / "ledger.jsonl"
    assert run("record", "ledger-v0", "--seed", "1", "-o", path).returncode == 0
    told = as_json("credit", "spawn", path)
    assert (told["unit"], told["identified"]) == ("decision", "overlap")
    assert {"trace_id", "seq", "item", "value"} == set(told["units"][0])
