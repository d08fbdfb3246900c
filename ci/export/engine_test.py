"""A trace as a unit test of vLLM's own kind: its scheduler, with a model runner that only takes notes."""

import re
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

from ci import TEMPLATES
from ci.export.bug_report import GENERATED_TITLES, Titles, git_description
from ci.export.engine_assertions import assert_clause
from ci.export.recorded_run import NotExportable, not_raising
from ci.export.helper_inlining import inline_helpers
from ci.export.specialised_scaffold import fill_lines, decide_branches, without_annotations
from ci.export.template_parts import SHARED, used_definitions
from ci.export.unit_test import ReleaseTarget, assemble, lines_of_command, failure_message, with_message
from impl.loading.renamed import in_code
from impl import stand_ins
from impl.loading import optional
from impl.vllm import bare_connectors, bare_scheduler
from impl.vllm.api import renamed_entries, uses
from impl.vllm.fetch import checkout_root, release_root
from impl.vllm.runner import ModelRunner
from impl.vllm.system import VLLMSystem
from reference.blocks.commands import (
    Add, End, Fail, LoadAdapter, More, NewWeights, ResetConnector, Schedule, Update, client_tokens,
)  # fmt: skip
from reference.tiers.commands import Complete, Copy, ResetCache
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane, chain
from reference.blocks.request_texts import LaneNote
from reference.commands import Abort, Done, kind_name
from reference.kv_sources import LoadedWeights
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_moments import EngineMoment
from stateful_tests.lockstep.run_results import Row, Run, Trace
from stateful_tests.traces.notation import format_command

_IMPORTS = "import hashlib\nimport importlib\nimport inspect\nfrom collections import deque\n"
_TYPES = "from collections.abc import Callable\nfrom typing import Any\n"


ENGINE = "vllm"


def hook(trace: Trace) -> str:
    """Return the code that loads a release for the test of a trace."""
    return f"impl.vllm.modules:{'with_connector' if trace.sizes(EngineConfig).connects else 'install'}"


def target(text: str) -> ReleaseTarget:
    """Return a release by its version, or a checkout by its folder. Raises UnusableImplementation."""
    if Path(text).is_dir():
        return ReleaseTarget(f"a checkout{git_description(text)}", "", checkout_root(text))
    return ReleaseTarget(f"vllm=={text}", text, release_root(text))


def shared_module(system: VLLMSystem, fixed: ReleaseTarget | None = None) -> str:
    """Return the module that all tests share: a scheduler without a server, and the engine around it, of
    any release."""
    about = '"""What the tests beside share: a scheduler of vLLM\'s own. Made by kvspec."""'
    text = (
        f"{about}\n\nfrom __future__ import annotations\n\n{_IMPORTS}{_TYPES}{_definitions(connects=True)}"
    )
    return _with_release_names(system, text, fixed)


def _definitions(*, connects: bool) -> str:
    engine = _source_from(stand_ins.__file__, "\n\nclass Values")
    engine += _source_from(bare_scheduler.__file__, "\n\nclass No")
    engine += _source_from(TEMPLATES / "stand_in_engine.py.j2")
    if not connects:
        return engine
    reads = _source_from(optional.__file__, "\n\ndef optional")
    connectors = reads + _source_from(bare_connectors.__file__, "\n\nCONNECTORS")
    return engine + connectors + _source_from(TEMPLATES / "stand_in_connector.py.j2")


