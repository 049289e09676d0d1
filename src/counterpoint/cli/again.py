"""Credit that plays on from the runs: which methods do, with whom, and on what account."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from counterpoint.branches import Spent
from counterpoint.branchfile import BranchFile
from counterpoint.cli import render
from counterpoint.cli.options import budget_of, own_env, policy_of
from counterpoint.credit import METHODS, Account, estimate, method
from counterpoint.credit.protocols import Budget
from counterpoint.ledger import Credit
from counterpoint.redrive import Branching
from counterpoint.redrive.follow import played
from counterpoint.schema import Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

_OF_LOGS = frozenset({"decisions"})
_NOTHING: Budget = {"env_calls": 0, "forward_passes": 0, "tokens": 0}


class Again(NamedTuple):
    """What the command line said about playing on.

    Attributes:
        rerun: whether to; None leaves it to the method.
        budget, price, cache, env, policy, allow_changed: its options of these names.
    """

    rerun: bool | None
    budget: list[str] | None
    price: bool
    cache: Path | None
    env: str | None
    policy: str | None
    allow_changed: bool

    def account(self, traces: Sequence[Trace], steps: Steps, held: BranchFile | None) -> Account:
        """Where the branches of these runs are paid and remembered; a price is an empty purse."""
        env = own_env(self.env, traces[0].header) if traces else None
        replay = Branching(
            traces,
            env,
            None if self.policy is None else policy_of(self.policy),
            allow_changed=self.allow_changed,
            watched=partial(render.progress, label="playing"),
        )
        return Account(
            replay,
            steps,
            _NOTHING if self.price else budget_of(self.budget),
            held=held,
            named=replay.named,
        )

    def said(self) -> list[str]:
        """The options that were given, as they are spelled."""
        values = self._asdict()
        return [f"--{name.replace('_', '-')}" for name, value in values.items() if value]


@contextmanager
def accounts(
    again: Again, names: Sequence[str], steps: Steps, traces: list[Trace]
) -> Iterator[Callable[[str], Account | None]]:
    """Give each method that plays on from the runs its account, one for all; others None.

    Raises:
        Refused: options about playing on, where no method does.
    """
    wanted = {name for name in names if _plays_on(name, again.rerun, steps)}
    if not wanted and (said := again.said()):
        raise Refused(f"{', '.join(names)} plays nothing here, so {said[0]} has no effect")
    other = foreign(traces)
    held = None if again.cache is None else BranchFile(again.cache)
    account = again.account(traces, steps, held) if wanted and other is None else None

    def replay_for(name: str) -> Account | None:
        must = name in METHODS and "replay" in METHODS[name].needs
        if must and again.rerun is False:
            raise Refused(f"{name} plays on from the runs and cannot do without; drop --no-rerun")
        if name in wanted and other is not None and (must or again.rerun):
            raise Refused(
                f"{name} needs runs that can be played on from, and trace {other.trace_id} was not "
                "played by our harness: an imported log cannot be run again, nor a run of another "
                "loop (in Python a harness of yours can: replay=, see credit.protocols)"
            )
        return account if name in wanted else None

    try:
        yield replay_for
    finally:
        if held is not None:
            held.close()


def foreign(traces: Sequence[Trace]) -> Trace | None:
    """The first run that nothing here can play on from."""
    return next((t for t in traces if t.header.fork is None and not played(t.header)), None)


class Answer(NamedTuple):
    """A method's credit; what its branches were priced at, and how many the budget left out."""

    credit: Credit
    priced: Spent = Spent()
    left_out: int = 0


def answered(name: str, steps: Steps, options: dict[str, Any], account: Account | None) -> Answer:
    """Run a method, on account if it plays on."""
    if account is None:
        return Answer(estimate(name, steps, **options))
    priced, left_out = account.priced, account.left_out
    credit = estimate(name, steps, replay=account, **options)
    return Answer(credit, account.priced - priced, account.left_out - left_out)


def _plays_on(name: str, rerun: bool | None, steps: Steps) -> bool:
    """Whether a method runs the runs again: where it can and was told to, or has to. What decisions
    were worth the log may tell.
    """
    if "replay" not in inspect.signature(method(name)).parameters:
        return False
    if rerun is not None:
        return rerun
    needs = METHODS[name].needs if name in METHODS else {"replay"}
    return "replay" in needs or any(getattr(steps, column) is None for column in needs - _OF_LOGS)
