"""The documentation is true: its Python runs, its commands exist, its tables are generated."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from importlib import resources
from pathlib import Path

import pytest
import typer
from private_llm_cli.app import app
from private_llm_hf.models.architectures import compared

from private_llm import errors
from private_llm.kernels.compiling import KernelsNotKept

ROOT = Path(__file__).resolve().parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def with_python() -> list[Path]:
    return [page for page in PAGES if blocks(page, "python") and page != ROOT / "README.md"]


def test_the_first_page_s_block_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every run: everybody reads it, and its figures change with each protocol's bytes."""
    test_python_blocks_run(ROOT / "README.md", tmp_path, monkeypatch, capsys)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("page", with_python(), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in one namespace; a `text` block below one is what it prints. Hub ids are replaced by the bundled
    model, as tests have no network."""
    monkeypatch.chdir(tmp_path)
    bundled = str(resources.files("private_llm_hf").joinpath("demo_model"))
    outputs = dict(
        re.findall(r"^```python\n([^`]*?)^```\n\n```text\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    )
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks(page, "python")):
        code = block.replace("facebook/opt-125m", bundled)
        exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
        printed = capsys.readouterr().out
        assert printed == outputs.get(block, printed)


def test_the_readme_is_short_and_shows_an_output() -> None:
    """What a reader has to take in before the first private text; figures and limits have pages of their own."""
    readme = ROOT / "README.md"
    assert len(readme.read_bytes()) <= 7000
    assert blocks(readme, "text")


def test_the_readme_shows_both_entry_points() -> None:
    text = "".join(blocks(ROOT / "README.md", "python"))
    assert "AutoPrivateModelForCausalLM.from_pretrained(" in text
    assert "patch(" in text


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    found = [line.split("#")[0].strip() for line in lines if line.startswith("private-llm ")]
    assert len(found) >= 5
    return found


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line: str) -> None:
    """Every command line that the pages show has a command and options that exist (it is not run)."""
    group = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    with group.make_context("private-llm", [words[0]]) as context:
        name, command, rest = group.resolve_command(context, words)
        if hasattr(command, "resolve_command") and rest[:1] and not rest[0].startswith("-"):  # `predictors train`
            _, command, rest = command.resolve_command(context, rest)
        with command.make_context(name, rest, parent=context) as inner:
            assert inner.params


def test_scripts_that_are_named_exist() -> None:
    command = re.compile(r"(?:scripts|tests/system)/[\w./]+\.(?:sh|py)")
    named = {name for page in PAGES for name in command.findall(page.read_text())}
    assert {"scripts/demo.sh", "scripts/test.sh"} <= named
    assert not [name for name in named if not (ROOT / name).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    missing = [target for target in targets if not (page.parent / target).exists()]
    named = re.findall(r"`((?:private_llm|integrations|tests|docs)/[\w./-]+)`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_table_of_functions_is_that_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    script = importlib.import_module("make_functions")
    assert script.PAGE.read_text() == script.page(), "run scripts/pages/make_functions.py"


def shown(page: Path, mark: str) -> str:
    """What stands between the markers of a page."""
    return page.read_text().split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0].strip()


def test_tables_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    script = importlib.import_module("make_benchmarks")
    rows = script.read_rows(script.ROWS)
    assert {row["name"] for row in rows} <= set(script.MAIN)
    assert shown(script.PAGE, "figures") == script.table(rows)
    network = script.bench_network
    for mark, page, path, table in (
        ("smollm2", script.PAGE, script.SMOLLM2_ROWS, script.smollm2_table),
        ("pigeon", script.PIGEON_PAGE, script.PIGEON_ROWS, script.pigeon_table),
        ("cascade", script.CASCADE_PAGE, script.CASCADE_ROWS, script.cascade_table),
        ("network", network.PAGE, network.ROWS, network.table),
    ):
        assert shown(page, mark) == table(script.read_rows(path)), page
    speed = [script.read_rows(path) for path in (script.CASCADE_ROWS, script.SMOLLM2_ROWS, script.DISTANCE_ROWS)]
    assert shown(script.README, "speed") == script.speed_table(*speed)


def test_python_files_that_are_mentioned_exist() -> None:
    """In pages, docstrings, comments and messages: `x.py` is the end of a path in the tree."""
    tree = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if not {".venv", "build"} & {*path.parts}]
    known = {"/".join(path.split("/")[-n:]) for path in tree for n in range(1, 8)}
    texts = [*PAGES, *(ROOT / path for path in tree if not path.startswith("tests/"))]
    elsewhere = {"script.py", "communicator.py"}  # of users, of a rival, and of transformers
    elsewhere |= {"generation/utils.py", "cache_utils.py", "modeling_outputs.py"}
    missing = []
    for text in texts:
        if text.name == "CHANGELOG.md":
            continue
        for name in re.findall(r"(?<![\w/*{}.-])([a-z_][\w/]*\.py)\b", text.read_text(encoding="utf-8")):
            if name not in known and name not in elsewhere:
                missing.append(f"{text.relative_to(ROOT)}: {name}")
    assert missing == []


# -- order ------------------------------------------------------------------------------------------------------------
README_ORDER = (
    "Install",
    "A private text in Python",
    "Chat",
    "Three hosts",
    "Speed",
    "Who learns what",
    "Where to read on",
)


def test_the_readme_keeps_its_order() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert tuple(headings[: len(README_ORDER)]) == README_ORDER


def test_the_index_names_every_page_once() -> None:
    listed = re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)\): .+$", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md") if path.parent.name != "decisions"]
    assert sorted(listed) == sorted([*(set(pages) - {"README.md"}), "../CONTRIBUTING.md", "decisions/README.md"])


def test_the_index_of_decisions_is_that_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    made = importlib.import_module("make_decisions")
    assert made.PAGE.read_text() == made.index(), "run scripts/pages/make_decisions.py"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("001-a.md", "# A\n\nStatus: perhaps.\n"),
        ("001-a.md", "# A\n\nNo status.\n"),
        ("001-a.md", "Status: accepted.\n"),
        ("a.md", "# A\n\nStatus: accepted.\n"),
        ("001-a.md", "# A\n\nStatus: accepted.\n" + "Line.\n" * 38),
    ],
)
def test_a_decision_has_number_title_status_and_few_lines(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    made = importlib.import_module("make_decisions")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        made.Decision.read(tmp_path / name)


def test_links_to_headings_lead_to_one() -> None:
    def anchors(page: Path) -> set[str]:
        titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            found = (page.parent / target).resolve() if target else page
            if anchor not in anchors(found):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert not broken


def test_the_readme_counts_the_classes_that_are_compared() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f": {len(compared('shares'))} model classes that tests compare" in readme


METAPHORS = (
    "house", "rooms", "ladder", "rung", "rungs", "door", "doors", "tape", "tapes", "hub", "lane", "lanes", "casting",
)  # fmt: skip


def test_prose_uses_the_field_s_words() -> None:
    """Where no identifier is meant. "Room" for bits is left out: it is plain English."""
    found = []
    for page in PAGES:
        if page.name in ("threat-model.md", "api.md", "CHANGELOG.md"):  # from code, and of the past
            continue
        prose = re.sub(r"```.*?```|`[^`]*`|<!-- (\w+) -->.*?<!-- /\1 -->", "", page.read_text(), flags=re.DOTALL)
        found += [f"{page.name}: {word}" for word in METAPHORS if re.search(rf"\b{word}\b", prose, re.IGNORECASE)]
    assert found == []


# -- errors -----------------------------------------------------------------------------------------------------------
def messages() -> set[tuple[str, ...]]:
    """Texts of the packages that have some words of their own between the values in them; "" for a value."""
    found = set()
    for path in [*(ROOT / "private_llm").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                texts = tuple(str(part.value) if isinstance(part, ast.Constant) else "" for part in parts)
                if max(map(len, texts)) > 12:
                    found.add(texts)
    return found


def is_one_of(made: set[tuple[str, ...]], message: str) -> bool:
    """Only texts whose words are all there become patterns: to compile thousands takes seconds."""
    possible = [texts for texts in made if all(text in message for text in texts)]
    return any(re.fullmatch("".join(re.escape(text) or ".*" for text in texts), message) for texts in possible)


def test_the_page_of_errors_has_every_class_with_a_real_message() -> None:
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    page = (ROOT / "docs" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE))
    assert set(sections) == {*classes, KernelsNotKept.__name__}
    shown = [message for text in sections.values() for message in re.findall(r"```text\n(.*)\n```", text)]
    assert len(shown) == len(sections) - 1, "all but the base class"
    made = messages()
    assert [message for message in shown if not is_one_of(made, message)] == []
    assert all("**Do:**" in text for name, text in sections.items() if name != "PrivateLLMError")


# -- words ------------------------------------------------------------------------------------------------------------
def test_the_glossary_has_every_word_that_readme_and_tutorial_stress() -> None:
    entries = re.findall(r"^\*\*([^.*]+)\.\*\* \S", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert entries == sorted(entries, key=str.lower)
    pages = [(ROOT / "README.md").read_text(), (ROOT / "docs" / "tutorial.md").read_text()]
    stressed = {word.removesuffix("s") if word != "parties" else "party"
                for page in pages for word in re.findall(r"(?<!\*)\*(\w[\w ]*)\*(?!\*)", page)}  # fmt: skip
    assert stressed
    assert not stressed - {*entries}