def _needed_definitions(code: str, config: EngineConfig, system: VLLMSystem) -> str:
    """Return the definitions of a test that stands by itself, without what its sizes rule out."""
    source = without_annotations(_definitions(connects=config.connects))
    sizes = {f"config.{field.name}": getattr(config, field.name) for field in fields(config)[1:]}
    sizes |= {"config.peer": int(config.peer)}
    states = any(group.state for group in config.groups)
    sizes |= {"any((g.state for g in config.groups))": states}
    if not states:
        sizes |= {"group.state": False, "self.config.groups[group].state": False}
    sizes |= {"group.drafter": False}
    windows = {group.window is None for group in config.groups}
    if len(windows) == 1:
        sizes |= {"group.window is None": windows == {True}}
        sizes |= {"group.window is not None": windows == {False}}
    ways = {"overlap": system.overlap, "v2": system.v2}
    around = {} if config.connects else {"around": None, "adapt": None}
    facts = {
        "": sizes,
        "new_scheduler": ways | around,
        "settings_of": {"drafts": config.drafts, "eagle": config.eagle},
    }
    if "drafts={" not in code:
        facts["Engine.update"] = {"drafts is not None": False}
    source = decide_branches(source, facts)
    source = re.sub(r'\*\*unset\("(\w+)"\)', _none_arguments, source)
    if not (config.connects or "engine.named(" in code):
        source = re.sub(r"(?s)(    def hashed.*?digest = (.*?)\n).*?\n\n", _PLAIN_HASH, source)
        source = source.replace("self.hashes, self.texts", "self.texts")
        source = source.replace(" = {}, {}, {}, ", " = {}, {}, ")
    if not config.drafts:
        source = re.sub(r"    def validate_tokens.*?\n\n", "", source, flags=re.DOTALL)
    if "engine.computes(" not in code or not states:
        source = re.sub(r"\n *self\.(continued = \{\}|copies\(\))", "", source)
    source = re.sub(r"\n# What is None in a stand-in .*\n", "", source)
    if not config.connects:
        source = re.sub(r",\n    around=None,\n    adapt=None(?=,\n)", "", source)
        fields_of_it = r'(?s)( and the function that makes requests for it\.).*?"""'
        source = re.sub(fields_of_it, r'\1"""', source, count=1)
    imports = _IMPORTS.replace("from coll", "import unittest\nfrom coll")
    complete_code = _without_arguments(fill_lines(f"{imports}{source}"), code)
    needed = used_definitions(fill_lines(complete_code), f"unittest\n{code}")
    if not config.connects:  # whose device and tables read sizes as well
        needed = _with_defaults_of(needed, code)
    return inline_helpers(needed, code)


def _without_arguments(source: str, code: str) -> str:
    """Return the definitions without arguments that no request of the test has: a priority, a session,
    an adapter or a salt."""
    sources = "lora_request=" in code or "cache_salt=" in code
    if not sources:
        source = re.sub(r",\s+\*\*source(?=,?\s*[)}])", "", source)
        source = re.sub(r" source:\s+lora_request, cache_salt\.", "", source)
    if "resumable=" not in code:
        source = re.sub(r"(?<=A request), or the next turn.*? ends it(?=\.)", "", source)
    for name, default in (("resumable", "False"), ("priority", "0")):
        if f"{name}=" not in code:
            source = re.sub(rf", {name}(?:={default})?(?=[,)])", "", source)
            source = re.sub(rf"\s+\"{name}\": {name},", "", source)
    return source


def _with_defaults_of(source: str, code: str) -> str:
    """Return the definitions with only those defaults of the sizes that they read and the test does not
    give."""
    defaults = re.search(r"\n        plain = .*?(?=\n        self\.config = )", source, re.DOTALL)
    assert defaults is not None
    space: dict[str, dict[str, Any]] = {}
    exec(textwrap.dedent(defaults[0]), space)
    without_defaults = source.replace(defaults[0], "")
    read = {*re.findall(r"\bconfig\.(\w+)", without_defaults)} - {*re.findall(r"\b(\w+)=", _call_of(code))}
    plain = {name: value for name, value in space["plain"].items() if name in read}
    items = "".join(f'            "{name}": {value},\n' for name, value in plain.items())
    return fill_lines(source.replace(defaults[0], f"\n        plain = {{\n{items}        }}"))


def _call_of(code: str) -> str:
    """Return the call that makes the engine of a test."""
    return code[: code.index("\n\n")]


_PLAIN_HASH = r"    def hashed(self, of):\n        return \2\n\n"


def _none_arguments(stand_in: re.Match[str]) -> str:
    """Return the attributes of a stand-in that are None, as arguments."""
    return ", ".join(f"{name}=None" for name in bare_scheduler.unset(stand_in[1]))


def _source_from(file: str | Path, begin: str = "") -> str:
    text = Path(file).read_text(encoding="utf-8")
    return text[text.index(begin) :]


