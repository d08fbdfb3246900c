"""Harnesses of Open, Submit and Close: how each is drawn, enumerated and labelled."""

from __future__ import annotations

from dataclasses import replace

from reference.commands import Close, Open, Submit
from reference.prefix_cache import shares_lock
from reference.state import Request, Session, State, text_len
from impl.choices import once_in, pick
from stateful_tests.generate.commands.shared_arguments import prompts_of
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, Present, harness
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.prompts import input_of
from stateful_tests.generate.exploration_scope import Scope


@harness(
    Open,
    applies=lambda c: len(c.state.sessions) < len(c.profile.sessions),
    weight=lambda _: 4,
    is_in=lambda scope: scope.sessions,
)
class OpenHarness(Harness[Open]):
    def draw(self, c: Enabled) -> Open:
        names = c.profile.sessions
        unknown = [s for s in names if c.state.session(s) is None]
        return Open(pick(c.source, names if c.invalid or not unknown else unknown))

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        if present.sessions < scope.sessions:
            yield Open(fresh.session)

    def misnamed_commands(self, scope: Scope, name: str, bearer: Session | Request | None) -> Commands:
        if not isinstance(bearer, Request):
            yield Open(name)


def _submit_weight(c: Enabled) -> int:
    """Return how often a Submit is drawn: more often where a session can be resumed."""
    if c.resumable:
        return 9
    return 6 if c.idle or len(c.state.requests) < 2 else 0


def _close_weight(c: Enabled) -> int:
    """Return how often a Close is drawn: more often where one is due, or locks a node with others."""
    return 1 + (2 if c.closable else 0) + (3 if c.crowded_sessions else 0)


@harness(
    Submit,
    applies=lambda c: len(c.state.requests) < len(c.profile.requests),
    weight=_submit_weight,
    is_in=lambda scope: scope.served,
)
class SubmitHarness(Harness[Submit]):
    def draw(self, c: Enabled) -> Submit:
        names = c.profile.requests
        free = [r for r in names if c.state.request(r) is None]
        name = pick(c.source, names if c.invalid or not free else free)
        if c.busy and once_in(c.source, 3):
            return Submit(name, pick(c.source, c.busy).name, 1)
        wiped = [s for s in c.wiped_sessions if s.turn is None]
        session = (
            pick(c.source, (*c.profile.sessions, None)) if c.invalid else self._draw_session(c, wiped)
        )
        if wiped and session is not None and not c.invalid and not once_in(c.source, 3):
            return Submit(name, session, 1)
        plain = Submit(name, session, *self._draw_lengths(c))
        if c.profile.machine == "sessions" or once_in(c.source, 6):
            return plain
        return self._with_prompt(c, plain)

    def _draw_session(self, c: Enabled, wiped: list[Session]) -> str | None:
        """Draw the session of a turn, one that was wiped if there is one. None stands for an ordinary
        request."""
        # More ordinary requests where there is a tree: every request can match what they insert.
        one_in = 5 if c.profile.machine == "sessions" or c.profile.allocate_ahead else 2
        ordinary = not c.idle or once_in(c.source, one_in)
        return None if ordinary else pick(c.source, wiped or c.idle).name

    def _draw_lengths(self, c: Enabled) -> tuple[int, int]:
        """Draw `tokens` and `rewind` of a Submit."""
        width = c.state.config.geometry.width
        tokens = c.length(width // (2 if c.profile.long_prompts else 4))
        if c.profile.long_prompts and once_in(c.source, 2):
            tokens = 1 + c.source.upto(width // 2)
        if c.invalid and once_in(c.source, 6):
            tokens = pick(c.source, (0, -1, width, width + 1))
        rewind = pick(c.source, (1, -1)) if c.invalid and once_in(c.source, 4) else 0
        return tokens, rewind

    def _with_prompt(self, c: Enabled, plain: Submit) -> Submit:
        """Return the submit with a prompt, mostly in place of tokens of its own."""
        session = c.state.session(plain.session)
        before = text_len(session.history) if session is not None else 0
        # Room for some output, and in a session for later turns: their window evictions pass what the tree
        # has.
        quarters = 3 if c.profile.long_prompts else 2
        if plain.session is not None:
            quarters -= 1
        longest = max(1, (c.state.config.geometry.width - before) * quarters // 4)
        twins = [prompt for r in c.state.requests if (prompt := input_of(r))]
        if twins and not before and once_in(c.source, 4):
            prompt = pick(c.source, twins)
        else:
            prompt = c.prompt(longest, fresh=before > 0)
        has_own = c.profile.own_tokens or once_in(c.source, 4)
        tokens = 1 + c.source.upto(1) if has_own else 0
        if c.invalid:
            tokens = c.source.upto(4) - 1
        answers = prompt[-1].text if c.profile.alike and prompt and not tokens else ""
        return replace(plain, prompt=prompt, tokens=tokens, answers=answers)

    def of_session(
        self, scope: Scope, session: Session, turn: Request | None, fresh: Names
    ) -> Commands:
        name = session.name
        may_submit = turn is None and not session.closing
        lengths = scope.submits if may_submit else scope.submits[:1]
        for tokens in lengths:
            yield Submit(fresh.request, name, tokens)
        if may_submit:
            for prompt in prompts_of(scope):
                yield from (
                    Submit(fresh.request, name, tokens, 0, prompt) for tokens in (0, *scope.submits)
                )
        if scope.invalid:
            yield from (Submit(fresh.request, name, 1, rewind) for rewind in (1, -1))

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        if present.ordinary < scope.ordinary:
            yield from (Submit(fresh.request, None, tokens) for tokens in scope.submits)
            for prompt in prompts_of(scope):
                yield from (
                    Submit(fresh.request, None, tokens, 0, prompt) for tokens in (0, *scope.submits)
                )

    def misnamed_commands(self, scope: Scope, name: str, bearer: Session | Request | None) -> Commands:
        if not isinstance(bearer, Session):
            yield Submit(name, None, 1)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Submit(fresh.request, fresh.session, 1)
        yield Submit(fresh.request, None, 0)
        yield Submit(fresh.request, None, scope.geometry.width + 1)

    def case(self, was: State, command: Submit, now: State) -> Labels:
        session = was.session(command.session)
        with_prompt = (
            "for the tree, with a prompt" if command.prompt and was.tree is not None else ""
        )
        if session is None:
            return "ordinary", with_prompt
        if session.slot is not None:
            return "later turn", with_prompt
        return "turn without a slot" if session.history else "first turn", with_prompt


@harness(
    Close,
    applies=lambda c: c.state.sessions,
    weight=_close_weight,
    is_in=lambda scope: scope.sessions,
    tells_late=True,
)
class CloseHarness(Harness[Close]):
    def draw(self, c: Enabled) -> Close:
        preferred = c.crowded_sessions if once_in(c.source, 2) else []
        candidates = preferred or c.closable or c.state.sessions
        known = [session.name for session in candidates]
        return Close(pick(c.source, known if known and not c.invalid else c.profile.sessions))

    def of_session(
        self, scope: Scope, session: Session, turn: Request | None, fresh: Names
    ) -> Commands:
        yield Close(session.name)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Close(fresh.session)

    def case(self, was: State, command: Close, now: State) -> Labels:
        session = was.session(command.session)
        assert session is not None
        if session.turn is not None:
            return "deferred", ""
        if session.slot is None:
            return "no slot", ""
        return "slot", "others lock its path in the tree" if shares_lock(was, session.name) else ""
