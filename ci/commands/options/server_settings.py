"""Settings of the servers of serve-check: `--set` is read, and settings that do not go together are refused.

given: the settings by field. Some requirements complete it: they fix a field that was left out, for else it
would be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

import click

from ci.commands.options.name_lists import similar_names
from ci.commands.shared import Unusable

# Heading -> the first field of its group in `--help`; the fields of Config stand in this order.
GROUPS = {
    "--set, the server": "page_size",
    "--set, recurrent state (0.5.23)": "states",
    "--set, a host tier (0.5.23)": "hicache",
    "--set, priorities": "priority",
    "--set, a prefill server P and a decode server D (0.5.23)": "pair",
}
NOT_LIVE = {
    "draft": "EAGLE's kernels need a GPU",
    "window": "torch_native attention reads the SWA pool by slots of the full one",
    "states": "recurrent layers have kernels for a GPU alone",
    "hicache": "its copies are kernels for a GPU alone",
}
# Field -> its least value: clients ask for up to a sixth of the pool, and pages divide it.
LEAST = {"page_size": 1, "tokens": 6, "running": 1}
MOST_PAGE = 8  # tokens: pools, windows and chunks of the servers that are drawn are this small
# SGLang's kv_cache_configurator.py wants three slots, and under overlap two more for states on the way.
LEAST_STATES = 5
# Releases in which Triton kernels allocate pages of several tokens.
PAGES_NEED_A_GPU = ("0.5.14", "0.5.18", "0.5.20")


class ServeCheckCommand(click.Command):
    """The command serve-check, whose `--help` ends with the fields of `--set`."""

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each field with what it means, in groups."""
        from impl.sglang.server.clients import Config

        headings = {field: heading for heading, field in GROUPS.items()}
        groups: dict[str, list[tuple[str, str]]] = {}
        for field, annotated in get_type_hints(Config, include_extras=True).items():
            heading = headings.get(field) or [*groups][-1]
            kind = annotated.__origin__
            (described,) = annotated.__metadata__
            value = "0|1" if kind is bool else "N"
            groups.setdefault(heading, []).append((f"{field}={value}", described.description))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def field_of(text: str) -> tuple[str, int | bool]:
    """Read FIELD=N: a field of Config and its value. Raises Unusable for another name, or no number."""
    from impl.sglang.server.clients import Config

    name, _, value = text.partition("=")
    kind = type(getattr(Config(), name, None))
    if kind not in (int, bool):
        meant = similar_names(name, Config.__struct_fields__)
        raise Unusable(f"--set {text:.40}: no such field{meant} (`kvspec serve-check --help` lists them)")
    if not value.isdigit() or (kind is bool and value not in ("0", "1")):
        expected = "a number" if kind is int else "0 or 1"
        raise Unusable(f"--set {text:.40}: expected {name}=N with {expected}")
    least = LEAST.get(name, 0)
    if int(value) < least:
        raise Unusable(f"--set {text:.40}: expected {name}=N with a number of at least {least}")
    return name, kind(int(value))


def require_canary(release: str, again: str | None) -> None:
    """Raise Unusable where the release's own canary cannot check a saved run.

    again: its file.
    """
    from impl.sglang.server.tried_releases import CANARY

    if again is None:
        raise Unusable("--canary: looks at a saved run; it goes with --again FILE")
    if release not in CANARY:
        raise Unusable(
            f"--canary: runs on a CPU in {', '.join(CANARY)} alone; the run is of {release}"
        )


def require_live(settings: dict[str, int | bool]) -> None:
    """Raise Unusable for a setting that a live server has only on a GPU."""
    for field, reason in NOT_LIVE.items():
        if settings.get(field):
            raise Unusable(f"--set {field}: not in a live server on a CPU: {reason}")


def require_small_pages(release: str, settings: dict[str, int | bool]) -> None:
    """Raise Unusable for pages that a live server of the release has only on a GPU."""
    if release in PAGES_NEED_A_GPU and settings.setdefault("page_size", 1) > 1:
        raise Unusable(f"--set page_size: not in a live {release} on a CPU: its kernels need a GPU")


def require_fitting(release: str, settings: dict[str, int | bool]) -> None:
    """Raise Unusable for settings that the release does not run with, or that exclude each other."""
    _require_pages(settings)
    _require_states(release, settings)
    _require_tier(release, settings)
    _require_priorities(release, settings)
    _require_pair(release, settings)


def _require_pages(settings: dict[str, int | bool]) -> None:
    """Refuse pages that are larger than a chunk, and a chunk of no whole pages."""
    page = _page_size(settings)
    if page > MOST_PAGE:
        raise Unusable(f"--set page_size: at most {MOST_PAGE}: chunks and windows here are no larger")
    if settings.get("chunk", 0) % page:
        raise Unusable("--set chunk: a multiple of --set page_size: a chunk is whole pages")


def _require_priorities(release: str, settings: dict[str, int | bool]) -> None:
    """Refuse settings for priorities where there are none, and those that the release lacks."""
    from impl.sglang.server.clients import PRIORITIES
    from impl.sglang.server.tried_releases import LOWEST

    _require_known("priority", PRIORITIES, settings)
    if not settings.get("priority"):
        for field in ("threshold", "lowest"):
            if settings.get(field):
                raise Unusable(f"--set {field}: a setting of priorities; needs --set priority=1 or 2")
    if settings.get("lowest") and release not in LOWEST:
        raise Unusable(f"--set lowest: {', '.join(LOWEST)} retracts so; this is {release}")