def unit_test(
    trace: Trace,
    file: str,
    system: VLLMSystem,
    fixed: ReleaseTarget | None = None,
    named: Titles = GENERATED_TITLES,
    shares_module: bool = False,
) -> str:
    """Return the text of a test that performs the trace on the scheduler of `system`; see
    `ci.export.unit_test`."""
    if trace.sizes(EngineConfig).simple:
        raise NotExportable("host memory is a pool of blocks, and the test of a scheduler has none")
    if trace.sizes(EngineConfig).storage:
        raise NotExportable("a storage stands behind host memory, and the test of a scheduler has none")
    if trace.sizes(EngineConfig).encodes:
        raise NotExportable("prompts have images, and the test of a scheduler has no encoder")
    if any(group.drafter for group in trace.sizes(EngineConfig).groups):
        raise NotExportable("a drafter has KV of its own, and the test of a scheduler has no drafter")
    run = replay(system, trace)
    if (violation := run.violation) is None:
        raise NotExportable(f"conforms on {system.name}: there is no fault to test")
    details = [(violation.expected, violation.observed), *violation.details]
    reported = dict(zip(violation.clauses, details))
    # The test asserts the first clause on facts of the scheduler or its pool.
    headline = trace.clause if trace.clause in reported else violation.clause
    notes = _Steps(run, system)
    steps = list(notes)
    if "BROKEN" in violation.clauses:
        command, calls = steps.pop()
        steps.append((command, []))
        assertions = {"BROKEN": not_raising(calls)}
    else:
        assertions = {clause: assert_clause(run, clause, notes.tokens) for clause in (headline, *reported)}
    clause = next((clause for clause, lines in assertions.items() if lines), None)
    if clause is None:
        unseen_reason = "no object of the scheduler shows it"
        if violation.clause.startswith("STA"):
            unseen_reason = "recurrent state is the worker's, and the test has a scheduler alone"
        raise NotExportable(f"{violation.clause}: {unseen_reason}")
    text = "\n".join(assertions[clause])
    if re.search(r"\b(reads|written|chunk|continues)\(", text) is None:
        steps = [
            (command, [c for c in calls if "engine.computes(" not in c]) for command, calls in steps
        ]
    wanted, observed = reported[clause]
    body = [
        line
        for command, calls in steps
        for line in lines_of_command(command, Done(), calls, sessions=True)
    ]
    body += with_message(assertions[clause], failure_message(clause, wanted, system.name, observed))
    code = "\n".join([_engine_line(run.trace.sizes(EngineConfig), system), "", *body])
    group_kinds = [_group_kind(run.trace.sizes(EngineConfig))]
    if "adapter_of(" in code:
        group_kinds.append("adapter_of")
    needed = f"import unittest\n\nfrom {SHARED} import {', '.join(group_kinds)}"
    if not shares_module:
        needed = _needed_definitions(code, run.trace.sizes(EngineConfig), system)
    text = assemble(
        trace, file, clause, trace.commands[violation.step], needed, code, named,
        named.with_commit(system.name),
        fixed and fixed.name,
    )  # fmt: skip
    return _with_release_names(system, text, fixed)


def _with_release_names(system: VLLMSystem, text: str, fixed: ReleaseTarget | None) -> str:
    """Return the test with the names that the release has."""
    assert system.root is not None
    names = renamed_entries(system.root)
    if fixed is not None and renamed_entries(fixed.root) != names:
        raise NotExportable(f"no one test runs on {system.name} and {fixed.name}: names differ")
    return in_code(text, names, (use for _, use in uses()))


def _engine_line(config: EngineConfig, system: VLLMSystem) -> str:
    """Return the line that makes an engine of these sizes."""
    groups = [
        (g.block_size, g.window, True) if g.state else (g.block_size, g.window)
        for g in config.groups
    ]
    arguments = [f"groups={groups}"]
    arguments += [f"{way}=True" for way in ("overlap", "v2") if getattr(system, way)]
    for field in fields(config)[1:]:
        if (value := getattr(config, field.name)) != field.default:
            arguments.append(f"{field.name}={value}")
    return fill_lines(f"engine = {_group_kind(config)}(\n    {', '.join(arguments)}\n)\n").rstrip()


def _group_kind(config: EngineConfig) -> str:
    return "ConnectedEngine" if config.connects else "Engine"


def _expected_tokens(note: LaneNote) -> list[int]:
    """Return the tokens that a batch entry should have computed: the request's text up to its end, and
    drafts."""
    input_count = len(note.lane.tokens) - note.lane.drafts
    return [*note.text[: note.lane.start + input_count], *note.lane.tokens[input_count:]]


