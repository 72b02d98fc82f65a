"""What the pages name exists: files behind links, make targets, commands, options and recipes."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

import lightning_longctx
from lightning_longctx.cli import COMMANDS
from lightning_longctx.cli.recipes import find
from tests.architecture.places import ROOT

FOLDERS = (".", "docs", "docs/how-to", "docs/decisions", "kernels", "recipes")
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIGHTNING_COMMANDS = {"fit", "validate", "test", "predict"}


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks of a page in one of the languages."""
    return [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def heading_anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in heading_anchors(file)):
            broken.append(link)
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"


def test_pages_are_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    queue = [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")))
        queue += [(page.parent / link).resolve() for link in links if link and "://" not in link]
    orphans = [
        page for page in PAGES if page not in seen and page.parent.name not in ("decisions", "kernels", "recipes")
    ]
    assert not orphans, f"no link leads to {names(orphans)}"


def commands(page: Path) -> list[list[str]]:
    """Shell commands of a page, one list of words each."""
    text = "".join(blocks(page, "bash", "sh", "console")).replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in text.splitlines())
    return [words for words in lines if words]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = LIGHTNING_COMMANDS | set(COMMANDS)
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        if words[0].endswith("lightning-longctx") or words[:3] == ["python", "-m", "lightning_longctx"]:
            assert words[1 if words[0] != "python" else 3] in known, words
        for flag, value in zip(words, words[1:], strict=False):
            if flag == "--config":
                assert find(value) or (ROOT / value).is_file(), f"no shipped recipe: {words}"


def strategy_options(recipe: object) -> dict[str, object]:
    """``init_args`` of the strategy in a recipe, if it has one."""
    trainer = recipe.get("trainer", {}) if isinstance(recipe, dict) else {}
    strategy = trainer.get("strategy") if isinstance(trainer, dict) else None
    return strategy.get("init_args", {}) if isinstance(strategy, dict) else {}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_recipes_use_options_that_exist(page: Path) -> None:
    options = inspect.signature(lightning_longctx.LongContextStrategy).parameters
    degrees = inspect.signature(lightning_longctx.Degrees).parameters
    for text in blocks(page, "yaml"):
        chosen = strategy_options(yaml.safe_load(text))
        assert set(chosen) <= set(options), f"unknown strategy options in {page.name}: {set(chosen) - set(options)}"
        assert set(chosen.get("degrees", {})) <= set(degrees)  # type: ignore[arg-type, call-overload]


def test_python_snippets_compile() -> None:
    for page in PAGES:
        for text in blocks(page, "python"):
            compile(text, str(page.relative_to(ROOT)), "exec")


def test_every_strategy_option_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    options = [
        *inspect.signature(lightning_longctx.LongContextStrategy).parameters,
        *inspect.signature(lightning_longctx.Degrees).parameters,
    ]
    missing = [option for option in options if f"`{option}`" not in readme and f".{option}`" not in readme]
    assert not missing