def _require_known(field: str, known: Sequence[str], settings: dict[str, int | bool]) -> None:
    """Refuse a value that is not the index of a name in `known`."""
    if settings.get(field, 0) >= len(known):
        names = ", ".join(f"{index} {name or 'none'}" for index, name in enumerate(known))
        raise Unusable(f"--set {field}: one of {names}; not {settings[field]}")


def _require_states(release: str, settings: dict[str, int | bool]) -> None:
    """Refuse recurrent layers that the release cannot run, or that other settings exclude."""
    from impl.sglang.server.tried_releases import STATES

    if settings.get("track") and not settings.get("states"):
        raise Unusable("--set track: a setting of recurrent states; needs --set states=N")
    if settings.get("lazy") and not settings.get("track"):
        raise Unusable("--set lazy: a setting of kept recurrent states; needs --set track=N")
    if settings.get("lazy") and settings.get("overlap") == 0:
        raise Unusable("--set lazy=1: needs overlap, and --set overlap=0 takes it away")
    if not settings.get("states"):
        return
    if release not in STATES:
        raise Unusable(
            f"--set states: recurrent layers run in {', '.join(STATES)}; this is {release}"
        )
    if settings.get("window"):
        raise Unusable("--set window: a server with --set states has none")
    if 0 < settings.get("track", 0) < 2 * settings.get("draft", 0):
        raise Unusable(
            "--set track: at least twice --set draft; below, it is tracked-slot-is-written-again that shows"
        )
    if settings.get("track", 0) % _page_size(settings):
        raise Unusable("--set track: a multiple of --set page_size: a state is kept at a page's end")
    if settings.get("track") == 0 and (settings.get("overlap") or _page_size(settings) > 1):
        raise Unusable(
            "--set track=0: states at the end of a text alone go with neither overlap nor pages"
        )
    if settings["states"] < LEAST_STATES:
        raise Unusable(
            f"--set states: at least {LEAST_STATES}, as many as SGLang wants for one request"
        )


def _page_size(settings: dict[str, int | bool]) -> int:
    return settings.get("page_size", 1)


def _require_tier(release: str, settings: dict[str, int | bool]) -> None:
    """Refuse a host tier that the release lacks, or that other settings exclude."""
    from impl.sglang.server.clients import POLICIES, STORAGES
    from impl.sglang.server.tried_releases import TIERS

    if not any(settings.get(field) for field in ("hicache", "decode_hicache", "host_backup")):
        for field in ("host", "policy", "storage", "rust"):
            if field in settings:
                raise Unusable(f"--set {field}: a setting of a host tier; needs --set hicache=1")
        return
    if release not in TIERS:
        raise Unusable(f"--set hicache: a host tier runs in {', '.join(TIERS)}; this is {release}")
    if settings.get("states"):
        misfits = [name for name in ("track", "storage", "mixed", "overlap") if settings.get(name)]
        if _page_size(settings) > 1:
            misfits.append("page_size")
        if misfits:
            raise Unusable(
                f"--set {misfits[0]}: a server with --set hicache=1 and --set states keeps states at the end"
                " of a text alone, without storage, mixed batches, overlap and pages"
            )
    if settings.get("hicache") and settings.get("tree") == 0:
        raise Unusable("--set tree=0: a host tier is one of the tree's KV")
    _require_known("policy", POLICIES, settings)
    _require_known("storage", STORAGES, settings)
    if not settings.get("host", 1):
        raise Unusable("--set host: the host's pools in tenths of the device's, at least 1")


def _require_pair(release: str, settings: dict[str, int | bool]) -> None:
    """Refuse a pair that the release cannot run, and settings with which no pair was driven."""
    from impl.sglang.server.pair.choices import NOT_OF_A_PAIR, OF_A_PAIR
    from impl.sglang.server.tried_releases import PAIRS

    if not settings.get("pair"):
        for field in OF_A_PAIR:
            if field in settings:
                raise Unusable(f"--set {field}: a setting of a pair; needs --set pair=1")
        return
    if release not in PAIRS:
        raise Unusable(f"--set pair: a pair runs in {', '.join(PAIRS)}; this is {release}")
    for field, reason in NOT_OF_A_PAIR.items():
        if settings.get(field):
            raise Unusable(f"--set {field}: not in a pair: {reason}")
    if settings.get("prefill_draft") and not settings.setdefault("draft", 2):
        raise Unusable("--set prefill_draft: a setting of speculation; needs --set draft=N")
    _require_pair_tiers(settings)
    if settings.get("prefill_complete"):
        for field, off in (("window", 0), ("decode_tree", False), ("states", 0)):
            if settings.setdefault(field, off):
                raise Unusable(f"--set {field}: SGLang has no prefill_complete with it")


# A setting of a host tier of a pair -> settings that SGLang does not support with it, each switched off.
_UNSUPPORTED_WITH: dict[str, dict[str, int | bool]] = {
    "decode_hicache": {"window": 0, "prefill_complete": False, "states": 0},
    "host_backup": {"priority": 0, "states": 0},
}


def _require_pair_tiers(settings: dict[str, int | bool]) -> None:
    """Refuse host tiers of a pair that other settings exclude."""
    if settings.get("decode_hicache") and not settings.setdefault("decode_tree", True):
        raise Unusable("--set decode_hicache: a setting of D's tree; needs --set decode_tree=1")
    for field, others in _UNSUPPORTED_WITH.items():
        if not settings.get(field):
            continue
        for other, off in others.items():
            if settings.setdefault(other, off):
                raise Unusable(f"--set {other}: not in a pair with --set {field}")
    if settings.get("hicache") and settings.get("prefill_complete") and settings.setdefault("policy", 2) != 2:
        raise Unusable("--set policy: SGLang has prefill_complete with policy=2 (write_back) alone")