class _Steps:
    """Yields commands as calls of the engine, with small numbers for tokens."""

    def __init__(self, run: Run, system: VLLMSystem) -> None:
        self.run = run
        self.system = system
        self.sent = 0
        self.loaded = LoadedWeights()
        self.small: dict[int, int] = {1: 1}  # the stop token is one
        # For each entry: the tokens that it computes, and the next token of its request's text.
        self.flights: deque[list[tuple[Lane, list[int], Sequence[int]]]] = deque()

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        for row, moment in zip(self.run.rows, self.run.moments(EngineMoment)[-len(self.run.rows) :]):
            refused = not isinstance(row.outcome, Done) and moment.step is not None
            yield format_command(row.command), [] if refused else list(self._calls(row, moment))

    def _calls(self, row: Row, moment: EngineMoment) -> Iterator[str]:
        """Yield the calls of an exported test that a command becomes, with what the batch of the moment must
        compute. Raises NotExportable for new weights."""
        command: object = row.command
        match command:
            case LoadAdapter(adapter):
                self.loaded.load_adapter(adapter)
            case NewWeights():
                raise NotExportable("new weights: the test of a scheduler has no server that loads them")
            case Add(name, most, _, _, priority, resumable):
                more = f", priority={priority}" if priority else ""
                more += ", resumable=True" if resumable else ""
                more += f", remote={command.remote}" if command.remote else ""
                more += self._source(command)
                yield f'engine.add("{name}", {self._sends(command)}, max_tokens={most}{more})'
            case More(name, most):
                yield f'engine.add("{name}", {self._sends(command)}, max_tokens={most}, resumable=True)'
            case End(name):
                yield f'engine.add("{name}", [2], max_tokens=1)'
            case Abort(name):
                yield f'engine.abort("{name}")'
            case ResetCache(running):
                yield f"engine.reset({'reset_running_requests=True' if running else ''})"
            case Schedule():
                yield "engine.schedule()"
                notes = moment.step.lanes if moment.step is not None else []
                texts = [_expected_tokens(note) for note in notes]
                if notes:
                    self.flights.append([
                        (note.lane, text, note.text[len(text) : len(text) + 1])
                        for note, text in zip(notes, texts)
                    ])  # fmt: skip
                for note, text in zip(notes, texts):
                    request = note.lane.request
                    start = note.lane.start
                    yield f'engine.computes("{request}", {start}, {self.tokens(text)})'
                if notes and self.run.trace.sizes(EngineConfig).connects:
                    yield "engine.forwarded()"
            case Copy(load) | Complete(load):
                yield f"engine.transfers.{kind_name(type(command))}(load={load})"
            case Fail(blocks):
                yield f"engine.worker.fail({blocks})"
            case ResetConnector():
                yield "engine.reset_connector()"
            case Update(drafts):
                yield from self._update(drafts)

    def _source(self, command: Add) -> str:
        """Return further arguments of a request that has an adapter or a salt."""
        load = self.loaded.source(command.adapter, "").adapter_loads
        arguments = ""
        if command.adapter:
            arguments += f', lora_request=adapter_of("{command.adapter}", {load})'
        if command.salt:
            arguments += f', cache_salt="{command.salt}"'
        return arguments

    def _sends(self, command: Add | More) -> str:
        self.sent += 1
        return self.tokens(client_tokens(command.prompt, command.tokens, self.sent), 1000)

    def tokens(self, tokens: Sequence[int], base: int = 9000) -> str:
        """Return tokens as a list, with ranges of consecutive ones.

        base: the number from which new ones are counted.
        """
        for token in tokens:
            if token not in self.small:
                self.small[token] = base + len(self.small)
        numbers = [self.small[token] for token in tokens]
        position = 0
        parts: list[str] = []
        while position < len(numbers):
            end = next(
                (i for i in range(position, len(numbers)) if numbers[i] - numbers[position] != i - position),
                len(numbers),
            )
            run = numbers[position:end]
            parts += [f"*range({run[0]}, {run[-1] + 1})"] if len(run) > 2 else map(str, run)
            position = end
        return f"[{', '.join(parts)}]"

    def _update(self, most: int) -> Iterator[str]:
        """Yield the call that takes the results of the oldest batch in flight.

        most: the most drafts for each request of the next round (tokens).
        """
        config = self.run.trace.sizes(EngineConfig)
        flight = self.flights.popleft()
        sampled_text = ", ".join(
            f'"{lane.request}": {self.tokens(lane.sampled)}' for lane, _, _ in flight
        )
        drafts = ""
        if config.drafts and not self.system.overlap:
            most = config.drafts if config.eagle else min(config.drafts, max(0, most))
            drafts_made = []
            for lane, text, further in flight:
                if self.system.v2:
                    drafts_made.append(f'"{lane.request}": {[-1] * config.drafts}')
                    continue
                own_tokens = [*text[: len(text) - lane.drafts], *(lane.sampled or further)]
                proposed = ModelRunner.drafts([reduce(chain, own_tokens, 0)], most)
                if not (lane.sampled or config.eagle):
                    proposed = []
                drafts_made.append(f'"{lane.request}": {self.tokens(proposed)}')
            drafts = f", drafts={{{', '.join(drafts_made)}}}"
        yield f"engine.update({{{sampled_text}}}{drafts})"
